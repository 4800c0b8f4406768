"""Orderers that hear of a simulated engine's blocks, when a test says so."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from ragorder import Document, Lengths, Orderer, Settings
from ragorder.eval.engines.base import settings_of
from ragorder.eval.engines.sim import SimEngine
from ragorder.scope.scopes import MAX_NODES
from ragorder.trie.residency.blocks import EngineBlocks
from ragorder.trie.residency.events import EventsResidency
from ragorder.trie.tree import Node
from support.inside import blocks_in, contents_in, scopes_of

BLOCK = 4
SYSTEM = list(range(1, 11))
DOCUMENTS = 12

REQUESTS = st.lists(st.integers(0, DOCUMENTS - 1), min_size=1, max_size=5, unique=True)
STEP = st.one_of(
    *(st.tuples(st.just(step), REQUESTS) for step in ("serve", "begin")),
    *(st.tuples(st.just(step), st.none()) for step in ("end", "tell", "discard", "clear")),
    st.tuples(st.just("foreign"), st.integers(1, 120)),
)
STEPS = st.lists(STEP, max_size=60)
LENGTHS = st.lists(st.integers(0, 30), min_size=DOCUMENTS, max_size=DOCUMENTS)


def token_ids(document: Document) -> list[int]:
    """The tokens of a document, all its own."""
    number = int(document.id)
    return list(range(1000 * number + 100, 1000 * number + 100 + document.token_count))


def make_documents(lengths: Sequence[int]) -> list[Document]:
    return [Document(str(number), "", tokens=length) for number, length in enumerate(lengths)]


def hearing(
    blocks: EngineBlocks, engine: SimEngine | None = None, *, prefix_ids: Sequence[int] = SYSTEM, **options: Any
) -> Orderer:
    """An orderer that hears of an engine's blocks."""
    options = {"block_size": BLOCK, "prefix_tokens": len(prefix_ids), "strict": True} | options
    settings = Settings(**options) if engine is None else settings_of(engine, **options)
    return Orderer(settings, token_ids=token_ids, prefix_ids=prefix_ids, blocks=blocks)


class TellingEngine:
    """The simulated engine, with KV events that come when the test says so."""

    def __init__(self, blocks: EngineBlocks, capacity_blocks: int) -> None:
        self.sim = SimEngine(block_size=BLOCK, capacity_tokens=capacity_blocks * BLOCK, in_flight=10**6)
        self.blocks = blocks
        self.running: deque[int] = deque()
        self.told: dict[int, None] = {}
        self.untold: deque[Any] = deque()
        self._foreign = 0

    def admit(self, prompt: Sequence[int], answer_tokens: int) -> tuple[int, int]:
        """Begin a request: the cached tokens of its prompt and a handle. Its events wait for `tell`."""
        completion, handle = self.sim.admit(prompt, answer_tokens)
        hashes = self.sim.block_hashes(prompt)
        held = dict.fromkeys(blocks_in(self.sim))
        self.untold.append(("removed", [each for each in self.told if each not in held]))
        new = [(place, each) for place, each in enumerate(hashes) if each not in self.told and each in held]
        for place, each in new:
            parent = hashes[place - 1] if place else None
            self.untold.append(("stored", each, parent, list(prompt[place * BLOCK : (place + 1) * BLOCK])))
        self.told = {each: None for each in [*self.told, *hashes] if each in held}
        return completion.cached_tokens, handle

    def foreign(self, tokens: int) -> None:
        """Another client's prompt, served at once."""
        self._foreign += 1
        _, handle = self.admit(range(-(10**6) * self._foreign - tokens, -(10**6) * self._foreign), 0)
        self.sim.finish(handle)

    def clear(self) -> None:
        self.sim.reset()
        self.told.clear()
        self.untold.append(("cleared",))

    def tell(self) -> None:
        """Whatever happened since the last time."""
        while self.untold:
            kind, *facts = self.untold.popleft()
            if kind == "stored":
                block_hash, parent, ids = facts
                self.blocks.store([block_hash], parent, ids)
            elif kind == "removed":
                self.blocks.remove(facts[0])
            else:
                self.blocks.clear()


