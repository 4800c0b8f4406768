"""What is measured of tiers on a real engine: sizes, pairing, and what the figures say."""

from __future__ import annotations

import random
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

pytest.importorskip("scipy")

from ragorder import Document
from ragorder.eval.prompts import NumberedPrompts
from ragorder.eval.tiering import ARMS, judge, make_cells, make_stream
from ragorder.eval.tiering.__main__ import main
from ragorder.eval.tiering.cells import CELLS
from ragorder.eval.tiering.chaos import Answer, chunk_files, damage, flip_bit, make_prompts, truncate
from ragorder.eval.tiering.tables import tiering_table
from ragorder.eval.trace import Request, Trace
from ragorder.trie.stores import ChunkStore

BLOCK = 32


def trace(*rankings: str) -> Trace:
    documents = {name: Document(name, name, tokens=100) for name in "abcdef"}
    requests = [Request("?", [documents[name] for name in ranking]) for ranking in rankings]
    return Trace("letters", requests, 600)


def lines(tier: str, apc: float, tiers: float, *, noise: float = 0.02, seeds: int = 3) -> list[dict[str, Any]]:
    """Results with these mean times, in ms, behind a warm-up that took for ever."""
    rng = random.Random(0)
    found = []
    for seed in range(seeds):
        for arm, mean in zip(ARMS, (apc, tiers), strict=True):
            times = [1e6] * 5 + [mean * (1 + noise * (rng.random() - 0.5)) for _ in range(50)]
            found.append(
                {
                    "cell": {"tier": tier},
                    "seed": seed,
                    "policy": arm,
                    "warmup": 5,
                    "sources": {"device": 10, "host": 20, "disk": 30, "elsewhere": 0, "computed": 40},
                    "rows": {"ttft_ms": times},
                }
            )
    return found


