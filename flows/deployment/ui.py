"""The Prefect server with its UI, on this machine only, and the deployments served beside it:
`python -m flows.deployment.ui`.

SQLite, loopback, no analytics; the same database that runs without a server write to, so their
history is there. A run that is started meanwhile finds it and goes through its deployments. Server
and serving are processes of their own and are started again when one of them dies: runs outlive
the server's restart, and those that die with the serving can be continued. Ctrl-C ends it all, the
served runs first, while the server can still be told how they ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.server import server, settings
from ratchet.errors import EXIT_USER_ERROR, UserError
from ratchet.store.store import write_durably
from tasks.runtime.supervisor import Supervised

WATCH_SECONDS = 0.5
RESTARTS = 3
"""How often a process is started again within `RESTART_WINDOW_SECONDS` before we give up."""
RESTART_WINDOW_SECONDS = 600.0
READY_SECONDS = 120.0


def _check_port(port: int) -> None:
    """UserError when the port is taken, saying by whom as far as that can be told."""
    if running := server.ui_api_url():
        raise UserError(
            f"the UI runs already at {running.removesuffix('/api')}: open it, or stop it with "
            "Ctrl-C where it was started"
        )
    if server.port_is_free(port):
        return
    api_url = server.api_url_at(port)
    if server.is_healthy(api_url):
        raise UserError(
            f"another Prefect server (version {server.server_version(api_url)}) uses port {port}: "
            f"set PREFECT_API_URL={api_url} to use it, or take another port with --port"
        )
    raise UserError(f"port {port} is taken by another program: take another with --port")


class RestartingProcess:
    """A process that is started again when it ends; a context manager that ends it."""

    def __init__(self, what: str, start: Callable[[], Supervised], log_file: Path) -> None:
        self._what = what
        self._start = start
        self._log_file = log_file
        self._restarts: list[float] = []
        self.process = start()

    def restart_if_ended(self) -> None:
        """Start the process again if it has ended; RuntimeError when it ends again and again."""
        code = self.process.poll()
        if code is None:
            return
        self.__exit__()  # what it left behind, if its supervisor died
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW_SECONDS] + [now]
        if len(self._restarts) > RESTARTS:
            raise RuntimeError(f"{self._what} ended with code {code}; see {self._log_file}")
        print(f"{self._what} ended with code {code}: starting it again", flush=True)
        self.process = self._start()

    def __enter__(self) -> RestartingProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.__exit__(None, None, None)


def _start_serving(store: Path, log_file: Path) -> Supervised:
    with log_file.open("ab") as log:
        return Supervised(
            [sys.executable, "-m", "flows.deployment.serve", "--store", str(store)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _polled_since(began: datetime, deployment: dict[str, Any] | None) -> bool:
    """Whether somebody has asked for the deployment's runs since then."""
    if deployment is None:
        return False
    return datetime.fromisoformat(deployment["last_polled"]) >= began


def _wait_until_served(api_url: str, serving: RestartingProcess, began: datetime) -> None:
    """Return once the deployments are there and looked after."""
    deadline = time.monotonic() + READY_SECONDS
    while not _polled_since(began, server.served_deployment(api_url, "full/full")):
        serving.restart_if_ended()
        if time.monotonic() > deadline:
            raise RuntimeError(f"the deployments aren't served within {READY_SECONDS:.0f} s")
        time.sleep(WATCH_SECONDS)


def run_ui(port: int, store: Path) -> None:
    """Serve the UI until Ctrl-C; UserError when that can't be."""
    _check_port(port)
    home = settings.prefect_home()
    server_log, serving_log = home / "ratchet-ui.log", home / "ratchet-serve.log"
    print("starting the Prefect server …", flush=True)
    api_url = server.api_url_at(port)
    with ExitStack() as stack:
        prefect_server = stack.enter_context(
            RestartingProcess(
                "the Prefect server",
                lambda: server.start_server(port, server_log, ui=True),
                server_log,
            )
        )
        server.wait_until_healthy(prefect_server.process, port, server_log)
        os.environ["PREFECT_API_URL"] = api_url
        write_durably(
            server.state_file(), json.dumps({"api_url": api_url, "pid": os.getpid()}) + "\n"
        )
        stack.callback(server.state_file().unlink, missing_ok=True)
        began = datetime.now(UTC)
        serving = stack.enter_context(
            RestartingProcess(
                "the serving", lambda: _start_serving(store, serving_log), serving_log
            )
        )
        _wait_until_served(api_url, serving, began)
        print(
            f"Prefect UI: {api_url.removesuffix('/api')}  (Ctrl-C stops it and the runs it serves)",
            flush=True,
        )
        while True:
            prefect_server.restart_if_ended()
            serving.restart_if_ended()
            time.sleep(WATCH_SECONDS)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flows.deployment.ui", description=__doc__)
    parser.add_argument("--port", type=int, default=4200, help="port of the server")
    parser.add_argument("--store", type=Path, required=True, help="folder of the store")
    options = parser.parse_args(arguments)
    settings.apply()
    if data := os.environ.get("RATCHET_DATA"):  # served runs start in another folder
        os.environ["RATCHET_DATA"] = str(Path(data).absolute())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        run_ui(options.port, options.store.absolute())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
