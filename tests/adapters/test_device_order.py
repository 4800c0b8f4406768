"""Which cached blocks the device gives up: held against vLLM's own cache manager, its block pool and its free queue."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import blocks_of, connector_without_engine, requests_in
from support.rings import examples

from ragorder.adapters.request_facts import RequestFacts
from ragorder.trie.policies import POLICIES, History, Tier, make_policy

pytestmark = pytest.mark.vllm

BLOCK = 4
QUESTION = 9999
NO_FACTS = RequestFacts()


@cache
def vllm() -> SimpleNamespace:
    """The parts of vLLM that decide about blocks, and ours, which need them. Importing them takes seconds."""
    pytest.importorskip("vllm")
    import torch
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    from ragorder.adapters.vllm_tiers.device_order import DeviceOrder
    from ragorder.adapters.vllm_tiers.ordered_connector import order_device

    if not hasattr(kv_cache_utils, "NONE_HASH"):
        kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)

    def manager(blocks: int) -> Any:
        config = KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        return KVCacheManager(config, 1 << 16, scheduler_block_size=BLOCK, hash_block_size=BLOCK)

    def request(id: str, tokens: Sequence[int]) -> Any:
        return Request(id, list(tokens), SamplingParams(max_tokens=64), None, block_hasher=hasher)

    return SimpleNamespace(manager=manager, request=request, DeviceOrder=DeviceOrder, order_device=order_device)


def tier(policy: str = "pgdsf", history: int = 0) -> Tier:
    return Tier(make_policy(policy), History(history) if history else None)


def prompt(documents: str) -> list[int]:
    """A block for each letter, and a question of one token."""
    return [token for letter in documents for token in [ord(letter)] * BLOCK] + [QUESTION]


@dataclass
class Running:
    """A request that holds blocks. It found `cached` tokens."""

    request: Any
    cached: int


class Device:
    """vLLM's cache manager over so many blocks, driven as its scheduler drives it; with an order, or without."""

    def __init__(self, blocks: int, tier: Tier | None = None) -> None:
        self.blocks = blocks
        self.manager = vllm().manager(blocks)
        self.pool = self.manager.block_pool
        self.tier = tier
        self.order = None if tier is None else vllm().DeviceOrder(self.pool, tier)
        self.requests = 0

    def begin(self, tokens: Sequence[int], chunk: int = 1 << 20) -> Running | None:
        """A request comes in, and its first chunk is computed; None if there is no room."""
        self.requests += 1
        return self.go_on(Running(vllm().request(str(self.requests), tokens), -1), chunk)

    def start(self, tokens: Sequence[int]) -> Running:
        running = self.begin(tokens)
        assert running is not None, "no room"
        return running

    def go_on(self, running: Running, chunk: int = 1 << 20) -> Running | None:
        """Its next chunk; the first one if it was preempted."""
        request = running.request
        if request.num_computed_tokens:
            new = min(chunk, request.num_tokens - request.num_computed_tokens)
            if self.manager.allocate_slots(request, new) is None:
                return None
        else:
            found, cached, _ = self.manager.get_computed_blocks(request)
            new = min(chunk, request.num_tokens - cached)
            if self.manager.allocate_slots(request, new, cached, found) is None:
                return None
            running.cached = cached if running.cached < 0 else running.cached
            request.num_computed_tokens = cached
        request.num_computed_tokens += new
        return running

    def decode(self, running: Running, token: int) -> bool:
        """One token of the answer; False if there is no room for it."""
        running.request.append_output_token_ids(token)
        return self.go_on(running) is not None

    def preempt(self, running: Running) -> None:
        self.manager.free(running.request)
        running.request.num_computed_tokens = 0

    def finish(self, running: Running, cost: float = 1.0, facts: RequestFacts = NO_FACTS) -> None:
        request = running.request
        if self.order is not None:
            ids = self.manager.get_block_ids_for_computed_tokens(request.request_id, request.num_computed_tokens)
            self.order.finished(ids[0], max(0, running.cached), cost, facts)
        self.manager.free(request)

    def serve(self, documents: str, cost: float = 1.0) -> int:
        """A request from its beginning to its end. How many of its documents were cached."""
        running = self.start(prompt(documents))
        self.finish(running, cost)
        return running.cached // BLOCK

    def holds(self, documents: str) -> int:
        """How many of these documents, from the first, a request would find."""
        cached: int = self.manager.get_computed_blocks(vllm().request("probe", prompt(documents)))[1]
        return cached // BLOCK

    def contents(self) -> set[bytes]:
        return {block.block_hash for block in self.pool.blocks if block.block_hash is not None}

    def check(self) -> None:
        """What vLLM takes for granted of its free queue, and what the order does of itself."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        assert len(free) == self.pool.get_num_free_blocks()
        ids = [block.block_id for block in free]
        assert sorted(ids) == [block.block_id for block in self.pool.blocks if not block.ref_cnt and not block.is_null]
        queue = self.pool.free_block_queue
        backwards, block = [], queue.fake_free_list_tail.prev_free_block
        while block is not queue.fake_free_list_head:
            backwards.append(block.block_id)
            block = block.prev_free_block
        assert backwards[::-1] == ids
        if self.order is None or self.order.failures:
            return
        order = self.order
        keys, spare = blocks_of(order)
        assert order.cached == len(self.tier) == self.tier.used  # type: ignore[arg-type, union-attr]
        for block in self.pool.blocks:
            key = keys.get(block.block_id)
            if key is not None and key == block.block_hash:
                node = self.tier.get(key)  # type: ignore[union-attr]
                assert node is not None and node.pins == (block.ref_cnt > 0)
            elif not block.ref_cnt and block.block_hash is not None:
                assert block.block_id in spare


class TestWhatGoesFirst:
    def test_the_spare_of_two_blocks_with_the_same_content_goes_first(self) -> None:
        device = Device(8, tier())
        device.serve("ab")
        # A prompt that ends where a block does: its last block is computed once more.
        again = device.start(prompt("ab")[:-1])
        device.finish(again)
        device.check()
        for documents in ("cd", "ef", "g"):
            device.serve(documents)
        assert [device.holds(documents) for documents in ("ab", "cd", "ef", "g")] == [2, 2, 2, 1]

    @pytest.mark.parametrize(("ends", "stays"), [((2 * BLOCK,), 1), ((), 0)])
    def test_the_question_goes_first_if_a_request_gives_document_ends(self, ends: tuple[int, ...], stays: int) -> None:
        device = Device(8, tier())
        device.serve("x")
        running = device.start([*prompt("ab")[:-1], *[QUESTION] * 2 * BLOCK, 0])
        # Where few tokens are new, each of them costs more: the question alone, if the documents were cached.
        device.finish(running, cost=50.0, facts=RequestFacts(ends))
        for documents in ("cd", "e", "f"):
            device.serve(documents)
        assert (device.holds("x"), device.holds("ab")) == (stays, 2)

    def test_what_a_request_forecasts_stays(self) -> None:
        device = Device(6, tier("forecast"))
        for documents, expected in (("a", 1.0), ("b", 50.0), ("c", 1.0)):
            running = device.start(prompt(documents))
            device.finish(running, facts=RequestFacts((BLOCK,), expected=(expected,)))
        for documents in "defgh":
            device.serve(documents)
        assert [device.holds(documents) for documents in "abc"] == [0, 1, 0]

    def test_lru_evicts_as_vllm_does(self) -> None:
        @settings(max_examples=examples(60))
        @given(st.lists(st.text("abcdef", min_size=1, max_size=5), max_size=40), st.integers(7, 12))
        def same(requests: list[str], blocks: int) -> None:
            ours, own = Device(blocks, tier("lru")), Device(blocks)
            for documents in requests:
                assert ours.serve(documents) == own.serve(documents)
                assert ours.contents() == own.contents()
                ours.check()

        same()


class PlainModel:
    """PGDSF by the book, for requests that come one after the other: every step looks at everything."""

    def __init__(self, blocks: int, remembers: bool) -> None:
        self.blocks = blocks
        self.remembers = remembers
        self.clock = 0.0
        self.held: dict[str, float] = {}
        self.costs: dict[str, tuple[int, float]] = {}
        self.uses: dict[str, list[int]] = {}
        self.time = 0

    def serve(self, documents: str, cost: float) -> int:
        paths = [documents[: end + 1] for end in range(len(documents))]
        hits = next((place for place, path in enumerate(paths) if path not in self.held), len(paths))
        # The question takes a block, too.
        missing = len(paths) - hits + 1 - (self.blocks - len(self.held))
        for _ in range(missing):
            inner = {path[:-1] for path in self.held}
            leaves = [path for path in self.held if path not in inner and path not in paths[:hits]]
            victim = min(leaves, key=lambda path: (self.held[path], self.uses[path][-1]))
            self.clock = max(self.clock, self.held.pop(victim))
            if not self.remembers:
                del self.costs[victim], self.uses[victim]
        for place, path in enumerate(paths):
            self.time += 1
            self.uses.setdefault(path, []).append(self.time)
            misses, mean = self.costs.get(path, (0, 0.0))
            if place >= hits:
                # As a running mean: rounded otherwise, ties would not be ties.
                misses, mean = misses + 1, mean + (cost - mean) / (misses + 1)
            self.costs[path] = misses, mean
            self.held[path] = self.clock + len(self.uses[path]) * mean
        return hits


class TestAgainstThePlainModel:
    @pytest.mark.parametrize("history", [0, 1000], ids=["no history", "history"])
    def test_the_same_blocks_stay(self, history: int) -> None:
        vllm()
        served = st.tuples(st.text("abcd", min_size=1, max_size=4), st.sampled_from([1.0, 2.0, 4.0]))

        @settings(max_examples=examples(100))
        @given(st.lists(served, max_size=60), st.integers(6, 14))
        def same(requests: list[tuple[str, float]], blocks: int) -> None:
            device, model = Device(blocks, tier("pgdsf", history)), PlainModel(blocks, bool(history))
            for documents, cost in requests:
                assert device.serve(documents, cost) == model.serve(documents, cost)
                assert len(device.contents()) == len(model.held)
                assert all(device.holds(path) == len(path) for path in model.held)
            device.check()
            assert device.order.failures == 0

        same()


class TestEveryWayToABlock:
    """Whatever takes blocks, they are those that are worth least: eleven cheap documents, and not the dear pair."""

    @pytest.fixture
    def device(self) -> Device:
        device = Device(16, tier())
        for _ in range(20):
            device.serve("ab")
        for letter in "cdefghijklm":
            device.serve(letter)
        assert device.holds("ab") == 2
        return device

    @pytest.fixture(autouse=True)
    def nothing_dear_is_lost(self, device: Device) -> Iterator[None]:
        yield
        device.check()
        assert device.holds("ab") == 2
        assert device.order.failures == 0

    def test_a_prompt_in_chunks(self, device: Device) -> None:
        running = device.begin(prompt("nopqrstuvw"), chunk=6)
        while running is not None and running.request.num_computed_tokens < running.request.num_tokens:
            running = device.go_on(running, chunk=6)
        assert running is not None
        device.finish(running)

    def test_an_answer(self, device: Device) -> None:
        running = device.start(prompt("n"))
        assert all(device.decode(running, token) for token in range(40))
        device.finish(running)

    def test_a_request_that_was_preempted(self, device: Device) -> None:
        running = device.start(prompt("nopqrst"))
        device.preempt(running)
        device.check()
        device.serve("uvwxyz")
        assert device.go_on(running) is running
        device.finish(running)

    def test_blocks_that_the_engine_declares_invalid(self, device: Device) -> None:
        running = device.start(prompt("nopq"))
        ids = device.manager.get_block_ids(running.request.request_id)[0]
        device.manager.evict_blocks(set(ids[2:]))
        device.finish(running)
        device.check()
        device.serve("rstuvwxyz")


class TestOneAfterAnother:
    def test_blocks_of_a_preempted_request_get_their_places_when_it_ends(self) -> None:
        device = Device(8, tier())
        running = device.start(prompt("abcd"))
        device.preempt(running)
        assert device.go_on(running) is running
        device.finish(running)
        for letter in "wxyz":
            device.serve(letter)
        assert device.holds("abcd") == 3

    def test_a_reset_of_the_prefix_cache_clears_the_tier(self) -> None:
        device = Device(8, tier("pgdsf", 100))
        for _ in range(50):
            device.serve("ab")
        assert device.manager.reset_prefix_cache()
        device.serve("ab")
        device.check()
        assert device.order.cached == 2
        for letter in "cdefghijklmnop":
            device.serve(letter)
        assert device.holds("ab") == 0

    def test_cached_stored_and_evicted_blocks_are_counted(self) -> None:
        device = Device(6, tier())
        assert device.order.oldest_seconds == 0
        device.serve("abc")
        assert (device.order.cached, device.order.stored, device.order.evicted) == (3, 3, 0)
        device.serve("defg")
        order = device.order
        assert (order.cached, order.stored, order.evicted, order.capacity) == (5, 7, 2, 6)
        assert order.oldest_seconds > 0


Step = tuple[str, int, str]


class TestWhateverHappens:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_every_free_block_is_in_the_queue_once_and_none_is_lost(self, policy: str) -> None:
        vllm()
        names = ["begin", "begin", "chunk", "chunk", "go on", "decode", "finish", "finish", "preempt", "reset", "evict"]
        steps = st.tuples(st.sampled_from(names), st.integers(0, 5), st.text("abc", min_size=1, max_size=4))

        @settings(max_examples=examples(80))
        @given(st.lists(steps, max_size=60), st.integers(4, 12), st.sampled_from([0, 3, 100]))
        def holds(steps: list[Step], blocks: int, history: int) -> None:
            device = Device(blocks, tier(policy, history))
            running: list[Running] = []
            for name, number, documents in steps:
                self.play(device, running, name, number, documents)
                device.check()
                assert device.order.failures == 0
            for each in running:
                device.finish(each)
            device.check()
            assert device.pool.get_num_free_blocks() == blocks
            # All of it can be had.
            assert device.begin(list(range(1, blocks * BLOCK + 1))) is not None
            device.check()

        holds()

    def play(self, device: Device, running: list[Running], name: str, number: int, documents: str) -> None:
        chosen = running[number % len(running)] if running else None
        if name in ("begin", "chunk"):
            # Some prompts end where a block does: what of them is cached is computed once more.
            tokens = prompt(documents)[: -1 if number % 2 else None]
            begun = device.begin(tokens, BLOCK + number if name == "chunk" else 1 << 20)
            if begun is not None:
                running.append(begun)
        elif name == "reset":
            device.manager.reset_prefix_cache()
        elif chosen is None:
            return
        elif name == "go on":
            if chosen.request.num_computed_tokens < chosen.request.num_tokens:
                device.go_on(chosen, BLOCK + number)
        elif name == "decode":
            if chosen.request.num_computed_tokens == chosen.request.num_tokens:
                device.decode(chosen, number)
        elif name == "preempt":
            if chosen.request.num_computed_tokens:
                device.preempt(chosen)
        elif name == "evict":
            device.manager.evict_blocks({1 + number % device.blocks})
        else:
            running.remove(chosen)
            device.finish(chosen)


class BrokenTier(Tier):
    """Raises in one of its steps, from the moment when it is `broken` on."""

    def __init__(self, step: str) -> None:
        super().__init__(make_policy("pgdsf"))
        self.broken = False
        intact = getattr(self, step)

        def raise_or(*arguments: Any, **options: Any) -> Any:
            if self.broken:
                raise RuntimeError("a document's text")
            return intact(*arguments, **options)

        setattr(self, step, raise_or)


class TestAnErrorOfOurs:
    @pytest.mark.parametrize("step", ["evict", "insert", "use", "pin", "unpin", "remove"])
    def test_turns_the_order_off_and_vllm_goes_on(self, step: str, caplog: pytest.LogCaptureFixture) -> None:
        broken = BrokenTier(step)
        device = Device(6, broken)
        for documents in ("ab", "cd", "ab"):
            device.serve(documents)
        broken.broken = True
        with caplog.at_level(logging.WARNING, "ragorder"):
            # A block loses its content, so that something is taken out of the tier as well.
            device.manager.evict_blocks({block.block_id for block in device.pool.blocks if block.block_hash})
            for _ in range(3):
                for documents in ("ab", "cd", "efg", "xyz"):
                    device.serve(documents)
                    device.check()
        assert device.order.failures == 1
        assert len(caplog.records) == 1
        message = caplog.records[0].getMessage()
        assert "RuntimeError" in message and "document" not in message
        assert device.order.cached == 0

    def test_leaves_the_blocks_in_vllms_own_order(self) -> None:
        broken = BrokenTier("evict")
        broken.broken = True
        device, own = Device(6, broken), Device(6)
        for documents in ("abc", "de", "abc", "fg", "abd", "hi", "abc", "xyz"):
            assert device.serve(documents) == own.serve(documents)
            assert device.contents() == own.contents()
        assert device.order.failures == 1


class TestWhereThereIsNoOrder:
    @pytest.mark.parametrize(
        ("groups", "caching", "said"), [(2, True, "2 groups of KV caches"), (1, False, "prefix caching is off")]
    )
    def test_vllms_own_is_kept(self, caplog: pytest.LogCaptureFixture, groups: int, caching: bool, said: str) -> None:
        from ragorder.adapters.vllm_tiers import TierSettings

        device = Device(4)
        device.pool.enable_caching = caching
        queue = device.pool.free_block_queue
        assert vllm().order_device(device.pool, groups, TierSettings(host_bytes=1 << 20)) is None
        assert said in caplog.text
        assert device.pool.free_block_queue is queue

    @pytest.mark.parametrize("policy", POLICIES)
    def test_others_get_the_one_of_the_settings(self, policy: str) -> None:
        from ragorder.adapters.vllm_tiers import TierSettings

        device = Device(4)
        queue = device.pool.free_block_queue
        order = vllm().order_device(device.pool, 1, TierSettings(host_bytes=1 << 20, policy=policy, history=0))
        assert order is not None and device.pool.free_block_queue is not queue
        assert [device.serve("ab") for _ in range(2)] == [0, 2]


class TestTheConnector:
    """What it tells the order of a request, from what vLLM's scheduler tells it."""

    @pytest.fixture
    def told(self) -> list[Any]:
        return []

    @pytest.fixture
    def connector(self, told: list[Any]) -> Any:
        """One without an engine: the host has 8 tokens for each request, and a new token costs 1 s per cached one."""
        vllm()
        from ragorder.adapters.vllm_tiers import TierSettings

        return connector_without_engine(
            TierSettings(host_bytes=1 << 20),
            SimpleNamespace(cost=lambda cached, new: float(cached) if new == 40 - cached else -1.0),
            connector_scheduler=SimpleNamespace(
                get_num_new_matched_tokens=lambda request, cached, max_num_new_tokens: (8, True),
                request_finished=lambda request: (False, None),
            ),
            device_order=SimpleNamespace(finished=lambda *facts: told.append(facts)),
        )

    def request(self, **fields: Any) -> Any:
        usual = {"num_preemptions": 0, "skip_reading_prefix_cache": False, "kv_transfer_params": None}
        return SimpleNamespace(**{"request_id": "1", "num_prompt_tokens": 40, **usual, **fields})

    def test_cached_tokens_are_from_device_and_host_and_the_rest_costs(self, connector: Any, told: list[Any]) -> None:
        request = self.request()
        assert connector.get_num_new_matched_tokens(request, 16) == (8, True)
        assert connector.request_finished_all_groups(request, ([1, 2, 3],)) == (False, None)
        assert told == [([1, 2, 3], 24, 24.0, RequestFacts())]
        assert requests_in(connector) == {}

    def test_cached_tokens_are_from_before_preemption_or_none_if_skipped(self, connector: Any, told: list[Any]) -> None:
        skipping = self.request(skip_reading_prefix_cache=True)
        connector.get_num_new_matched_tokens(skipping, 0)
        connector.request_finished(skipping, [1])
        assert told.pop() == ([1], 0, 0.0, RequestFacts())
        request = self.request()
        connector.get_num_new_matched_tokens(request, 0)
        request.num_preemptions = 1
        connector.get_num_new_matched_tokens(request, 32)
        connector.request_finished(request, [1])
        assert told == [([1], 8, 8.0, RequestFacts())]

    @pytest.mark.parametrize(
        ("facts", "expected"),
        [
            ({"cost": 0.5, "documents": [8, 24]}, (0.5, RequestFacts((8, 24), cost=0.5))),
            ({"documents": [8], "expected": [3]}, (0.0, RequestFacts((8,), expected=(3.0,)))),
            ({"cost": "dear"}, (0.0, RequestFacts())),
            ("rubbish", (0.0, RequestFacts())),
        ],
        ids=ascii,
    )
    def test_the_facts_given_by_a_request_count(
        self, connector: Any, told: list[Any], facts: Any, expected: tuple[float, RequestFacts]
    ) -> None:
        connector.request_finished(self.request(kv_transfer_params={"ragorder": facts}), [1])
        assert told == [([1], 0, *expected)]


class TestWhatItTakes:
    def test_depends_on_the_blocks_that_are_needed_and_not_on_those_that_are_free(self) -> None:
        """Counted in calls of Python functions."""
        calls = []
        for blocks in (128, 2048):
            device = Device(blocks, tier())
            for number in range(blocks - 1):
                device.serve(chr(1000 + number))
            device.pool.get_new_blocks(1)
            counted = 0

            def count(frame: Any, event: str, argument: Any) -> None:
                nonlocal counted
                counted += event in ("call", "c_call")

            sys.setprofile(count)
            try:
                device.pool.get_new_blocks(8)
            finally:
                sys.setprofile(None)
            assert device.order.evicted == 8
            calls.append(counted)
        few, many = calls
        assert many < 2 * few
