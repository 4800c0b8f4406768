"""Workflow server with ordered documents."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ragorder import Document, Ordering, PromptBuilder
from ragorder.adapters.openai.pipelined import PromptLoad, SystemPrefix
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptForm, PromptRequest, Question
from ragorder.pipelining import CachedLengths, CommittedRequest, StreamingEngine, Usage, WarmUp
from ragorder.pipelining.servers import observer_of
from ragorder.pipelining.workflow import NodeQuestion, WorkflowServer, WorkflowTrace
from ragorder.pipelining.workflow.transformations import Transformation, all_transformations
from ragorder.protocols import OrdererLike

if TYPE_CHECKING:
    from ragorder.pipelining import ContinuousIVF, StagedSearch


class WorkflowPrompts:
    """`OrderedPrompts` for a `WorkflowServer`: {query} in the question template is a generation's prompt."""

    def __init__(self, prompts: OrderedPrompts) -> None:
        self._prompts = prompts

    def lengths(self, question: NodeQuestion, documents: Sequence[Document], /) -> Callable[[], CachedLengths] | None:
        """Return None for retrieval order, which the orderer does not track."""
        return self._prompts.lengths(_question(question), documents) if question.ordered or not documents else None

    def preview(self, question: NodeQuestion, documents: Sequence[Document], /) -> PromptRequest:
        asked = _question(question)
        if question.ordered or not documents:
            return self._prompts.preview(asked, documents)
        return self._ranked(asked, documents)

    def commit(self, question: NodeQuestion, documents: Sequence[Document], /) -> CommittedRequest[PromptRequest]:
        asked = _question(question)
        if question.ordered or not documents:
            return self._prompts.commit(asked, documents)
        request = self._ranked(asked, documents)
        self._prompts.note_sent(request)
        return _Ranked(request)

    def _ranked(self, question: Question, documents: Sequence[Document]) -> PromptRequest:
        ordering = Ordering(list(documents), list(range(len(documents))))
        request = self._prompts.request(question.query, ordering, question.scope, question.all_options())
        return replace(request, streamed=question.streamed)


@dataclass(slots=True)
class _Ranked:
    request: PromptRequest

    def confirm(self, usage: Usage | None, /) -> None:
        pass

    def discard(self) -> None:
        pass


def _question(question: NodeQuestion) -> Question:
    limits = question.max_tokens, question.temperature
    return Question(question.text, question.scope, *limits, question.options, streamed=question.streamed)


@dataclass(frozen=True, slots=True)
class WorkflowPrefix:
    """System prompt of all generations, warmed up by one of one token."""

    prefix: SystemPrefix
    prompts: WorkflowPrompts

    def scope(self, question: NodeQuestion, /) -> Hashable:
        return question.scope

    def is_cached(self, question: NodeQuestion, /) -> bool:
        return self.prefix.is_cached(_question(question))

    async def prefill(self, question: NodeQuestion, /) -> None:
        committed = self.prompts.commit(NodeQuestion("", question.scope, max_tokens=1), ())
        await self.prefix.engine.prefill(committed.request, committed.confirm, committed.discard)


class OrderedWorkflows(WorkflowServer[Document, PromptRequest]):
    warm_up: WarmUp[NodeQuestion] | None = None

    async def close(self) -> None:
        await super().close()
        if self.warm_up is not None:
            await self.warm_up.close()


def ordered_workflows(
    engine: StreamingEngine[PromptRequest],
    search: ContinuousIVF | StagedSearch | Callable[..., Any],
    embed: Callable[[str], Any] | None,
    document: Callable[[Any], Document] | None,
    *,
    orderer: OrdererLike,
    builder: PromptBuilder,
    prompts: PromptForm = "messages",
    transformations: Sequence[Transformation] | None = None,
    warm_up: bool = True,
    max_prefill_bs: int | None = None,
    token_budget: int = 8192,
    requests: Callable[[], int | None] | None = None,
    observers: Sequence[Callable[[WorkflowTrace], None]] = (),
    **options: Any,
) -> OrderedWorkflows:
    """Return a workflow server that orders its documents, on `OpenAIStreams`, `AsyncVLLM` or `EmbeddedStreams`.

        async with ordered_workflows(engine, ContinuousIVF(index), embed, documents.__getitem__,
                                     orderer=orderer, builder=builder) as server:
            result = await server.run(multistep().compile(), "Which drawer?")

    - `search`: an index, or a function of a vector (of a text if `embed` is None) and k that returns ids (documents if
      `document` is None).
    - `builder`: its question template should be "{query}", since nodes have whole prompts.
    - `prompts`: as for `OrderedPrompts`.
    - `transformations`: None for all, () for stage by stage.
    - `warm_up`: prefill an uncached system prompt during searches, if `transformations` is None.
    - `max_prefill_bs`, `token_budget`, `requests`: as for `ordered_pipeline`; they admit speculative generations.
    - `observers`: one that fails is logged once and dropped.

    Other options as for `WorkflowServer`. Raises ValueError for invalid `prompts` and limits below 1.
    """
    prefix = SystemPrefix(orderer, builder, engine, prompts)
    load = PromptLoad(prefix.engine, max_prefill_bs=max_prefill_bs, token_budget=token_budget, requests=requests)
    made = WorkflowPrompts(OrderedPrompts(orderer, builder, prompts, learn=load.learn))
    # An engine with fused reuse warms up the system prompt with each question.
    warming = WarmUp(WorkflowPrefix(prefix, made)) if warm_up and orderer.settings.reuse != "fused" else None
    if transformations is None:
        transformations = all_transformations(warming)
    server = OrderedWorkflows(
        prefix.engine,
        search,
        embed,
        document,
        made,
        transformations=transformations,
        load=load,
        observer=observer_of(observers, "workflows"),
        **options,
    )
    server.warm_up = warming
    return server
