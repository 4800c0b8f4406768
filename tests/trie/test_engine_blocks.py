"""An engine's blocks, by its events: what is held, what watchers hear, and how much memory that takes."""

from __future__ import annotations

import random
import threading
import time
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import contents_in, held_in, writers_lock_of

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from support.event_server import BLOCK, contents_of

from ragorder import Document, Orderer
from ragorder.trie.residency import TierLevel
from ragorder.trie.residency.blocks import Content, EngineBlocks

TOKENS = list(range(BLOCK))
DOCUMENTS = [Document(f"d{number}", "a text") for number in range(12)]


class Recorder:
    """A watcher."""

    def __init__(self) -> None:
        self.changed: dict[Content, None] = {}

    def told(self) -> set[Content]:
        told = set(self.changed)
        self.changed.clear()
        return told


# Store, remove, clear; a token; the number of a block; a tier.
OPERATIONS = st.tuples(st.sampled_from("ssssrrrc"), st.integers(0, 2), st.integers(0, 9), st.sampled_from(TierLevel))


@pytest.mark.parametrize("same_engine", [True, False])
def test_a_successor_replaces_the_table_at_once(same_engine: bool) -> None:
    blocks = EngineBlocks(BLOCK)
    tokens = list(range(2 * BLOCK))
    blocks.store([1], None, tokens[:BLOCK])
    successor = blocks.make_successor(same_engine=same_engine)
    successor.store([2], 1, tokens[BLOCK:])
    successor.store([3], None, [9] * BLOCK)
    assert list(map(blocks.holds, contents_of(tokens))) == [True, False], "nothing has changed yet"
    generation, epoch = blocks.generation, blocks.epoch
    blocks.replace(successor, same_engine=same_engine)
    assert list(map(blocks.holds, contents_of(tokens))) == [same_engine] * 2, "another engine has other hashes"
    assert blocks.holds(contents_of([9] * BLOCK)[0])
    assert blocks.orphans == (not same_engine)
    assert blocks.generation == generation + 1
    assert blocks.epoch == epoch + (not same_engine)


def test_the_last_watcher_gets_changes_until_it_stops() -> None:
    blocks = EngineBlocks(BLOCK)
    (content,) = contents_of(TOKENS)
    first, last = Recorder(), Recorder()
    blocks.watch(content, first)
    blocks.watch(content, last)
    blocks.unwatch(content, first)
    blocks.store([1], None, TOKENS)
    assert (first.told(), last.told()) == (set(), {content})
    blocks.unwatch(content, last)
    blocks.unwatch(content, last)
    blocks.remove([1])
    assert (first.told(), last.told()) == (set(), set())


def test_memory_is_bounded_and_what_is_held_stays_up_to_half_of_it() -> None:
    blocks = EngineBlocks(BLOCK, max_blocks=40)
    chance = random.Random(5)
    held: dict[int, Content] = {}
    for number in range(1000):
        while len(held) >= 20:
            block = chance.choice(list(held)[1:])
            blocks.remove([block])
            del held[block]
        tokens = [number] * BLOCK
        blocks.store([number], None, tokens)
        (held[number],) = contents_of(tokens)
        assert len(contents_in(blocks)) <= 40
        assert held_in(blocks).keys() == set(held.values())
    assert 0 in held, "however old it is"


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(("new_hashes", "new_tokens"), [(True, True), (True, False), (False, True)])
def test_ever_new_hashes_or_blocks_fill_no_memory(held: bool, new_hashes: bool, new_tokens: bool) -> None:
    blocks = EngineBlocks(BLOCK, max_blocks=10)
    for number in range(100):
        name, tokens = number * new_hashes, [number * new_tokens] * BLOCK
        blocks.store([name], None, tokens)
        assert blocks.holds(*contents_of(tokens))
        if not held:
            blocks.remove([name])
        assert len(blocks) <= len(contents_in(blocks)) <= 10
    assert (len(blocks) > 0) == held


def test_a_block_costs_the_same_however_many_were_forgotten() -> None:
    table = EngineBlocks(BLOCK, 1 << 16)
    numbers = count()

    def cost(blocks: int) -> float:
        start = time.thread_time()
        for number in islice(numbers, blocks):
            table.store([number], None, [number, 1, 1, 1])
            table.remove([number])
        return (time.thread_time() - start) / blocks

    first = cost(1 << 14)
    cost(3 << 15)
    # It grew 24 times.
    assert max(cost(1 << 13) for _ in range(12)) < 6 * first
    assert len(contents_in(table)) == 1 << 16


def test_no_call_of_an_orderer_waits_for_a_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finaliser may run within `store` on the same thread, and finish, order or close an orderer there."""
    monkeypatch.setattr("ragorder.scope.scopes.MAX_SCOPES", 2)
    table = EngineBlocks(BLOCK)
    orderer = Orderer(
        block_size=BLOCK,
        capacity_tokens=40 * BLOCK,
        blocks=table,
        prefix_ids=[1] * BLOCK,
        prefix_tokens=BLOCK,
        tokens=lambda _: 2 * BLOCK,
        token_ids=lambda document: [DOCUMENTS.index(document) + 2] * 2 * BLOCK,
    )
    table.store([1], None, [1] * BLOCK)

    def use() -> None:
        for number in range(20):
            ordering = orderer.order(DOCUMENTS[number % 4 : number % 4 + 5], scope=f"tenant {number % 3}")
            ordering.confirm(0) if number % 2 else ordering.discard()
            orderer.predict_cached_tokens(DOCUMENTS[:3], scope=f"tenant {number % 3}")
        orderer.close()

    with writers_lock_of(table):
        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert not orderer.fallbacks


@given(st.lists(OPERATIONS))
def test_watchers_hear_of_every_change_when_it_happens_and_the_fastest_tier_counts(
    operations: list[tuple[str, int, int, TierLevel]],
) -> None:
    blocks = EngineBlocks(BLOCK)
    watcher = Recorder()

    def content_of(chain: tuple[int, ...]) -> Content:
        return contents_of([each for each in chain for _ in range(BLOCK)])[-1]

    # Three tokens and chains of up to three blocks: every block comes and goes more than once.
    known: list[tuple[int, ...]] = [()]
    tiers: dict[tuple[int, ...], set[TierLevel]] = {}
    generation = 0
    for what, token, number, medium in operations:
        before = {chain for chain, media in tiers.items() if media}
        chain = known[number % len(known)]
        if what == "s":
            grown = (*chain[:2], token)
            above = grown[:-1]
            if above:
                tiers[above].add(medium)
            if grown not in known:
                known.append(grown)
                blocks.watch(content_of(grown), watcher)
            tiers.setdefault(grown, set()).add(medium)
            blocks.store([grown], above or None, [token] * BLOCK, None, medium)
        elif what == "r":
            tiers.get(chain, set()).discard(medium)
            blocks.remove([chain], medium)
        else:
            for media in tiers.values():
                media.clear()
            blocks.clear()
            generation += 1
            before = set()
        after = {chain for chain, media in tiers.items() if media}
        assert set(map(content_of, after)) == held_in(blocks).keys()
        assert watcher.told() == set(map(content_of, before ^ after))
        assert all(blocks.place(content_of(chain)) is min(tiers[chain]) for chain in after)
        assert blocks.generation == generation
