"""What ordering saves, from Prometheus metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isinf, sqrt
from typing import TYPE_CHECKING, Any

from ragorder.adapters.http_client import Server, ServerError
from ragorder.adapters.observing.costs import CostStats
from ragorder.common.extras import needs

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_MIN_REPORTS = 8
_MAX_ERROR_SHARE = 0.02
_COUNT = "if lengths are estimated, count them: serve --tokenizer MODEL, or Document(tokens=…)"
_ENOUGH = 20
LEARNED = "learned"
"""Name of a form that is no preset."""

# Gauges of the embedded engine's streamed layers, and of a server that retrieves documents itself.
_SERVING = {
    "ragorder_batching_waiting": "waiting",
    "ragorder_batching_running": "running",
    "ragorder_batching_batch_size": "at once",
    "ragorder_batching_most": "most at once",
    "ragorder_batching_partitions": "partitions in memory",
    "ragorder_engine_layers": "layers",
    "ragorder_engine_kv_layers": "layers' KV",
    "ragorder_engine_moving_layers": "moving layers",
}

_DERIVED = (
    "saved_tokens",
    "saved_share",
    "cached_share",
    "other_cached_share",
    "predicted_other_share",
    "reordered_share",
    "saved_tokens_per_reordered",
)


@dataclass(frozen=True, slots=True)
class Reports:
    """Sums over requests with reported cached tokens; `absolute` and `squared` are of prediction errors."""

    count: int
    reported: int
    predicted: int
    absolute: int
    squared: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cached tokens of the unserved order, and their error, or None for this `reason`."""

    other_tokens: int | None
    error_tokens: int | None
    reason: str | None


