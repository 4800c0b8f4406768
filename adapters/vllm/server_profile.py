"""Prefill profile of a vLLM server with ragorder's tiers."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any

from ragorder.adapters.http_client import Server, ServerError
from ragorder.adapters.vllm.cache_config import cache_config, requests_on
from ragorder.adapters.vllm.load_times import Answered, TierLoads
from ragorder.kernels.profile_cache import ProfileCache
from ragorder.kernels.short_profile import LONGEST_TOKENS, measure_short_profile
from ragorder.trie.profile import PrefillProfile

__all__ = ["measure_server", "profile_server"]

_logger = logging.getLogger("ragorder.profile")

_AWAITED = re.compile(r'^vllm:ragorder_profile\{[^}\n]*\bkey="([0-9a-f]{24})"[^}\n]*\} ([0-9.e+]+)$', re.MULTILINE)
_PUBLISHED_S = 3.0
_POLL_S = 0.1
_TIMEOUT_S = 60.0
_TRIES = 3
_CHECK_TOKENS = 16
# Share of the budget on a server with tiers; load times have the rest.
_PREFILLS_SHARE = 0.5
_LOADS = 3
# Ordinary or at least harmless tokens in any vocabulary.
_TOKEN_IDS = range(100, 256)


def profile_server(
    base_url: str, *, api_key: str | None = None, budget_s: float = 10.0, cache: ProfileCache | None = None
) -> PrefillProfile | None:
    """Return the cached profile of the server at `base_url`, or measure one with load times and cache it for an engine
    on this machine, of this user.

    Returns None if the server awaits no profile (`--profile auto`). Raises ServerError with the reason if it cannot be
    measured.
    """
    cache = cache or ProfileCache()
    with Server(base_url, timeout_s=_TIMEOUT_S, api_key=api_key) as server:
        prefills = _Prefills(server, *_model_of(server))
        key = _awaited(server, prefills)
        if key is None:
            return None
        return cache.find_or_measure(key, lambda: _measure_tiers(server, prefills, budget_s, base_url, api_key))


def measure_server(base_url: str, *, api_key: str | None = None, budget_s: float = 10.0) -> PrefillProfile:
    """Measure a profile of an idle server that caches prefixes and reports cached tokens. Raises ServerError."""
    with Server(base_url, timeout_s=_TIMEOUT_S, api_key=api_key) as server:
        return _measure(server, _Prefills(server, *_model_of(server)), budget_s)


def _model_of(server: Server) -> tuple[str, int]:
    answer = server.get_json("/v1/models")
    listed = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict) or "id" not in listed[0]:
        raise ServerError(f"{server.root} lists no models: give the address of an OpenAI-compatible server")
    longest = listed[0].get("max_model_len")
    return str(listed[0]["id"]), longest if isinstance(longest, int) else LONGEST_TOKENS


def _awaited(server: Server, prefills: _Prefills, clock: Callable[[], float] = time.monotonic) -> str | None:
    found = _AWAITED.search(server.get("/metrics"))
    if found is None:
        # An engine has no metrics of its tiers before its first step.
        prefills.send([], _CHECK_TOKENS)
        deadline = clock() + _PUBLISHED_S
        while found is None and clock() < deadline:
            time.sleep(_POLL_S)
            found = _AWAITED.search(server.get("/metrics"))
    return None if found is None else found[1]


def _measure(server: Server, prefills: _Prefills, budget_s: float) -> PrefillProfile:
    page = server.get("/metrics")
    if requests_on(page):
        raise ServerError("the server is busy, so its times would include other requests: measure an idle server")
    _logger.info("measuring prefill times of %s, once for this model and machine (at most %g s)", server.root, budget_s)
    block_size = prefills.block_size()
    facts = {
        "engine": "vllm",
        "model": prefills.model,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "measured": "one request for one token at the client, in seconds: median of the repeats",
        "block_size": block_size,
        "longest_tokens": prefills.longest_tokens,
    }
    return measure_short_profile(
        prefills, longest_tokens=prefills.longest_tokens, block_size=block_size, budget_s=budget_s, facts=facts
    )


def _measure_tiers(
    server: Server, prefills: _Prefills, budget_s: float, base_url: str, api_key: str | None
) -> PrefillProfile:
    begun_s = time.monotonic()
    profile = _measure(server, prefills, _PREFILLS_SHARE * budget_s)
    try:
        config = cache_config(server)
        loads = TierLoads(
            base_url,
            prefills.answer,
            profile,
            block_size=config.block_size,
            capacity_tokens=config.capacity_tokens,
            longest_tokens=prefills.longest_tokens,
            api_key=api_key,
        )
        profile = loads.measure(_LOADS, max(0.0, begun_s + budget_s - time.monotonic()))
    except ServerError as error:
        _logger.warning("load times are not measured (%s): cached prefixes are compared in tokens", error)
    return replace(profile, facts={**profile.facts, "budget_s": budget_s})


class _Prefills:
    """A row's prefix is sent first, under its own salt, so that nothing else is cached. Raises ServerError."""

    def __init__(self, server: Server, model: str, longest: int) -> None:
        self.model = model
        self.longest_tokens = min(longest - 1, LONGEST_TOKENS)
        self._server = server
        self._draw = Random(0)
        self._prefixes: dict[int, tuple[str, list[int]]] = {}

    def block_size(self) -> int:
        return cache_config(self._server).block_size

    def __call__(self, cached_tokens: int, new_tokens: int) -> float:
        for _ in range(_TRIES):
            if cached_tokens not in self._prefixes:
                self._prefixes[cached_tokens] = secrets.token_hex(16), self._draw.choices(_TOKEN_IDS, k=cached_tokens)
                if cached_tokens:
                    self.send(self._prefixes[cached_tokens][1], 0, self._prefixes[cached_tokens][0])
            salt, prefix = self._prefixes[cached_tokens]
            seconds, found = self.send(prefix, new_tokens, salt)
            if found == cached_tokens:
                return seconds
            del self._prefixes[cached_tokens]
            if found is None:
                raise ServerError(
                    "the server does not report cached tokens: start vLLM with --enable-prompt-tokens-details"
                )
        raise ServerError(
            f"the server had {found:,} of {cached_tokens:,} tokens cached just after they were sent: give one idle "
            "engine"
        )

    def answer(self, token_ids: list[int], salt: str) -> Answered:
        seconds, found = self.send(token_ids, 0, salt)
        return Answered(seconds, found or 0, len(token_ids))

    def send(self, prefix: list[int], new_tokens: int, salt: str | None = None) -> tuple[float, int | None]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": [*prefix, *self._draw.choices(_TOKEN_IDS, k=new_tokens)],
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": salt or secrets.token_hex(16),
        }
        before = time.perf_counter()
        answer = self._server.post_json("/v1/completions", body)
        seconds = time.perf_counter() - before
        usage = answer.get("usage") if isinstance(answer, dict) else None
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return seconds, cached if isinstance(cached, int) else None
