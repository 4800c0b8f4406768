"""Request bodies of OpenAI's API; unsupported fields are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.untrusted_json import (
    MAX_VALUES,
    NOT_JSON,
    TooManyValuesError,
    count_outside_texts,
    count_values,
    decode_any,
    replace_surrogates,
)
from ragorder.adapters.structs import readable_by_threads

_INT64 = 1 << 63
_MAX_TOKENS = 1 << 30
_MAX_STOPS = 16
_MAX_PROMPTS = 1024
# Alternatives to each token: OpenAI's limit.
_MAX_ALTERNATIVES = 20
_MAX_NAME = 64
# Limit for all prompts together; a model with a longer context takes its length.
_MAX_TOKEN_IDS = 1 << 20
# Values of a field that is kept until the answer has ended.
_MAX_OPTIONS = 1 << 14
_OPTIONS = frozenset({"chat_template_kwargs", "kv_transfer_params"})
# Bytes of the longest value of `_NEUTRAL`, and more.
_MAX_NEUTRAL = 64
_NULL = Raw(b"null")
_NOTHING = (b"null", b"[]")

_Limit = Annotated[int, Meta(ge=1, le=_MAX_TOKENS)]
_Alternatives = Annotated[int, Meta(ge=0, le=_MAX_ALTERNATIVES)]
_Stop = Annotated[str, Meta(min_length=1)]

# Values that do not use functions that the engine lacks; null never does.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("bad_words", "documents", "functions", "stop_token_ids", "tools"), ([],)),
    **dict.fromkeys(("best_of", "length_penalty", "n", "repetition_penalty"), (1,)),
    **dict.fromkeys(("continue_final_message", "echo", "include_stop_str_in_output", "return_token_ids"), (False,)),
    **dict.fromkeys(("frequency_penalty", "min_p", "min_tokens", "presence_penalty"), (0,)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    **dict.fromkeys(("logit_bias", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("return_tokens_as_token_ids", "use_beam_search"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_k": (0, -1),
}
# Fields that do not change an answer.
_CACHE_FIELDS = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user")
_HARMLESS = frozenset({*_CACHE_FIELDS, "metadata", "parallel_tool_calls", "priority", "request_id"})


FUSION_FIELDS = ("recompute", "select", "select_rounds")
"""Fields of fused requests, named as the engine's options."""

# Each round computes the tokens chosen so far once more.
_MOST_ROUNDS = 16


@readable_by_threads
class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


@readable_by_threads
class CommonRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: _Limit | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=_MAX_STOPS)] = []
    ignore_eos: bool = False
    cache_salt: str | None = None
    # Ours: seconds for the whole answer, at most the server's.
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    # Ours: how documents outside the cached prefix are reused, the share of their tokens recomputed, and which ones.
    reuse: Literal["exact", "fused"] | None = None
    recompute: Annotated[float, Meta(ge=0, le=1)] | None = None
    select: Annotated[str, Meta(max_length=_MAX_NAME)] | None = None
    select_rounds: Annotated[int, Meta(ge=1, le=_MOST_ROUNDS)] | None = None
    # Only our facts in it are read; malformed ones refuse no request.
    kv_transfer_params: Any = None


@readable_by_threads
class CompletionRequest(CommonRequest):
    prompt: str | Annotated[list[int | str | list[int]], Meta(min_length=1)]
    logprobs: _Alternatives | None = None
    add_special_tokens: bool = True


@readable_by_threads
class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


@readable_by_threads
class CalledFunction(msgspec.Struct):
    name: str
    # JSON text in OpenAI's API; templates show its value.
    arguments: str | dict[str, Any] = ""


@readable_by_threads
class ToolCall(msgspec.Struct):
    function: CalledFunction
    id: str | None = None
    type: str = "function"


@readable_by_threads
class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart] = ""
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning: str | None = None
    # Its other name, in servers and templates.
    reasoning_content: str | None = None


@readable_by_threads
class ChatCompletionRequest(CommonRequest):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: _Limit | None = None
    logprobs: bool = False
    top_logprobs: _Alternatives = 0
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}


@readable_by_threads
class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


@readable_by_threads
class _Prompt(msgspec.Struct):
    prompt: Raw = _NULL


T = TypeVar("T")
B = TypeVar("B", CompletionRequest, ChatCompletionRequest, TokenizeRequest)


