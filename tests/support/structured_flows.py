"""Random workflows made of sequences, forks, choices and loops, and what each must do, found by recursion over them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from ragorder.pipelining import AnswerChunk, Stage
from ragorder.pipelining.workflow import END, START, RAGraph
from support.workflows import Asked, ScriptedEngine, digest


@dataclass
class Leaf:
    """A node, and how it goes on: to what comes next in its block, or through `branches` that all end there.

    `out`: "next"; "fork": all branches side by side; "choice": one of them; "end", "break": next, or the end of the
    branch, or what comes after the loop.
    """

    id: int
    kind: str
    output: str
    reads: str | None
    shows: str | None
    out: str = "next"
    branches: list[Branch] = field(default_factory=list)
    counts: bool = False


@dataclass
class Branch:
    """`maybe`: taken only under a condition."""

    block: list[Leaf | Loop]
    maybe: bool = False


@dataclass
class Loop:
    """Its last leaf counts the rounds, and leads back or on."""

    body: list[Leaf | Loop]


Block = list[Leaf | Loop]


class RandomFlow:
    """`RandomFlow(seed)`: a workflow by its structure."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = Random(seed)
        self._ids = 0
        self.leaves: list[Leaf] = []
        self.block = self._block(depth=3, names=[], visible=[], in_loop=False)
        self.answer = self.leaves[0].output
        self.loops_in_branches = _loops(self.block, beside=False)

    def _block(self, depth: int, names: list[str], visible: list[str], *, in_loop: bool, most: int = 3) -> Block:
        """`names`: those that may be written again here; `visible`: those that have been written for certain."""
        block: Block = []
        for number in range(1 + self._random.randrange(most)):
            if number and depth and self._random.random() < 0.4:
                block.append(self._loop(depth - 1, names, list(visible)))
            else:
                leaf = self._leaf(names, visible)
                block.append(leaf)
                if depth:
                    self._go_on(leaf, depth - 1, names, visible, in_loop=in_loop)
        return block

    def _loop(self, depth: int, names: list[str], visible: list[str]) -> Loop:
        body = self._block(depth, names, visible, in_loop=True, most=2)
        last = self._leaf(names, visible)
        last.kind, last.counts, last.output = "step", True, f"n{last.id}"
        return Loop([*body, last])

    def _go_on(self, leaf: Leaf, depth: int, names: list[str], visible: list[str], *, in_loop: bool) -> None:
        drawn = self._random.random()
        if drawn < 0.25:
            leaf.out = "fork"
            shares: list[list[str]] = [[] for _ in range(self._random.randint(2, 3))]
            for name in names:
                self._random.choice(shares).append(name)
            straight = self._random.random() < 0.3
            for share in shares[straight:]:
                block = self._block(depth, share, list(visible), in_loop=False, most=2)
                leaf.branches.append(Branch(block, maybe=self._random.random() < 0.2))
            leaf.branches += [Branch([])] * straight
            names[:] = [name for share in shares for name in share]
        elif drawn < 0.4:
            leaf.out = "choice"
            straight = self._random.random() < 0.4
            for _ in range(2):
                block = self._block(depth, names, list(visible), in_loop=in_loop, most=2)
                leaf.branches.append(Branch(block))
            leaf.branches += [Branch([])] * straight
        elif drawn < 0.45:
            leaf.out = "end"
        elif drawn < 0.55 and in_loop:
            leaf.out = "break"

    def _leaf(self, names: list[str], visible: list[str]) -> Leaf:
        id, self._ids = self._ids, self._ids + 1
        kind = self._random.choice(("generation", "generation", "retrieval", "step", "pure"))
        again = [name for name in names if name.startswith("d" if kind == "retrieval" else "t")]
        output = f"{'d' if kind == 'retrieval' else 't'}{id}"
        if again and self._random.random() < 0.3:
            output = self._random.choice(again)
        shown = [name for name in visible if name.startswith("d")]
        leaf = Leaf(
            id,
            kind,
            output,
            self._random.choice(visible) if visible and self._random.random() < 0.5 else None,
            self._random.choice(shown) if shown and kind == "generation" and self._random.random() < 0.7 else None,
        )
        for known in (names, visible):
            if output not in known:
                known.append(output)
        self.leaves.append(leaf)
        return leaf

    def graph(self, pause: Callable[[], float]) -> RAGraph:
        """Steps that are not pure take `pause()` seconds."""
        graph = RAGraph("structured", max_rounds=500)
        for leaf in self.leaves:
            if leaf.kind == "generation":
                graph.add_generation(
                    leaf.id,
                    prompt=lambda state, leaf=leaf: text_of(leaf, state),
                    output=leaf.output,
                    documents=leaf.shows,
                )
            elif leaf.kind == "retrieval":
                query = lambda state, leaf=leaf: text_of(leaf, state)  # noqa: E731
                graph.add_retrieval(leaf.id, query=query, topk=1 + leaf.id % 2, output=leaf.output)
            else:
                pure = leaf.kind == "pure"
                graph.add_step(leaf.id, _step(leaf, None if pure else pause), writes=leaf.output, pure=pure)
        graph.add_edge(START, entry(self.block))
        _connect(graph, self.block, END, END)
        return graph


