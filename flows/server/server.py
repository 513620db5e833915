"""The Prefect server: the one that `ratchet ui` runs, or a private one for the time of a run.

A run looks for a server that the user configured, then for the one `ratchet ui` started here (its
address lies in `ratchet-ui.json` in Prefect's home), and starts a private one on the same database
otherwise, so that its runs are there when the UI starts later.

The private server is ours rather than the one Prefect starts by itself, because that one shares the
terminal's process group (Ctrl-C ends it before the run can report its end) and outlives a killed
run. It starts while the run imports Prefect: 4.4 s on two idle cores, 19 to 24 s on busy ones.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flows.server.settings import apply, configured_api_url, prefect_home
from ratchet.errors import UserError
from tasks.runtime.supervisor import Supervised, free_port

HOST = "127.0.0.1"
START_SECONDS = 120.0
POLL_SECONDS = 0.1
ANSWER_SECONDS = 30.0
BUSY = (429, 503)
BUSY_SECONDS = 60.0
ALIVE_SECONDS = 30.0
"""Deployments nobody has polled for this long count as not served."""
STATE = "ratchet-ui.json"
PRIVATE = "RATCHET_PRIVATE_SERVER"
"""Environment variable that tells a run its server is its own."""

# Loopback answers must not go through a proxy that the environment names.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def api_url_at(port: int) -> str:
    """Address of the API of a server here."""
    return f"http://{HOST}:{port}/api"


def is_healthy(api_url: str, timeout_seconds: float = 2.0) -> bool:
    """Whether a Prefect server answers at `api_url`."""
    try:
        with _direct.open(f"{api_url}/health", timeout=timeout_seconds) as answer:
            return answer.status == 200 and answer.read().strip() == b"true"
    except (OSError, ValueError):
        return False


def read(url: str) -> Any:
    """What the server answers, as JSON; OSError (urllib's included) when it doesn't."""
    return _answer(urllib.request.Request(url))


def post(url: str, body: dict[str, Any]) -> Any:
    """What the server answers to `body`, as JSON; OSError (urllib's included) when it doesn't."""
    headers = {"Content-Type": "application/json"}
    return _answer(urllib.request.Request(url, json.dumps(body).encode(), headers))


def _answer(request: urllib.request.Request) -> Any:
    """The server's answer; a server that is busy (SQLite has one writer at a time) is asked again
    for `BUSY_SECONDS`."""
    began = time.monotonic()
    while True:
        try:
            with _direct.open(request, timeout=ANSWER_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code not in BUSY or time.monotonic() - began > BUSY_SECONDS:
                raise
        time.sleep(1.0)


def server_version(api_url: str) -> str | None:
    """Version of Prefect that the server at `api_url` runs; None when it doesn't tell us."""
    try:
        return str(read(f"{api_url}/admin/version"))
    except urllib.error.HTTPError:
        return None


def _check_version(api_url: str) -> None:
    """UserError when the server's version can't work with the Prefect installed here: another
    major version, or an older one than ours."""
    theirs, ours = server_version(api_url), version("prefect")
    if theirs is None:
        return
    if _numbers(theirs)[0] != _numbers(ours)[0] or _numbers(theirs) < _numbers(ours):
        raise UserError(
            f"the Prefect server at {api_url} has version {theirs}, Ratchet's Prefect is {ours}: "
            f"run the server with {ours}, or unset PREFECT_API_URL to do without it"
        )


def _numbers(text: str) -> tuple[int, ...]:
    """'3.7.7' → (3, 7, 7); what follows the numbers is left out."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())


def served_deployment(api_url: str, name: str) -> dict[str, Any] | None:
    """The deployment called `name` ('flow/deployment') if somebody has asked for its runs within
    the last `ALIVE_SECONDS`."""
    try:
        found = read(f"{api_url}/deployments/name/{urllib.parse.quote(name)}")
    except urllib.error.HTTPError:  # there is none, or the server wants credentials
        return None
    polled = found.get("last_polled")
    if polled is None:
        return None
    age = datetime.now(UTC) - datetime.fromisoformat(polled)
    return found if age.total_seconds() < ALIVE_SECONDS else None


def is_shared() -> bool:
    """Whether other runs may use the same server."""
    return PRIVATE not in os.environ


def port_is_free(port: int) -> bool:
    """Whether nobody listens on the port of the loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((HOST, port))
        except OSError:
            return False
        return True


def state_file() -> Path:
    """Where `ratchet ui` leaves its address."""
    return prefect_home() / STATE


def ui_api_url() -> str | None:
    """Address of the server that `ratchet ui` runs here, if it answers."""
    try:
        url = json.loads(state_file().read_text(encoding="utf-8"))["api_url"]
    except FileNotFoundError:
        return None
    return url if is_healthy(url) else None


def find_server() -> str | None:
    """Address of the server to use, or None when there is none.

    UserError when the user configured one and it doesn't answer.
    """
    configured = configured_api_url()
    if configured is None:
        return ui_api_url()
    if not is_healthy(configured, timeout_seconds=10.0):
        raise UserError(
            f"no Prefect server answers at {configured} (PREFECT_API_URL): start it, or unset the "
            "variable to run without one"
        )
    _check_version(configured)
    return configured


def start_server(port: int, log_file: Path, *, ui: bool) -> Supervised:
    """Start a server on a port of the loopback address; see `wait_until_healthy`."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    kind = "ui" if ui else "private"
    with log_file.open("ab") as log:
        return Supervised(
            [sys.executable, "-m", "flows.server.server", kind, str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def wait_until_healthy(server: Supervised, port: int, log_file: Path) -> None:
    """Return once the server answers; RuntimeError when it ended or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not is_healthy(api_url_at(port)):
        if (code := server.poll()) is not None:
            raise RuntimeError(f"the Prefect server ended with code {code}; see {log_file}")
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the Prefect server didn't answer within {START_SECONDS:.0f} s; see {log_file}"
            )
        time.sleep(POLL_SECONDS)


@contextmanager
def private_server(log_file: Path) -> Iterator[tuple[Supervised, int]]:
    """A server for the time of a run; it has yet to become healthy."""
    port = free_port()
    with start_server(port, log_file, ui=False) as server:
        yield server, port


def serve(kind: str, port: int, host: str = HOST) -> None:
    """Be a server until ended; 'private' leaves out the UI and the services of a lasting one."""
    apply()
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(ephemeral=kind == "private", final=True)
    uvicorn.run(app, host=host, port=port, log_level="error", lifespan="on")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
