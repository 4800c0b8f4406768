"""Test requests to a server: random tokens, and one generated token."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from typing import Any

from ragorder.adapters.http_client import Server, ServerError

__all__ = ["count_of", "probe_topic", "random_tokens", "send"]

# Ordinary or at least harmless tokens in any vocabulary.
_TOKEN_IDS = range(100, 256)
# Statuses of a server that lacks a route or does not take token ids.
_OTHER_FORM = (400, 404, 405, 422, 501)
_REPEATS = 7
_PROBE_TOKENS = 512


def random_tokens(count: int) -> list[int]:
    return random.choices(_TOKEN_IDS, k=count)


def send(
    server: Server, model: str | None, token_ids: list[int], headers: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], bool]:
    """Return the answer's usage, and whether the prompt was sent as token ids. Raises ServerError."""
    if model is None:
        raise ServerError(f"{server.root} got no test request, because it lists no model: give --model")
    text = " ".join(map(str, token_ids))
    forms: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": token_ids}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ]
    refusals = []
    for path, prompt in forms:
        try:
            answer = server.post_json(path, {"model": model, "max_tokens": 1, "temperature": 0, **prompt}, headers)
        except ServerError as error:
            if error.status not in _OTHER_FORM:
                raise
            refusals.append(error)
            continue
        usage = answer.get("usage") if isinstance(answer, dict) else None
        return usage if isinstance(usage, dict) else {}, prompt.get("prompt") is token_ids
    raise refusals[0]


def probe_topic(server: Server, model: str | None, header: str, *, tokens: int = _PROBE_TOKENS) -> list[int | None]:
    """Return the cached tokens of each repetition of a prompt with the same topic. A random balancer over two replicas
    passes once in 128 probes."""
    topic = {header: secrets.token_hex(16)}
    token_ids = random_tokens(tokens)
    found = []
    for _ in range(_REPEATS + 1):
        usage, _exact = send(server, model, token_ids, topic)
        found.append(count_of(usage.get("prompt_tokens_details"), "cached_tokens"))
    return found[1:]


def count_of(value: object, name: str) -> int | None:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None
