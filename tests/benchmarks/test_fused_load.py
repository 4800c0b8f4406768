"""Suite fused-load: requests that wait for the same documents."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from ragorder.benchmarks.fusion.fused_load import WAYS, LoadCell, serve
from ragorder.benchmarks.kernels.embedded.models import SHAPES, threads
from ragorder.eval.engines.torch import TorchModel

EXACT, SHARED = "exact, any order", "fused, 5 %"


@pytest.fixture(scope="module")
def model() -> Iterator[TorchModel]:
    with threads(1):
        yield SHAPES["tiny"].make()


def served(model: TorchModel, way: str, **cell: int) -> dict[str, float]:
    return serve(model, LoadCell(**cell), WAYS[way], 0)


class TestCounts:
    def test_with_a_pool_of_4096_tokens_are_those_of_the_pages(self, model: TorchModel) -> None:
        found = {way: served(model, way) for way in WAYS}
        counts = [(way, facts["most"], facts["steps"]) for way, facts in found.items()]
        assert counts == [
            ("full attention", 4, 96),
            ("exact, any order", 4, 96),
            ("exact, one order", 24, 16),
            ("fused, 15 %", 19, 34),
            ("fused, 5 %", 24, 17),
        ]

    def test_with_room_for_all_are_the_same_but_for_the_prefills(self, model: TorchModel) -> None:
        found = [served(model, way, device_tokens=32_768, waiting=12) for way in WAYS]
        assert {facts["most"] for facts in found} == {12}
        assert {facts["preempted"] for facts in found} == {0}

    def test_are_those_of_answers_that_all_run_one_after_the_other(self, model: TorchModel) -> None:
        facts = served(model, EXACT, device_tokens=1_024, waiting=3, output_tokens=5)
        assert (facts["most"], facts["steps"]) == (1, 15)
