"""Feedback from LangChain by callbacks."""

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

from ragorder.adapters.langchain.payloads import is_token, prompt_text, response_usage
from ragorder.adapters.langchain.runs import Runs
from ragorder.ordering import Ordering
from ragorder.protocols import OrdererLike

P = ParamSpec("P")
T = TypeVar("T")

_logger = logging.getLogger("ragorder")

_STREAMED_SILENTLY = (
    "answers are streamed without usage, so the engine's cached tokens are unknown: set stream_usage=True in the chat "
    "model"
)


class FeedbackHandler(BaseCallbackHandler):
    """Callback handler that reports each ordering's outcome and the engine's cached tokens to the orderer. Thread-safe.

        chain.invoke(question, config={"callbacks": [FeedbackHandler()]})  # the outermost call

    - An ordering is confirmed with the usage of the first LLM call whose prompt has its documents' texts in order.
    - Without such a call, the only call served after it counts; several or none give no numbers.
    - If that call failed, the next with the same documents counts; otherwise the ordering is discarded.
    - A stream that ends early after its first token counts as served, without numbers.
    - Streams need `ChatOpenAI(stream_usage=True)`; without it the orderer is degraded.

    Never raises; keeps and logs nothing of a prompt. Follows at most `max_runs` runs.
    """

    # Inline: an event takes microseconds. A coroutine would cost a synchronous chain an event loop for each token, an
    # executor an asynchronous chain a thread. (With any inline handler, langchain-core drops the on_llm_start of other
    # handlers, for text models called asynchronously: langchain#39633.)
    run_inline = True
    raise_error = False

    def __init__(self, *, max_runs: int = 10_000) -> None:
        super().__init__()
        self._runs = Runs(max_runs)
        self._failed = False

    @property
    def open_runs(self) -> int:
        return len(self._runs.roots)

    @property
    def waiting_orderings(self) -> int:
        return self._runs.waiting

    # LangChain gives what starts a run by position, and a tool's `inputs` among the others.
    def _start(self, serialized: Any, given: Any, /, **run: Any) -> None:
        self._handle(self._runs.begin, run["run_id"], run.get("parent_run_id"))

    on_chain_start = on_tool_start = on_retriever_start = _start  # type: ignore[assignment]

    def on_chat_model_start(self, serialized: Any, messages: list[list[BaseMessage]], **run: Any) -> None:
        self._handle(lambda: self._call(run, "\n".join(map(prompt_text, messages)), alone=True))

    def on_llm_start(self, serialized: Any, prompts: list[str], *, batch_size: int = 1, **run: Any) -> None:
        self._handle(self._call, run, "\n".join(prompts), alone=batch_size == 1)

    def on_llm_new_token(self, token: Any, *, run_id: UUID, chunk: Any = None, **kwargs: Any) -> None:
        if self._handle(is_token, token, chunk):
            self._handle(self._runs.token, run_id)

    def on_stream_event(self, event: Any, *, run_id: UUID, **kwargs: Any) -> None:
        # A message starts with its role, before anything is computed: see is_token.
        if event.get("event") != "message-start":
            self._handle(self._runs.token, run_id)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        self._handle(self._runs.answered, run_id, partial(response_usage, response))

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._handle(self._runs.end, run_id, failed=True)

    on_retriever_error = on_llm_error

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._handle(self._runs.end, run_id, failed=False)

    on_tool_end = on_retriever_end = on_chain_end  # type: ignore[assignment]

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._handle(self._runs.end, run_id, failed=not _is_control_flow(error))

    on_tool_error = on_chain_error

    def expect(
        self, run_id: UUID, ordering: Ordering[Any], texts: Sequence[str], streamed_silently: Callable[[], object]
    ) -> bool:
        """Follow an ordering. `streamed_silently` is called for a streamed answer without usage."""
        return bool(self._handle(self._runs.expect, run_id, ordering, texts, streamed_silently))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, pickled or deep, follows no runs yet.
        return partial(type(self), max_runs=self._runs.limit), ()

    def _call(self, run: dict[str, Any], prompt: str, alone: bool) -> None:
        self._runs.call(run["run_id"], run.get("parent_run_id"), prompt, alone)

    def _handle(self, event: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        # LangChain would log an error in full, with its quotations of a prompt.
        try:
            return event(*args, **kwargs)
        except Exception as error:
            if not self._failed:
                self._failed = True
                _logger.warning("feedback from LangChain failed with %s: numbers may be missing", type(error).__name__)
            return None


def hand_over(ordering: Ordering[Any], texts: Sequence[str], run_manager: Any, orderer: OrdererLike) -> None:
    """Give an ordering to the run's handler; without one it counts as served."""
    silently = partial(orderer.degrade, _STREAMED_SILENTLY)
    if not any(handler.expect(run_manager.run_id, ordering, texts, silently) for handler in _handlers(run_manager)):
        ordering.confirm()


def abandon(run_manager: Any) -> None:
    for handler in _handlers(run_manager):
        handler.on_retriever_error(BaseException(), run_id=run_manager.run_id)


def _handlers(run_manager: Any) -> Iterable[FeedbackHandler]:
    handlers = [*run_manager.handlers, *run_manager.inheritable_handlers]
    return (handler for handler in handlers if isinstance(handler, FeedbackHandler))


def _is_control_flow(error: BaseException) -> bool:
    # LangGraph raises an error to interrupt the graph or to go to a node of the parent graph.
    control_flow = getattr(sys.modules.get("langgraph.errors"), "GraphBubbleUp", ())
    return isinstance(error, control_flow)
