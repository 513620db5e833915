"""Serves the flows as deployments from this machine: `python -m flows.serve`.

A run that `ratchet run` recorded in a store this machine sees can then be carried out, scheduled or
cancelled from the Prefect UI or its API. Each run gets a process of its own; Ctrl-C ends the
serving and the runs.
"""

from __future__ import annotations

import os
import sys

from flows import server, settings
from ratchet.errors import EXIT_USER_ERROR, UserError

RUNS_AT_ONCE = 4
"""Stages still take turns on the device; this bounds the waiting processes."""


def main() -> int:
    """Entry point; the exit code."""
    settings.apply()
    try:
        api_url = server.find_server()
        if api_url is None:
            raise UserError("no Prefect server runs here: start one with `ratchet ui`")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    os.environ["PREFECT_API_URL"] = api_url
    from prefect import serve
    from prefect.deployments.runner import RunnerDeployment

    from flows.full import full
    from flows.publish import create_device_limit
    from flows.stage import stage

    create_device_limit()
    deployments = [flow.to_deployment("ratchet") for flow in (full, stage)]
    assert all(isinstance(found, RunnerDeployment) for found in deployments)
    serve(*deployments, pause_on_shutdown=False, limit=RUNS_AT_ONCE)  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main())