def entry(block: Block) -> int:
    first = block[0]
    return first.id if isinstance(first, Leaf) else entry(first.body)


def _loops(block: Block, *, beside: bool) -> int:
    """Those beside another branch."""
    found = 0
    for item in block:
        if isinstance(item, Loop):
            found += beside + _loops(item.body, beside=beside)
        else:
            found += sum(_loops(branch.block, beside=beside or item.out == "fork") for branch in item.branches)
    return found


def text_of(leaf: Leaf, state: Mapping[str, Any]) -> str:
    """All that a leaf can see, or the one name that it reads; documents that are shown are not in the text."""
    seen = [leaf.reads] if leaf.reads else sorted(set(state) - {leaf.shows})
    return f"{leaf.id}: {digest([(name, state.get(name)) for name in seen if name != leaf.shows]):x}"


def step_value(leaf: Leaf, state: Mapping[str, Any]) -> Any:
    return state.get(leaf.output, 0) + 1 if leaf.counts else text_of(leaf, state)


def chosen(leaf: Leaf, what: object, state: Mapping[str, Any], count: int) -> int:
    return digest((leaf.id, what, sorted(state.items()))) % count


def goes_back(last: Leaf, state: Mapping[str, Any]) -> bool:
    """One to three rounds each time that the loop is entered."""
    return bool(state[last.output] % (1 + last.id % 3))


def _step(leaf: Leaf, pause: Callable[[], float] | None) -> Any:
    async def step(state: Mapping[str, Any]) -> dict[str, Any]:
        if pause is not None:
            await asyncio.sleep(pause())
        return {leaf.output: step_value(leaf, state)}

    return step


def _connect(graph: RAGraph, block: Block, after: Any, way_out: Any, head: Any = None) -> None:
    """`after`: what comes after the block; `way_out`: after the loop that it is in; `head`: where its last leaf leads
    back to."""
    for number, item in enumerate(block):
        last = number == len(block) - 1
        next = after if last else entry(block[number + 1 :])
        if isinstance(item, Loop):
            _connect(graph, item.body, next, next, entry(item.body))
        elif last and head is not None:
            back = lambda state, leaf=item, targets=(next, head): targets[goes_back(leaf, state)]  # noqa: E731
            graph.add_edge(item.id, back, to=(head, next))
        elif item.out == "next":
            graph.add_edge(item.id, next)
        elif item.out in ("end", "break"):
            _choose(graph, item, item.out, [next, next, END if item.out == "end" else way_out])
        else:
            targets = [entry(branch.block) if branch.block else next for branch in item.branches]
            if item.out == "choice":
                _choose(graph, item, "choice", targets)
            else:
                for place, (target, branch) in enumerate(zip(targets, item.branches, strict=True)):
                    if branch.maybe:
                        _choose(graph, item, place, [target, END])
                    else:
                        graph.add_edge(item.id, target)
            for branch in item.branches:
                _connect(graph, branch.block, next, way_out)


def _choose(graph: RAGraph, leaf: Leaf, what: object, targets: list[Any]) -> None:
    graph.add_edge(leaf.id, lambda state: targets[chosen(leaf, what, state, len(targets))], to=dict.fromkeys(targets))


@dataclass
class Branched:
    """What one branch knows, and when each of it was written."""

    values: dict[str, Any]
    written: dict[str, int]

    def copy(self) -> Branched:
        return Branched(dict(self.values), dict(self.written))


class _LeftLoop(Exception):  # noqa: N818
    def __init__(self, known: Branched) -> None:
        self.known = known


