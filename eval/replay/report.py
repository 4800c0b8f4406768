"""Report of a replay: figures, savings and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ragorder.common.request_lines import describe
from ragorder.eval.replay.overlap import Overlap
from ragorder.eval.replay.runs import RETRIEVAL, PolicyFigures
from ragorder.eval.report.words import policy_words

_A_LITTLE = 0.05
_SHOWN_FIELDS = 8

Verdict = Literal["helps", "helps a little", "not worth it", "costs"]
_ANSWERS: dict[Verdict, str] = {"helps": "Yes", "helps a little": "A little", "not worth it": "No", "costs": "No"}


@dataclass(frozen=True, slots=True)
class LogInfo:
    """Facts about a log. Documents and tokens count for each scope; `longest_tokens` is a prompt with its answer."""

    name: str
    requests: int
    duration_s: float
    tenants: int
    scopes: int
    documents: int
    documents_per_request_mean: float
    working_set_tokens: int
    prompt_tokens_mean: float
    longest_tokens: int
    out_of_order: int
    passed_over: Mapping[str, int] = field(default_factory=dict)
    estimated_lengths: int = 0
    assumed_lengths: int = 0


@dataclass(frozen=True, slots=True)
class CapacityInfo:
    """A cache size: as in the option ("5%"), and in tokens (None: unlimited). `asked`: not from the sweep."""

    name: str
    tokens: int | None
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Saving:
    """The saving of a policy against retrieval order at one capacity, in prefill tokens; negative for a loss."""

    policy: str
    capacity: str
    capacity_tokens: int | None
    saved_tokens: int
    share_of_prefill: float
    tokens_per_1000_requests: float
    seconds_per_1000_requests: float | None
    verdict: Verdict
    says: str


@dataclass(frozen=True)
class ReplayReport:
    """Cached ratio by policy and capacity, the saving, and the reasons. `left_out`: capacities below the longest
    prompt. `timed`: requests came at recorded times."""

    log: LogInfo
    overlap: Overlap
    capacities: Sequence[CapacityInfo]
    figures: Sequence[PolicyFigures]
    block_size: int
    left_out: Sequence[str] = ()
    timed: bool = False
    prefill_tokens_per_s: float | None = None
    processes: int = 1
    seconds: float = 0.0

    @property
    def policies(self) -> list[str]:
        """In the given order, retrieval first."""
        return list(dict.fromkeys(figures.policy for figures in self.figures))

    @property
    def compared_policy(self) -> str | None:
        """The policy of the savings: "earned", or the last one; None: retrieval order only."""
        others = [policy for policy in self.policies if policy != RETRIEVAL]
        return "earned" if "earned" in others else others[-1] if others else None

    @property
    def notes(self) -> list[str]:
        log, notes = self.log, []
        if log.out_of_order:
            notes.append(f"lines earlier than the line before them: {log.out_of_order:,}; sorted by time")
        if log.estimated_lengths:
            notes.append(f"documents whose length is estimated from their text: {log.estimated_lengths:,}")
        if log.assumed_lengths:
            assumed = "each counts with the tokens of --document-tokens"
            notes.append(f"documents without a length in the log: {log.assumed_lengths:,}; {assumed}")
        if log.passed_over:
            shown = [describe(name, count) for name, count in list(log.passed_over.items())[:_SHOWN_FIELDS]]
            more = len(log.passed_over) - len(shown)
            shown += [f"and {more:,} more"] if more else []
            notes.append(f"fields that a replay has no use for were passed over: {', '.join(shown)}")
        if self.left_out:
            longest = f"the longest prompt with its answer takes {log.longest_tokens:,} tokens"
            notes.append(f"caches of {', '.join(self.left_out)} were left out: {longest}")
        notes += [
            f"no engine has a cache of {each.name}: the longest prompt with its answer takes {log.longest_tokens:,}"
            for each in self.capacities
            if each.tokens is not None and each.tokens < log.longest_tokens
        ]
        fallbacks = sum(figures.fallbacks for figures in self.figures)
        if fallbacks:
            notes.append(f"{fallbacks:,} requests were left in retrieval order after an internal error: report it")
        return notes

    @property
    def requests_per_s(self) -> float:
        return self.log.requests * len(self.figures) / self.seconds if self.seconds else 0.0

    def at(self, policy: str, capacity: CapacityInfo) -> PolicyFigures:
        """Raises KeyError for what was not run."""
        for figures in self.figures:
            if (figures.policy, figures.capacity_tokens) == (policy, capacity.tokens):
                return figures
        raise KeyError(f"{policy} was not replayed with {capacity.name}")

    @property
    def focus(self) -> CapacityInfo:
        """The smallest given capacity, or the middle of the sweep."""
        asked = [capacity for capacity in self.capacities if capacity.asked]
        return asked[0] if asked else self.capacities[(len(self.capacities) - 1) // 2]

    @property
    def savings(self) -> list[Saving]:
        policy = self.compared_policy
        return [self._saving(policy, capacity) for capacity in self.capacities] if policy else []

    @property
    def answer(self) -> str:
        """Whether ordering would help, at the given capacities or else over the sweep."""
        savings, policy = self.savings, self.compared_policy
        if policy is None:
            return "Only retrieval order was replayed: there is nothing to compare it with."
        asked = [saving for saving, size in zip(savings, self.capacities, strict=True) if size.asked]
        if asked:
            return " ".join(f"{_ANSWERS[saving.verdict]}: {saving.says}." for saving in asked)
        helping = [saving for saving in savings if saving.verdict in ("helps", "helps a little")]
        if not helping:
            return f"No: {policy_words(policy)} saves nothing worth having at any of these capacities."
        helping.sort(key=lambda saving: saving.share_of_prefill)
        span = " to ".join(f"{100 * share:.1f}" for share in _ends([each.share_of_prefill for each in helping]))
        where = "all" if len(helping) == len(savings) else f"{len(helping)} of the {len(savings)}"
        yes = _ANSWERS[helping[-1].verdict]
        return f"{yes}: {policy_words(policy)} saves {span} % of the prefill tokens at {where} capacities."

    def as_json(self) -> dict[str, Any]:
        return {
            "engine": {
                "name": "sim",
                "block_size": self.block_size,
                "timed": self.timed,
                "prefill_tokens_per_s": self.prefill_tokens_per_s,
            },
            "log": asdict(self.log),
            "overlap": asdict(self.overlap),
            "capacities": [asdict(capacity) for capacity in self.capacities],
            "runs": [asdict(figures) for figures in self.figures],
            "left_out": list(self.left_out),
            "savings": [asdict(saving) for saving in self.savings],
            "answer": self.answer,
            "notes": self.notes,
            "speed": {
                "seconds": round(self.seconds, 3),
                "requests_per_s": round(self.requests_per_s),
                "processes": self.processes,
            },
        }

    def _saving(self, policy: str, capacity: CapacityInfo) -> Saving:
        plain, ordered = self.at(RETRIEVAL, capacity), self.at(policy, capacity)
        saved = ordered.cached_tokens - plain.cached_tokens
        prefill = plain.prompt_tokens - plain.cached_tokens
        share = saved / prefill if prefill else 0.0
        per_request = saved / self.log.requests
        verdict, reason = self._verdict(share, per_request)
        rate = self.prefill_tokens_per_s
        return Saving(
            policy=policy,
            capacity=capacity.name,
            capacity_tokens=capacity.tokens,
            saved_tokens=saved,
            share_of_prefill=round(share, 6),
            tokens_per_1000_requests=round(1000 * per_request, 1),
            seconds_per_1000_requests=round(1000 * per_request / rate, 3) if rate else None,
            verdict=verdict,
            says=f"at {capacity.name} {policy_words(policy)} saves {100 * share:.1f} % of the prefill, "
            f"{per_request:,.1f} tokens a request: {reason}",
        )

    def _verdict(self, share: float, per_request: float) -> tuple[Verdict, str]:
        """A shifted block boundary makes a block more or less a request, whatever the order."""
        if abs(per_request) < self.block_size:
            return "not worth it", "no more than rounding to whole blocks explains: not worth it"
        if share < 0:
            return "costs", "retrieval order reuses more; leave it as it is"
        if share < _A_LITTLE:
            return "helps a little", "little, yet more than rounding to whole blocks explains"
        return "helps", "worth it"


def _ends(values: Sequence[float]) -> list[float]:
    return [values[0], values[-1]] if len(values) > 1 else list(values)