class Live:
    """An orderer that hears of an engine, and requests in flight between them."""

    def __init__(self, lengths: Sequence[int], capacity_blocks: int, **options: Any) -> None:
        self.documents = make_documents(lengths)
        self.blocks = EngineBlocks(BLOCK)
        self.engine = TellingEngine(self.blocks, capacity_blocks)
        self.orderer = self.make_orderer(**options)
        self.in_flight: deque[tuple[Any, int, int]] = deque()
        self.served = 0
        self.total_tokens: int | None = None

    def make_orderer(self, *, max_nodes: int = MAX_NODES, **options: Any) -> Orderer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ragorder.scope.scopes.MAX_NODES", max_nodes)
            return hearing(self.blocks, self.engine.sim, **options)

    @property
    def residency(self) -> EventsResidency:
        mirror = scopes_of(self.orderer)[None].mirror
        assert isinstance(mirror, EventsResidency)
        return mirror

    def begin(self, numbers: Sequence[int], suffix_tokens: int | None = 3, answer_tokens: int = 2) -> tuple[int, int]:
        """Order a request and send it: cached tokens predicted and reported."""
        self.served += 1
        ordering = self.orderer.order(
            [self.documents[number] for number in numbers], lengths=Lengths(suffix=suffix_tokens)
        )
        assert sorted(map(self.documents.index, ordering.documents)) == sorted(numbers)
        prompt = array("q", SYSTEM)
        for document in ordering.documents:
            prompt.extend(token_ids(document))
        prompt.append(-self.served)
        reported, handle = self.engine.admit(prompt, answer_tokens)
        self.in_flight.append((ordering, handle, reported))
        return ordering.cached_tokens, reported

    def end(self, *, served: bool = True) -> None:
        ordering, handle, reported = self.in_flight.popleft()
        self.engine.sim.finish(handle)
        ordering.confirm(reported, self.total_tokens) if served else ordering.discard()

    def serve(self, numbers: Sequence[int], **options: Any) -> tuple[int, int]:
        both = self.begin(numbers, **options)
        self.engine.tell()
        self.end()
        return both

    def do(self, step: str, value: Any, **options: Any) -> Any:
        """A step of a property, where it can be taken."""
        if step in ("serve", "begin"):
            return getattr(self, step)(value, **options)
        if step == "foreign":
            self.engine.foreign(value)
        elif step in ("tell", "clear"):
            getattr(self.engine, step)()
        elif self.in_flight:
            self.end(served=step == "end")

    def settle(self) -> None:
        """Everything is answered, and everything told."""
        while self.in_flight:
            self.end()
        self.engine.tell()

    def check(self, exact: bool = True) -> None:
        """The tree is sound, and of each path the engine holds what it says, or at least that."""
        residency, pool = self.residency, self.residency.pool
        residency.refresh()
        prompts: dict[Node, list[int]] = {}
        # What the last requests may have displaced, until a later one is heard of.
        in_doubt = {node for pending in pool.pending for _, node in pending.displaced}
        for node in residency.tree.walk():
            above = prompts[node.parent] if node.parent is not None else []
            ids = [token_ids(each) for each in self.documents if each.key == node.key] or [SYSTEM]
            prompts[node] = above + ids[0]
            assert 0 <= node.missing <= node.blocks
            assert node.leases == 0
            assert node in contents_in(residency)
            held = self.engine.sim.cached_tokens(prompts[node])
            if node.parent is None or not node.parent.missing:
                claimed = residency.tree.cached_tokens(node)
                assert claimed == held if exact and node not in in_doubt else claimed <= held
        assert residency.tree.size == len(prompts) - 1
        assert set(contents_in(residency)) == set(prompts)
        # An empty document makes two paths of the same tokens.
        places = [node for _, node in pool.watched.values()] + [node for twins in pool.twins.values() for node in twins]
        assert Counter(places) == {
            node: len(known.blocks) for node, known in contents_in(residency).items() if known.blocks
        }
        suffixes = sum(use.suffix_blocks for use in pool.log)
        assert pool.used_blocks == suffixes + sum(node.blocks - node.missing for node in prompts)
        pool.capacity_blocks = 0
        pool.make_room(residency)
        assert pool.used_blocks == 0, "all that is held has its turn to go"


class Tables(list[EngineBlocks]):
    """The tables of several processes: each hears what the engine says."""

    def store(self, *event: Any) -> None:
        for table in self:
            table.store(*event)

    def remove(self, *event: Any) -> None:
        for table in self:
            table.remove(*event)

    def clear(self) -> None:
        for table in self:
            table.clear()


def make_workers(count: int, lengths: Sequence[int], capacity_blocks: int, **options: Any) -> list[Live]:
    """Orderers in processes of their own, with one engine."""
    workers = [Live(lengths, capacity_blocks, **options) for _ in range(count)]
    for number, worker in enumerate(workers):
        worker.engine = workers[0].engine
        worker.served = 10**5 * number
    workers[0].engine.blocks = Tables(worker.blocks for worker in workers)  # type: ignore[assignment]
    return workers
