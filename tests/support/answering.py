"""A server that knows a few paths, in place of Prefect's. Not a test module."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def answering(answers: dict[str, object]) -> Iterator[str]:
    """A server that knows just these paths; its API's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path in answers
            body = json.dumps(answers.get(self.path)).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/api"
        running.shutdown()
