"""A server that answers each question at once, and one path without end; run as a module, it prints its address."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import click

from ragorder.benchmarks.proxy.proxy_load.upstream import allow_many_connections

__all__ = ["ENDLESS", "main"]

ENDLESS = "/v1/endless"

_PIECE = 1 << 16


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        # The proxy hangs up with its client.
        with suppress(OSError):
            self._answer()

    def _answer(self) -> None:
        left = int(self.headers["content-length"])
        while left:
            piece = self.rfile.read(min(left, _PIECE))
            if not piece:
                return
            left -= len(piece)
        self.send_response(200)
        if self.path != ENDLESS:
            answer = json.dumps({"choices": [{"message": {"content": "yes"}}]}).encode()
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            return
        self.end_headers()
        self.close_connection = True
        while True:
            self.wfile.write(b"x" * _PIECE)

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = socket.SOMAXCONN


def main() -> None:
    allow_many_connections()
    server = _Server(("127.0.0.1", 0), _Answers)
    click.echo(f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()


if __name__ == "__main__":
    main()
