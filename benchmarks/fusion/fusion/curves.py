"""Right answers by the share of tokens that are recomputed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ragorder.benchmarks.fusion.fusion.arms import Arm
from ragorder.benchmarks.fusion.fusion.model import ChainModel
from ragorder.benchmarks.fusion.fusion.prompts import Prompts
from ragorder.benchmarks.fusion.fusion.questions import Questions

__all__ = ["DEVIATION", "Measured", "measure_curves"]

DEVIATION = "deviation"

_TOGETHER = 50


@dataclass(slots=True)
class Measured:
    """Of an arm: `rows` has columns with an entry for each question, 1.0 where the answer is right, for each ratio, and
    the deviation of the reused KV in the second layer; `by_position` is its mean at each token of the documents."""

    rows: dict[str, list[float]] = field(default_factory=dict)
    by_position: list[float] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """What a record has of it beside `rows`."""
        return {DEVIATION: [round(value, 3) for value in self.by_position]}


def measure_curves(
    model: ChainModel,
    questions: Questions,
    arms: Mapping[str, Arm],
    *,
    neighbours: int,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Measured]:
    found = {name: Measured(by_position=[0.0] * questions.level.tokens) for name in arms}
    for start in range(0, len(questions), _TOGETHER):
        prompts = Prompts(model, questions.part(start, start + _TOGETHER), neighbours, seed + start)
        for name, arm in arms.items():
            deviation = prompts.deviation(arm)
            columns = {f"{ratio:g}": prompts.right(arm, ratio) for ratio in arm.ratios}
            columns[DEVIATION] = deviation.sum(1)
            for key, values in columns.items():
                found[name].rows.setdefault(key, []).extend(round(value, 3) for value in values.tolist())
            shares = (deviation.sum(0) / len(questions)).tolist()
            found[name].by_position = [sum(pair) for pair in zip(found[name].by_position, shares, strict=True)]
        for _ in prompts.questions.names:
            advance()
    return found
