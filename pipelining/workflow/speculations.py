"""Work of one request that is ahead of need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ragorder.pipelining.attempt import Attempt
from ragorder.pipelining.load import EngineLoad
from ragorder.pipelining.protocols import EngineRequest, PipelineTrace, RequestBuilder, StreamingEngine
from ragorder.pipelining.workflow.execution import answered, documents_of, found, query_of, question_of
from ragorder.pipelining.workflow.foresight import SearchAhead, foresee
from ragorder.pipelining.workflow.join import NodeRun, Tokens
from ragorder.pipelining.workflow.nodes import Generation, NodeId, NodeQuestion, Retrieval, Step
from ragorder.pipelining.workflow.result import Outcome
from ragorder.pipelining.workflow.searching import Handle, Searcher
from ragorder.pipelining.workflow.wavefront import ANY_PART, Facts, Piece, Wavefront

if TYPE_CHECKING:
    from ragorder.pipelining.search import History

__all__ = ["GenerationAhead", "Place", "Speculations", "Workers", "question_for"]

D = TypeVar("D")
R = TypeVar("R", bound=EngineRequest)


class GenerationAhead(Generic[D, R]):
    """Speculations on one run of a generation, one at a time. `begun` and `ended` are called for their pieces, and
    `off_engine` once the engine is done with one that is still of use."""

    def __init__(
        self,
        attempt: Attempt[NodeQuestion, D, R],
        trace: PipelineTrace,
        begun: Callable[[Piece], None],
        ended: Callable[[Piece, Outcome], None],
        off_engine: Callable[[Piece], None],
    ) -> None:
        self.attempt = attempt
        self._trace = trace
        self._begun = begun
        self._ended = ended
        self._off_engine = off_engine
        self._piece: Piece | None = None
        self._next: Piece | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def right(self) -> bool:
        """The answer is that of a speculation."""
        return self._trace.right

    @property
    def idle(self) -> bool:
        """There has been none."""
        return self._task is None

    @property
    def beginning(self) -> bool:
        """A speculation waits for the abort of the last one."""
        return self._next is not None

    def has_place(self, question: NodeQuestion, documents: Sequence[D]) -> bool:
        """A speculation is on the engine, or has been answered and is right."""
        piece = self._piece
        return piece is not None and (not piece.released or self.attempt.foresaw(question, documents))

    def begin(self, piece: Piece, question: NodeQuestion, documents: Sequence[D], load: EngineLoad) -> None:
        self._next = piece
        self._task = asyncio.create_task(self._begin(piece, question, documents, load))

    def due(self) -> None:
        """The generation is due: a speculation that runs stays, none begins."""
        if self._next is not None:
            self._ended(self._next, "cancelled")
            self._next = None
        if self._task is not None:
            self._task.cancel()

    def used(self, *, right: bool) -> None:
        self._replace(None, "used" if right else "rolled back")

    async def leave(self, outcome: Outcome) -> None:
        """Returns when the engine is done with it."""
        self.due()
        self._replace(None, outcome)
        await self.attempt.abort()

    async def _begin(self, piece: Piece, question: NodeQuestion, documents: Sequence[D], load: EngineLoad) -> None:
        began = self._trace.speculations
        kept = await self.attempt.speculate(
            question, documents, load, lambda: True, lambda: piece.admission, lambda: self._off_engine(piece)
        )
        self._next = None
        if self._trace.speculations > began:
            self._replace(piece, "rolled back")
            self._begun(piece)
        else:
            # The request is the last one's, or there is no room.
            self._ended(piece, "cancelled")
        if not kept:
            self._replace(None, "rolled back")
            if piece.after is not None:
                piece.after.speculated = None

    def _replace(self, piece: Piece | None, outcome: Outcome) -> None:
        if self._piece is not None:
            self._ended(self._piece, outcome)
        self._piece = piece


Place = tuple[NodeId, int]


@dataclass(frozen=True, slots=True)
class Workers(Generic[D, R]):
    """What all requests share."""

    engine: StreamingEngine[R]
    prompts: RequestBuilder[NodeQuestion, D, R]
    searcher: Searcher[D]
    facts: Facts
    wavefront: Wavefront
    clock: Callable[[], float]


def _place_of(run: NodeRun) -> Place:
    return run.id, run.round


def question_for(piece: Piece, node: Generation, scope: Hashable) -> NodeQuestion:
    """Raises what `question_of` raises."""
    return replace(question_of(node, piece.run.state, scope), ordered=piece.ordered)


class _Guesses(NamedTuple):
    """Prompts and documents that a search ahead of need led to, by its part, and when they were foreseen."""

    source: Piece
    by_part: dict[int, tuple[tuple[NodeQuestion, tuple[Any, ...]], float]]


class Speculations(Generic[D, R]):
    """Generations and searches of one request that are not due yet. `begun` and `ended` are called for their pieces.
    `tasks` of searches, cancelled ones until they have ended."""

    def __init__(
        self,
        workers: Workers[D, R],
        scope: Hashable,
        elapsed_s: Callable[[], float],
        begun: Callable[[Piece], None],
        ended: Callable[[Piece, Outcome], None],
    ) -> None:
        self._workers = workers
        self._scope = scope
        self._elapsed_s = elapsed_s
        self._begun = begun
        self._ended = ended
        self._generations: dict[Place, GenerationAhead[D, R]] = {}
        self._searches: dict[Place, SearchAhead] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._sources: dict[Place, Piece] = {}
        self._looks: dict[Place, dict[int, tuple[str, float]]] = {}
        self._guesses: dict[Place, _Guesses] = {}

    def foreseen(self, tokens: Tokens, piece: Piece) -> list[NodeRun]:
        """See `Request.foreseen`. Functions of a graph may not be ready for half a text: then nothing is foreseen."""
        try:
            chain = (piece,) if piece.after is None else (piece.after, piece)
            runs = foresee(tokens, *((each.run, self._values(each)) for each in chain))
            return [run for run in runs if self._is_new(piece, run)]
        except Exception:
            return []

    def begin(self, piece: Piece, source: Piece, history: Callable[[], History | None]) -> None:
        """A piece ahead of need, because of another one's progress. Raises what the prompt's or query's function
        raises."""
        place, node = _place_of(piece.run), piece.node
        self._sources[place] = source
        if isinstance(node, Generation):
            question, documents = question_for(piece, node, self._scope), documents_of(node, piece.run.state)
            source.speculated = None if source.stage is None else source.stage.ids.tobytes()
            generation = self._generation(place)
            if generation.beginning:
                # Two searches that led to it had news in one cycle.
                self._ended(piece, "cancelled")
            else:
                generation.begin(piece, question, documents, self._workers.facts.load)
        elif isinstance(node, Retrieval):
            query, before = query_of(node, piece.run.state), self._searches.get(place)
            if before is not None:
                before.cancel()
                self._ended(before.piece, "rolled back")
            past = None if not piece.reorder else history() if before is None else before.history
            workers = self._workers
            ahead = SearchAhead(piece, node, query, past, before, workers.searcher, workers.facts, self._spawn)
            self._searches[place] = ahead
            if before is not None:
                self._follow(before.piece, piece)
            self._begun(piece)

    def has_place(self, piece: Piece) -> bool:
        """See `Request.has_place`."""
        generation, node = self._generations.get(_place_of(piece.run)), piece.node
        if generation is None or not isinstance(node, Generation):
            return False
        generation.due()
        try:
            question, documents = question_for(piece, node, self._scope), documents_of(node, piece.run.state)
        except Exception:
            # The generation itself meets the error.
            return False
        return generation.has_place(question, documents)

    def generation(self, run: NodeRun) -> GenerationAhead[D, R]:
        """The run is due. Its caller must leave what this returns."""
        place = _place_of(run)
        self._learn_guesses(run)
        generation = self._generation(place)
        del self._generations[place]
        self._sources.pop(place, None)
        generation.due()
        return generation

    async def search(self, piece: Piece, query: str) -> tuple[Handle | None, History | None]:
        """The piece is due: its search, if one for this query has begun, and the history in which it is."""
        place = _place_of(piece.run)
        self._learn(place, query)
        ahead, _ = self._searches.pop(place, None), self._sources.pop(place, None)
        if ahead is None:
            return None, None
        self._follow(ahead.piece, piece)
        try:
            handle = await ahead.taken(query)
        except BaseException:
            ahead.cancel()
            self._ended(ahead.piece, "cancelled")
            raise
        ahead.piece.trace.clusters = ahead.clusters
        self._ended(ahead.piece, "rolled back" if handle is None else "used")
        return handle, ahead.history

    def left(self, tokens: Tokens) -> list[GenerationAhead[D, R]]:
        """Drops what was foreseen on branches that were not taken. Returns generations, which their caller must
        leave."""
        if any(isinstance(run.node, Step) for run in tokens.running):
            # What was foreseen may lie behind it.
            return []
        running = {_place_of(run) for run in tokens.running}
        dropped: list[GenerationAhead[D, R]] = []
        while places := [place for place, source in self._sources.items() if source.ended and place not in running]:
            dropped += [generation for place in places for generation in self._drop(place, "wasted")]
        return dropped

    def drop_all(self, outcome: Outcome) -> list[GenerationAhead[D, R]]:
        places = {*self._sources, *self._generations}
        return [generation for place in places for generation in self._drop(place, outcome)]

    def _drop(self, place: Place, outcome: Outcome) -> list[GenerationAhead[D, R]]:
        self._sources.pop(place, None)
        self._looks.pop(place, None)
        self._guesses.pop(place, None)
        search = self._searches.pop(place, None)
        if search is not None:
            search.cancel()
            self._ended(search.piece, outcome)
        generation = self._generations.pop(place, None)
        return [] if generation is None else [generation]

    def _generation(self, place: Place) -> GenerationAhead[D, R]:
        generation = self._generations.get(place)
        if generation is None:
            workers, trace = self._workers, PipelineTrace()
            attempt = Attempt(workers.engine, workers.prompts, workers.facts.load, trace, self._elapsed_s)
            generation = self._generations[place] = GenerationAhead(
                attempt, trace, self._begun, self._ended, workers.wavefront.release
            )
        return generation

    def _values(self, piece: Piece) -> Mapping[str, Any]:
        node = piece.node
        if isinstance(node, Generation):
            return answered(node, "".join(piece.text), piece.run.state)
        if isinstance(node, Retrieval) and piece.stage is not None:
            return found(node, self._workers.searcher.documents(piece.stage))
        raise TypeError(f"nothing can be foreseen from a {type(node).__name__}")

    def _is_new(self, piece: Piece, run: NodeRun) -> bool:
        place, node = _place_of(run), run.node
        if isinstance(node, Generation) and not piece.due:
            guesses = self._guesses.setdefault(place, _Guesses(piece, {}))
            guesses.by_part[piece.part] = self._input(node, run), self._elapsed_s()
        if not isinstance(node, Retrieval):
            return place not in self._generations or not self._generations[place].beginning
        query = query_of(node, run.state)
        if piece.worker == "engine":
            self._sources[place] = piece
            self._looks.setdefault(place, {})[piece.part] = query, self._elapsed_s()
        return bool(query.strip()) and (place not in self._searches or self._searches[place].query != query)

    def _follow(self, old: Piece, new: Piece) -> None:
        """What was foreseen from one piece is kept for another."""
        for place, source in self._sources.items():
            if source is old:
                self._sources[place] = new

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _input(self, node: Generation, run: NodeRun) -> tuple[NodeQuestion, tuple[Any, ...]]:
        return question_of(node, run.state, self._scope), documents_of(node, run.state)

    def _learn_guesses(self, run: NodeRun) -> None:
        """A search ahead of need was right if it led to the prompt that is due."""
        guesses, node = self._guesses.pop(_place_of(run), None), run.node
        if guesses is None or not isinstance(node, Generation):
            return
        now_s = self._elapsed_s()
        try:
            final = self._input(node, run)
            seen = [(guess == final, now_s - at_s) for guess, at_s in guesses.by_part.values()]
        except Exception:
            # The generation itself meets the error.
            return
        odds = self._workers.facts.odds(guesses.source)
        odds.learn(seen, guesses.by_part)
        # There are many parts: one that is new is as likely right as the others.
        odds.learn(seen, [ANY_PART] * len(seen))

    def _learn(self, place: Place, query: str) -> None:
        looks, source = self._looks.pop(place, None), self._sources.get(place)
        if looks and source is not None:
            now_s = self._elapsed_s()
            seen = [(foreseen == query, now_s - at_s) for foreseen, at_s in looks.values()]
            self._workers.facts.odds(source).learn(seen, looks)
