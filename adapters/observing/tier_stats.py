"""Metrics of a vLLM server with ragorder's tiers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ragorder.adapters.http_client import Server, ServerError
from ragorder.common.extras import needs

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

TIERS = ("device", "host", "disk")
SOURCES = (*TIERS, "elsewhere", "computed")

_OURS = "vllm:ragorder_"
_MISFITS = {
    "other_model": "another model, or the same one set up differently",
    "other_prefix": "another system prompt or cache_salt",
    "other_documents": "none of its documents",
}
_HITS = "vllm:prompt_tokens_cached_by_source_total"
_QUERIES = "vllm:prefix_cache_queries_total"


@dataclass(frozen=True, slots=True)
class Hits:
    """Prompt tokens by source of their KV since the server's start, also those that a tier failed to load.
    `elsewhere`: another server, or a connector without named sources."""

    device: int = 0
    host: int = 0
    disk: int = 0
    elsewhere: int = 0
    computed: int = 0

    def __sub__(self, before: Hits) -> Hits:
        return Hits(*(getattr(self, name) - getattr(before, name) for name in SOURCES))

    @property
    def total(self) -> int:
        return sum(self.as_json().values())

    def as_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def of(cls, families: Iterable[Metric]) -> Hits:
        """Add up all engines. Raises ValueError without vLLM's metrics."""
        queried, found = None, dict.fromkeys((*TIERS, "elsewhere"), 0)
        for family in families:
            for sample in family.samples:
                if sample.name == _QUERIES:
                    queried = (queried or 0) + round(sample.value)
                elif sample.name == _HITS:
                    source = sample.labels["source"]
                    found[source if source in TIERS else "elsewhere"] += round(sample.value)
        if queried is None:
            raise ValueError("there are no metrics of vLLM's prefix cache")
        return cls(**found, computed=queried - sum(found.values()))


@dataclass(frozen=True, slots=True)
class TierFigures:
    tier: str
    chunks: int
    bytes: int
    capacity_bytes: int
    oldest_s: float
    stored: int = 0
    evicted: int = 0
    failed_transfers: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def used_share(self) -> float:
        return self.bytes / self.capacity_bytes if self.capacity_bytes else 0.0


