"""KV events: whatever a server sends, loses or repeats, the table in the end says what its engine holds."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.event_server import BLOCK, Event, Server, contents_of, follows, removed, stored, troubles
from support.inside import held_in, set_bounds
from support.waiting import eventually

from ragorder.adapters.vllm.kv_events import KVEventSubscriber
from ragorder.trie.residency.blocks import EngineBlocks, block_content, chain_root

Serve = Callable[..., Server]
Subscribe = Callable[..., KVEventSubscriber]


class TestTheTableIsWhatTheEngineHolds:
    """For any delay of the subscription, any loss, any engine."""

    @pytest.mark.parametrize("batches", [0, 40, 2400])
    def test_at_once_after_a_late_start(self, server: Server, subscribe: Subscribe, batches: int) -> None:
        """Also if the line is too slow for a long answer: of 2,400 batches the end is lost as well."""
        server.line = 1000
        chance = random.Random(batches)
        for _ in range(batches):
            server.act(chance)
        events = subscribe(server, settled=False)
        assert events.wait_until_synchronised(60)
        assert follows(events, server)
        assert events.counters.batches == batches
        assert events.counters.replays
        assert troubles(events) <= {"cleared"}

    def test_while_it_stores_and_removes_and_clears(self, server: Server, events: KVEventSubscriber) -> None:
        replays = events.counters.replays
        chance = random.Random(7)
        for _ in range(300):
            server.act(chance)
        assert eventually(lambda: follows(events, server))
        generation, epoch = events.blocks.generation, events.blocks.epoch
        server.clear()
        server.store(blocks=3)
        assert eventually(lambda: follows(events, server))
        assert (events.blocks.generation, events.blocks.epoch) == (generation + 1, epoch)
        assert events.counters.batches == 302
        assert events.counters.replays == replays, "nothing was missed"
        assert troubles(events) == {"cleared"}
        assert events.counters.stored and events.counters.removed

    def test_after_a_gap(self, server: Server, events: KVEventSubscriber) -> None:
        first, second = server.store(blocks=2)
        assert eventually(lambda: follows(events, server))
        before = events.blocks.generation, events.blocks.epoch, events.counters.replays
        with server.losing():
            server.remove(second)
            server.store(first, 3)
        server.store()
        assert eventually(lambda: follows(events, server))
        assert troubles(events) == {"gaps"}
        after = events.blocks.generation, events.blocks.epoch, events.counters.replays
        assert after == (*before[:2], before[2] + 1), "all was told: nobody need look at each block again"

    @pytest.mark.parametrize(
        ("lost", "heard"), [(0, 2), (0, 0), (3, 1)], ids=["told", "nothing said yet", "the next batch by number"]
    )
    def test_after_a_restart(self, server: Server, events: KVEventSubscriber, lost: int, heard: int) -> None:
        for _ in range(3):
            server.store(blocks=2)
        assert eventually(lambda: follows(events, server))
        generation, epoch = events.blocks.generation, events.blocks.epoch
        server.restart()
        with server.losing():
            for _ in range(lost):
                server.store()
        if lost:
            server.wait_for_subscriber()
        for _ in range(heard):
            server.store()
        assert eventually(lambda: follows(events, server))
        assert len(events.blocks) == lost + heard
        assert troubles(events) == {"restarts"}
        assert events.blocks.generation > generation
        assert events.blocks.epoch == epoch + 1

    @pytest.mark.parametrize(("seed", "dialect"), enumerate(("vLLM", "older vLLM", "SGLang", "vLLM")))
    def test_whatever_happens_at_any_point(
        self, serve: Serve, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch, seed: int, dialect: str
    ) -> None:
        # Who dies over a question does not answer it.
        set_bounds(monkeypatch, replay_timeout_s=1.0)
        server, chance = serve(dialect=dialect), random.Random(seed)
        for _ in range(chance.randint(0, 30)):
            server.act(chance)
        events = subscribe(server, settled=chance.random() < 0.5, check_interval_s=0.2)
        for _ in range(chance.randint(100, 200)):
            server.heard = chance.random() < 0.8
            server.act(chance)
            if chance.random() < 0.03:
                server.restart()
            if chance.random() < 0.05:
                time.sleep(0.05 * chance.random())
        assert eventually(lambda: follows(events, server) and events.synchronised)
        assert troubles(events) <= {"cleared", "gaps", "restarts", "garbage", "silences"}


class TestStartingOver:
    """What was lost for good is not believed any more."""

    def test_a_late_start_takes_what_the_server_still_has(self, serve: Serve, subscribe: Subscribe) -> None:
        server = serve(buffer=3)
        first, *_ = [server.store()[0] for _ in range(3)]
        server.store(first, 2)
        late = [server.store()[0] for _ in range(2)]
        events = subscribe(server, settled=False)
        assert events.wait_until_synchronised(60)
        assert troubles(events) == {"start_overs", "orphans"}
        assert events.counters.orphans == 2, "nobody knows what stands before them"
        assert held_in(events.blocks).keys() == {server.held[each] for each in late}
        server.clear()
        server.store(blocks=2)
        assert eventually(lambda: follows(events, server))

    def test_a_gap_too_long_begins_with_what_the_server_still_has(self, serve: Serve, subscribe: Subscribe) -> None:
        server = serve(buffer=3)
        events = subscribe(server)
        (known,) = server.store()
        assert eventually(lambda: follows(events, server))
        generation, epoch = events.blocks.generation, events.blocks.epoch
        with server.losing():
            for _ in range(10):
                server.store()
        (child,) = server.store(known)
        assert eventually(lambda: events.blocks.holds(server.held[child]))
        assert events.blocks.holds(server.held[known]), "its name is remembered, and a block comes after it"
        assert len(events.blocks) == 4
        assert troubles(events) == {"gaps", "start_overs"}
        assert events.blocks.generation > generation
        assert events.blocks.epoch == epoch, "it is the same engine"
        server.clear()
        server.store(blocks=2)
        assert eventually(lambda: follows(events, server))

    @pytest.mark.parametrize("late", [False, True])
    def test_a_batch_that_the_server_lost_is_skipped(self, server: Server, subscribe: Subscribe, late: bool) -> None:
        events = subscribe(server) if not late else None
        before, other = server.store()[0], server.store()[0]
        with server.losing(also_for_replays=True):
            server.remove(other)
            server.store()
        after = server.store(blocks=2)
        if events is None:
            events = subscribe(server)
        held = {server.held[each] for each in after}
        assert eventually(lambda: held_in(events.blocks).keys() == held)
        assert troubles(events) == ({"start_overs"} if late else {"start_overs", "gaps"})
        replays = events.counters.replays
        server.store(before)
        server.clear()
        server.store()
        assert eventually(lambda: follows(events, server))
        assert events.counters.replays == replays, "it is asked for no more"

    def test_nothing_is_started_over_when_missed_batches_are_looked_for(
        self, server: Server, subscribe: Subscribe
    ) -> None:
        """What was served but not reported yet must not look lost."""
        events = subscribe(server, check_interval_s=0.02)
        generation = events.blocks.generation
        for blocks in (0, 3):
            if blocks:
                with server.losing():
                    server.store(blocks=blocks)
            replays = events.counters.replays
            assert eventually(lambda replays=replays: events.counters.replays > replays + 3 and follows(events, server))
            assert len(events.blocks) == blocks
            assert events.blocks.generation == generation
        assert troubles(events) == set()


class TestWithoutAReplayEndpoint:
    """What is missed is missed: the table is emptied, and goes on."""

    def test_a_late_start_follows_later_events(self, server: Server, subscribe: Subscribe) -> None:
        (early,) = server.store()
        events = subscribe(server, replay=False)
        assert not events.synchronised
        server.store(early)
        late = server.store(blocks=2)
        assert eventually(lambda: held_in(events.blocks).keys() == {server.held[each] for each in late})
        assert events.synchronised
        assert troubles(events) == {"start_overs", "orphans"}
        assert not events.counters.replays

    def test_a_gap_empties_the_table(self, server: Server, subscribe: Subscribe) -> None:
        events = subscribe(server, replay=False)
        server.store()
        assert eventually(lambda: follows(events, server))
        generation, epoch = events.blocks.generation, events.blocks.epoch
        with server.losing():
            server.store()
        after = server.store()
        assert eventually(lambda: held_in(events.blocks).keys() == {server.held[each] for each in after})
        assert troubles(events) == {"gaps", "start_overs"}
        assert events.blocks.generation > generation
        assert events.blocks.epoch == epoch
        server.clear()
        server.store()
        assert eventually(lambda: follows(events, server))

    def test_smaller_numbers_are_those_of_another_engine(self, server: Server, subscribe: Subscribe) -> None:
        events = subscribe(server, replay=False)
        for _ in range(3):
            server.store()
        assert eventually(lambda: follows(events, server))
        epoch = events.blocks.epoch
        server.restart()
        server.wait_for_subscriber()
        server.store(blocks=2)
        assert eventually(lambda: follows(events, server))
        assert troubles(events) == {"restarts"}
        assert events.blocks.epoch == epoch + 1


class TestTenants:
    """The same tokens under another salt are another content."""

    def test_salted_blocks_are_others_than_unsalted_ones(self, server: Server, events: KVEventSubscriber) -> None:
        tokens = list(range(3 * BLOCK))
        for salt in ("one", "two"):
            server.store(salt=salt, tokens=tokens)
        assert eventually(lambda: len(events.blocks) == 6 and follows(events, server))
        assert not events.blocks.holds(block_content(chain_root(), tokens[:BLOCK]))
        server.store(tokens=tokens)
        assert eventually(lambda: len(events.blocks) == 9 and follows(events, server))
        assert troubles(events) == set()

    @given(st.lists(st.one_of(st.none(), st.text()), min_size=2, max_size=2, unique_by=lambda salt: salt or None))
    @example(["('a',)", "a"])
    @example(["a", "a',"])
    @example([None, "None"])
    def test_two_salts_are_never_equal(self, salts: list[str | None]) -> None:
        tokens = [1] * BLOCK
        contents = set()
        for salt in salts:
            contents |= set(contents_of(tokens * 2, salt))
            blocks = EngineBlocks(BLOCK)
            blocks.store([1, 2], None, tokens * 2, [[salt], None] if salt else None)
            assert all(map(blocks.holds, contents_of(tokens * 2, salt)))
        assert len(contents) == 4

    @pytest.mark.parametrize(
        "fields",
        [
            {"lora_id": 1, "lora_name": "adapter", "extra_keys": [["adapter"], ["adapter"]]},
            {"lora_id": 1, "lora_name": "adapter", "extra_keys": [["adapter", "salt"], ["adapter"]]},
            {"lora_id": 1},
        ],
        ids=["an adapter", "an adapter and a salt", "an adapter as older engines tell it"],
    )
    def test_an_adapters_blocks_are_neither_the_models_nor_a_tenants(
        self, server: Server, events: KVEventSubscriber, fields: Event
    ) -> None:
        tokens = list(range(2 * BLOCK))
        server.publish(stored([b"1", b"2"], tokens, **fields))
        assert eventually(lambda: len(events.blocks) == 2)
        for salt in (None, "adapter", "salt"):
            assert not any(map(events.blocks.holds, contents_of(tokens, salt)))
        server.publish(removed([b"1", b"2"]))
        assert eventually(lambda: len(events.blocks) == 0)
        assert troubles(events) == set()

    def test_blocks_of_other_layers_or_machines_do_not_count(self, server: Server, events: KVEventSubscriber) -> None:
        tokens = list(range(BLOCK))
        server.publish(stored([b"1"], tokens, group_idx=1), stored([b"2"], tokens, locality="REMOTE"))
        (block,) = server.store(tokens=tokens)
        server.publish(removed([block]) | {"group_idx": 1}, removed([block]) | {"locality": "REMOTE"})
        assert eventually(lambda: events.counters.batches == 3)
        assert follows(events, server)


class TestAServerThatIsNotThere:
    """Waiting for it happens on a thread of its own."""

    @pytest.fixture
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_bounds(monkeypatch, replay_timeout_s=0.5)

    @pytest.mark.usefixtures("impatient")
    def test_a_server_that_goes_and_comes_back_is_another_one(self, server: Server, subscribe: Subscribe) -> None:
        events = subscribe(server, check_interval_s=0.1)
        server.store(blocks=2)
        assert eventually(lambda: follows(events, server))
        server.die()
        assert eventually(lambda: not events.synchronised)
        server.start()
        server.store()
        assert eventually(lambda: events.synchronised and follows(events, server))
        assert troubles(events) == {"silences", "restarts"}

    @pytest.mark.usefixtures("impatient")
    def test_a_server_that_hangs_is_asked_again(self, server: Server, subscribe: Subscribe) -> None:
        events = subscribe(server)
        server.store(blocks=2)
        assert eventually(lambda: follows(events, server))
        generation = events.blocks.generation
        server.answering = False
        with server.losing():
            server.store()
        server.store()
        assert eventually(lambda: not events.synchronised)
        server.answering = True
        assert eventually(lambda: events.synchronised and follows(events, server))
        assert troubles(events) == {"silences", "gaps"}
        assert events.blocks.generation == generation, "the same engine went on where it stood"

    @pytest.mark.usefixtures("impatient")
    def test_an_answer_that_breaks_off_is_asked_for_from_the_start(self, server: Server, subscribe: Subscribe) -> None:
        for _ in range(5):
            server.store()
        server.line = 3
        events = subscribe(server, settled=False)
        assert eventually(lambda: events.counters.silences > 0)
        assert not events.synchronised
        assert len(events.blocks) == 0, "half of the story is not told"
        server.line = None
        assert eventually(lambda: events.synchronised)
        assert follows(events, server)

    @pytest.mark.parametrize("state", ["synchronised", "down", "hanging", "without replays", "answering at length"])
    def test_closing_is_quick_and_leaves_nothing(
        self, serve: Serve, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch, state: str
    ) -> None:
        set_bounds(monkeypatch, replay_timeout_s=600.0)
        server = serve(start=state != "down")
        server.answering = state != "hanging"
        if state == "answering at length":
            server.line = 1000
            for _ in range(1400):
                server.store()
        events = subscribe(server, settled=False, replay=state != "without replays")
        if state == "synchronised":
            assert events.wait_until_synchronised(60)
        elif state in ("hanging", "answering at length"):
            assert eventually(lambda: events.counters.replays > 0)
        start = time.monotonic()
        events.close()
        assert time.monotonic() - start < 60, "it waits for no answer, which would take 600 seconds"
        events.close()
        assert "ragorder-kv-events" not in {thread.name for thread in threading.enumerate()}

    @pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="there are no file descriptors to be counted")
    def test_no_file_is_left_open(self, server: Server) -> None:
        closed = []

        def cycle() -> None:
            blocks = EngineBlocks(BLOCK)
            with KVEventSubscriber(blocks, server.endpoint, server.replay_endpoint) as events:
                assert events.wait_until_synchronised(60)
            assert "ragorder-kv-events" not in {thread.name for thread in threading.enumerate()}
            with pytest.raises(ValueError, match="endpoint"):
                KVEventSubscriber(blocks, server.endpoint, "nonsense")
            closed.append(events)

        server.store()
        for _ in range(2):
            cycle()
        before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(5):
            cycle()
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert threading.active_count() == threads


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:5557", "http://localhost:5557", "tcp://localhost", "tcp://*:5557", "tcp://"]
)
def test_an_invalid_endpoint_is_refused_with_an_example(endpoint: str) -> None:
    for endpoints in ((endpoint,), ("tcp://127.0.0.1:5557", endpoint)):
        with pytest.raises(ValueError, match=r"tcp://127\.0\.0\.1:5557"):
            KVEventSubscriber(EngineBlocks(BLOCK), *endpoints)
    assert "ragorder-kv-events" not in {thread.name for thread in threading.enumerate()}
