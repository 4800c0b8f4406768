"""Parts of workflows whose results depend on their inputs alone, and random graphs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from zlib import crc32

from hypothesis import strategies as st

from ragorder.pipelining import AnswerChunk, Usage
from ragorder.pipelining.workflow import END, START, CompiledGraph, GraphError, NodeQuestion, RAGraph, State
from support.inside import nodes_in


def digest(value: object) -> int:
    return crc32(repr(value).encode())


@dataclass(frozen=True)
class Asked:
    question: NodeQuestion
    documents: tuple[Any, ...]

    @property
    def prompt_tokens(self) -> int:
        return 10 * (1 + len(self.documents))


@dataclass
class PlainPrompts:
    """Documents in rank order; counts what is in flight."""

    open: int = 0
    confirmed: int = 0
    discarded: int = 0

    def preview(self, question: NodeQuestion, documents: Sequence[Any], /) -> Asked:
        return Asked(question, tuple(documents))

    def commit(self, question: NodeQuestion, documents: Sequence[Any], /) -> Committed:
        self.open += 1
        return Committed(self.preview(question, documents), self)


@dataclass
class Committed:
    request: Asked
    prompts: PlainPrompts

    def confirm(self, usage: Usage | None, /) -> None:
        self.prompts.open -= 1
        self.prompts.confirmed += 1

    def discard(self) -> None:
        self.prompts.open -= 1
        self.prompts.discarded += 1


@dataclass
class ScriptedEngine:
    """Answers with `answer(request)`, a word a chunk; without it with a digest of the request."""

    answer: Callable[[Asked], str] = lambda request: f"a{digest((request.question.text, request.documents)):x}"
    sent: list[Asked] = field(default_factory=list)

    async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
        self.sent.append(request)
        text = self.answer(request)
        for number, word in enumerate(text.split(" ")):
            yield AnswerChunk(" " * (number > 0) + word)
        yield AnswerChunk("", Usage(request.prompt_tokens, 0, len(text.split(" ")), "stop"))


def chain(graph: RAGraph, *ids: Any) -> RAGraph:
    """Lead from START through these nodes to END."""
    for source, target in pairwise((START, *ids, END)):
        graph.add_edge(source, target)
    return graph


async def found_by_name(query: str, topk: int) -> list[str]:
    return [f"{query[-12:]}/{rank}" for rank in range(topk)]


def choice(seed: int, targets: Sequence[Any]) -> Callable[[State], Any]:
    """One of `targets` by what the state holds."""
    return lambda state: targets[digest((seed, sorted(state.items()))) % len(targets)]


def written(seed: int, name: str) -> Callable[[State], dict[str, Any]]:
    async def step(state: State) -> dict[str, Any]:
        return {name: f"s{digest((seed, sorted(state.items()))):x}"}

    return step  # type: ignore[return-value]


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 6) -> RAGraph:
    """Loops, conditional edges, branches side by side; most can be compiled, the others are wrong in some way."""
    graph = RAGraph("random", max_rounds=draw(st.integers(1, 4)))
    count = draw(st.integers(1, max_nodes))
    parents = [START, *(draw(st.sampled_from((START, *range(id)))) for id in range(1, count))]
    names: dict[Any, tuple[str, ...]] = {START: ("query",)}
    for id, parent in enumerate(parents):
        name = _add_node(draw, graph, id, names[parent])
        names[id] = (*names[parent], name)
    back = draw(st.lists(st.integers(0, count - 1), max_size=3))
    targets = st.lists(st.integers(0, count - 1), min_size=1, max_size=2, unique=True)
    edges = [(parent, id) for id, parent in enumerate(parents)]
    edges += [(source, *draw(targets), END) for source in back]
    edges += [(leaf, END) for leaf in range(count) if all(source != leaf for source, *_ in edges)]
    for source, *to in edges:
        if len(to) == 1:
            graph.add_edge(source, to[0])
        else:
            graph.add_edge(source, choice(draw(st.integers(0, 99)), to), to=to)
    return graph


def compiled(graph: RAGraph) -> CompiledGraph | None:
    """With the output of node 0, which always runs, as the answer."""
    try:
        return graph.compile(answer=nodes_in(graph)[0].writes[0])
    except GraphError:
        return None


def _add_node(draw: st.DrawFn, graph: RAGraph, id: int, names: tuple[str, ...]) -> str:
    kind = draw(st.sampled_from(("generation", "generation", "retrieval", "step")))
    shared = draw(st.integers(0, 9)) == 0
    read = draw(st.sampled_from(names))
    if kind == "generation":
        name = "text" if shared else f"text{id}"
        shown = "".join(f" {{{each}}}" for each in names if draw(st.booleans()))
        graph.add_generation(id, prompt=f"{id} {{{read}}}{shown}", output=name, max_tokens=1 + id)
    elif kind == "retrieval":
        name = "docs" if shared else f"docs{id}"
        query = choice_of_text(draw(st.integers(0, 99))) if read.startswith("docs") else read
        graph.add_retrieval(id, query=query, topk=draw(st.integers(1, 3)), output=name)
    else:
        name = "step" if shared else f"step{id}"
        graph.add_step(id, written(id, name), reads=read if draw(st.booleans()) else (), writes=name, pure=id % 2 == 0)
    return name


def choice_of_text(seed: int) -> Callable[[State], str]:
    return lambda state: f"q{digest((seed, sorted(state.items()))):x}"
