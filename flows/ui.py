"""The Prefect server with its UI, on this machine only: `python -m flows.ui`.

SQLite, loopback, no analytics; the same database that runs without a server write to, so their
history is there. Ctrl-C ends it. A run that is started meanwhile finds it and uses it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from flows import server, settings
from ratchet.errors import EXIT_USER_ERROR, UserError
from ratchet.store.store import write_durably
from tasks.supervisor import Supervised


def _check_port(port: int) -> None:
    """UserError when the port is taken, saying by whom as far as that can be told."""
    if running := server.ui_api_url():
        raise UserError(
            f"the UI runs already at {running.removesuffix('/api')}: open it, or stop it with "
            "Ctrl-C where it was started"
        )
    if server.port_is_free(port):
        return
    if server.is_healthy(server.api_url_at(port)):
        raise UserError(
            f"another Prefect server uses port {port}: set "
            f"PREFECT_API_URL={server.api_url_at(port)} to use it, or take another port with --port"
        )
    raise UserError(f"port {port} is taken by another program: take another with --port")


def run_ui(port: int) -> None:
    """Serve the UI until Ctrl-C; UserError when that can't be."""
    _check_port(port)
    log_file = settings.prefect_home() / "ratchet-ui.log"
    print("starting the Prefect server …", flush=True)
    with server.start_server(port, log_file, ui=True) as process:
        server.wait_until_healthy(process, port, log_file)
        api_url = server.api_url_at(port)
        os.environ["PREFECT_API_URL"] = api_url
        from flows.publish import create_device_limit

        create_device_limit()
        write_durably(
            server.state_file(), json.dumps({"api_url": api_url, "pid": os.getpid()}) + "\n"
        )
        try:
            print(f"Prefect UI: {api_url.removesuffix('/api')}  (Ctrl-C stops it)", flush=True)
            _wait(process, log_file)
        finally:
            server.state_file().unlink(missing_ok=True)


def _wait(process: Supervised, log_file: Path) -> None:
    """Wait for the server's end, which nobody but Ctrl-C should bring."""
    code = process.wait()
    raise RuntimeError(f"the Prefect server ended with code {code}; see {log_file}")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flows.ui", description=__doc__)
    parser.add_argument("--port", type=int, default=4200, help="port of the server")
    parser.add_argument("--store", type=Path, required=True, help="folder of the store")
    options = parser.parse_args(arguments)
    settings.apply()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        run_ui(options.port)
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
