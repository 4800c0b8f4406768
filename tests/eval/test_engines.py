"""Engines: the simulated one, block by block, and real vLLM, which the orderer must predict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.benched import runs_of
from support.rings import length

from ragorder import Document, Lengths, Orderer, Prompt, PromptBuilder
from ragorder.cli import main
from ragorder.eval.engines.base import EngineCompletion
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.engines.vllm import VLLMEngine


def ids(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def sim(blocks: int | None = None, *, block_size: int = 4, output_tokens: int = 0, **options: Any) -> SimEngine:
    """A simulated engine with blocks of four tokens that answers with nothing."""
    capacity = None if blocks is None else blocks * block_size
    return SimEngine(block_size=block_size, capacity_tokens=capacity, output_tokens=output_tokens, **options)


def hits(engine: Any, *prompts: Sequence[int]) -> list[int]:
    """The cached tokens of each prompt, served in a row."""
    return [engine.generate(prompt).cached_tokens for prompt in prompts]


A, B, C = ids(0, 8), ids(100, 8), ids(200, 8)


class TestSim:
    def test_reports_tokens_and_no_time(self) -> None:
        engine = sim()
        assert engine.generate(A) == EngineCompletion(ttft_s=None, cached_tokens=0, prompt_tokens=8, text="")
        assert engine.generate([*A, 1]) == EngineCompletion(ttft_s=None, cached_tokens=8, prompt_tokens=9, text="")
        assert engine.generate([]) == EngineCompletion(None, 0, 0)
        engine.close()

    @pytest.mark.parametrize(
        ("engine", "prompts", "found"),
        [
            # Whole blocks are reused, up to where the tokens differ.
            (sim(), [ids(0, 10), ids(0, 20)], [0, 8]),
            (sim(), [ids(0, 16), [*ids(0, 9), 77, *ids(10, 6)]], [0, 8]),
            # The same block after another prefix is another one.
            (sim(), [[*A, *B], [*C, *B]], [0, 0]),
            # The block of the last token is always computed.
            (sim(), [A, A, [*A, 1]], [0, 4, 8]),
            *((sim(), [ids(0, length)] * 2, [0, 0]) for length in (1, 3, 4)),
            # Room for two prompts of two blocks: the third takes the place of the oldest.
            (sim(4), [A, B, C, [*B, 1]], [0, 0, 0, 8]),
            (sim(4), [A, B, C, [*A, 1]], [0, 0, 0, 0]),
            (sim(5), [A, B, [*A, 1], C, [*A, 2]], [0, 0, 8, 0, 8]),
            # Answers take room, and match no prompt.
            (sim(8, output_tokens=8), [A, [*A, 1]], [0, 8]),
            (sim(4, output_tokens=8), [A, B, [*A, 1]], [0, 0, 0]),
            (sim(4, output_tokens=0), [A, B, [*A, 1]], [0, 0, 8]),
            # Prompts count as cached from when they are admitted.
            (sim(in_flight=4), [[*A, 1], [*A, 2]], [0, 8]),
            # Without a limit nothing is evicted.
            (sim(), [[*ids(1000 * n, 40), *more] for more in ([], [1]) for n in range(100)], [0] * 100 + [40] * 100),
            # A capacity below one block is one block.
            (SimEngine(block_size=16, capacity_tokens=5, output_tokens=0), [ids(0, 16), ids(0, 17)], [0, 16]),
        ],
    )
    def test_finds_the_blocks_that_were_not_evicted(
        self, engine: SimEngine, prompts: list[list[int]], found: list[int]
    ) -> None:
        engine.reset()
        assert hits(engine, *prompts) == found

    def test_a_request_loses_its_tail_first(self) -> None:
        engine = sim(4)
        assert hits(engine, [*A, *B]) == [0]
        engine.generate([500])  # one block, taken from the end of the first request
        assert engine.cached_tokens([*A, *B]) == 12

    def test_blocks_of_requests_in_flight_are_not_evicted(self) -> None:
        engine = sim(4, in_flight=2)
        hits(engine, A, B)  # both run and hold all four blocks
        assert hits(engine, C) == [0]  # the older one ends
        assert (engine.cached_tokens(A), engine.cached_tokens(B)) == (0, 8)

    def test_a_block_shared_by_two_requests_in_flight_is_held_until_both_end(self) -> None:
        engine = sim(4, in_flight=2)
        assert hits(engine, [*A, 1], [*A, 2]) == [0, 8]  # A is held twice: four blocks in all
        assert hits(engine, [900]) == [0]  # ends the first; only its last block is free
        assert engine.cached_tokens(A) == 8

    def test_reset_forgets_everything(self) -> None:
        engine = sim(8, in_flight=2)
        hits(engine, A, B)
        engine.reset()
        assert engine.cached_tokens(A) == 0
        assert hits(engine, [*A, 1], [*A, 2]) == [0, 8]
        assert (engine.capacity_tokens, engine.block_size) == (32, 4)

    def test_without_prefix_caching_nothing_is_reused(self) -> None:
        engine = sim(prefix_caching=False)
        assert hits(engine, [*A, 1], [*A, 1], [*A, 1]) == [0, 0, 0]
        assert engine.generate(A).prompt_tokens == 8
        assert engine.cached_tokens(A) == 0

    def test_a_prompt_larger_than_the_cache_is_served_and_leaves_what_fits(self) -> None:
        engine = sim(2)
        assert engine.generate(ids(0, 40)) == EngineCompletion(None, 0, 40)
        assert engine.cached_tokens(ids(0, 40)) == 8
        assert engine.generate(ids(0, 40)).cached_tokens == 8


class TestVLLMRefuses:
    """What a vLLM engine refuses before it starts one."""

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            *(
                (
                    {"block_size": 32, "capacity_tokens": size},
                    f"a pool of {size} tokens has no block of 32 tokens: raise the",
                )
                for size in (0, 31)
            ),
            *(({"block_size": size, "capacity_tokens": 1024}, f"block of {size} tokens") for size in (0, -16)),
            ({"output_tokens": 0}, "output_tokens is 0; vLLM generates 1 or more"),
        ],
    )
    def test_sizes_that_it_cannot_have(self, options: dict[str, int], said: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=said):
            VLLMEngine(tmp_path, **options)

    def test_to_start_without_vllm_and_names_the_extra(self, python: Any, tmp_path: Path) -> None:
        script = (
            "import sys\nfrom ragorder.eval.engines.vllm import VLLMEngine\n"
            "try:\n    VLLMEngine(sys.argv[1])\nexcept ImportError as error:\n    print(error.name, '|', error)"
        )
        done = python("-c", script, tmp_path, blocked=("vllm",))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(
            "vllm | the vllm engine needs vllm: in a clone of ragorder, pip install '.[vllm]'"
        )


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


@pytest.fixture(scope="module")
def builder(vllm_model: Path) -> PromptBuilder:
    return PromptBuilder("You are careful. Use the documents.", tokenizer=load(vllm_model))


def load(model: Path) -> Any:
    from ragorder.eval.engines.models import load_tokenizer

    return load_tokenizer(model)


def paper_shuf(requests: int) -> list[tuple[str, list[Document]]]:
    from ragorder.eval.data.workloads import make_workload

    workload = make_workload("paper-shuf", 0, requests=requests)
    rankings = [[workload.documents[number] for number in ranking] for ranking in workload.rankings]
    return [(f"What do they say about number {number}?", documents) for number, documents in enumerate(rankings)]


def token_ids(prompt: Prompt) -> list[int]:
    assert prompt.token_ids is not None
    return prompt.token_ids


@pytest.mark.vllm
class TestVLLM:
    @pytest.fixture(autouse=True)
    def empty_cache(self, vllm_engine: VLLMEngine) -> None:
        vllm_engine.reset()

    def test_a_block_too_small_for_a_cpu_is_refused(self, vllm_model: Path) -> None:
        if not on_cpu():
            pytest.skip("needs a machine without a GPU")
        with pytest.raises(ValueError, match="block_size is 16; on a CPU vLLM needs 32 or more"):
            VLLMEngine(vllm_model, block_size=16, capacity_tokens=1024)

    def test_reports_what_it_is(self, vllm_engine: VLLMEngine) -> None:
        assert (vllm_engine.name, vllm_engine.block_size, vllm_engine.capacity_tokens) == ("vllm", 32, 2048)
        assert (vllm_engine.kept_output_tokens, vllm_engine.partial_blocks_first) == (0, True)

    def test_counts_cached_tokens_in_whole_blocks_and_measures_time(self, vllm_engine: VLLMEngine) -> None:
        prompt = ids(10, 100)
        first, again = vllm_engine.generate(prompt), vllm_engine.generate(prompt)
        assert (first.cached_tokens, again.cached_tokens) == (0, 96)
        assert (first.prompt_tokens, again.prompt_tokens) == (100, 100)
        assert first.ttft_s > 0 and first.tbt_s is None
        with vllm_engine.answering(4):
            several = vllm_engine.generate(prompt)
        assert 0 < several.tbt_s <= several.total_s - several.ttft_s

    @pytest.mark.parametrize("length", [0, 2048, 5000])
    def test_a_prompt_that_does_not_fit_is_refused(self, vllm_engine: VLLMEngine, length: int) -> None:
        with pytest.raises(ValueError, match=f"the prompt has {length} tokens; this engine takes 1 to 2047"):
            vllm_engine.generate([7] * length)
        assert vllm_engine.generate([7] * 2047).prompt_tokens == 2047

    def test_aligned_prompts_lose_nothing_where_documents_meet(self, vllm_engine: VLLMEngine, vllm_model: Path) -> None:
        aligned = PromptBuilder("You are careful.", tokenizer=load(vllm_model), align_to=32)
        (query, documents), *_ = paper_shuf(1)
        vllm_engine.generate(token_ids(aligned.build(query, documents)))
        for shared in range(5):
            # A question long enough that its own last block is not the one that is compared.
            prompt = aligned.build(f"{shared} " + "and then " * 20, documents[:shared])
            end = prompt.spans[-1].end if prompt.spans else aligned.prefix_tokens
            assert vllm_engine.generate(token_ids(prompt)).cached_tokens == end

    @pytest.mark.slow
    def test_the_orderer_predicts_the_cache_and_ordering_doubles_its_use(
        self, vllm_engine: VLLMEngine, builder: PromptBuilder
    ) -> None:
        requests = paper_shuf(length(120, 60))
        retrieval = sum(hits(vllm_engine, *(token_ids(builder.build(*request)) for request in requests)))
        vllm_engine.reset()
        orderer = Orderer(
            tokens=builder.document_tokens,
            capacity_tokens=vllm_engine.capacity_tokens,
            block_size=vllm_engine.block_size,
            prefix_tokens=builder.prefix_tokens,
            strict=True,
        )
        ordered = predicted = evicted = 0
        for query, documents in requests:
            suffix_tokens = builder.suffix_tokens(query) + vllm_engine.kept_output_tokens
            ordering = orderer.order(documents, lengths=Lengths(suffix=suffix_tokens))
            completion = vllm_engine.generate(token_ids(builder.build(query, ordering)))
            predicted += abs(completion.cached_tokens - ordering.cached_tokens) <= vllm_engine.block_size
            ordered += completion.cached_tokens
            evicted += completion.prompt_tokens - completion.cached_tokens
            # What the engine reports is kept from the orderer: it must be right without.
            ordering.confirm()
        assert evicted > 10 * 2048, "the pool must overflow often for this to prove anything"
        assert predicted >= 0.99 * len(requests)
        assert ordered >= 2 * retrieval > 0

    @pytest.mark.slow
    def test_bench_serves_a_workload_on_it(self, vllm_model: Path, tmp_path: Path, python: Any) -> None:
        """In a process of its own: closing engines here would take the session's process groups away."""
        arguments = ["bench", "--engine", "vllm", "--model", str(vllm_model), "--workload", "paper-shuf"]
        arguments += ["--limit", "6", "--policy", "none", "--policy", "retrieval", "--policy", "free"]
        arguments += ["--capacity-tokens", "4096", "-o", str(tmp_path)]
        done = python("-c", "from ragorder.cli import main; main()", *arguments, timeout=400)
        assert done.returncode == 0, done.stderr
        runs = {run["policy"]: run for run in runs_of((tmp_path / "results.jsonl").read_text("utf-8"))}
        assert set(runs) == {"none", "retrieval", "free"}
        for run in runs.values():
            assert (run["engine"], run["requests"]) == ("vllm", 6)
            assert min(run["ttft_ms"].values()) > 0
        assert runs["none"]["cached_tokens"] == 0
        assert 0 < runs["retrieval"]["cached_tokens"] < runs["free"]["cached_tokens"]
        assert len({run["prompt_tokens"] for run in runs.values()}) == 1
        assert "TTFT" in done.stdout

    def test_bench_says_how_large_the_cache_must_be(self, vllm_model: Path) -> None:
        arguments = ["bench", "--engine", "vllm", "--model", str(vllm_model), "--limit", "2", "--capacity-tokens", "64"]
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 1
        assert "the longest prompt of paper-shuf has" in done.stderr
        assert "raise --capacity-tokens" in done.stderr
