"""Speculative work of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from ragorder.pipelining.attempt import Attempt
from ragorder.pipelining.load import EngineLoad
from ragorder.pipelining.protocols import D, PipelineTrace, R, RequestBuilder, StreamingEngine
from ragorder.pipelining.workflow.execution import Input, answered, documents_of, found, input_of, query_of, question_of
from ragorder.pipelining.workflow.graph import CompiledGraph
from ragorder.pipelining.workflow.join import Tokens
from ragorder.pipelining.workflow.nodes import Generation, NodeQuestion, NodeRun, Retrieval, Step
from ragorder.pipelining.workflow.prediction import Query, RunKey, SpeculativeSearch, known_runs, predict_runs
from ragorder.pipelining.workflow.result import Outcome
from ragorder.pipelining.workflow.searching import Handle, Searcher
from ragorder.pipelining.workflow.wavefront import ANY_PART, KNOWN, Measurements, Wavefront, WorkItem

if TYPE_CHECKING:
    from ragorder.pipelining.search import History


class SpeculativeGeneration(Generic[D, R]):
    """Speculations on one run of a generation, one at a time; `begun` and `ended` get their items."""

    def __init__(
        self,
        attempt: Attempt[NodeQuestion, D, R],
        trace: PipelineTrace,
        begun: Callable[[WorkItem], None],
        ended: Callable[[WorkItem, Outcome], None],
        off_engine: Callable[[WorkItem, tuple[int, int]], None],
    ) -> None:
        self.attempt = attempt
        self._trace = trace
        self._begun = begun
        self._ended = ended
        self._off_engine = off_engine
        self._current: WorkItem | None = None
        self._next: WorkItem | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def right(self) -> bool:
        return self._trace.right

    @property
    def idle(self) -> bool:
        return self._task is None

    @property
    def beginning(self) -> bool:
        return self._next is not None

    def is_speculated(self, question: NodeQuestion, documents: Sequence[D]) -> bool:
        item = self._current
        return item is not None and (not item.released or self.attempt.speculates_on(question, documents))

    def begin(self, item: WorkItem, question: NodeQuestion, documents: Sequence[D], load: EngineLoad) -> None:
        self._next = item
        self._task = asyncio.create_task(self._begin(item, question, documents, load))

    def due(self) -> None:
        """Keep a running speculation, and begin no other."""
        if self._next is not None:
            self._ended(self._next, "cancelled")
            self._next = None
        if self._task is not None:
            self._task.cancel()

    def used(self, *, right: bool) -> None:
        self._replace(None, "used" if right else "rolled back")

    async def leave(self, outcome: Outcome) -> None:
        self.due()
        self._replace(None, outcome)
        await self.attempt.abort()

    async def _begin(self, item: WorkItem, question: NodeQuestion, documents: Sequence[D], load: EngineLoad) -> None:
        began = self._trace.speculations
        kept = await self.attempt.speculate(
            question,
            documents,
            load,
            lambda: True,
            lambda: item.admission,
            lambda speculation: self._off_engine(item, speculation.tokens),
        )
        self._next = None
        if self._trace.speculations > began:
            self._replace(item, "rolled back")
            self._begun(item)
        else:
            # The request equals the last one, or there is no room.
            self._ended(item, "cancelled")
        if not kept:
            self._replace(None, "rolled back")
            if item.after is not None:
                item.after.speculated = None

    def _replace(self, item: WorkItem | None, outcome: Outcome) -> None:
        if self._current is not None:
            self._ended(self._current, outcome)
        self._current = item


@dataclass(frozen=True, slots=True)
class Workers(Generic[D, R]):
    """Parts of the server that all requests share."""

    engine: StreamingEngine[R]
    prompts: RequestBuilder[NodeQuestion, D, R]
    searcher: Searcher[D]
    measured: Measurements
    wavefront: Wavefront
    clock: Callable[[], float]


def question_for(item: WorkItem, node: Generation, scope: Hashable) -> NodeQuestion:
    return replace(question_of(node, item.run.state, scope), ordered=item.ordered, streamed=item.streamed)


class _Guesses(NamedTuple):
    """Inputs predicted from a speculative search, by its part, with the times."""

    source: WorkItem
    by_part: dict[int, tuple[Input, float]]


class Speculations(Generic[D, R]):
    """Speculations of one request; `tasks`: of searches, until they end."""

    def __init__(
        self,
        workers: Workers[D, R],
        graph: CompiledGraph,
        scope: Hashable,
        is_known: Callable[[NodeRun], bool],
        elapsed_s: Callable[[], float],
        begun: Callable[[WorkItem], None],
        ended: Callable[[WorkItem, Outcome], None],
    ) -> None:
        self._workers = workers
        self._graph = graph
        self._scope = scope
        self._is_known = is_known
        self._elapsed_s = elapsed_s
        self._begun = begun
        self._ended = ended
        self._generations: dict[RunKey, SpeculativeGeneration[D, R]] = {}
        self._searches: dict[RunKey, SpeculativeSearch] = {}
        self._known: dict[Query, SpeculativeSearch] = {}
        self._known_since: dict[Query, float | None] = {}
        self._predicted: set[RunKey] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._sources: dict[RunKey, WorkItem] = {}
        self._predicted_queries: dict[RunKey, dict[int, tuple[str, float]]] = {}
        self._guesses: dict[RunKey, _Guesses] = {}

    def predicted_runs(self, tokens: Tokens, item: WorkItem) -> list[NodeRun]:
        try:
            chain = (item,) if item.after is None else (item.after, item)
            runs = predict_runs(tokens, *((each.run, self._values(each)) for each in chain))
            return [run for run in runs if not self._is_known(run) and self._is_new(item, run)]
        except Exception:
            return []

    def known_runs(self, tokens: Tokens, started: NodeRun) -> list[NodeRun]:
        """Return searches whose queries do not depend on what still runs, each once."""
        if started.key in self._predicted:
            return []
        try:
            known, self._predicted = known_runs(tokens)
        except Exception:
            return []
        now_s = self._elapsed_s()
        begun = {(search.item.run.id, search.query) for search in self._searches.values()}
        for run in tokens.running:
            if isinstance(run.node, Retrieval):
                with suppress(Exception):
                    begun.add((run.id, query_of(run.node, run.state)))
        runs = []
        for query, run in known.items():
            new = query not in self._known_since and query not in begun and query[1].strip()
            if new and not self._is_known(run):
                self._known_since[query] = now_s
                runs.append(run)
        return runs

    def begin(self, item: WorkItem, source: WorkItem, history: Callable[[], History | None]) -> None:
        key, node = item.run.key, item.node
        if not item.known:
            self._sources[key] = source
        if isinstance(node, Generation):
            question, documents = question_for(item, node, self._scope), documents_of(node, item.run.state)
            source.speculated = None if source.stage is None else source.stage.ids.tobytes()
            generation = self._generation(key)
            if generation.beginning:
                # Two searches that lead to this generation had new results in one cycle.
                self._ended(item, "cancelled")
            else:
                generation.begin(item, question, documents, self._workers.measured.load)
        elif isinstance(node, Retrieval):
            query = query_of(node, item.run.state)
            before = None if item.known else self._searches.get(key)
            if before is not None:
                before.cancel()
                self._ended(before.item, "rolled back")
            past = None if not item.reorder else history() if before is None else before.history
            workers = self._workers
            speculative = SpeculativeSearch(
                item, node, query, past, before, workers.searcher, workers.measured, self._spawn
            )
            if item.known:
                self._known[item.run.id, query] = speculative
            else:
                self._searches[key] = speculative
            if before is not None:
                self._reassign(before.item, item)
            self._begun(item)

    def is_speculated(self, item: WorkItem) -> bool:
        generation, node = self._generations.get(item.run.key), item.node
        if generation is None or not isinstance(node, Generation):
            return False
        generation.due()
        try:
            question, documents = question_for(item, node, self._scope), documents_of(node, item.run.state)
        except Exception:
            # The generation raises the error itself.
            return False
        return generation.is_speculated(question, documents)

    def generation(self, run: NodeRun) -> SpeculativeGeneration[D, R]:
        """Return the speculations on a run that is due. The caller must call `leave`."""
        key, node = run.key, run.node
        guesses = self._guesses.pop(key, None)
        if guesses is not None and isinstance(node, Generation):
            # The generation raises errors of the graph's functions itself.
            with suppress(Exception):
                self._learn(guesses.source, guesses.by_part, input_of(node, run.state, self._scope))
        generation = self._generation(key)
        del self._generations[key]
        self._sources.pop(key, None)
        generation.due()
        return generation

    async def search(self, item: WorkItem, query: str) -> tuple[Handle | None, History | None]:
        key = item.run.key
        predicted, source = self._predicted_queries.pop(key, None), self._sources.get(key)
        if predicted and source is not None:
            self._learn(source, predicted, query)
        self._workers.measured.spending.searches.due += 1
        speculative, _ = self._searches.pop(key, None), self._sources.pop(key, None)
        known = self._known_search(item, query)
        if known is not None:
            if speculative is not None:
                speculative.cancel()
                self._ended(speculative.item, "rolled back")
                self._reassign(speculative.item, item)
            speculative = known
        if speculative is None:
            return None, None
        self._reassign(speculative.item, item)
        try:
            handle = await speculative.use(query)
        except BaseException:
            speculative.cancel()
            self._ended(speculative.item, "cancelled")
            raise
        speculative.item.trace.clusters = speculative.clusters
        self._ended(speculative.item, "rolled back" if handle is None else "used")
        return handle, speculative.history

    def left(self, tokens: Tokens) -> list[SpeculativeGeneration[D, R]]:
        """Drop speculations on branches not taken. The caller must `leave` the returned generations."""
        if any(isinstance(run.node, Step) for run in tokens.running):
            # Predicted runs may come after this step.
            return []
        running = {run.key for run in tokens.running}
        dropped: list[SpeculativeGeneration[D, R]] = []
        while keys := [key for key, source in self._sources.items() if source.ended and key not in running]:
            dropped += [generation for key in keys for generation in self.drop(key, "wasted")]
        return dropped

    def drop(self, key: RunKey, outcome: Outcome) -> list[SpeculativeGeneration[D, R]]:
        self._sources.pop(key, None)
        self._predicted_queries.pop(key, None)
        self._guesses.pop(key, None)
        search = self._searches.pop(key, None)
        if search is not None:
            search.cancel()
            self._ended(search.item, outcome)
        generation = self._generations.pop(key, None)
        return [] if generation is None else [generation]

    def drop_all(self, outcome: Outcome) -> list[SpeculativeGeneration[D, R]]:
        for (id, _), since_s in self._known_since.items():
            if since_s is not None and outcome == "wasted":
                self._workers.measured.odds_of(self._graph, id, KNOWN).learn([(False, 0.0)], [ANY_PART])
        for search in self._known.values():
            search.cancel()
            self._ended(search.item, outcome)
        self._known.clear()
        self._known_since.clear()
        keys = {*self._sources, *self._generations}
        return [generation for key in keys for generation in self.drop(key, outcome)]

    def _known_search(self, item: WorkItem, query: str) -> SpeculativeSearch | None:
        since_s = self._known_since.get((item.run.id, query))
        # What has been searched for is not searched for ahead again.
        self._known_since[item.run.id, query] = None
        if since_s is not None:
            odds = self._workers.measured.odds_of(self._graph, item.run.id, KNOWN)
            odds.learn([(True, self._elapsed_s() - since_s)], [ANY_PART])
        return self._known.pop((item.run.id, query), None)

    def _generation(self, key: RunKey) -> SpeculativeGeneration[D, R]:
        generation = self._generations.get(key)
        if generation is None:
            workers, trace = self._workers, PipelineTrace()
            attempt = Attempt(workers.engine, workers.prompts, workers.measured.load, trace, self._elapsed_s)
            generation = self._generations[key] = SpeculativeGeneration(
                attempt, trace, self._begun, self._ended, self._off_engine
            )
        return generation

    def _off_engine(self, item: WorkItem, tokens: tuple[int, int]) -> None:
        item.trace.prompt_tokens, item.trace.tokens = tokens
        item.sent = sum(tokens)
        self._workers.measured.settle(item)
        self._workers.wavefront.release(item)

    def _values(self, item: WorkItem) -> Mapping[str, Any]:
        node = item.node
        if isinstance(node, Generation):
            return answered(node, "".join(item.text), item.run.state)
        if isinstance(node, Retrieval) and item.stage is not None:
            return found(node, self._workers.searcher.documents(item.stage))
        raise TypeError(f"nothing can be predicted from a {type(node).__name__}")

    def _is_new(self, item: WorkItem, run: NodeRun) -> bool:
        key, node = run.key, run.node
        if isinstance(node, Generation) and not item.due:
            guesses = self._guesses.setdefault(key, _Guesses(item, {}))
            guesses.by_part[item.part] = input_of(node, run.state, self._scope), self._elapsed_s()
        if not isinstance(node, Retrieval):
            return key not in self._generations or not self._generations[key].beginning
        query = query_of(node, run.state)
        if item.worker == "engine":
            self._sources[key] = item
            self._predicted_queries.setdefault(key, {})[item.part] = query, self._elapsed_s()
        return (
            bool(query.strip())
            and (run.id, query) not in self._known
            and (key not in self._searches or self._searches[key].query != query)
        )

    def _reassign(self, old: WorkItem, new: WorkItem) -> None:
        for key, source in self._sources.items():
            if source is old:
                self._sources[key] = new

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _learn(self, source: WorkItem, guesses: Mapping[int, tuple[Any, float]], final: object) -> None:
        now_s = self._elapsed_s()
        seen = [(guess == final, now_s - at_s) for guess, at_s in guesses.values()]
        odds = self._workers.measured.odds(source)
        odds.learn(seen, guesses)
        # There are many parts: a part without data is as likely right as the others.
        odds.learn(seen, [ANY_PART] * len(seen))