@dataclass(frozen=True, slots=True)
class TierStats:
    """Gauges are those of the engine's last step.

        fetch_tier_stats("http://host:8000")

    `device_order`: the device evicts in the policy's order (None: not configured). `profile`: prefill times are
    measured (None: not awaited). `build`: fused requests that used the build in the disk tier's folder (`used`), or not
    (`other_model`, `other_prefix`, `other_documents`). `build_sides`: model and tokens of the system prompt that the
    "build" is for, and those of "requests" that did not use it. Both are empty without a build.
    """

    tiers: tuple[TierFigures, ...]
    hits: Hits
    with_facts: int
    without_facts: int
    unreadable_facts: int
    documents: int
    tenants: int
    device_order: bool | None = None
    profile: bool | None = None
    build: Mapping[str, int] = field(default_factory=dict)
    build_sides: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        tiers = [asdict(tier) | {"used_share": round(tier.used_share, 4)} for tier in self.tiers]
        return asdict(self) | {"tiers": tiers}

    @property
    def misfits(self) -> str:
        """Why requests do not use the build, with counts and both sides, or ""."""
        words = {fit: count for fit, count in self.build.items() if count and fit in _MISFITS}
        return ", ".join(f"{count:,} have {_MISFITS[fit]}{self._sides_of(fit)}" for fit, count in words.items())

    def _sides_of(self, fit: str) -> str:
        if fit == "other_documents" or not {"build", "requests"} <= self.build_sides.keys():
            return ""
        (built_model, built), (model, asked) = self.build_sides["build"], self.build_sides["requests"]
        if fit == "other_model":
            return f" (built for {built_model}, asked for {model})"
        return f" (built for one of {built:,} tokens, asked for one of {asked:,})"

    @classmethod
    def of(cls, families: Iterable[Metric]) -> TierStats:
        """Raises ValueError without ragorder's metrics, LookupError while they are empty."""
        families = list(families)
        if not any(family.name.startswith(_OURS) for family in families):
            raise ValueError("there are no metrics of ragorder's tiers")
        values: defaultdict[tuple[str, str], float] = defaultdict(float)
        refused: defaultdict[str, dict[str, int]] = defaultdict(dict)
        build: Counter[str] = Counter()
        sides: dict[str, tuple[str, int]] = {}
        for family in families:
            for sample in family.samples:
                name, tier = sample.name.removeprefix(_OURS), sample.labels.get("tier", "")
                if name == "refused_chunks_total":
                    reason = sample.labels["reason"]
                    refused[tier][reason] = refused[tier].get(reason, 0) + round(sample.value)
                elif name == "build_requests_total":
                    build[sample.labels.get("fit", "")] += round(sample.value)
                elif name == "build_prefix_tokens":
                    sides[sample.labels.get("of", "")] = sample.labels.get("model", ""), round(sample.value)
                elif name == "oldest_chunk_seconds":
                    values[name, tier] = max(values[name, tier], sample.value)
                elif sample.name.startswith(_OURS):
                    values[name, tier] += sample.value

        def figure(name: str, tier: str = "") -> int:
            return round(values.get((name, tier), 0.0))

        tiers = tuple(
            TierFigures(
                tier,
                chunks=figure("chunks", tier),
                bytes=figure("bytes", tier),
                capacity_bytes=figure("capacity_bytes", tier),
                oldest_s=round(values.get(("oldest_chunk_seconds", tier), 0.0), 1),
                stored=figure("stored_chunks_total", tier),
                evicted=figure("evicted_chunks_total", tier),
                failed_transfers=figure("failed_transfers_total", tier),
                refused=refused[tier],
            )
            for tier in TIERS
            if ("chunks", tier) in values or refused.get(tier)
        )
        if not tiers:
            raise LookupError("the tiers have reported nothing yet")
        return cls(
            tiers,
            Hits.of(families),
            with_facts=figure("requests_with_facts_total"),
            without_facts=figure("requests_without_facts_total"),
            unreadable_facts=figure("requests_with_unreadable_facts_total"),
            documents=figure("documents_total"),
            tenants=figure("tenants"),
            device_order=bool(figure("device_order")) if ("device_order", "") in values else None,
            profile=bool(figure("profile")) if ("profile", "") in values else None,
            build=build,
            build_sides=sides,
        )


def fetch_tier_stats(url: str, *, timeout_s: float = 5.0, api_key: str | None = None) -> TierStats:
    """Raises ServerError, or ImportError without ragorder[live]."""
    root, families = _fetch(url, timeout_s, api_key)
    try:
        return TierStats.of(families)
    except LookupError:
        raise ServerError(f"{root} has tiers and has served no request yet: send one, then repeat this") from None
    except ValueError:
        raise ServerError(
            f"{root} is a vLLM server without ragorder's tiers: start it with the --kv-transfer-config that "
            "`ragorder tiers config` prints"
        ) from None


def fetch_hits(url: str, *, timeout_s: float = 5.0, api_key: str | None = None) -> Hits:
    return Hits.of(_fetch(url, timeout_s, api_key)[1])


def _fetch(url: str, timeout_s: float, api_key: str | None) -> tuple[str, list[Metric]]:
    with needs("live", "talking to a server"):
        from prometheus_client.parser import text_string_to_metric_families
    with Server(url.rstrip("/").removesuffix("/metrics"), timeout_s=timeout_s, api_key=api_key) as server:
        page = server.get("/metrics")
        wanted = (_OURS, _HITS.removesuffix("_total"), _QUERIES.removesuffix("_total"))
        lines = [line for line in page.split("\n") if any(name in line for name in wanted)]
        try:
            families = list(text_string_to_metric_families("\n".join(lines)))
            Hits.of(families)
        except (ValueError, KeyError, OverflowError):
            raise ServerError(
                f"{server.root}/metrics is not from a vLLM server with prefix caching: give vLLM's own address, "
                "and start it without --disable-log-stats"
            ) from None
        return server.root, families
