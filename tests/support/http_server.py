"""HTTP servers in threads, on ports of this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self


class Handler(BaseHTTPRequestHandler):
    """Keeps its connection open, and logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def read_json(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, status: int, content: str | bytes = b"") -> None:
        data = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class LocalServer(ThreadingHTTPServer):
    """Serves in a `with` block, or from `start` to `stop`."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.base_url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves first is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def start(self) -> Self:
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _PageHandler(Handler):
    protocol_version = "HTTP/1.0"
    server: PageServer

    def do_GET(self) -> None:
        self.answer(*self.server.page(self.path, self.headers))


class PageServer(LocalServer):
    """Answers a GET by what `page` returns for its path and headers: status and content. One request a connection."""

    def __init__(self, page: Callable[[str, Message], tuple[int, str | bytes]]) -> None:
        super().__init__(_PageHandler)
        self.page = page
