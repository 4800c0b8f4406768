"""Workflow server with ordered documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ragorder import Document, PromptBuilder
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptForm, PromptRequest
from ragorder.adapters.openai.server_load import PromptLoad
from ragorder.adapters.openai.system_prefix import SystemPrefix
from ragorder.adapters.workflows.prompts import WorkflowPrefix, WorkflowPrompts
from ragorder.orderer import OrdererLike
from ragorder.pipelining import StreamingEngine, WarmUp
from ragorder.pipelining.servers import observer_of
from ragorder.pipelining.workflow import NodeQuestion, WorkflowServer, WorkflowTrace
from ragorder.pipelining.workflow.transformations import Prefetch, Transformation, all_transformations

if TYPE_CHECKING:
    from ragorder.pipelining import ContinuousIVF, StagedSearch

__all__ = ["OrderedWorkflows", "ordered_workflows"]


class OrderedWorkflows(WorkflowServer[Document, PromptRequest]):
    """See `ordered_workflows`."""

    warm_up: WarmUp[NodeQuestion] | None = None

    async def close(self) -> None:
        await super().close()
        if self.warm_up is not None:
            await self.warm_up.close()


def ordered_workflows(
    engine: StreamingEngine[PromptRequest],
    search: ContinuousIVF | StagedSearch | Callable[..., Any],
    embed: Callable[[str], Any],
    document: Callable[[int], Document],
    *,
    orderer: OrdererLike,
    builder: PromptBuilder,
    prompts: PromptForm = "messages",
    transformations: Sequence[Transformation] | None = None,
    warm_up: bool = True,
    max_prefill_bs: int | None = None,
    token_budget: int = 8192,
    requests: Callable[[], int | None] | None = None,
    max_requests: int = 64,
    max_waiting: int = 1024,
    max_generations: int | None = None,
    window: int = 32,
    observers: Sequence[Callable[[WorkflowTrace], None]] = (),
) -> OrderedWorkflows:
    """Return a workflow server that orders the documents of its generations, on `OpenAIStreams`, `AsyncVLLM` or
    `EmbeddedStreams`.

        async with ordered_workflows(engine, ContinuousIVF(index), embed, documents.__getitem__,
                                     orderer=orderer, builder=builder) as server:
            result = await server.run(multistep().compile(), "Which drawer?")

    - `prompts`: "messages" for a server's chat template, "token_ids" for an engine in this process.
    - `transformations`: None for all, () for stage by stage.
    - `warm_up`: prefill an uncached system prompt during searches, if `transformations` is None.
    - `max_prefill_bs`, `token_budget`, `requests`: as for `ordered_pipeline`; they admit speculative generations.
    - `observers`: get the trace of each ended request; one that fails is logged once and dropped.

    Other options as for `WorkflowServer`. A builder's question template should be "{query}", since nodes have whole
    prompts. Raises ValueError for invalid `prompts` and for limits below 1.
    """
    prefix = SystemPrefix(orderer, builder, engine, prompts)
    load = PromptLoad(prefix.engine, max_prefill_bs=max_prefill_bs, token_budget=token_budget, requests=requests)
    made = WorkflowPrompts(OrderedPrompts(orderer, builder, prompts, learn=load.learn))
    # An engine with fused reuse warms up the system prompt with each question.
    warming = WarmUp(WorkflowPrefix(prefix, made)) if warm_up and orderer.settings.reuse != "fused" else None
    if transformations is None:
        transformations = [Prefetch(warming) if isinstance(each, Prefetch) else each for each in all_transformations()]
    server = OrderedWorkflows(
        prefix.engine,
        search,
        embed,
        document,
        made,
        transformations=transformations,
        load=load,
        max_requests=max_requests,
        max_waiting=max_waiting,
        max_generations=max_generations,
        window=window,
        observer=observer_of(observers, "workflows"),
    )
    server.warm_up = warming
    return server
