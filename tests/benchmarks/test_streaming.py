"""Steps with streamed weights: what is read and when, and what the report says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


from ragorder.benchmarks.doll.streaming.cells import StreamingCell
from ragorder.benchmarks.doll.streaming.experiment import SLOTS
from ragorder.benchmarks.doll.streaming.measuring import Bench, ThrottledSource, TokenBucket, write_model
from ragorder.kernels.offload import Checkpoint

SMALL = {"layers": 6, "hidden_size": 64, "intermediate_size": 256, "budget_layers": 4, "gigabytes_s": 1.0}


def cell(**fields: object) -> StreamingCell:
    return StreamingCell.read(SMALL | fields, "here")


class TestBench:
    def test_all_policies_read_all_layers_and_give_the_same_logits(self, tmp_path: Path) -> None:
        with Bench(write_model(tmp_path, cell(jitter=0.5), 0), cell(jitter=0.5), 0) as bench:
            bench.calibrate()
            assert bench.stream_s > 0 and bench.compute_s > 0 and bench.tokens >= 1
            layer = (2 * 64 * 64 + 2 * 64 * 64 + 3 * 64 * 256 + 2 * 64) * 4
            for policy in SLOTS:
                ticks: list[int] = []
                assert len(bench.steps(policy, 3, lambda ticks=ticks: ticks.append(1))) == len(ticks) == 3
                facts = bench.facts(policy)
                assert facts["equal"] is True
                assert facts["slots"] == (SLOTS[policy] or 4)
                assert facts["hits"] + facts["waits"] == 6
                assert abs(facts["bytes"] - 6 * layer) <= 4 * layer


class TestSource:
    def test_takes_as_long_as_the_bucket_says(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint(write_model(tmp_path, cell(), 0))
        entry = checkpoint.entries["model.layers.2.mlp.up_proj.weight"]
        into = memoryview(bytearray(entry.length))
        source = ThrottledSource(checkpoint, 1e6, 0.0, 0)
        before_s = time.perf_counter()
        source.read(entry, 0, into)
        assert time.perf_counter() - before_s >= entry.length / 1e6
        assert bytes(into) == checkpoint.tensor(entry.name).numpy().tobytes()
        checkpoint.close()


class TestBucket:
    def test_what_is_asked_for_together_passes_one_after_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(time, "perf_counter", lambda: 50.0)
        bucket = TokenBucket(100.0)
        assert [bucket.take(200), bucket.take(50)] == [52.0, 52.5]

    @pytest.mark.parametrize(("late_s", "ends_s"), [(0.0, 54.0), (0.5, 54.0), (2.0, 55.5)])
    def test_a_late_reader_loses_what_is_beyond_the_burst(
        self, late_s: float, ends_s: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket = TokenBucket(100.0, burst_s=0.5)
        monkeypatch.setattr(time, "perf_counter", lambda: 50.5)
        assert bucket.take(200) == 52.0
        monkeypatch.setattr(time, "perf_counter", lambda: 52.0 + late_s)
        assert bucket.take(200) == ends_s
