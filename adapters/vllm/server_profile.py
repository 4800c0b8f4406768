"""Prefill and load times of a vLLM server with ragorder's tiers."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from statistics import median
from typing import Any, NamedTuple

from ragorder.adapters.http_client import Server, ServerError
from ragorder.adapters.observing.tier_stats import Hits, TierStats, fetch_hits, fetch_tier_stats
from ragorder.adapters.usage import member, read_usage
from ragorder.adapters.vllm.cache_config import cache_config, requests_on
from ragorder.kernels.profile_cache import ProfileCache
from ragorder.kernels.short_profile import LONGEST_TOKENS, measure_short_profile
from ragorder.trie.profile import PrefillProfile

_COPIES = re.compile(
    r"^vllm:kv_offload_(?P<name>(?:load|store|tiering_read|tiering_write)_(?:bytes|time))_total(?:\{[^}\n]*\})? "
    r"(?P<value>[0-9.]+(?:e[+-]?[0-9]{1,3})?)$",
    re.MULTILINE,
)
_TIERS = ("host", "disk")
_METRICS_TIMEOUT_S = 5.0
_COUNTED_S = 2.0
_COUNT_POLL_S = 0.02
# Prompts of this many times the device's size evict all earlier ones.
_FILLS = 1.25
Advance = Callable[[], None]
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
    """Return the profile that a server with `--profile auto` awaits (None if it awaits none): cached, or measured with
    load times and cached for this user's engines on this machine. Raises ServerError."""
    cache = cache or ProfileCache()
    with Server(base_url, timeout_s=_TIMEOUT_S, api_key=api_key) as server:
        prefills = _Prefills(server, *_model_of(server))
        key = _awaited(server, prefills)
        if key is None:
            return None
        return cache.find_or_measure(key, lambda: _measure_tiers(server, prefills, budget_s, base_url, api_key))


def measure_server(base_url: str, *, api_key: str | None = None, budget_s: float = 10.0) -> PrefillProfile:
    """Measure an idle server that caches prefixes and reports cached tokens. Raises ServerError."""
    with Server(base_url, timeout_s=_TIMEOUT_S, api_key=api_key) as server:
        return _measure(server, _Prefills(server, *_model_of(server)), budget_s)


def _model_of(server: Server) -> tuple[str, int]:
    first = next(iter(server.models()), None)
    if first is None:
        raise ServerError(f"{server.root} lists no models: give the address of an OpenAI-compatible server")
    longest = first.get("max_model_len")
    return first["id"], longest if isinstance(longest, int) else LONGEST_TOKENS


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
    if requests_on(server.get("/metrics")):
        raise ServerError("the server is busy, so its times would include other requests: measure an idle server")
    _logger.info("measuring prefill times of %s, once for this model and machine (at most %g s)", server.root, budget_s)
    block_size = cache_config(server).block_size
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
    """Sends a row's prefix first, under its own salt, so that nothing else is cached. Raises ServerError."""

    def __init__(self, server: Server, model: str, longest: int) -> None:
        self.model = model
        self.longest_tokens = min(longest - 1, LONGEST_TOKENS)
        self._server = server
        self._draw = Random(0)
        self._prefixes: dict[int, tuple[str, list[int]]] = {}

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
        return seconds, read_usage(member(answer, "usage")).cached_tokens


def copy_times(page: str, token_bytes: float) -> dict[str, float]:
    """Return seconds per token from "host" and "disk" to the device, by loads so far, or else stores."""
    sums: dict[str, float] = {}
    for found in _COPIES.finditer(page):
        sums[found["name"]] = sums.get(found["name"], 0.0) + float(found["value"])

    def a_token(*copies: str) -> float | None:
        for name in copies:
            if (size := sums.get(f"{name}_bytes", 0.0)) and (time_s := sums.get(f"{name}_time", 0.0)):
                return token_bytes * time_s / size
        return None

    host_s = a_token("load", "store")
    disk_s = a_token("tiering_read", "tiering_write")
    times = {} if host_s is None else {"host": host_s}
    if host_s is not None and disk_s is not None:
        times["disk"] = host_s + disk_s
    return times


class Answered(NamedTuple):
    seconds: float
    cached_tokens: int
    prompt_tokens: int


