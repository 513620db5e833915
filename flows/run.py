"""Carries out a recorded run: `python -m flows.run --store PATH --run RUN_ID`.

`ratchet run` and `ratchet stage` write the record and start this. Exit code 0 when the targets
are there, 2 when the user can fix what stopped it, 1 for a crash or a failed audit, 130 after
Ctrl-C.

**When everything exists already and no Prefect server runs, Prefect is left out.** Importing it
and starting a server costs 6 s on two idle cores and up to 25 s on busy ones, to record that no
stage was executed; checking the store costs a fraction of a second. Such a run is in the run
records (`ratchet runs`) like any other, but not in Prefect. With a server running
(`ratchet ui`) every run goes through Prefect.

**Where `ratchet ui` serves deployments for the same store, the run is handed over to them** and
followed here (`flows.deployment.handover`): it can then be cancelled and retried in the UI, and
doesn't end with this terminal. `--here` keeps it in this process, with this terminal's environment.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from flows.deployment.handover import EXIT_BY_STATE, find_serving, flow_name, hand_over
from flows.execution.executor import EXIT_CODES, RunExecutor
from flows.server import server, settings
from ratchet.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from ratchet.store.runs import run_folder
from ratchet.store.store import Store
from tasks.runtime.launch import WorkerState


def run_bare(executor: RunExecutor) -> int:
    """Bring the run's nodes about without Prefect; the exit code."""
    executor.begin()
    try:
        for planned in executor.needed:
            if not executor.run_node(planned).ok:
                break
    except BaseException as error:
        executor.finish(error)
        raise
    return executor.finish()


def run_with_prefect(executor: RunExecutor, api_url: str | None) -> int:
    """Run the flow on the server at `api_url`, or on a private one; the exit code."""
    with ExitStack() as stack:
        if api_url is None:
            log_file = run_folder(executor.store, executor.record.run_id) / "logs" / "server.log"
            process, port = stack.enter_context(server.private_server(log_file))
            api_url = server.api_url_at(port)
            os.environ[server.PRIVATE] = "1"
        os.environ["PREFECT_API_URL"] = api_url
        from flows.pages.publish import send_what_is_queued
        from flows.pipeline.flow import FLOWS, REFUSED

        if server.PRIVATE in os.environ:
            server.wait_until_healthy(process, port, log_file)
        state = FLOWS[flow_name(executor)](
            store=str(executor.store.root), run_id=executor.record.run_id, return_state=True
        )
        send_what_is_queued()
    escaped = state.result(raise_on_failure=False)
    if isinstance(escaped, BaseException):
        raise escaped  # a fault of ours; what stops a stage comes back as a state
    if state.name == REFUSED:
        return EXIT_CODES[WorkerState.REFUSED]
    return EXIT_BY_STATE[state.type.value]


def run(executor: RunExecutor, *, here: bool = False) -> int:
    """Carry out a run in the way that fits; the exit code."""
    try:
        api_url = server.find_server()
        if api_url is None and executor.everything_is_there():
            return run_bare(executor)
        if api_url is not None and not here:
            serving = find_serving(executor, api_url)
            code = None if serving is None else hand_over(executor, api_url, serving)
            if code is not None:
                return code
        return run_with_prefect(executor, api_url)
    except BaseException as error:
        executor.close_if_planned(error)
        raise


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flows.run", description=__doc__)
    parser.add_argument("--store", type=Path, required=True, help="folder of the store")
    parser.add_argument("--run", required=True, help="id of a recorded run")
    parser.add_argument("--here", action="store_true", help="run it in this process")
    options = parser.parse_args(arguments)
    try:
        settings.apply()
        executor = RunExecutor(Store(options.store.absolute()), options.run)
        return run(executor, here=options.here)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
