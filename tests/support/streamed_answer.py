"""A streamed answer, as far as it came to a client."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx2

from support.sent_requests import CERTIFICATES


@dataclass
class StreamedAnswer:
    status: int = 0
    replica: str | None = None
    text: str = ""
    done: bool = False
    error: Any = None
    broke: bool = False
    began: threading.Event = field(default_factory=threading.Event)


def stream(url: str, body: dict[str, Any], into: StreamedAnswer, timeout_s: float = 60) -> StreamedAnswer:
    """Send the chat to the server at this URL, and read its answer, of which each piece may take `timeout_s`."""
    try:
        with (
            httpx2.Client(trust_env=False, timeout=timeout_s, verify=CERTIFICATES) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}) as response,
        ):
            into.status, into.replica = response.status_code, response.headers.get("x-ragorder-replica")
            if response.status_code != 200:
                into.error = json.loads(response.read())["error"]
                return into
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    into.done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    into.error = event.get("error", into.error)
                    for choice in event.get("choices", ()):
                        into.text += choice["delta"].get("content") or ""
                    if into.text:
                        into.began.set()
    except httpx2.TransportError:
        into.broke = True
    return into
