"""Answers in the format of OpenAI's API, in one piece or as server-sent events."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from ragorder.adapters.http_server.errors import HTTPError

if TYPE_CHECKING:
    from ragorder.kernels.engine import Completion, TokenLogprobs, Update

__all__ = ["DONE", "Answer", "ChatAnswer", "CompletionAnswer", "event", "usage"]

DONE = b"data: [DONE]\n\n"

# What stands for a probability of 0, whose logarithm is no JSON.
_NEVER = -9999.0


def event(content: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def usage(completions: Iterable[Completion]) -> dict[str, Any]:
    """The token counts of the prompts of a body, together."""
    completions = list(completions)
    prompt_tokens = sum(each.prompt_tokens for each in completions)
    completion_tokens = sum(len(each.token_ids) for each in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached.total for each in completions)},
    }


class Answer(ABC):
    """The answer to one body. `token_text` shows a token as text."""

    prefix: str
    whole_object: str
    piece_object: str

    def __init__(self, model: str, token_text: Callable[[int], str]) -> None:
        self._token_text = token_text
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        # Choices that were begun, and how much of their text was sent.
        self._sent: dict[int, int] = {}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer in one piece. Raises HTTPError if one of its requests failed."""
        choices = []
        for index, completion in enumerate(completions):
            check(completion)
            choice = self._choice(completion.text, self._logprobs(completion.logprobs, 0))
            choices.append({"index": index, **choice, "finish_reason": completion.finish_reason})
        return self._head | {"object": self.whole_object, "choices": choices, "usage": usage(completions)}

    def pieces(self, index: int, update: Update) -> Iterator[dict[str, Any]]:
        """What a step brought for a prompt, as parts of a stream. Raises HTTPError if its request failed."""
        completion = update.completion
        if completion is not None:
            check(completion)
        if index not in self._sent:
            yield from self._opening(index)
        sent = self._sent.setdefault(index, 0)
        self._sent[index] += len(update.text)
        if not (update.text or update.logprobs or completion is not None):
            return
        piece = self._piece(update.text, self._logprobs(update.logprobs or None, sent))
        yield self._part([{"index": index, **piece, "finish_reason": completion and completion.finish_reason}])

    def last(self, completions: Iterable[Completion]) -> dict[str, Any]:
        """What a stream ends with if its token counts were asked for."""
        return self._part([]) | {"usage": usage(completions)}

    def _part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self.piece_object, "choices": choices}

    def _opening(self, index: int) -> Iterator[dict[str, Any]]:
        """What comes before a choice's first piece."""
        return iter(())

    @abstractmethod
    def _choice(self, text: str, logprobs: Any) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def _piece(self, text: str, logprobs: Any) -> dict[str, Any]:
        """A part of one."""

    @abstractmethod
    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None, offset: int) -> Any:
        """Of tokens whose text begins `offset` characters into the answer; None if they were not asked for."""


class CompletionAnswer(Answer):
    """The answer to a plain completion."""

    prefix = "cmpl"
    whole_object = piece_object = "text_completion"

    def _choice(self, text: str, logprobs: Any) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs}

    _piece = _choice

    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None, offset: int) -> Any:
        if tokens is None:
            return None
        texts = [self._token_text(each.token_id) for each in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(each.logprob) for each in tokens],
            "top_logprobs": [{self._token_text(id): _finite(value) for id, value in each.top} for each in tokens],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
        }


class ChatAnswer(Answer):
    """The answer to a chat."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def _opening(self, index: int) -> Iterator[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        yield self._part([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _choice(self, text: str, logprobs: Any) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}

    def _piece(self, text: str, logprobs: Any) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}, "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None, offset: int) -> Any:
        if tokens is None:
            return None
        return {
            "content": [
                self._token(each.token_id, each.logprob) | {"top_logprobs": [self._token(*one) for one in each.top]}
                for each in tokens
            ]
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def check(completion: Completion) -> None:
    """Raises HTTPError if a request did not end as it should have."""
    if completion.finish_reason == "error":
        message = f"The engine could not answer this request: {completion.error or 'its log has the reason'}"
        raise HTTPError(500, message, code="engine_error")
    if completion.finish_reason == "abort":
        raise HTTPError(503, "The request was aborted.", code="aborted")


def _finite(logprob: float) -> float:
    return max(logprob, _NEVER)
