"""Request bodies of OpenAI's API; unsupported fields are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.structs import readable_by_threads

__all__ = [
    "ChatCompletionRequest",
    "ChatMessage",
    "CommonRequest",
    "CompletionRequest",
    "TextPart",
    "TokenizeRequest",
    "read_request",
]

_INT64 = 1 << 63
_MAX_TOKENS = 1 << 30
_MAX_STOPS = 16
_MAX_PROMPTS = 1024
# Alternatives to each token: as many as OpenAI gives.
_MAX_ALTERNATIVES = 20
_MAX_NAME = 64

_Limit = Annotated[int, Meta(ge=1, le=_MAX_TOKENS)]
_Alternatives = Annotated[int, Meta(ge=0, le=_MAX_ALTERNATIVES)]
_Stop = Annotated[str, Meta(min_length=1)]

# Fields for what the engine cannot do, with the values that do not need it; null never does.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (0, -1),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
# Fields that do not change an answer.
_HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)


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
    # Ours: seconds for the whole answer, at most those of the server.
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    # Ours: how documents behind the cached prefix are reused, the share of their tokens recomputed at most, and how
    # much of what the selection measures is enough.
    reuse: Literal["exact", "fused"] | None = None
    recompute: Annotated[float, Meta(ge=0, le=1)] | None = None
    coverage: Annotated[float, Meta(gt=0, le=1)] | None = None
    # Only our facts in it are read, and malformed ones refuse no request.
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
class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart] = ""
    name: str | None = None


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
    """The body of vLLM's /tokenize: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


B = TypeVar("B", CompletionRequest, ChatCompletionRequest, TokenizeRequest)


def read_request(content: bytes, kind: type[B]) -> B:
    """Raises HTTPError for malformed or unsupported bodies."""
    try:
        fields = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise HTTPError(400, "The body must be JSON in UTF-8.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise HTTPError(400, "The body must be a JSON object.", code="invalid_json")
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given.keys() - known:
        if name not in _HARMLESS and given[name] not in _NEUTRAL.get(name, ()):
            raise _unsupported(name)
        del given[name]
    for message in _dicts(given.get("messages")):
        for name in [name for name, value in message.items() if value is None or value == []]:
            del message[name]
    try:
        body = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except RecursionError:
        raise HTTPError(400, "The body is nested too deeply.", code="invalid_body") from None
    if not isinstance(body, TokenizeRequest):
        _check(body)
    return body


def _check(body: CommonRequest) -> None:
    if body.stream_options is not None:
        if not body.stream:
            raise _wrong("stream_options", "requires stream: true")
        if body.stream_options.continuous_usage_stats:
            raise _unsupported("stream_options.continuous_usage_stats")
    if body.reuse == "exact":
        for name in ("recompute", "coverage"):
            if getattr(body, name) is not None:
                raise _wrong(name, "requires reuse: fused")
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
    """msgspec's complaint names the type and place of a value, never the value."""
    what, _, where = message.partition(" - at `$")
    where = where.rstrip("`").lstrip(".")
    if not where and (missing := re.search("required field `(.*)`", what)):
        where = missing[1]
    return HTTPError(400, f"{where or 'body'}: {what}.", code="invalid_body", param=where or None)


def _dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
