"""Feedback from LangChain: what became of each ordering, told by callbacks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from ragorder.adapters.documents import degrade
from ragorder.adapters.langchain.runs import Runs
from ragorder.adapters.langchain.usage import is_token, prompt_text, read_usage
from ragorder.orderer_like import OrdererLike
from ragorder.ordering import Ordering

__all__ = ["FeedbackHandler", "abandon", "hand_over"]

P = ParamSpec("P")
T = TypeVar("T")

_logger = logging.getLogger("ragorder")

_STREAMED_SILENTLY = (
    "answers are streamed without usage, and what the engine reports of its cache is lost: set stream_usage=True "
    "in the chat model"
)


class FeedbackHandler(BaseCallbackHandler):
    """Tells the orderer what became of each ordering, and what the engine reports of it. Thread-safe.

    Give it to the outermost call, `chain.invoke(question, config={"callbacks": [handler]})`, or bind it there by
    `chain.with_config(callbacks=[handler])`; one handler serves any number of concurrent runs. The retriever and the
    `CacheReorder` inside find it in their callbacks.

    - An ordering belongs to the LLM call whose prompt has its documents' texts in their order. When that call ends, it
      is confirmed with the reported tokens; of several such calls, with those of the first.
    - If no call of the outermost run has them (the prompt shows them otherwise), and exactly one was served after it,
      that one counts; if several were, or none, it is confirmed without numbers once the outermost run has ended.
    - If its call failed, the next one that has the same documents counts: a retry, a fallback. If there is none, and if
      the run in which it was made fails, it is discarded.
    - A stream that broke or was closed after its first token counts as served, without numbers. An answer from
      LangChain's own cache does not: no engine was asked.
    - Streams report their usage if the model asks for it: `ChatOpenAI(stream_usage=True)`, which is off for a server of
      your own. An orderer whose answers are streamed without it is degraded.

    Nothing is raised into the chain, and nothing of a prompt is kept or logged. At most `max_runs` runs are followed at
    a time; the orderings of the oldest are counted as served beyond that.

    It runs inline: what it does takes microseconds, in the thread and at the time of the event, in chains and
    coroutines alike. A coroutine would cost a synchronous chain an event loop for each token, an executor an
    asynchronous chain a thread. (With any inline handler, langchain-core drops the on_llm_start of handlers that are
    not, for text models called asynchronously: langchain#39633.)
    """

    run_inline = True
    raise_error = False

    def __init__(self, *, max_runs: int = 10_000) -> None:
        super().__init__()
        self._runs = Runs(max_runs)
        self._failed = False

    @property
    def open_runs(self) -> int:
        """Runs that began and did not end."""
        return self._runs.open

    @property
    def waiting_orderings(self) -> int:
        """Orderings that wait for their LLM call, or for the end of their run."""
        return self._runs.waiting

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        self._tell(self._runs.begin, run_id, parent_run_id)

    def on_tool_start(
        self, serialized: Any, input_str: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        self._tell(self._runs.begin, run_id, parent_run_id)

    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        self._tell(self._runs.begin, run_id, parent_run_id)

    def on_chat_model_start(
        self,
        serialized: Any,
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        self._tell(lambda: self._runs.call(run_id, parent_run_id, "\n".join(map(prompt_text, messages)), alone=True))

    def on_llm_start(
        self,
        serialized: Any,
        prompts: list[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        batch_size: int = 1,
        **kwargs: Any,
    ) -> None:
        self._tell(self._runs.call, run_id, parent_run_id, "\n".join(prompts), alone=batch_size == 1)

    def on_llm_new_token(self, token: Any, *, run_id: UUID, chunk: Any = None, **kwargs: Any) -> None:
        if self._tell(is_token, token, chunk):
            self._tell(self._runs.token, run_id)

    def on_stream_event(self, event: Any, *, run_id: UUID, **kwargs: Any) -> None:
        # A message starts with its role, which says nothing: see is_token.
        if event.get("event") != "message-start":
            self._tell(self._runs.token, run_id)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        self._tell(self._runs.answered, run_id, partial(read_usage, response))

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._tell(self._runs.end, run_id, failed=True)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._tell(self._runs.end, run_id, failed=False)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._tell(self._runs.end, run_id, failed=False)

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._tell(self._runs.end, run_id, failed=False)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._tell(self._runs.end, run_id, failed=not _is_control_flow(error))

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._tell(self._runs.end, run_id, failed=not _is_control_flow(error))

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._tell(self._runs.end, run_id, failed=True)

    def expect(
        self, run_id: UUID, ordering: Ordering[Any], texts: Sequence[str], streamed_silently: Callable[[], object]
    ) -> bool:
        """Have an ordering finished that was made in a run, for documents with these texts. `streamed_silently` is
        called if its answer is streamed, and nothing is reported of it. False after an error."""
        return bool(self._tell(self._runs.expect, run_id, ordering, texts, streamed_silently))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, pickled or deep, follows no runs yet."""
        return partial(type(self), max_runs=self._runs.limit), ()

    def _tell(self, event: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """LangChain would log an error in full, and with it what it quotes of a prompt."""
        try:
            return event(*args, **kwargs)
        except Exception as error:
            if not self._failed:
                self._failed = True
                _logger.warning("feedback from LangChain failed with %s: numbers may be missing", type(error).__name__)
            return None


def hand_over(ordering: Ordering[Any], texts: Sequence[str], run_manager: Any, orderer: OrdererLike) -> None:
    """Leave an ordering to the handler among a run's callbacks. If there is none, it counts as served."""
    silently = partial(degrade, orderer, _STREAMED_SILENTLY)
    if not any(handler.expect(run_manager.run_id, ordering, texts, silently) for handler in _handlers(run_manager)):
        ordering.confirm()


def abandon(run_manager: Any) -> None:
    """A retriever was cancelled, of which LangChain does not tell."""
    for handler in _handlers(run_manager):
        handler.on_retriever_error(BaseException(), run_id=run_manager.run_id)


def _handlers(run_manager: Any) -> Iterable[FeedbackHandler]:
    handlers = [*run_manager.handlers, *run_manager.inheritable_handlers]
    return (handler for handler in handlers if isinstance(handler, FeedbackHandler))


def _is_control_flow(error: BaseException) -> bool:
    """Whether an error is how LangGraph leaves a node: to interrupt the graph, or for a node of the parent's."""
    control_flow = getattr(sys.modules.get("langgraph.errors"), "GraphBubbleUp", ())
    return isinstance(error, control_flow)