class TierLoads:
    """Measures an idle server's load times from ragorder's tiers, in seconds a token.

    `send` requests one token for a prompt and a salt. Random prompts are sent until the device, then the host, has
    evicted the first, which is sent again: its load time is the excess over a prefill with the prefix on the device.
    Raises ServerError, also if the server takes no prompt of a block.
    """

    def __init__(
        self,
        base_url: str,
        send: Callable[[list[int], str], Answered],
        profile: PrefillProfile,
        *,
        block_size: int,
        capacity_tokens: int,
        longest_tokens: int,
        api_key: str | None = None,
        seed: int = 0,
    ) -> None:
        self._base_url, self._api_key = base_url, api_key
        self._send = send
        self._profile = profile
        self._draw = Random(seed)
        self._new_tokens = profile.new_tokens[0]
        room = min(longest_tokens - 1 - self._new_tokens, capacity_tokens // 4)
        if room < block_size:
            raise ServerError(
                f"the server takes prompts of {room:,} tokens, but its blocks have {block_size}: "
                "raise --max-model-len or --kv-cache-memory-bytes"
            )
        self._capacity_tokens = capacity_tokens
        self._prefix_tokens = room // block_size * block_size
        self._filling = int(_FILLS * capacity_tokens) // self._prefix_tokens + 1
        # Prompts and their salts.
        self._sent: deque[tuple[list[int], str]] = deque()
        self._samples: dict[str, list[float]] = {tier: [] for tier in _TIERS}
        self._deadline = float("inf")

    def measure(
        self, repeats: int, limit_s: float, progress: Callable[[int], Advance] = lambda samples: lambda: None
    ) -> PrefillProfile:
        """Add `loads`: medians of up to `repeats` samples, but at least the server's own copy times."""
        samples = self._samples
        self._deadline = time.monotonic() + limit_s
        self._fill(1)
        stats = fetch_tier_stats(self._base_url, api_key=self._api_key)
        present = [figures.tier for figures in stats.tiers if figures.tier in _TIERS and figures.capacity_bytes]
        wanted = [tier for tier in present if self._filling_s(tier, stats) <= limit_s]
        if wanted:
            self._sample(wanted, repeats, progress(repeats * len(wanted)))
        measured = {tier: [median(times)] for tier, times in samples.items() if times}
        copies = {tier: time_s for tier, time_s in self._copies(stats).items() if tier in present}
        loads = {tier: max([*measured.get(tier, ()), copies.get(tier, 0.0)]) for tier in {*measured, *copies}}
        facts = {
            "load_samples_s_per_token": samples,
            "load_copies_s_per_token": copies,
            "load_tokens": self._prefix_tokens,
            "load_missing": [tier for tier in present if tier not in measured],
        }
        return replace(self._profile, loads=loads, facts={**self._profile.facts, **facts})

    def _sample(self, wanted: list[str], repeats: int, advance: Advance) -> None:
        samples = self._samples
        self._fill(self._filling + repeats)
        while self._in_time and self._sent:
            tier = self._probe()
            if tier in wanted and len(samples[tier]) <= repeats:
                advance()
            left = [tier for tier in wanted if len(samples[tier]) < repeats]
            if not left:
                break
            # The device is full; the host takes many more.
            self._fill(1 if left[0] == "host" else self._filling)

    @property
    def _in_time(self) -> bool:
        return time.monotonic() < self._deadline

    def _filling_s(self, tier: str, stats: TierStats) -> float:
        sizes = {figures.tier: figures.capacity_bytes for figures in stats.tiers}
        prompts = float(self._filling)
        if tier == "disk" and sizes.get("device"):
            prompts *= max(1.0, sizes.get("host", 0) / sizes["device"])
        return prompts * self._profile(0, self._prefix_tokens)

    def _copies(self, stats: TierStats) -> dict[str, float]:
        device_bytes = sum(figures.capacity_bytes for figures in stats.tiers if figures.tier == "device")
        with Server(self._base_url, timeout_s=_METRICS_TIMEOUT_S, api_key=self._api_key) as server:
            return copy_times(server.get("/metrics"), device_bytes / self._capacity_tokens)

    def _fill(self, prompts: int) -> None:
        for _ in range(prompts):
            if not self._in_time:
                return
            prompt = self._token_ids(self._prefix_tokens), secrets.token_hex(16)
            self._send(*prompt)
            self._sent.append(prompt)

    def _probe(self) -> str | None:
        """Return the oldest prompt's tier, or None if several had parts of it."""
        token_ids, salt = self._sent.popleft()
        before = self._hits()
        answer = self._send([*token_ids, *self._token_ids(self._new_tokens)], salt)
        found = self._counted(before, answer.prompt_tokens)
        for tier in _TIERS:
            tokens: int = getattr(found, tier)
            if tokens and tokens == answer.cached_tokens - found.device and 10 * tokens >= 9 * answer.cached_tokens:
                on_device_s = self._profile(answer.cached_tokens, answer.prompt_tokens - answer.cached_tokens)
                self._samples[tier].append(max(0.0, answer.seconds - on_device_s) / tokens)
                return tier
        return None

    def _counted(self, before: Hits, prompt_tokens: int) -> Hits:
        """Wait for the server's count, which follows the last token."""
        deadline = time.monotonic() + _COUNTED_S
        found = self._hits() - before
        while found.total < prompt_tokens and time.monotonic() < deadline:
            time.sleep(_COUNT_POLL_S)
            found = self._hits() - before
        return found

    def _hits(self) -> Hits:
        return fetch_hits(self._base_url, api_key=self._api_key)

    def _token_ids(self, count: int) -> list[int]:
        return self._draw.choices(_TOKEN_IDS, k=count)
