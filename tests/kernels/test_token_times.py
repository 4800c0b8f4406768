"""The time between tokens (RAGCache 5.4), as the embedded engine counts it."""

from __future__ import annotations

from itertools import accumulate

import pytest
from support.small_engine import Make

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ragorder.kernels.engine import TBT_BOUNDS_S, Request, Sampling, TieredEngine


class Clock:
    """Each step of the engine takes so long."""

    def __init__(self, *steps_s: float) -> None:
        self._times = list(accumulate(steps_s))
        self.steps = 0

    def __call__(self) -> float:
        return [0.0, *self._times][min(self.steps, len(self._times))]


@pytest.fixture
def engine(make: Make) -> TieredEngine:
    return make()


def serve(engine: TieredEngine, clock: Clock, *lengths: int) -> dict[int, float | None]:
    """Mean times between tokens of requests with answers of these lengths, which are computed together."""
    sampling = [Sampling(max_tokens=length, ignore_eos=True) for length in lengths]
    ids = {engine.add(Request([1, 2, 3], sampling=each)): place for place, each in enumerate(sampling)}
    found = {}
    while engine.has_unfinished:
        clock.steps += 1
        for update in engine.step():
            if update.completion is not None:
                found[ids[update.request_id]] = update.completion.tbt_s
    return found


def test_each_token_after_the_first_is_timed(engine: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(9.0, 0.004, 0.02, 0.06, 30.0, 100.0)
    monkeypatch.setattr("ragorder.kernels.engine.sequence.perf_counter", clock)
    assert serve(engine, clock, 4, 1, 2) == {
        0: pytest.approx((0.004 + 0.02 + 0.06) / 3),
        1: None,
        2: pytest.approx(0.004),
    }
    serve(engine, clock, 3)
    stats = engine.stats()
    counts = dict(zip((*TBT_BOUNDS_S, None), stats.tbt_counts, strict=True))
    # The last one is longer than every bound, and then the clock stands still.
    counted = {bound: count for bound, count in counts.items() if count}
    assert counted == {0.001: 1, 0.005: 2, 0.025: 1, 0.075: 1, None: 1}
    assert stats.tbt_s_sum == pytest.approx(2 * 0.004 + 0.02 + 0.06 + 100.0)


def test_a_request_that_is_aborted_has_what_it_had(engine: TieredEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1.0, 2.0)
    monkeypatch.setattr("ragorder.kernels.engine.sequence.perf_counter", clock)
    number = engine.add(Request([1, 2, 3], sampling=Sampling(max_tokens=9, ignore_eos=True)))
    for _ in range(2):
        clock.steps += 1
        engine.step()
    engine.abort(number)
    (update,) = engine.step()
    assert update.completion is not None
    assert (update.completion.ttft_s, update.completion.tbt_s) == (1.0, 2.0)
