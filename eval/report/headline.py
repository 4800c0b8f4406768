"""Headline of a report: what ordering saves, with its interval, in words and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.marks import Mark, draw_marks
from ragorder.eval.report.statistics import PairedDifference
from ragorder.eval.report.words import THIN, capital, change_words, format_number, policy_words, signed, spread_words

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Chart", "Headline", "Lead", "main_policy", "saving_words"]

_BAR = 30


@dataclass(frozen=True, slots=True)
class Chart:
    """Differences to a baseline, one row each: a picture on the page, bars on the console."""

    title: str
    axis: str
    marks: Sequence[Mark]
    caption: str = ""
    lower_is_better: bool = False

    def picture(self) -> Picture:
        """Raises ImportError naming the extra."""
        said = "; ".join(f"{mark.label}: {mark.shown}" for mark in self.marks)
        caption = self.caption + " Strokes are the seeds." * any(mark.seeds for mark in self.marks)
        return draw_marks(self.marks, title=self.title, axis=self.axis, alt=said, caption=caption, baseline=0)

    def __rich__(self) -> Text:
        from rich.text import Text

        text = Text(f"{self.title} ({self.axis})\n", "bold")
        width = max(len(mark.label) for mark in self.marks)
        longest = max(abs(mark.value) for mark in self.marks) or 1
        for mark in self.marks:
            bar = "█" * max(1, round(_BAR * abs(mark.value) / longest))
            text.append(f"  {mark.label:<{width}}  ", "")
            text.append(f"{bar} ", "green" if (mark.value > 0) != self.lower_is_better else "red")
            text.append(f"{mark.shown}\n", "")
        return text.append(self.caption, "dim") if self.caption else text


@dataclass(frozen=True, slots=True)
class Lead:
    """The first figure of a report: the smallest and the largest of these changes. The first sentence has the same."""

    changes: Sequence[float]
    unit: str
    says: str

    @property
    def figure(self) -> str:
        return spread_words(self.changes)


@dataclass(slots=True)
class Headline:
    """The most important sentence comes first; it says in words what `lead` says."""

    words: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    lead: Lead | None = None


def main_policy(policies: Sequence[str], baseline: str) -> str | None:
    """The default policy, or else the last one that is ours."""
    ours = [policy for policy in ("earned", "free", "prefix", "events", "greedy") if policy in policies]
    others = [policy for policy in policies if policy not in (baseline, "none", "oracle")]
    return next((policy for policy in [*ours, *reversed(others)] if policy != baseline), None)


def saving_words(
    policy: str,
    baseline: str,
    cached: PairedDifference,
    times: PairedDifference | None = None,
    *,
    where: str = "",
    unknown: str = "too few requests",
) -> str:
    """A sentence; `unknown` is the reason for a missing interval."""
    words = f"{where}: " if where else ""
    words += (
        f"{policy_words(policy)} finds {format_number(cached.value)}{THIN}% of the prompt tokens in the cache, "
        f"{policy_words(baseline)} {format_number(cached.baseline)}{THIN}%: {_changed(cached, ' points', unknown)}"
    )
    if times is not None:
        words += f". The median time to the first token changes by {_changed(times, '', unknown)}"
    return f"{words if where else capital(words)}."


def _changed(found: PairedDifference, unit: str, unknown: str) -> str:
    if not found.known:
        shown = f"{signed(100 * found.difference)}{THIN}%" if found.relative else signed(found.difference)
        return f"{shown}{unit} (not decided: {unknown})"
    return f"{change_words(found)}{unit}" + (
        " (not decided: the interval covers zero)" if found.verdict == "no difference" else ""
    )
