"""A proxy of a far end that is served, and what is sent through it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2

from ragorder.ordering import RequestOutcome
from support import sent_requests
from support.sent_requests import CHAT, written

COMPLETIONS = "/v1/completions"
SYSTEM = {"role": "system", "content": "Answer from the documents."}
JSON = {"content-type": "application/json"}
USAGE = {"prompt_tokens": 600, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 512}}
WHOLE = json.dumps({"choices": [{"message": {"content": "yes"}}], "usage": USAGE}).encode()
LAST = b'data: {"choices":[],"usage":%s}\n\ndata: [DONE]\n\n' % json.dumps(USAGE).encode()
UNKNOWN = RequestOutcome(True)
FAILED = RequestOutcome(False)


@dataclass
class Proxy:
    """A running proxy and a client of it."""

    url: str
    client: httpx2.Client

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    def post(self, body: Any, path: str = CHAT, **options: Any) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(path, content=content, headers=JSON | options.pop("headers", {}), **options)


Start = Callable[..., Proxy]


tagged = partial(sent_requests.tagged, messages=[SYSTEM])


def chat(names: str, **fields: Any) -> dict[str, Any]:
    """The body of a chat whose documents stand in a message."""
    content = f"Here they are:\n{written(names)}\n\nQuestion: which?"
    return {"model": "m", "messages": [SYSTEM, {"role": "user", "content": content}], **fields}


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error in an answer of the proxy's own."""
    content = response.json()
    assert list(content) == ["error"]
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("secret")
