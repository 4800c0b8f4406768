"""The simulated engine and real vLLM find the same tokens cached: on whole traces, and block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exactness import TRACES, Exactness, Served, compare, make_asks, serve_on_vllm
from support.rings import examples

from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.engines.vllm import VLLMEngine

BLOCK = 4
REQUESTS = 500


def ids(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def sim(blocks: int | None, *, block_size: int = BLOCK, like: Any = "vllm-0.32", **options: Any) -> SimEngine:
    capacity = None if blocks is None else blocks * block_size
    return SimEngine(block_size=block_size, capacity_tokens=capacity, output_tokens=0, like=like, **options)


def hits(engine: SimEngine, *prompts: Sequence[int]) -> list[int]:
    return [engine.generate(prompt).cached_tokens for prompt in prompts]


A, B, C = ids(0, 8), ids(100, 8), ids(200, 8)
# For three blocks: the pool overflows, then A and one token take it all, and one more block is needed.
UNFILLED = [ids(900, 12), A, [1], ids(300, 4), [*A, 2]]


class TestLikeVLLM032:
    def test_is_asked_for(self) -> None:
        assert (SimEngine().like, SimEngine().partial_blocks_first) == ("lru", False)
        assert (sim(1).like, sim(1).partial_blocks_first) == ("vllm-0.32", True)
        with pytest.raises(ValueError, match=r"cannot imitate 'vllm-0.1': choose from lru, vllm-0\.32"):
            sim(1, like="vllm-0.1")

    def test_blocks_that_were_not_filled_are_reused_first(self) -> None:
        assert hits(sim(3), *UNFILLED) == [0, 0, 0, 0, 8]
        assert hits(sim(3, like="lru"), *UNFILLED) == [0, 0, 0, 0, 4]

    def test_a_whole_prompt_asked_again_keeps_its_last_block_twice(self) -> None:
        engine = sim(5)
        assert hits(engine, A, A, B) == [0, 4, 0]
        assert engine.evicted_blocks == 0, "three blocks of A's and two of B's"
        hits(engine, ids(300, 4))
        assert (engine.evicted_blocks, engine.cached_tokens(A)) == (1, 8), "the older one went, the other is found"
        hits(engine, ids(400, 4))
        assert (engine.evicted_blocks, engine.cached_tokens(A)) == (2, 4)

    def test_an_answer_is_found_by_a_prompt_that_goes_on_from_it(self) -> None:
        told, untold = sim(None), sim(None)
        told.generate(ids(0, 6), answer=ids(6, 6))
        untold.admit(ids(0, 6), 6)
        assert hits(told, ids(0, 20)) == [12]
        assert hits(untold, ids(0, 20)) == [4]

    def test_reset_forgets_duplicates(self) -> None:
        engine = sim(5)
        hits(engine, A, A, A)
        engine.reset()
        assert (engine.free_blocks, engine.evicted_blocks) == (5, 0)
        assert hits(engine, A, B, [*A, 1]) == [0, 0, 8]

    @settings(max_examples=examples(150))
    @given(st.data(), st.sampled_from(["lru", "vllm-0.32"]), st.integers(1, 12))
    def test_every_block_is_free_once_all_requests_have_ended(
        self, data: st.DataObject, like: str, blocks: int
    ) -> None:
        engine, handles = sim(blocks, like=like), []
        for _ in range(data.draw(st.integers(1, 30))):
            first = data.draw(st.sampled_from([0, 1000, 2000]))
            prompt = ids(first, data.draw(st.integers(0, 20)))
            handles.append(engine.admit(prompt, answer=ids(first + 500, data.draw(st.integers(0, 6))))[1])
            for handle in handles:
                engine.extend(handle, ids(first + 700, data.draw(st.integers(0, 6))))
            if data.draw(st.booleans()):
                engine.finish(handles.pop(data.draw(st.integers(0, len(handles) - 1))))
            assert 0 <= engine.free_blocks <= blocks
        for handle in handles:
            engine.finish(handle)
        assert engine.free_blocks == blocks
        assert engine.cached_blocks <= blocks


class TestComparing:
    """vLLM played by a simulated engine of known behaviour."""

    def served(self, prompts: Sequence[Sequence[int]], engine: SimEngine) -> list[Served]:
        return [Served(prompt, [7], engine.generate(prompt).cached_tokens) for prompt in prompts]

    def test_counts_requests_and_tokens(self) -> None:
        result = compare(self.served([A, A, B, C, [*A, 1]], sim(4)), sim(4))
        assert (result.requests, result.prompt_tokens, result.working_set_tokens) == (5, 41, 24)
        assert (result.vllm_tokens, result.sim_tokens, result.capacity_tokens) == (4, 4, 16)
        assert result.evicted_blocks > 0
        assert (result.identical_share, result.differences) == (1.0, [])

    @pytest.mark.parametrize(
        ("prompts", "played", "compared", "reason"),
        [
            ([A, [*A, 1]], sim(9), sim(9, prefix_caching=False), "nothing was evicted yet"),
            (UNFILLED, sim(3), sim(3, like="lru"), "vLLM kept it"),
            (UNFILLED, sim(3, like="lru"), sim(3), "vLLM evicted it"),
        ],
    )
    def test_gives_the_reason_of_a_difference(
        self, prompts: list[list[int]], played: SimEngine, compared: SimEngine, reason: str
    ) -> None:
        result = compare(self.served(prompts, played), compared)
        (difference,) = result.differences
        assert difference.row == len(prompts) - 1
        assert difference.prompt_tokens == len(prompts[-1])
        assert result.vllm_tokens - result.sim_tokens == difference.vllm_tokens - difference.sim_tokens != 0
        assert difference.reason == reason

    def test_the_last_block_of_a_whole_prompt_has_a_reason_of_its_own(self) -> None:
        engine = sim(2)
        served = [*self.served([A, B], engine), Served(B, [7], 8)]
        (difference,) = compare(served, sim(2)).differences
        assert (difference.vllm_tokens, difference.sim_tokens) == (8, 4)
        assert difference.reason == "last block of a whole prompt"


class KVBlocks:
    """vLLM's own block manager, without a model: it says what a request finds, and gives and takes back its blocks."""

    def __init__(self, blocks: int) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self._manager = KVCacheManager(
            config, max_model_len=10_000, scheduler_block_size=BLOCK, hash_block_size=BLOCK, max_in_flight_tokens=10_000
        )
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    @property
    def free_blocks(self) -> int:
        return int(self._manager.block_pool.get_num_free_blocks())

    def admit(self, name: str, prompt: list[int], answer: list[int]) -> tuple[int, Any]:
        """Prefill a prompt in one step and compute upon each token of its answer."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request(name, prompt, SamplingParams(max_tokens=1_000), None, block_hasher=self._hasher)
        blocks, cached, _ = self._manager.get_computed_blocks(request)
        assert self._manager.allocate_slots(request, len(prompt) - cached, cached, blocks) is not None
        request.num_computed_tokens = len(prompt)
        self.extend(request, answer)
        return cached, request

    def extend(self, request: Any, answer: list[int]) -> None:
        for token in answer:
            request.append_output_token_ids(token)
            assert self._manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1

    def finish(self, request: Any) -> None:
        self._manager.free(request)


@pytest.mark.vllm
class TestAgainstTheBlocksOfVLLM:
    """Its block manager alone is fast enough for any sequence of requests, many of them in flight."""

    @pytest.mark.parametrize(
        "steps",
        [["admit", "finish"], ["admit", "extend", "extend", "finish"]],
        ids=["answers at once", "answers by and by"],
    )
    @settings(max_examples=examples(50))
    @given(data=st.data(), blocks=st.integers(3, 20))
    def test_the_same_blocks_are_found_and_free_at_every_step(
        self, steps: list[str], data: st.DataObject, blocks: int
    ) -> None:
        """While an answer is generated and takes blocks, other prompts may be computed, and take or find the same."""
        vllm, simulated = KVBlocks(blocks), sim(blocks)
        running: list[tuple[Any, int, list[int]]] = []
        served: list[list[int]] = [[]]
        for number in range(data.draw(st.integers(1, 40))):
            step = data.draw(st.sampled_from(steps)) if running else "admit"
            place = data.draw(st.integers(0, len(running) - 1)) if running else 0
            if step == "finish":
                request, handle, _ = running.pop(place)
                vllm.finish(request)
                simulated.finish(handle)
            elif step == "extend":
                request, handle, tokens = running[place]
                answer = ids(9_000, data.draw(st.integers(1, 6)))
                if -(-(len(tokens) + len(answer)) // BLOCK) - -(-len(tokens) // BLOCK) > vllm.free_blocks:
                    continue
                vllm.extend(request, answer)
                simulated.extend(handle, answer)
                tokens += answer
            else:
                before = data.draw(st.sampled_from(served))
                kept = before[: data.draw(st.sampled_from([0, 4, 7, 8, 100]))]
                prompt = [*kept, *ids(data.draw(st.integers(0, 2)) * 1_000, data.draw(st.integers(1, 12)))]
                answer = ids(9_000, data.draw(st.integers(0, 6)))
                if not simulated.has_room(prompt, len(answer)):
                    continue
                cached, request = vllm.admit(str(number), prompt, answer)
                completion, handle = simulated.admit(prompt, answer=answer)
                assert completion.cached_tokens == cached
                # vLLM keeps the prompt that it was given.
                running.append((request, handle, prompt + answer))
                served.append(running[-1][-1])
            assert simulated.free_blocks == vllm.free_blocks


@pytest.fixture(scope="module")
def served(vllm_engine: VLLMEngine) -> Iterator[Any]:
    """What real vLLM made of each trace, served when first asked for."""
    import torch

    done: dict[str, list[Served]] = {}

    def serve(name: str) -> list[Served]:
        if name not in done:
            sizes = {"vocabulary": 2048, "block_size": vllm_engine.block_size, "pool_blocks": 64, "longest_answer": 4}
            done[name] = serve_on_vllm(vllm_engine, make_asks(name, 0, REQUESTS, document_scale=0.25, **sizes))
        return done[name]

    # So small a model is faster on one core, above all where others use the second one.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield serve
    torch.set_num_threads(threads)


@pytest.mark.vllm
class TestAgainstVLLM:
    """The engine of the benchmarks, one request at a time: 500 requests a trace, a pool of 64 blocks."""

    def compared(self, served: list[Served], blocks: int = 64, **options: Any) -> Exactness:
        return compare(served, sim(blocks, block_size=32, **options))

    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("zipf", "paper-shuf"))) for name in TRACES]
    )
    def test_every_request_finds_the_same_tokens(self, name: str, served: Any) -> None:
        result = self.compared(served(name))
        assert result.requests == REQUESTS
        assert result.capacity_tokens == 2048
        assert result.working_set_tokens >= 5 * 2048, "the pool must overflow often for this to prove anything"
        assert result.evicted_blocks >= 5 * 64
        assert result.vllm_tokens >= 0.1 * result.prompt_tokens
        assert result.differences == []

    @pytest.mark.parametrize(
        ("name", "other"),
        [
            ("repeats", {"like": "lru"}),
            ("answers", {"like": "lru"}),
            ("repeats", {"blocks": 63}),
            ("repeats", {"blocks": 65}),
            ("whole-blocks", {"blocks": 63}),
        ],
    )
    def test_another_engine_is_detected(self, name: str, other: dict[str, Any], served: Any) -> None:
        assert self.compared(served(name), **other).identical_share < 0.97

    def test_answers_and_aborted_requests_were_among_them(self, served: Any) -> None:
        asks = make_asks("answers", 0, REQUESTS, vocabulary=2048, block_size=32, pool_blocks=64, longest_answer=4)
        assert [len(request.answer) for request in served("answers")] == [ask.output_tokens for ask in asks]
        assert sum(ask.aborted for ask in asks) >= 50
        found = sum(
            request.cached_tokens > len(asks[ask.follows].token_ids)
            for ask, request in zip(asks, served("answers"), strict=True)
            if ask.follows is not None
        )
        assert found >= 5, "some prompts must have found an answer cached"