def compare(served: int, prompt_tokens: int, cached_tokens: int, predicted_other: int, reports: Reports) -> Comparison:
    """Correct the other order's prediction by reports on the served one.

    If reports exceed predictions, their mean excess is added. If they fall short (other clients used the cache), the
    prediction shrinks in proportion. Its error: half the mean absolute error plus three standard errors of the mean.
    """
    count, unknown = reports.count, partial(Comparison, None, None)
    if not served:
        return unknown("no request has ended yet")
    if not count:
        return unknown("predicted only: no request reported its cached tokens")
    if 2 * count < served:
        return unknown(f"predicted only: {count:,} of {served:,} requests reported their cached tokens")
    if count < _MIN_REPORTS:
        return unknown(f"too early: {count:,} of the first {_MIN_REPORTS} requests reported their cached tokens")
    excess = (reports.reported - reports.predicted) / count
    if excess >= 0:
        other_tokens = predicted_other + excess * served
    else:
        other_tokens = predicted_other * reports.reported / reports.predicted
    other_tokens = min(other_tokens, float(prompt_tokens))
    deviation = sqrt(max(0.0, reports.squared / count - excess**2))
    error_tokens = served * (reports.absolute / count / 2 + 3 * deviation / sqrt(count))
    difference = abs(cached_tokens - other_tokens)
    reason = None
    if error_tokens > _MAX_ERROR_SHARE * prompt_tokens:
        off = f"{reports.absolute / count:,.0f} tokens a request"
        share = 100 * min(1.0, error_tokens / prompt_tokens) if prompt_tokens else 100.0
        reason = (
            f"predictions are off by {off}, and the other order is uncertain by {share:.1f} % of the prompts; {_COUNT}"
        )
    elif difference < error_tokens:
        reason = f"the orders differ by {difference:,.0f} tokens, and predictions are uncertain by {error_tokens:,.0f}"
    if reason is not None:
        return Comparison(None, round(error_tokens), f"cannot compare: {reason}")
    return Comparison(round(other_tokens), round(error_tokens), None)


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures since the process started; tokens are of `served` requests.

        print(fetch_stats("http://proxy:8000").saved_share)

    - `cached_tokens`: of the served order, reported for `reports` requests, else predicted
    - `other_cached_tokens`: the other order's `predicted_other_tokens`, corrected by reports, ± `error_tokens`; None
      for the reason `cannot_compare`
    - `reordered`: `ordered` requests with moved documents, `reordered_cold` although nothing should be cached;
      `best_moved` do not begin with the best one
    - `passed`: unchanged requests by reason, in no other figure
    - `recognised`: share of the prefill that a preset would save, from 20 requests on; `LEARNED` is a form learned in
      shadow mode
    - `serving`: streamed layers' places, and queues, batches and partitions of a server that retrieves documents
    """

    shadow: bool
    served: int
    discarded: int
    documents: int
    prompt_tokens: int
    cached_tokens: int
    predicted_other_tokens: int | None
    other_cached_tokens: int | None
    error_tokens: int | None
    cannot_compare: str | None
    reports: int
    prediction_error_tokens: float | None
    prediction_bias_tokens: float | None
    order_us: dict[str, float]
    displacement_mean: float
    ordered: int
    reordered: int
    reordered_cold: int
    best_moved: int
    fallbacks: int
    tree_nodes: int
    evicted_blocks: int
    passed: dict[str, int] = field(default_factory=dict)
    cost: CostStats | None = None
    recognised: dict[str, float] = field(default_factory=dict)
    serving: dict[str, int] = field(default_factory=dict)

    @property
    def saved_tokens(self) -> int | None:
        """Prefill tokens that ragorder's order saves (in shadow mode would save); None if unknown."""
        if self.other_cached_tokens is None:
            return None
        return (self.other_cached_tokens - self.cached_tokens) * (1 if self.shadow else -1)

    @property
    def saved_share(self) -> float | None:
        if self.saved_tokens is None or self.other_cached_tokens is None:
            return None
        retrieval = self.cached_tokens if self.shadow else self.other_cached_tokens
        prefill = self.prompt_tokens - retrieval
        return self.saved_tokens / prefill if prefill > 0 else 0.0

    @property
    def reordered_share(self) -> float:
        return self.reordered / self.ordered if self.ordered else 0.0

    @property
    def saved_tokens_per_reordered(self) -> float | None:
        return None if self.saved_tokens is None or not self.reordered else self.saved_tokens / self.reordered

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def other_cached_share(self) -> float | None:
        return self._share(self.other_cached_tokens)

    @property
    def predicted_other_share(self) -> float | None:
        return self._share(self.predicted_other_tokens)

    def as_json(self) -> dict[str, Any]:
        figures = asdict(self)
        if self.cost is not None:
            figures["cost"] |= {"share": self.cost.share, "saved_money": self.cost.saved_money}
        return figures | {name: getattr(self, name) for name in _DERIVED}

    def _share(self, tokens: int | None) -> float | None:
        if tokens is None:
            return None
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @classmethod
    def of(cls, families: Iterable[Metric]) -> Stats:
        """Raises ValueError without ragorder's metrics."""
        values: defaultdict[tuple[str, str], float] = defaultdict(float)
        buckets: defaultdict[float, float] = defaultdict(float)
        families = list(families)
        passed: defaultdict[str, int] = defaultdict(int)
        recognised: defaultdict[tuple[str, str], float] = defaultdict(float)
        serving: dict[str, int] = {}
        for family in families:
            for sample in family.samples:
                labels = sample.labels
                if sample.name == "ragorder_order_seconds_bucket":
                    buckets[float(labels["le"])] += sample.value
                elif sample.name == "ragorder_passed_requests_total":
                    passed[labels["reason"]] += round(sample.value)
                elif sample.name == "ragorder_recognised_requests_total":
                    recognised[labels["preset"], "requests"] += sample.value
                elif sample.name == "ragorder_recognised_tokens_total":
                    recognised[labels["preset"], labels["of"]] += sample.value
                elif sample.name in _SERVING:
                    place = [value for _, value in sorted(labels.items())]
                    serving[" ".join([*place, _SERVING[sample.name]])] = round(sample.value)
                else:
                    label = labels.get("order") or labels.get("outcome") or labels.get("cached") or ""
                    values[sample.name, label] += sample.value
        if ("ragorder_shadow", "") not in values:
            raise ValueError("there are no ragorder metrics")

        def total(name: str, label: str = "") -> int:
            return round(values.get((f"ragorder_{name}", label), 0.0))

        shadow, reports = bool(total("shadow")), total("reports_total")
        served, other = ("retrieval", "ragorder") if shadow else ("ragorder", "retrieval")
        ordered = values.get(("ragorder_displacement_positions_count", ""), 0.0)
        displaced = values.get(("ragorder_displacement_positions_sum", ""), 0.0)
        known = Reports(
            count=reports,
            reported=total("reported_cached_tokens_total"),
            predicted=total("predicted_cached_tokens_total"),
            absolute=total("prediction_error_tokens_total"),
            squared=total("prediction_error_squared_tokens_total"),
        )
        prompt_tokens, cached_tokens = total("prompt_tokens_total"), total("cached_tokens_total", served)
        requests = total("settled_requests_total", "served")
        predicted_other = None
        comparison = Comparison(None, None, "not compared: comparison is off in the orderer")
        if not requests or ("ragorder_cached_tokens_total", other) in values:
            predicted_other = total("cached_tokens_total", other)
            comparison = compare(requests, prompt_tokens, cached_tokens, predicted_other, known)
        return cls(
            shadow=shadow,
            served=requests,
            discarded=total("settled_requests_total", "discarded"),
            documents=total("documents_total"),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            predicted_other_tokens=predicted_other,
            other_cached_tokens=comparison.other_tokens,
            error_tokens=comparison.error_tokens,
            cannot_compare=comparison.reason,
            reports=reports,
            prediction_error_tokens=round(known.absolute / reports, 2) if reports else None,
            prediction_bias_tokens=round((known.predicted - known.reported) / reports, 2) if reports else None,
            order_us={f"p{percent}": _percentile_us(sorted(buckets.items()), percent) for percent in (50, 99)},
            displacement_mean=round(displaced / ordered, 3) if ordered else 0.0,
            ordered=round(ordered),
            reordered=total("reordered_requests_total", "some") + total("reordered_requests_total", "nothing"),
            reordered_cold=total("reordered_requests_total", "nothing"),
            best_moved=total("best_moved_requests_total"),
            fallbacks=total("fallbacks_total"),
            tree_nodes=total("tree_nodes"),
            evicted_blocks=total("evicted_blocks_total"),
            passed=dict(passed),
            cost=CostStats.of(families, served, other),
            recognised=_recognised_savings(recognised),
            serving=serving,
        )