class Reference:
    """What a workflow must do: `runs` of its leaves, and the last `values`. One branch is run after the other; names of
    those side by side are different, so what is written last here is so in any order."""

    def __init__(self, flow: RandomFlow, question: str) -> None:
        self.runs: Counter[int] = Counter()
        self.values: dict[str, Any] = {"input": question, "query": question}
        self._clock = 0
        self._block(flow.block, Branched(dict(self.values), dict.fromkeys(self.values, 0)))

    def _block(self, block: Block, known: Branched) -> Branched | None:
        """None: the branch has ended."""
        for item in block:
            after = self._loop(item, known) if isinstance(item, Loop) else self._leaf(item, known)
            if after is None:
                return None
            known = after
        return known

    def _loop(self, loop: Loop, known: Branched) -> Branched | None:
        last = loop.body[-1]
        assert isinstance(last, Leaf)
        while True:
            try:
                after = self._block(loop.body, known)
            except _LeftLoop as left:
                return left.known
            if after is None or not goes_back(last, after.values):
                return after
            known = after

    def _leaf(self, leaf: Leaf, known: Branched) -> Branched | None:
        self.runs[leaf.id] += 1
        self._clock += 1
        known = known.copy()
        self.values[leaf.output] = known.values[leaf.output] = value_of(leaf, known.values)
        known.written[leaf.output] = self._clock
        if leaf.counts or leaf.out == "next":
            return known
        if leaf.out in ("end", "break"):
            if chosen(leaf, leaf.out, known.values, 3) < 2:
                return known
            if leaf.out == "end":
                return None
            raise _LeftLoop(known)
        if leaf.out == "choice":
            return self._block(leaf.branches[chosen(leaf, "choice", known.values, len(leaf.branches))].block, known)
        ends = [
            self._block(branch.block, known.copy())
            for place, branch in enumerate(leaf.branches)
            if not (branch.maybe and chosen(leaf, place, known.values, 2))
        ]
        met: Branched | None = None
        for end in ends:
            if end is None:
                continue
            if met is None:
                met = end.copy()
            for name, written in end.written.items():
                if written > met.written.get(name, -1):
                    met.written[name], met.values[name] = written, end.values[name]
        return met


def value_of(leaf: Leaf, state: Mapping[str, Any]) -> Any:
    if leaf.kind == "generation":
        return reply(text_of(leaf, state), state[leaf.shows] if leaf.shows else ())
    if leaf.kind == "retrieval":
        return tuple(f"document {id}" for id in ids_of(text_of(leaf, state), 1 + leaf.id % 2))
    return step_value(leaf, state)


def reply(text: str, documents: Any) -> str:
    """Half of it depends on the text alone."""
    return " ".join([f"w{digest(text):x}"] * 8 + [f"d{digest((text, tuple(documents))):x}"] * 4)


def ids_of(query: str, count: int) -> list[int]:
    first = digest(query) % 1000
    return [first + rank for rank in range(count)]


class RandomSpeeds:
    """An engine, an embedder and searches in stages; what each takes is drawn."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.engine = _Engine(self)

    def pause(self) -> float:
        return self._random.choice((0.0, 0.001, 0.01, 0.1, 1.0)) * self._random.random()

    async def embed(self, query: str) -> Any:
        await asyncio.sleep(self.pause())
        return np.array([digest(query) & 0xFFFF, digest(query) >> 16], np.float32)

    async def found(self, query: str, k: int) -> list[str]:
        await asyncio.sleep(self.pause())
        return [f"document {id}" for id in ids_of(query, k)]

    def submit(self, vector: Any, k: int, **_: Any) -> _Handle:
        first = ((int(vector[1]) << 16) | int(vector[0])) % 1000
        return _Handle(self, [first + rank for rank in range(k)], self._random.randint(1, 4))


class _Engine(ScriptedEngine):
    def __init__(self, speeds: RandomSpeeds) -> None:
        super().__init__(lambda asked: reply(asked.question.text, asked.documents))
        self._speeds = speeds

    async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
        pause = self._speeds.pause() / 4
        async for chunk in super().stream(request):
            await asyncio.sleep(pause)
            yield chunk


class _Handle:
    """Finds something else first, or the same."""

    stage: Stage | None = None

    def __init__(self, speeds: RandomSpeeds, ids: list[int], count: int) -> None:
        self._speeds, self._ids, self._count = speeds, ids, count
        self._early = int(speeds.pause() > 0.005)

    async def stages_async(self) -> AsyncGenerator[Stage, None]:
        for number in range(1, self._count + 1):
            await asyncio.sleep(self._speeds.pause())
            ids = np.array([[id + self._early * (number < self._count) for id in self._ids]])
            self.stage = Stage(number, self._count, ids, np.ones(ids.shape, np.float32))
            yield self.stage

    def promote(self) -> None: ...

    def cancel(self) -> bool:
        return False
