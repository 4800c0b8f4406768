"""Load times of a vLLM server's tiers, in seconds a token.

Random prompts are sent until the device has evicted the first of them, and then the host. An early prompt is sent
again, followed by new tokens: the server's metrics name its tier. The load time is the excess over a prefill with the
same prefix cached on the device.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import median
from typing import NamedTuple, Protocol

from ragorder.adapters.http_client import Server, ServerError
from ragorder.adapters.observing.tier_stats import Hits, TierStats, fetch_hits, fetch_tier_stats
from ragorder.trie.profile import PrefillProfile

__all__ = ["Advance", "Answered", "Send", "TierLoads", "copy_times"]

_COPIES = re.compile(
    r"^vllm:kv_offload_(?P<name>(?:load|store|tiering_read|tiering_write)_(?:bytes|time))_total(?:\{[^}\n]*\})? "
    r"(?P<value>[0-9.]+(?:e[+-]?[0-9]{1,3})?)$",
    re.MULTILINE,
)
_TOKEN_IDS = range(100, 256)
_TIERS = ("host", "disk")
_TIMEOUT_S = 5.0
_COUNTED_S = 2.0
_POLL_S = 0.02
# Prompts of this many times the device's size evict all earlier ones.
_FILLS = 1.25
Advance = Callable[[], None]


def copy_times(page: str, token_bytes: float) -> dict[str, float]:
    """Return the seconds to copy a token to the device from "host" memory, and from "disk" through it: from the loads
    so far, else from the copies in the other direction."""
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


class Send(Protocol):
    def __call__(self, token_ids: list[int], salt: str, /) -> Answered:
        """Send a request for one token."""


class _Salted(NamedTuple):
    salt: str
    token_ids: list[int]


class TierLoads:
    """Measurement of an idle server with ragorder's tiers. Raises ServerError, also if the server takes no prompt of a
    block."""

    def __init__(
        self,
        base_url: str,
        send: Send,
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
        self._sent: deque[_Salted] = deque()
        self._samples: dict[str, list[float]] = {tier: [] for tier in _TIERS}
        self._deadline = float("inf")

    def measure(
        self, repeats: int, limit_s: float, progress: Callable[[int], Advance] = lambda samples: lambda: None
    ) -> PrefillProfile:
        """Return the profile with `loads`: medians of up to `repeats` samples of each tier within `limit_s`. A tier is
        skipped if filling the tiers before it takes longer. The server's own copy times are a lower bound, and replace
        missing samples."""
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
        with Server(self._base_url, timeout_s=_TIMEOUT_S, api_key=self._api_key) as server:
            return copy_times(server.get("/metrics"), device_bytes / self._capacity_tokens)

    def _fill(self, prompts: int) -> None:
        for _ in range(prompts):
            if not self._in_time:
                return
            prompt = _Salted(secrets.token_hex(16), self._token_ids(self._prefix_tokens))
            self._send(prompt.token_ids, prompt.salt)
            self._sent.append(prompt)

    def _probe(self) -> str | None:
        """Return the tier of the oldest prompt, or None if several tiers had parts of it."""
        prompt = self._sent.popleft()
        before = self._hits()
        answer = self._send([*prompt.token_ids, *self._token_ids(self._new_tokens)], prompt.salt)
        found = self._counted(before, answer.prompt_tokens)
        for tier in _TIERS:
            tokens: int = getattr(found, tier)
            if tokens and tokens == answer.cached_tokens - found.device and 10 * tokens >= 9 * answer.cached_tokens:
                on_device_s = self._profile(answer.cached_tokens, answer.prompt_tokens - answer.cached_tokens)
                self._samples[tier].append(max(0.0, answer.seconds - on_device_s) / tokens)
                return tier
        return None

    def _counted(self, before: Hits, prompt_tokens: int) -> Hits:
        """A server counts a request after its last token."""
        deadline = time.monotonic() + _COUNTED_S
        found = self._hits() - before
        while found.total < prompt_tokens and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found = self._hits() - before
        return found

    def _hits(self) -> Hits:
        return fetch_hits(self._base_url, api_key=self._api_key)

    def _token_ids(self, count: int) -> list[int]:
        return self._draw.choices(_TOKEN_IDS, k=count)
