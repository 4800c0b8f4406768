"""The bodies of the two routes: what the engine can do of them. What it cannot is refused, by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ragorder.adapters.http_server.errors import HTTPError

__all__ = ["ChatBody", "CommonBody", "CompletionBody", "Message", "TextPart", "TokenizeBody", "read_body"]

_INT64 = 1 << 63
_MOST_TOKENS = 1 << 30
_MOST_STOPS = 16
_MOST_PROMPTS = 1024
# Which alternatives come with each token: as many as OpenAI gives.
_MOST_ALTERNATIVES = 20
_LONGEST_NAME = 64

_Limit = Annotated[int, Meta(ge=1, le=_MOST_TOKENS)]
_Alternatives = Annotated[int, Meta(ge=0, le=_MOST_ALTERNATIVES)]
_Stop = Annotated[str, Meta(min_length=1)]

# Fields that ask for something that the engine cannot do, but not with these values. null is always one of them.
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
# Fields that change nothing of an answer.
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


class StreamOptions(msgspec.Struct):
    """How a stream is to end."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CommonBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both routes take."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: _Limit | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=_MOST_STOPS)] = []
    ignore_eos: bool = False
    cache_salt: str | None = None
    # Anything but our facts is for others, and facts that cannot be read refuse nobody.
    kv_transfer_params: Any = None


class CompletionBody(CommonBody):
    """The body of a plain completion."""

    prompt: str | Annotated[list[int | str | list[int]], Meta(min_length=1)]
    logprobs: _Alternatives | None = None
    add_special_tokens: bool = True


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A part of a message, which must be text."""

    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a chat."""

    role: str
    content: str | list[TextPart] = ""
    name: str | None = None


class ChatBody(CommonBody):
    """The body of a chat."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Limit | None = None
    logprobs: bool = False
    top_logprobs: _Alternatives = 0
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /tokenize, as vLLM takes it: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


B = TypeVar("B", CompletionBody, ChatBody, TokenizeBody)


def read_body(content: bytes, kind: type[B]) -> B:
    """Read a body. Raises HTTPError for what is no body of this kind, or asks for what the engine cannot do."""
    try:
        fields = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise HTTPError(400, "The body must be JSON in UTF-8.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise HTTPError(400, "The body must be a JSON object.", code="invalid_json")
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    asked = {name: value for name, value in fields.items() if value is not None}
    for name in asked.keys() - known:
        if name not in _HARMLESS and asked[name] not in _NEUTRAL.get(name, ()):
            raise _unsupported(name)
        del asked[name]
    for message in _dicts(asked.get("messages")):
        for name in [name for name, value in message.items() if value is None or value == []]:
            del message[name]
    try:
        body = msgspec.convert(asked, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except RecursionError:
        raise HTTPError(400, "The body is nested too deeply.", code="invalid_body") from None
    if not isinstance(body, TokenizeBody):
        _check(body)
    return body


def _check(body: CommonBody) -> None:
    """What the types do not say."""
    if body.stream_options is not None:
        if not body.stream:
            raise _wrong("stream_options", "goes with stream: true")
        if body.stream_options.continuous_usage_stats:
            raise _unsupported("stream_options.continuous_usage_stats")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise _wrong("top_logprobs", "goes with logprobs: true")
    if isinstance(body, CompletionBody) and isinstance(body.prompt, list):
        kinds = {type(each) for each in body.prompt}
        if len(kinds) > 1:
            raise _wrong("prompt", "must be a text, token ids, or a list of one of these")
        if kinds != {int} and len(body.prompt) > _MOST_PROMPTS:
            raise _wrong("prompt", f"may have {_MOST_PROMPTS:,} prompts, not {len(body.prompt):,}")


def _wrong(name: str, message: str) -> HTTPError:
    return HTTPError(400, f"{name}: {message}.", code=f"invalid_{name}", param=name)


def _unsupported(name: str) -> HTTPError:
    name = name[:_LONGEST_NAME]
    message = f"{name}: the embedded engine does not support it, or not with this value. Leave it out."
    return HTTPError(400, message, code="unsupported_field", param=name)


def _invalid(message: str) -> HTTPError:
    """What msgspec says of a value (its type, its place, and no more of it)."""
    what, _, where = message.partition(" - at `$")
    where = where.rstrip("`").lstrip(".")
    if not where and (missing := re.search("required field `(.*)`", what)):
        where = missing[1]
    return HTTPError(400, f"{where or 'body'}: {what}.", code="invalid_body", param=where or None)


def _dicts(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
