"""Translation of OpenAI requests into the engine's."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec

from ragorder.adapters.embedded.protocol import (
    FUSION_FIELDS,
    ChatCompletionRequest,
    ChatMessage,
    CommonRequest,
    CompletionRequest,
    TokenizeRequest,
    read_request,
)
from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.request_facts import EXACT, FACTS, PREFIX, QUESTION, RequestFacts, checked_salt, read_facts
from ragorder.kernels.engine import Fusion, Request, Sampling
from ragorder.tokens import PLACEHOLDER

B = TypeVar("B", bound=CommonRequest)

_MAX_COMPLAINT = 200
# What an answer from batches, with the server's own prompt, does not have.
_NOT_OF_QUESTIONS = ("deadline_s", "logprobs", "add_special_tokens", "chat_template_kwargs", "reuse", *FUSION_FIELDS)


@dataclass(frozen=True, slots=True)
class TranslatedRequest(Generic[B]):
    body: B
    requests: tuple[Request, ...]
    facts: RequestFacts | None
    readable: bool


@dataclass(frozen=True, slots=True)
class TranslatedQuestion:
    body: ChatCompletionRequest
    text: str
    sampling: Sampling
    salt: str | None


class RequestTranslator:
    """Translator for one thread. `longest` limits prompt plus answer, in tokens. Raises HTTPError."""

    def __init__(self, tokenizer: Any, *, model_name: str, longest: int, fusion: Fusion | None = None) -> None:
        self._tokenizer = tokenizer
        self._fusion = fusion
        self._model_name = model_name
        self._max_model_len = longest
        # Longer texts have too many tokens, and take long to tokenise.
        widest = 0 if tokenizer is None else max(map(len, tokenizer.get_vocab()), default=1)
        self._max_characters = longest * max(widest, 1)
        options = () if tokenizer is None else inspect.signature(tokenizer.apply_chat_template).parameters
        self._own_options = frozenset(options) | {"messages"}
        self._anchor = [] if tokenizer is None else tokenizer.encode("a", add_special_tokens=False)
        self._anchor_text = "" if tokenizer is None else self._decode(self._anchor)

    def completion(self, content: bytes) -> TranslatedRequest[CompletionRequest]:
        body = read_request(content, CompletionRequest, self._max_model_len)
        self._check_model(body.model)
        prompt = body.prompt
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            prompts: Sequence[Any] = prompt
        else:
            prompts = [prompt]
        token_ids = [
            self._encode(each, body.add_special_tokens, "prompt") if isinstance(each, str) else each for each in prompts
        ]
        return self._translated(body, token_ids, body.logprobs, body.max_tokens or 16)

    def chat(self, content: bytes) -> TranslatedRequest[ChatCompletionRequest]:
        body = read_request(content, ChatCompletionRequest, self._max_model_len)
        self._check_model(body.model)
        token_ids = self._render(body)
        if len(token_ids) > self._max_model_len:
            raise self._too_long("messages")
        limit = body.max_completion_tokens or body.max_tokens or max(1, self._max_model_len - len(token_ids))
        return self._translated(body, [token_ids], body.top_logprobs if body.logprobs else None, limit)

    def question(self, content: bytes, usual_tokens: int) -> TranslatedQuestion:
        """Read a chat of one question, for the server's own prompt. `usual_tokens` limit the answer if the body does
        not."""
        body = read_request(content, ChatCompletionRequest, self._max_model_len)
        self._check_model(body.model)
        for name in _NOT_OF_QUESTIONS:
            if getattr(body, name):
                message = f"{name}: questions are answered in batches, without this field: leave it out."
                raise HTTPError(400, message, code="unsupported_field", param=name)
        if len(body.messages) != 1 or body.messages[0].role != "user":
            message = "messages: give one message of the user, the question: this server adds the rest of the prompt."
            raise HTTPError(400, message, code="invalid_messages", param="messages")
        text = _text_of(body.messages[0])
        if not text.strip():
            raise HTTPError(400, "messages: the question is empty.", code="invalid_messages", param="messages")
        left = self._max_model_len - len(self._encode(text, False, "messages"))
        if left <= 0:
            raise self._too_long("messages")
        limit = body.max_completion_tokens or body.max_tokens
        if limit is not None and limit > left:
            name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            message = f"{name}: question and answer may have {self._max_model_len:,} tokens together: give less."
            raise HTTPError(400, message, code="context_length_exceeded", param=name)
        return TranslatedQuestion(body, text, _sampling(body, None, limit or usual_tokens), _salt(body))

    def tokenize(self, content: bytes) -> dict[str, Any]:
        body = read_request(content, TokenizeRequest, self._max_model_len)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise HTTPError(400, "Give either prompt or messages.", code="invalid_body", param="prompt")
        if body.prompt is not None:
            token_ids = self._encode(body.prompt, body.add_special_tokens is not False, "prompt")
        else:
            token_ids = self._render(body)
        shown = self._tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
        return {"count": len(token_ids), "max_model_len": self._max_model_len, "tokens": token_ids, "token_strs": shown}

    def token_text(self, token_id: int) -> str:
        """Return the text that a token adds to others: some decoders strip a space at the start of a text."""
        if self._tokenizer is None:
            return ""
        text = self._decode([*self._anchor, token_id])
        return text[len(self._anchor_text) :] if text.startswith(self._anchor_text) else self._decode([token_id])

    def _translated(
        self, body: B, prompts: Sequence[Sequence[int]], logprobs: int | None, max_tokens: int
    ) -> TranslatedRequest[B]:
        if any(len(each) > self._max_model_len for each in prompts):
            raise self._too_long("prompt")
        facts, readable = _facts_of(body)
        salt = _salt(body)
        sampling = _sampling(body, logprobs, max_tokens)
        marked: dict[str, Any] = {}
        # The facts describe one prompt.
        if facts is not None and facts.documents and len(prompts) == 1:
            marked = {
                "document_ends": facts.documents,
                "prefix_tokens": self._prefix_tokens(body, prompts[0]),
                "expected_uses": facts.expected,
                "exact_documents": _whole(body.kv_transfer_params[FACTS].get(EXACT)),
                "keep_question": body.kv_transfer_params[FACTS].get(QUESTION) is True,
            }
        fusion = self._fusion_of(body)
        requests = (
            Request(each, sampling=sampling, salt=salt, deadline_s=body.deadline_s, fusion=fusion, **marked)
            for each in prompts
        )
        return TranslatedRequest(body, tuple(requests), facts, readable)

    def _fusion_of(self, body: CommonRequest) -> Fusion | Literal["exact"] | None:
        if body.reuse == "exact":
            return "exact"
        given = [name for name in ("reuse", *FUSION_FIELDS) if getattr(body, name) is not None]
        if not given:
            return None
        if self._fusion is None:
            message = f"{given[0]}: this engine reuses exact prefixes only: start it with --reuse fused."
            raise HTTPError(400, message, code=f"invalid_{given[0]}", param=given[0])
        recompute = self._fusion.recompute if body.recompute is None else body.recompute
        select, rounds = body.select or self._fusion.select, body.select_rounds or self._fusion.rounds
        try:
            return Fusion(recompute, select, rounds=rounds)
        except ValueError as error:
            # The others are numbers that the schema has checked.
            raise HTTPError(400, f"select: {error}.", code="invalid_select", param="select") from None

    def _prefix_tokens(self, body: CommonRequest, token_ids: Sequence[int]) -> int:
        given = body.kv_transfer_params[FACTS].get(PREFIX)
        # Any other number would move the request in the queue.
        if type(given) is int and 0 <= given <= len(token_ids):
            return given
        return self._front(body, token_ids) if isinstance(body, ChatCompletionRequest) else 0

    def _front(self, body: ChatCompletionRequest, token_ids: Sequence[int]) -> int:
        """Return how many first tokens are the same for any text of the last message."""
        *before, last = body.messages
        text = self._template([*before, msgspec.structs.replace(last, content=PLACEHOLDER)], body)
        head, slot, _ = text.rpartition(PLACEHOLDER)
        if not slot:
            return 0
        front = self._encode(head, body.add_special_tokens, "messages")
        differing = (place for place, (one, other) in enumerate(zip(front, token_ids, strict=False)) if one != other)
        return next(differing, min(len(front), len(token_ids)))

    def _render(self, body: ChatCompletionRequest | TokenizeRequest) -> list[int]:
        text = self._template(body.messages or [], body)
        return self._encode(text, body.add_special_tokens is True, "messages")

    def _template(self, messages: Sequence[ChatMessage], body: ChatCompletionRequest | TokenizeRequest) -> str:
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise HTTPError(400, "The model has no chat template: use /v1/completions.", code="no_chat_template")
        for name in body.chat_template_kwargs:
            if name in self._own_options:
                where = f"chat_template_kwargs.{name}"
                raise HTTPError(400, f"{where}: cannot be set by a request.", code="invalid_body", param=where)
        said = [_as_dict(message) for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    said, tokenize=False, add_generation_prompt=body.add_generation_prompt, **body.chat_template_kwargs
                )
            )
        except Exception as error:
            # Templates refuse unexpected messages, each with its own exception.
            complaint = str(error)[:_MAX_COMPLAINT]
            message = f"messages: the model's chat template refuses them: {complaint}"
            raise HTTPError(400, message, code="invalid_messages", param="messages") from None

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        if self._tokenizer is None:
            raise HTTPError(400, f"{field}: must be token ids: the model has no tokenizer.", code="no_tokenizer")
        if len(text) > self._max_characters:
            raise self._too_long(field)
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return token_ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

    def _too_long(self, field: str) -> HTTPError:
        message = f"{field}: is longer than {self._max_model_len} tokens, the limit for prompt and answer together."
        return HTTPError(400, message, code="context_length_exceeded", param=field)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._model_name:
            message = f"This server has one model: {self._model_name}."
            raise HTTPError(404, message, code="model_not_found", param="model")


def _facts_of(body: CommonRequest) -> tuple[RequestFacts | None, bool]:
    try:
        return read_facts(body.kv_transfer_params), True
    except ValueError:
        return None, False


def _whole(given: object) -> int:
    return given if type(given) is int and given > 0 else 0


def _sampling(body: CommonRequest, logprobs: int | None, max_tokens: int) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
    )


def _salt(body: CommonRequest) -> str | None:
    if body.cache_salt is None:
        return None
    try:
        return checked_salt(body.cache_salt)
    except ValueError as error:
        raise HTTPError(400, f"cache_salt: {error}", code="invalid_cache_salt", param="cache_salt") from None


def _text_of(message: ChatMessage) -> str:
    content = message.content
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _as_dict(message: ChatMessage) -> dict[str, Any]:
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    others = {
        "name": message.name,
        "tool_calls": msgspec.to_builtins(message.tool_calls) or None,
        "tool_call_id": message.tool_call_id,
        "reasoning": reasoning,
        "reasoning_content": reasoning,
    }
    given = {name: value for name, value in others.items() if value is not None}
    return {"role": message.role, "content": _text_of(message), **given}