def _recognised_savings(counts: Mapping[tuple[str, str], float]) -> dict[str, float]:
    savings = {}
    for preset in sorted({preset for preset, _ in counts}):
        requests, prompt, ours, theirs = (
            counts.get((preset, name), 0.0) for name in ("requests", "prompt", "ragorder", "retrieval")
        )
        if requests >= _ENOUGH and prompt > theirs:
            savings[preset] = round((ours - theirs) / (prompt - theirs), 4)
    return savings


def fetch_stats(url: str, *, timeout_s: float = 5.0, api_key: str | None = None) -> Stats:
    """Read `url`/metrics of a proxy, or an application with `Metrics`. Raises ServerError, or ImportError without
    ragorder[live]."""
    with needs("live", "talking to a server"):
        from prometheus_client.parser import text_string_to_metric_families
    with Server(url.rstrip("/").removesuffix("/metrics"), timeout_s=timeout_s, api_key=api_key) as server:
        try:
            page = server.get("/metrics")
        except ServerError as error:
            if error.status not in (401, 403):
                raise
            message = f"{server.root}/metrics refuses with HTTP {error.status}: give the proxy's key"
            raise ServerError(f"{message} (--api-key, or RAGORDER_PROXY_API_KEY)", error.status) from None
        ours = "\n".join(line for line in page.split("\n") if "ragorder_" in line)
        try:
            return Stats.of(text_string_to_metric_families(ours))
        except (ValueError, KeyError, OverflowError):
            message = f"{server.root}/metrics has no ragorder metrics: give the address of `ragorder serve`, or of an"
            raise ServerError(f"{message} application that serves Metrics().registry") from None


def _percentile_us(buckets: Sequence[tuple[float, float]], percent: float) -> float:
    """Interpolate as Prometheus' histogram_quantile."""
    finite = [(bound_s, count) for bound_s, count in buckets if not isinf(bound_s)]
    rank = (buckets[-1][1] if buckets else 0.0) * percent / 100
    below_s = below = 0.0
    for bound_s, count in finite:
        if count >= rank:
            below_s += (bound_s - below_s) * ((rank - below) / (count - below) if count > below else 0.0)
            break
        below_s, below = bound_s, count
    return round(1e6 * below_s, 1)
