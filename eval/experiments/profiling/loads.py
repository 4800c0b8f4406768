"""Load times of a server's tiers: seconds for each token that comes from host memory or disk.

Prompts of random tokens are sent until the device has evicted the first of them, and then the host. An early one is
sent again with new tokens behind it: the server's metrics say which tier it came from, and what its time exceeds a
prefill behind tokens on the device is that of the load.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from dataclasses import replace
from random import Random
from statistics import median
from typing import NamedTuple

from ragorder.adapters.http_client import ServerError
from ragorder.adapters.observing.tier_stats import Hits, fetch_hits, fetch_tier_stats
from ragorder.eval.engines.base import EngineError, RequestError
from ragorder.eval.engines.openai import OpenAIEngine
from ragorder.eval.experiments.profiling.measuring import ProfiledServer
from ragorder.eval.running.progress import Progress, silent
from ragorder.kernels.profile import PrefillProfile

__all__ = ["measure_loads"]

_TOKEN_IDS = range(100, 256)
_TIERS = ("host", "disk")
_COUNTED_S = 2.0
_POLL_S = 0.02
# Prompts that fill the device so many times evict those before them.
_FILLS = 1.25


class _Salted(NamedTuple):
    salt: str
    token_ids: list[int]


def measure_loads(
    server: ProfiledServer,
    profile: PrefillProfile,
    *,
    repeats: int = 5,
    seed: int = 0,
    limit_s: float = 600.0,
    progress: Progress = silent,
) -> PrefillProfile:
    """The profile of a vLLM server with ragorder's tiers, with `loads`: medians of `repeats` samples of each tier, or
    of as many as `limit_s` allows. The server and this machine should serve nothing else.

    Raises EngineError if requests fail, or for a server without tiers or without a published capacity.
    """
    if server.capacity_tokens is None:
        raise EngineError("the server does not publish the size of its cache: load times are measured on vLLM only")
    try:
        return asyncio.run(_Loads(server, profile, seed).measure(repeats, limit_s, progress))
    except (RequestError, ServerError) as error:
        raise EngineError(f"load times: {error}") from None


class _Loads:
    def __init__(self, server: ProfiledServer, profile: PrefillProfile, seed: int) -> None:
        assert server.capacity_tokens is not None
        size = server.block_size
        self._server = server
        self._profile = profile
        self._draw = Random(seed)
        self._new_tokens = profile.new_tokens[0]
        room = min(server.longest_tokens - 1 - self._new_tokens, server.capacity_tokens // 4)
        if room < size:
            raise EngineError(f"the server takes prompts of {room:,} tokens, less than one of its blocks of {size}")
        self._prefix_tokens = room // size * size
        self._filling = int(_FILLS * server.capacity_tokens) // self._prefix_tokens + 1
        self._sent: deque[_Salted] = deque()
        self._samples: dict[str, list[float]] = {tier: [] for tier in _TIERS}

    async def measure(self, repeats: int, limit_s: float, progress: Progress) -> PrefillProfile:
        server, samples = self._server, self._samples
        deadline = time.monotonic() + limit_s
        async with OpenAIEngine(
            server.base_url, server.model, block_size=server.block_size, capacity_tokens=None, api_key=server.api_key
        ) as engine:
            await self._fill(engine, 1)
            wanted = await self._tiers()
            advance = progress("loads", repeats * len(wanted))
            await self._fill(engine, self._filling + repeats)
            while time.monotonic() < deadline:
                tier = await self._probe(engine)
                if tier in wanted and len(samples[tier]) <= repeats:
                    advance()
                left = [tier for tier in wanted if len(samples[tier]) < repeats]
                if not left:
                    break
                # The device is full; the host takes many more.
                await self._fill(engine, 1 if left[0] == "host" else self._filling)
        loads = {tier: median(times) for tier, times in samples.items() if times}
        facts = {
            "load_samples_s_per_token": samples,
            "load_tokens": self._prefix_tokens,
            "load_missing": [tier for tier in wanted if tier not in loads],
        }
        return replace(self._profile, loads=loads, facts={**self._profile.facts, **facts})

    async def _tiers(self) -> list[str]:
        stats = await asyncio.to_thread(fetch_tier_stats, self._server.base_url, api_key=self._server.api_key)
        return [figures.tier for figures in stats.tiers if figures.tier in _TIERS and figures.capacity_bytes]

    async def _fill(self, engine: OpenAIEngine, prompts: int) -> None:
        for _ in range(prompts):
            prompt = _Salted(secrets.token_hex(16), self._token_ids(self._prefix_tokens))
            engine.salt = prompt.salt
            await engine.complete(prompt.token_ids)
            self._sent.append(prompt)

    async def _probe(self, engine: OpenAIEngine) -> str | None:
        """The tier from which the oldest prompt came, if it was one alone."""
        prompt = self._sent.popleft()
        before = await self._hits()
        engine.salt = prompt.salt
        answer = await engine.complete([*prompt.token_ids, *self._token_ids(self._new_tokens)])
        found = await self._counted(before, answer.prompt_tokens)
        for tier in _TIERS:
            tokens: int = getattr(found, tier)
            if tokens and tokens == answer.cached_tokens - found.device and 10 * tokens >= 9 * answer.cached_tokens:
                assert answer.ttft_s is not None
                on_device_s = self._profile(answer.cached_tokens, answer.prompt_tokens - answer.cached_tokens)
                self._samples[tier].append(max(0.0, answer.ttft_s - on_device_s) / tokens)
                return tier
        return None

    async def _counted(self, before: Hits, prompt_tokens: int) -> Hits:
        """A server counts a request a moment after its last token has left."""
        deadline = time.monotonic() + _COUNTED_S
        found = await self._hits() - before
        while found.total < prompt_tokens and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            found = await self._hits() - before
        return found

    async def _hits(self) -> Hits:
        return await asyncio.to_thread(fetch_hits, self._server.base_url, api_key=self._server.api_key)

    def _token_ids(self, count: int) -> list[int]:
        return self._draw.choices(_TOKEN_IDS, k=count)
