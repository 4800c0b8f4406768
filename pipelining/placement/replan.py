"""Placement that follows the load (RAGDoll 4.4, Figure 9)."""

from __future__ import annotations

from dataclasses import replace
from math import log

from ragorder.common.running_mean import RunningMean
from ragorder.pipelining.placement.base import Workload
from ragorder.pipelining.placement.costs import EstimatedCosts
from ragorder.pipelining.placement.plan import WORTHWHILE, PlannedPlacement, plan_placement

# Tokens of prompts and answers are rounded up to steps of this factor, so that few plans are made.
_STEP = 1.25
_PLANS = 256


class Replanner:
    """Plans again for the backlog and lengths of now, from a first placement `placed` with room for any request.

    A move pays once its seconds, times the waiting requests, are less than what these would save and what those since
    the last move would have saved: a burst moves at once, a low load after some requests. Measured times correct the
    expected ones. `most` bounds the batch.
    """

    def __init__(self, placed: PlannedPlacement, costs: EstimatedCosts, *, most: int) -> None:
        self.placed = placed
        self._costs = costs
        self.most = most
        self._longest = costs.workload
        self._prompt = RunningMean(arithmetic_start=True)
        self._answer = RunningMean(arithmetic_start=True)
        self._since = 0
        # Of the requests since the last move, what they would have saved by the better placement.
        self._missed_s = 0.0
        # Of generations, measured seconds by expected ones.
        self._generating = RunningMean(arithmetic_start=True)
        # Of retrievals, measured seconds of reads by expected ones, and seconds of all else.
        self._reading = RunningMean(arithmetic_start=True)
        self._scanning = RunningMean(arithmetic_start=True)
        # Of moves, the latest counting most: measured and expected seconds, and the most that were expected of one.
        self._moved_s, self._expected_s, self._most_s = 0.0, 0.0, 0.0
        self._caution = 1.0
        self._plans: dict[tuple[int, Workload, float, float | None], PlannedPlacement] = {}

    def retrieved(self, seconds: float) -> None:
        """Learn from a retrieval: with all partitions in memory the time of a scan, else that of reads."""
        now = self._costs if self._scanning.value is None else replace(self._costs, scan_s=self._scanning.value)
        read_s = now.read_s(self.placed.partitions)
        if read_s:
            other_s = now.retrieval_s(self.placed.partitions) - now.reading * read_s
            self._reading.add(max(0.0, seconds - other_s) / read_s)
        else:
            self._scanning.add(seconds)

    def answered(self, prompt_tokens: int, answer_tokens: int, batch: int, generation_s: float) -> None:
        """Learn from a request that was generated with up to `batch` requests."""
        placed = self.placed
        self._prompt.add(prompt_tokens)
        self._answer.add(answer_tokens)
        costs = replace(self._costs, workload=self._workload())
        expected_s = costs.generation_s(max(1, batch), placed.weights, placed.step_tokens, placed.kv_host_layers)
        self._generating.add(generation_s / expected_s)
        self._since += 1

    def plan(self, backlog: int) -> PlannedPlacement:
        """Return the best placement for `backlog` requests, rounded up to a power of two."""
        backlog = min(1 << (max(1, backlog) - 1).bit_length(), self.most)
        costs = self._costs_now()
        key = backlog, costs.workload, costs.reading, costs.scan_s
        if key not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[key] = plan_placement(self.placed.budgets, costs, backlog=backlog)
        return self._plans[key]

    def propose(self, backlog: int) -> PlannedPlacement | None:
        """Return the placement to move to now, or None while no move pays."""
        wanted, since, self._since = self.plan(backlog), self._since, 0
        now = replace(self.placed, costs=wanted.costs, backlog=wanted.backlog)
        saved_s = now.latency_s - wanted.latency_s
        if saved_s <= WORTHWHILE * now.latency_s:
            self._missed_s = 0.0
            return None
        saved_s *= self._generating.value or 1.0
        self._missed_s += since * saved_s
        return wanted if self._missed_s + backlog * saved_s >= backlog * self._cost_s(wanted) else None

    def moved(self, placement: PlannedPlacement, seconds: float) -> None:
        expected_s = self._costs.moving_s(self.placed, placement)
        if expected_s > 0:
            self._moved_s, self._expected_s = self._moved_s / 2 + seconds, self._expected_s / 2 + expected_s
            self._most_s = max(self._most_s, expected_s)
        self.placed, self._missed_s, self._caution = placement, 0.0, 1.0

    def failed(self) -> None:
        """Ask for twice as much gain before the next move."""
        self._caution, self._missed_s = 2 * self._caution, 0.0

    def _cost_s(self, wanted: PlannedPlacement) -> float:
        expected_s = self._costs.moving_s(self.placed, wanted)
        # A short move may have waited for requests, which says nothing about a longer one.
        known_s = min(expected_s, self._most_s)
        measured_s = known_s * self._moved_s / self._expected_s if known_s else 0.0
        return self._caution * (measured_s + expected_s - known_s)

    def _costs_now(self) -> EstimatedCosts:
        # By the pace of generation, whose expected times the plan uses.
        costs, pace = self._costs, self._generating.value or 1.0
        reading, scan_s = self._reading.value, self._scanning.value
        return replace(
            costs,
            workload=self._workload(),
            reading=costs.reading if reading is None else _near(reading / pace),
            scan_s=costs.scan_s if scan_s is None else _near(scan_s / pace),
        )

    def _workload(self) -> Workload:
        longest = self._longest.prompt_tokens + self._longest.answer_tokens
        if self._prompt.value is None or self._answer.value is None:
            return self._longest
        prompt, answer = (
            _rounded(each, most)
            for each, most in (
                (self._prompt.value, self._longest.prompt_tokens),
                (self._answer.value, self._longest.answer_tokens),
            )
        )
        # One of them may be the longest.
        return Workload(prompt_tokens=prompt, answer_tokens=answer, shared=((1, longest),))


def _near(value: float) -> float:
    return _STEP ** round(log(value, _STEP)) if value > 0 else 0.0


def _rounded(tokens: float, most: int) -> int:
    step = 1.0
    while step < tokens:
        step *= _STEP
    return max(1, min(round(step), most))