class TestSizes:
    def test_a_prefix_counts_once_in_the_working_set_and_whole_blocks_only(self) -> None:
        # 64 of the system, 100 a document, 20 of a question that nobody shares: 184 and 284 tokens.
        once = make_stream(trace("a"), NumberedPrompts(), BLOCK).working_set_tokens
        assert once == 184 // BLOCK * BLOCK
        # The system prompt's two blocks and the three with the first document's 96 tokens are shared.
        both = make_stream(trace("a", "ab"), NumberedPrompts(), BLOCK).working_set_tokens
        assert both == once + (284 // BLOCK - 5) * BLOCK
        apart = make_stream(trace("a", "b"), NumberedPrompts(), BLOCK).working_set_tokens
        assert apart == 2 * once - 64

    def test_each_cell_is_what_it_says(self) -> None:
        streams = [make_stream(trace("abc", "bcd", "cde", "def"), NumberedPrompts(), BLOCK)]
        (working_set,) = (stream.working_set_tokens for stream in streams)
        cells = {cell.name: cell for cell in make_cells(CELLS, streams, block_size=BLOCK, bytes_per_token=10)}
        assert cells["device"].blocks * BLOCK > working_set
        for name in ("host", "beyond", "disk"):
            assert cells[name].blocks * BLOCK < working_set
        assert cells["host"].host_bytes > 10 * working_set
        assert cells["beyond"].host_bytes < 10 * working_set
        assert cells["beyond"].disk_bytes is None
        assert cells["disk"].host_bytes == cells["beyond"].host_bytes
        assert (cells["disk"].disk_bytes or 0) > 10 * working_set

    def test_no_pool_is_too_small_for_a_prompt(self) -> None:
        streams = [make_stream(trace("abcdef"), NumberedPrompts(), BLOCK)]
        for cell in make_cells(CELLS, streams, block_size=BLOCK, bytes_per_token=10):
            assert cell.blocks * BLOCK > streams[0].longest_tokens

    def test_the_disk_has_room_for_all_seeds(self) -> None:
        streams = [make_stream(trace("abc"), NumberedPrompts(), BLOCK) for _ in range(3)]
        (cell,) = make_cells(["disk"], streams, block_size=BLOCK, bytes_per_token=10)
        assert (cell.disk_bytes or 0) > 10 * sum(stream.working_set_tokens for stream in streams)


class TestVerdicts:
    def test_warm_up_is_left_out(self) -> None:
        verdict = judge("host", lines("host", 300, 100))
        assert verdict.apc_ms == pytest.approx(300, rel=0.02)
        assert verdict.tiers_ms == pytest.approx(100, rel=0.02)

    @pytest.mark.parametrize(
        ("tier", "apc", "tiers", "met"),
        [
            ("host", 300, 100, "met"),
            ("host", 140, 100, "not met"),
            ("device", 100, 100, "met"),
            ("device", 100, 90, "met"),
            ("device", 100, 110, "not met"),
            ("beyond", 100, 90, ""),
            ("disk", 100, 200, ""),
        ],
    )
    def test_what_is_required_of_a_cell(self, tier: str, apc: float, tiers: float, met: str) -> None:
        assert judge(tier, lines(tier, apc, tiers)).met == met

    def test_noise_decides_nothing(self) -> None:
        verdict = judge("device", lines("device", 100, 100, noise=1.5))
        assert verdict.low < 1 < verdict.high
        assert verdict.met == "not decided"

    def test_the_interval_is_around_the_ratio(self) -> None:
        verdict = judge("host", lines("host", 200, 100, noise=0.5))
        assert verdict.low < verdict.ratio < verdict.high
        assert verdict.ratio == pytest.approx(2, rel=0.1)
        assert len(verdict.by_seed) == 3

    def test_the_table_says_it_all(self) -> None:
        console = Console(width=90, record=True, file=StringIO())
        console.print(tiering_table(lines("device", 100, 110) + lines("host", 300, 100)))
        shown = console.export_text()
        for text in ("100, 110", "not met", "300, 100", "3.00 [", "10.0, 20.0, 30.0"):
            assert text in shown


class TestChaos:
    def test_damage_changes_files_and_a_store_refuses_them_all(self, tmp_path: Path) -> None:
        store = ChunkStore(tmp_path / "disk", 1 << 22, "somebody")
        keys = [b"key %d" % number for number in range(40)]
        for key in keys:
            assert store.write(key, key * 100, None)
        store.close()
        assert len(chunk_files(tmp_path / "disk")) == 40
        assert damage(tmp_path / "disk", random.Random(0), share=1.0) == 40
        store = ChunkStore(tmp_path / "disk", 1 << 22, "somebody")
        for key in keys:
            into = bytearray(len(key) * 100)
            assert not store.read(key, memoryview(into))
        refused = store.counters.refusals()
        assert sum(refused.values()) == 40
        assert refused["checksum"] > 0
        assert refused["truncated"] > 0
        store.close()

    def test_one_bit_and_no_more(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(bytes(100))
        assert flip_bit(path, random.Random(1))
        assert sum(byte.bit_count() for byte in path.read_bytes()) == 1
        assert path.stat().st_size == 100
        assert truncate(path, random.Random(1))
        assert path.stat().st_size < 100

    def test_the_same_prompts_for_the_same_seed_in_which_documents_are_shared(self) -> None:
        drawn = make_prompts(30)
        assert drawn == make_prompts(30)
        assert all(400 < len(prompt) < 800 for prompt in drawn.prompts)
        starts = {tuple(prompt[:200]) for prompt in drawn.prompts}
        assert 1 < len(starts) < 30

    def test_answers_are_compared_up_to_where_they_part(self) -> None:
        def answer(text: str, *logprobs: float, other: float = -2.0) -> Answer:
            likely = [{token: logprob, "~": other} for token, logprob in zip(text, logprobs, strict=True)]
            return Answer(tuple(text), tuple(likely), 10, 0)

        right = answer("abc", -1.0, -1.5, -1.0)
        assert right.agrees(answer("abc", -1.0005, -1.5, -1.0))
        assert right.agrees(answer("ab", -1.0, -1.5))
        assert not right.agrees(answer("abc", -1.0, -1.6, -1.0))
        # What is not chosen counts, too.
        assert not right.agrees(answer("abc", -1.0, -1.5, -1.0, other=-2.1))
        assert not right.agrees(answer("abx", -1.0, -1.5, -1.0))

    def test_of_two_tokens_that_are_as_likely_as_each_other_either_is_right(self) -> None:
        tied = {"a": -1.0, "b": -1.0}
        one = Answer(("a", "c"), (tied, {"c": -1.0}), 10, 0)
        other = Answer(("b", "d"), (tied, {"d": -3.0}), 10, 0)
        assert one.agrees(other)


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--seeds", "one"], "--seeds"),
            (["--requests", "40", "--warmup", "35"], "--warmup"),
            (["--corpora", "/", "--corpus", "nowhere"], "nowhere"),
        ],
    )
    def test_says_what_is_wrong(self, tmp_path: Path, arguments: list[str], said: str) -> None:
        done = CliRunner().invoke(main, ["-o", str(tmp_path), *arguments])
        assert done.exit_code != 0
        assert said in done.output
