"""Responses in the format of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.kernels.engine import Completion, TokenLogprobs, Update

DONE = b"data: [DONE]\n\n"

# Replaces the logarithm of 0, which JSON cannot express.
_NEVER = -9999.0
# The tokenizers' text for an incomplete character.
_BROKEN = "\ufffd"


def event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def usage(completions: Iterable[Completion]) -> dict[str, Any]:
    completions = list(completions)
    prompt_tokens = sum(each.prompt_tokens for each in completions)
    completion_tokens = sum(len(each.token_ids) for each in completions)
    details = {"cached_tokens": sum(each.cached.total for each in completions)}
    if fused := sum(each.fused.total for each in completions):
        # Ours: tokens reused approximately, and those of them recomputed.
        details |= {"fused_tokens": fused, "recomputed_tokens": sum(each.recomputed for each in completions)}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }


class ResponseBuilder(ABC):
    prefix: str
    object: str
    chunk_object: str

    def __init__(self, model: str, token_text: Callable[[int], str]) -> None:
        self._token_text = token_text
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        # The choices that have begun, and the length of their tokens' texts so far.
        self._sent: dict[int, int] = {}

    def complete(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Raises HTTPError if a request failed."""
        choices = []
        for index, completion in enumerate(completions):
            check(completion)
            choice = self._choice(completion.text, self._logprobs(completion.logprobs, 0))
            choices.append({"index": index, **choice, "finish_reason": completion.finish_reason})
        return self._head | {"object": self.object, "choices": choices, "usage": usage(completions)}

    def chunks(self, index: int, update: Update) -> Iterator[dict[str, Any]]:
        completion = update.completion
        if completion is not None:
            check(completion)
        if index not in self._sent:
            yield from self._opening(index)
        sent = self._sent.setdefault(index, 0)
        self._sent[index] += sum(len(self._token_text(each.token_id)) for each in update.logprobs)
        if not (update.text or update.logprobs or completion is not None):
            return
        piece = self._chunk_choice(update.text, self._logprobs(update.logprobs or None, sent))
        yield self._chunk([{"index": index, **piece, "finish_reason": completion and completion.finish_reason}])

    def last(self, completions: Iterable[Completion]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage(completions)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self.chunk_object, "choices": choices}

    def _opening(self, index: int) -> Iterator[dict[str, Any]]:
        return iter(())

    @abstractmethod
    def _choice(self, text: str, logprobs: Any) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choice(self, text: str, logprobs: Any) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, tokens: Sequence[TokenLogprobs] | None, offset: int) -> Any:
        """Return log probabilities of tokens whose text begins at `offset`, or None if not requested."""


class CompletionResponseBuilder(ResponseBuilder):
    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def _choice(self, text: str, logprobs: Any) -> dict[str, Any]:
        return {"text": text, "logprobs": logprobs}

    _chunk_choice = _choice

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


class ChatResponseBuilder(ResponseBuilder):
    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _opening(self, index: int) -> Iterator[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        yield self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _choice(self, text: str, logprobs: Any) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": logprobs}

    def _chunk_choice(self, text: str, logprobs: Any) -> dict[str, Any]:
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
        # Those of a part of a character are not known.
        content = None if _BROKEN in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": content}


def check(completion: Completion) -> None:
    if completion.finish_reason == "error":
        message = f"The engine could not answer this request: {completion.error or 'its log has the reason'}"
        raise HTTPError(500, message, code="engine_error")
    if completion.finish_reason == "timeout":
        message = f"The request was ended: {completion.error}."
        raise HTTPError(504, message, code="deadline_exceeded", param="deadline_s")
    if completion.finish_reason == "abort":
        raise HTTPError(503, "The request was aborted.", code="aborted")


def _finite(logprob: float) -> float:
    return max(logprob, _NEVER)