def read_request(content: bytes, kind: type[B], longest: int = 0) -> B:
    """Read a body for a model with a context of `longest` tokens. Raises HTTPError."""
    most_tokens = max(longest, _MAX_TOKEN_IDS)
    try:
        fields = _fields(content, most_tokens)
    except NOT_JSON:
        try:
            # A lone surrogate is no reason to refuse the body.
            fields = _fields(replace_surrogates(content), most_tokens)
        except NOT_JSON:
            raise _no_json() from None
    given = {name: value for name, value in fields.items() if value != _NULL}
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for name in given.keys() - known:
        if name not in _HARMLESS and not _is_neutral(name, given[name]):
            raise _unsupported(name)
        del given[name]
    for name in _OPTIONS & given.keys():
        _check_values(given[name], _MAX_OPTIONS, name)
    if "messages" in given:
        given["messages"] = _without_nothing(given["messages"])
    try:
        body = msgspec.json.decode(msgspec.json.encode(given), type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except RecursionError:
        raise HTTPError(400, "The body is nested too deeply.", code="invalid_body") from None
    except NOT_JSON:
        raise _no_json() from None
    if not isinstance(body, TokenizeRequest):
        _check(body)
    if not isinstance(body, CompletionRequest):
        _read_arguments(body.messages or [])
    return body


def _fields(content: bytes, most_tokens: int) -> dict[str, Raw]:
    try:
        count_values(content, MAX_VALUES)
    except TooManyValuesError:
        # Token ids have their own limit. The commas of a text do not count, and leave no room for other values.
        prompt = bytes(_object(content, _Prompt).prompt)
        _check_values(prompt, most_tokens, "prompt")
        _check_values(content, MAX_VALUES, None, besides=count_outside_texts(prompt, most_tokens))
    return _object(content, dict[str, Raw])


def _object(content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError:
        raise HTTPError(400, "The body must be a JSON object.", code="invalid_json") from None


def _no_json() -> HTTPError:
    return HTTPError(400, "The body must be JSON in UTF-8.", code="invalid_json")


def _read_arguments(messages: Sequence[ChatMessage]) -> None:
    """Parse the arguments of all tool calls: one limit of values holds for them together."""
    counted = 0
    for place, message in enumerate(messages):
        for call in message.tool_calls:
            given = call.function.arguments
            if isinstance(given, str):
                content = given.encode()
                counted += _check_values(content, _MAX_OPTIONS, f"messages[{place}].tool_calls", besides=-counted)
                with suppress(*NOT_JSON):
                    call.function.arguments = msgspec.json.decode(content, type=dict[str, Any])


def _check_values(content: bytes | Raw, limit: int, field: str | None, besides: int = 0) -> int:
    try:
        return count_values(content, limit + besides)
    except TooManyValuesError:
        code = "context_length_exceeded" if field == "prompt" else "too_many_values"
        what = field or "The body without its prompt"
        message = f"{what}: has more than {limit:,} JSON values (members of objects, items of lists)."
        raise HTTPError(400, message, code=code, param=field) from None


def _is_neutral(name: str, value: Raw) -> bool:
    raw = bytes(value)
    if len(raw) <= _MAX_NEUTRAL:
        # A skipped value may not be UTF-8.
        with suppress(ValueError):
            return decode_any(raw) in _NEUTRAL.get(name, ())
    return False


def _without_nothing(messages: Raw) -> Raw:
    try:
        read = msgspec.json.decode(messages, type=list[dict[str, Raw]])
    except NOT_JSON:
        return messages
    said = [{name: value for name, value in each.items() if bytes(value) not in _NOTHING} for each in read]
    return Raw(msgspec.json.encode(said))


def _check(body: CommonRequest) -> None:
    if body.stream_options is not None:
        if not body.stream:
            raise _wrong("stream_options", "requires stream: true")
        if body.stream_options.continuous_usage_stats:
            raise _unsupported("stream_options.continuous_usage_stats")
    if body.reuse == "exact" and (idle := [name for name in FUSION_FIELDS if getattr(body, name) is not None]):
        raise _wrong(idle[0], "requires reuse: fused")
    if isinstance(body, ChatCompletionRequest) and body.top_logprobs and not body.logprobs:
        raise _wrong("top_logprobs", "requires logprobs: true")
    if isinstance(body, CompletionRequest) and isinstance(body.prompt, list):
        kinds = {type(each) for each in body.prompt}
        if len(kinds) > 1:
            raise _wrong("prompt", "must be a text, token ids, or a list of one of these")
        if kinds != {int} and len(body.prompt) > _MAX_PROMPTS:
            raise _wrong("prompt", f"may have {_MAX_PROMPTS:,} prompts, not {len(body.prompt):,}")


def _wrong(name: str, message: str) -> HTTPError:
    return HTTPError(400, f"{name}: {message}.", code=f"invalid_{name}", param=name)


def _unsupported(name: str) -> HTTPError:
    name = name[:_MAX_NAME]
    message = f"{name}: the embedded engine does not support this field, or not this value: leave it out."
    return HTTPError(400, message, code="unsupported_field", param=name)


def _invalid(message: str) -> HTTPError:
    what, _, where = message.partition(" - at `$")
    where = where.rstrip("`").lstrip(".")
    if not where and (missing := re.search("required field `(.*)`", what)):
        where = missing[1]
    return HTTPError(400, f"{where or 'body'}: {what}.", code="invalid_body", param=where or None)
