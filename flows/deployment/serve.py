"""Serves the flows as deployments from this machine: `python -m flows.deployment.serve --store
PATH`.

`ratchet ui` runs it beside the server; on another machine (or in a container) it runs alone,
against the server that PREFECT_API_URL names. There are deployments `full/full` (the pipeline's
form), `stage/STAGE` for every stage (`audit/audit` for the audit), and `full/recorded` and the
like, which carry out runs that `ratchet run`, `ratchet stage` and `ratchet audit-sync` have
recorded. Each flow run gets a process of its own; when the serving ends, the runs end with it.

A deployment's version says where it is served: host and code folder. `ratchet run` hands its run
over only to its own code on its own machine, with the same store.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flows.server import server, settings
from ratchet.errors import EXIT_USER_ERROR, UserError
from ratchet.pipeline.dag import STAGES
from tasks.runtime.supervisor import ROOT

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment

RUNS_AT_ONCE = 6
"""Stages still take turns on the device; this bounds the waiting processes."""
QUERY_SECONDS = 2.0
"""How often the server is asked for runs to start."""
RECORDED = "recorded"
RECORDING_COMMANDS = {
    "full": "ratchet run",
    "stage": "ratchet stage",
    "audit": "ratchet audit-sync",
}
"""Which command records the runs that a flow carries out."""


def served_from() -> str:
    """Where this code runs: the version that its deployments carry."""
    return f"{socket.gethostname()}:{ROOT}"


def deployments(store: Path) -> list[RunnerDeployment]:
    """What is served for the store."""
    from prefect import Flow
    from prefect.deployments.runner import EntrypointType, RunnerDeployment

    from flows.pipeline import form_flows
    from flows.pipeline.flow import FLOWS
    from flows.pipeline.forms import title

    def deployment(flow: Flow, name: str, entrypoint: str, description: str) -> RunnerDeployment:
        made = flow.to_deployment(
            name,
            description=description,
            version=served_from(),
            parameters={"store": str(store)},
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        assert isinstance(made, RunnerDeployment)
        made.entrypoint = entrypoint
        # Not "no schedules, not paused": what was set in the UI stays.
        made.model_fields_set.difference_update({"schedules", "paused"})
        # Prefect titles a parameter with its bare name and takes no other.
        for parameter, schema in made._parameter_openapi_schema.properties.items():
            schema["title"] = title(parameter)
        return made

    return [
        deployment(
            form_flows.pipeline,
            "full",
            "flows.pipeline.form_flows.pipeline",
            "The whole pipeline: choose a preset, change what you like, run.",
        ),
        *(
            deployment(
                stage_flow,
                name,
                f"flows.pipeline.form_flows.{name}",
                f"One stage of an earlier run again: {STAGES[name].gist}.",
            )
            for name, stage_flow in form_flows.STAGE_FLOWS.items()
        ),
        *(
            deployment(
                FLOWS[name],
                RECORDED,
                f"flows.pipeline.flow.{name}",
                f"Carries out runs that `{command}` has recorded; not meant to be started by hand.",
            )
            for name, command in RECORDING_COMMANDS.items()
        ),
    ]


def serve(store: Path) -> None:
    """Serve until ended."""
    from prefect import serve as serve_deployments

    from flows.deployment import reconciler
    from flows.deployment.automation import create_automation
    from flows.pages.publish import create_device_limit

    create_device_limit()
    create_automation()
    reconciler.start(store)
    serve_deployments(
        *deployments(store),
        pause_on_shutdown=False,  # or schedules would be off after a restart
        print_starting_message=False,
        limit=RUNS_AT_ONCE,
        query_seconds=QUERY_SECONDS,
    )


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flows.deployment.serve", description=__doc__)
    parser.add_argument(
        "--store",
        type=Path,
        default=os.environ.get("RATCHET_STORE", "artifacts"),
        help="folder of the store",
    )
    options = parser.parse_args(arguments)
    settings.apply()
    try:
        api_url = server.find_server()
        if api_url is None:
            raise UserError("no Prefect server runs here: start one with `ratchet ui`")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    os.environ["PREFECT_API_URL"] = api_url
    serve(options.store.absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
