"""Profiles of placements: power laws by layers, and what files may hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragorder.pipelining.placement.base import IndexSizes, ModelSizes, Spread
from ragorder.pipelining.placement.budgets import Budgets
from ragorder.pipelining.placement.plan import plan_placement
from ragorder.pipelining.placement.profile import GenerationSample, PlacementProfile, RetrievalSample

MODEL = ModelSizes(layers=(100,) * 8, outside=50, kv_token=1, step_bytes=((64, 30),))
INDEX = IndexSizes(partitions=(10,) * 4)
STEP = 64
PLACES = [(0, 0), (0, 8), (4, 0), (4, 4), (8, 0)]
"""Layers on the device and in host memory."""


def generation(
    seconds: Callable[[int, int, int], float], places: list[tuple[int, int]]
) -> tuple[GenerationSample, ...]:
    return tuple(
        GenerationSample(batch=batch, device_layers=device, host_layers=host, seconds=seconds(batch, device, host))
        for device, host in places
        for batch in (1, 4, 16)
    )


def square_root(batch: int, device: int, host: int) -> float:
    return (1 + (8 - device) * (1 if host else 2)) * batch**0.5


def profile(**changes: Any) -> PlacementProfile:
    """Times that are exactly a power law: half as long from host memory as from the disk."""
    samples = generation(square_root, PLACES)
    retrieval = tuple(RetrievalSample(partitions=count, seconds=5 - count) for count in (0, 2, 4))
    return PlacementProfile(
        **{"model": MODEL, "index": INDEX, "step_tokens": STEP, "generation": samples, "retrieval": retrieval} | changes
    )


class TestTimes:
    def test_are_a_power_law_of_the_batch(self) -> None:
        made = profile()
        for batch in (1, 2, 4, 9, 16):
            assert made.generation_s(batch, Spread(8), STEP) == pytest.approx(batch**0.5)
            assert made.generation_s(batch, Spread(0, 0, 8), STEP) == pytest.approx(17 * batch**0.5)
            assert made.generation_s(batch, Spread(0, 8, 0), STEP) == pytest.approx(9 * batch**0.5)
            # A byte of KV is copied in the time of a layer's.
            kv = made.model.kv_token * made.workload.kv_tokens(batch) / 2 / made.model.slot
            seconds = made.generation_s(batch, Spread(8), STEP, 4)
            assert seconds == pytest.approx((1 + kv) * batch**0.5)
        assert made.batches == [1, 2, 4, 8, 16]

    @pytest.mark.parametrize(
        ("places", "weights", "seconds"),
        [
            # Linear between measured layers.
            (PLACES, Spread(2, 6, 0), 7),
            (PLACES, Spread(6, 0, 2), 5),
            # A mixture lies in proportion: a third of six streamed layers on the disk, 7 + (13 - 7) / 3.
            (PLACES, Spread(2, 4, 2), 9),
            # The slope goes on below the measured layers.
            ([(4, 0), (8, 0)], Spread(0, 0, 8), 17),
            # The disk alone stands for host memory.
            ([(0, 0), (8, 0)], Spread(0, 8, 0), 17),
        ],
    )
    def test_by_layers(self, places: list[tuple[int, int]], weights: Spread, seconds: float) -> None:
        made = profile(generation=generation(square_root, places))
        assert made.generation_s(1, weights, STEP) == pytest.approx(seconds)

    def test_never_rise_with_what_is_resident(self) -> None:
        noisy = {0: 3.0, 2: 1.0, 4: 2.0, 8: 0.5}
        samples = generation(lambda batch, device, host: noisy[device] * batch, [(device, 0) for device in noisy])
        made = profile(
            generation=samples,
            retrieval=[RetrievalSample(partitions=n, seconds=s) for n, s in ((0, 2), (2, 3), (4, 1))],
        )
        for values in (
            [made.generation_s(4, Spread(layers, 0, 8 - layers), STEP) for layers in range(9)],
            [made.retrieval_s(count) for count in range(5)],
        ):
            assert values == sorted(values, reverse=True)

    def test_retrieval_is_linear_in_resident_partitions(self) -> None:
        assert [profile().retrieval_s(count) for count in range(5)] == pytest.approx([5, 4, 3, 2, 1])
        # Repeats count once.
        timed = [(count, seconds) for count in (0, 4) for seconds in (1.0, 2.0, 9.0)]
        samples = [RetrievalSample(partitions=count, seconds=seconds) for count, seconds in timed]
        assert profile(retrieval=samples).retrieval_s(0) == 2.0

    def test_a_placement_can_be_planned(self) -> None:
        placement = plan_placement(Budgets(4000, 300), profile())
        assert placement.weights == Spread(8)
        assert placement.partitions == 4
        assert "estimates" not in placement.explain()


class TestTooFewSamples:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"generation": ()}, "one number of layers"),
            ({"generation": generation(lambda *_: 1.0, [(8, 0)])}, "one number of layers"),
            ({"generation": generation(lambda *_: 1.0, [(4, 0)])}, "one number of layers"),
            ({"generation": generation(lambda *_: 1.0, [(4, 2), (8, 0)])}, "all in host memory, or all on the disk"),
            ({"generation": generation(lambda *_: 1.0, [(9, 0), (0, 0)])}, "9 of 8 layers"),
            ({"generation": generation(lambda *_: 1.0, [(0, 0), (8, 0)])[:4]}, "one batch"),
            ({"retrieval": ()}, "two numbers or more"),
            ({"retrieval": (RetrievalSample(partitions=0, seconds=1),)}, "two numbers or more"),
            (
                {"retrieval": tuple(RetrievalSample(partitions=count, seconds=1) for count in (0, 5))},
                "up to the 4 of the index",
            ),
        ],
    )
    def test_are_refused(self, changes: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            profile(**changes)

    @pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
    def test_times_are_positive(self, seconds: float) -> None:
        with pytest.raises(ValueError, match="seconds"):
            RetrievalSample(partitions=0, seconds=seconds)


class TestFile:
    def test_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        made = profile(facts={"model": "m", "left_out": []})
        made.to_file(tmp_path / "profile.json")
        assert PlacementProfile.from_file(tmp_path / "profile.json") == made

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"\xff{", "is no JSON"),
            (b"[]", "no profile of placements"),
            (b'{"format": "ragorder-prefill-profile"}', "no profile of placements"),
            (b'{"format": "ragorder-placement-profile"}', "model"),
            (json.dumps({**profile().model_dump(mode="json"), "version": 2}).encode(), "version"),
        ],
    )
    def test_of_another_kind_or_version_is_refused_by_name(self, content: bytes, said: str, tmp_path: Path) -> None:
        path = tmp_path / "profile.json"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=said) as refused:
            PlacementProfile.from_file(path)
        assert str(path) in str(refused.value)
        assert "ragorder profile --placement" in str(refused.value)
