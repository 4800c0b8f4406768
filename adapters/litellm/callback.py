"""LiteLLM's hooks around a request."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import litellm
import msgspec
from litellm.integrations.custom_logger import CustomLogger

from ragorder.adapters.cloud_orderers import CloudOrderers
from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.untrusted_json import decode_any, encode_any
from ragorder.adapters.proxy import DocumentTemplate, RepeatedDocuments
from ragorder.adapters.proxy.bodies.body import Route
from ragorder.adapters.proxy.bodies.parsed import digest_of
from ragorder.adapters.proxy.bodies.parsing import BodyParser
from ragorder.adapters.proxy.bodies.schema import FIELD
from ragorder.adapters.proxy.bodies.token_counter import TokenCounter
from ragorder.adapters.proxy.ordering import OrderedRequest, RequestOrderer
from ragorder.adapters.proxy.workers import Workers
from ragorder.adapters.usage import answers_something, member, read_usage
from ragorder.clouds import read_cloud_usage
from ragorder.prompt import PromptBuilder
from ragorder.protocols import OrdererLike

_ROUTES: Mapping[str, Route] = {
    "completion": "chat",
    "acompletion": "chat",
    "text_completion": "completions",
    "atext_completion": "completions",
    "anthropic_messages": "messages",
    "aanthropic_messages": "messages",
    "responses": "responses",
    "aresponses": "responses",
}
# Gemini's own API. Its contents are read as a chat's messages, of a route whose bodies take no breakpoints.
_OF_GEMINI = frozenset({"generate_content", "agenerate_content", "generate_content_stream", "agenerate_content_stream"})
_GEMINI: Route = "cohere"
_GEMINI_ROLES = {"model": "assistant", "function": "tool"}
_INSTRUCTIONS = ("systemInstruction", "system_instruction")
_PROMPT = ("input", "instructions", "messages", "prompt", "prompt_cache_key", "prompt_cache_options", "system")
_READ = (
    *_PROMPT,
    FIELD,
    "cache_control",
    "cache_control_injection_points",
    "cache_salt",
    "chat_template_kwargs",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "model",
    "n",
    "output_config",
    "previous_response_id",
    "reasoning_effort",
    "thinking",
    "tool_choice",
    "tools",
)
_MOST_PENDING = 10_000
# A client chooses LiteLLM's call id (x-litellm-call-id): the request's own name is in its metadata.
_NAME = "ragorder_request"
_METADATA = ("litellm_metadata", "metadata")


class OrderDocuments(CustomLogger):  # type: ignore[misc]
    """Callback that orders documents in LiteLLM's proxy: of chats, completions, messages, responses and Gemini's
    contents. Thread-safe.

    - `template` finds documents in messages; those in a field "ragorder" need none (docs/proxy.md)
    - `repeated` and a client's own breakpoints: as for the proxy's `make_app`
    - `scope` returns the tenant (None is one, too) of LiteLLM's `UserAPIKeyAuth`, instead of a client's "cache_salt" or
      "ragorder.scope"; tenants share no order
    - `marks` sets cache_control after documents for Anthropic's models, and needs an orderer with `feedback=False`
    - `clouds` order requests for their models instead, and set breakpoints by their rules

    A "ragorder" that is malformed, on another route, or in an unreadable request raises litellm.BadRequestError. After
    other failures the request is sent unchanged, and the orderer is degraded.
    """

    def __init__(
        self,
        orderer: OrdererLike,
        *,
        template: DocumentTemplate | None = None,
        repeated: RepeatedDocuments | None = None,
        builder: PromptBuilder | None = None,
        scope: Callable[[Any], str | None] | None = None,
        marks: bool | None = None,
        clouds: CloudOrderers | None = None,
    ) -> None:
        super().__init__()
        builder = builder or PromptBuilder("")
        if builder.system:
            raise ValueError("the builder has a system prompt, but requests have their own: give PromptBuilder('')")
        tokens = TokenCounter(builder)
        self._orderer = orderer
        self._parser = BodyParser(
            builder,
            tokens,
            template,
            warn=orderer.degrade,
            repeated=repeated,
            marks=["chat", "messages"] if marks or clouds is not None else [],
            clouds=clouds,
            heeds_client_marks=marks is not False,
        )
        self._requests = RequestOrderer(orderer)
        self._scope = scope
        self._workers = Workers()
        self._pending: OrderedDict[str, OrderedRequest] = OrderedDict()
        # Those of them that LiteLLM may try again after a failure.
        self._tried_again: set[str] = set()

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        is_gemini = call_type in _OF_GEMINI
        route = _GEMINI if is_gemini else _ROUTES.get(call_type)
        if route is None:
            if FIELD in data:
                raise _bad_request(
                    f"{FIELD}: {call_type} would answer without the documents: leave the field out", data
                )
            return data
        try:
            content = self._content(data | _messages_of(data) if is_gemini else data, user_api_key_dict)
            sent = await self._workers.run(partial(self._order, route, content), len(content), abandoned=_end)
        except HTTPError as error:
            raise _bad_request(str(error), data) from None
        except Exception as error:
            return self._as_it_came(data, error)
        if sent is None:
            return data
        try:
            changed = decode_any(sent.take_body())
            # A tag's tenant is also the engine's.
            names = _PROMPT if self._scope is not None else (*_PROMPT, "cache_salt")
            if is_gemini:
                ordered = data | _contents_of(data, changed["messages"])
            else:
                ordered = data | {name: changed[name] for name in names if name in changed}
            ordered.pop(FIELD, None)
            self._finish(_name_in(data), None)
            name = _give_name(ordered)
            self._pending[name] = sent
            if "proxy_server_request" in data:
                self._tried_again.add(name)
            while len(self._pending) > _MOST_PENDING:
                # Its answer was never reported: it counts as served.
                self._finish(next(iter(self._pending)), {})
        except Exception as error:
            sent.end()
            return self._as_it_came(data, error)
        return ordered

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        name = _name_in(request_data)
        sent = self._pending.get(name)
        async for chunk in response:
            self._tried_again.discard(name)
            if sent is not None and _answers(chunk):
                sent.readable()
                sent = None
            yield chunk

    async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        # From LiteLLM's own cache no engine has answered.
        answered = None if member(kwargs, "cache_hit") is True else response_obj
        self._finish(_name_in(member(kwargs, "litellm_params")), answered)

    async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        # Each failed attempt has this event; after the last one the proxy calls the hook below.
        name = _name_in(member(kwargs, "litellm_params"))
        if name not in self._tried_again:
            self._finish(name, None)

    async def async_post_call_failure_hook(
        self, request_data: Any, original_exception: Any, user_api_key_dict: Any, traceback_str: str | None = None
    ) -> None:
        self._finish(_name_in(request_data), None)

    def _content(self, data: Mapping[str, Any], caller: Any) -> bytes:
        read = {name: data[name] for name in _READ if data.get(name) is not None}
        if self._scope is not None:
            # For the order alone, instead of the client's: LiteLLM sends the engine's salt.
            read["cache_salt"] = digest_of(self._scope(caller)).hex()
        return encode_any(read)

    def _order(self, route: Route, content: bytes) -> OrderedRequest | None:
        parsed = self._parser.parse(route, content)
        return None if parsed is None else self._requests.order(parsed)

    def _finish(self, name: str, response: Any) -> None:
        self._tried_again.discard(name)
        sent = self._pending.pop(name, None)
        if sent is None:
            return
        try:
            if response is not None:
                reported = member(response, "usage")
                usage, cloud = read_usage(reported), read_cloud_usage(reported)
                details = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": cloud.written_tokens}
                report = {
                    "prompt_tokens": usage.prompt_tokens,
                    "completion_tokens": usage.completion_tokens,
                    "prompt_tokens_details": details,
                }
                sent.begin(200, [(b"content-type", b"application/json")])
                sent.feed(msgspec.json.encode({"usage": report}))
                sent.complete = True
            sent.end()
        except Exception as error:
            self._failed(error)

    def _as_it_came(self, data: dict[str, Any], error: Exception) -> dict[str, Any]:
        self._failed(error)
        if FIELD in data:
            message = f"{FIELD}: the request cannot be read as strict JSON in UTF-8, or its tenant is unknown"
            raise _bad_request(message, data) from None
        return data

    def _failed(self, error: Exception) -> None:
        # An error's message may quote a prompt.
        kind = type(error).__name__
        self._orderer.degrade(f"ordering for LiteLLM failed with {kind}: such requests are sent unchanged, or refused")


def _messages_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return no messages for a request that Gemini's API would refuse."""
    try:
        said = [(_GEMINI_ROLES.get(each.get("role"), "user"), each["parts"]) for each in data["contents"]]
        given = [("system", data[name]["parts"]) for name in _INSTRUCTIONS if data.get(name)]
    except (AttributeError, KeyError, TypeError):
        return {"messages": []}
    return {"messages": [{"role": role, "content": parts} for role, parts in [*given, *said]]}


def _contents_of(data: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields that `_messages_of` reads, with these messages' parts. A tagged request has one more."""
    parts = [each["content"] if isinstance(each["content"], list) else [{"text": each["content"]}] for each in messages]
    given = [name for name in _INSTRUCTIONS if data.get(name)]
    instructions = {name: data[name] | {"parts": own} for name, own in zip(given, parts, strict=False)}
    said = zip_longest(data["contents"], parts[len(given) :], fillvalue={"role": "user"})
    return {**instructions, "contents": [content | {"parts": own} for content, own in said]}


def _give_name(ordered: dict[str, Any]) -> str:
    """Name a request in its metadata, which LiteLLM passes to all hooks and never sends."""
    name = uuid.uuid4().hex
    field = next((field for field in _METADATA if isinstance(ordered.get(field), dict)), None)
    if field is None:
        field = "litellm_metadata" if "metadata" in ordered else "metadata"
        ordered[field] = {}
    ordered[field] = ordered[field] | {_NAME: name}
    return name


def _name_in(data: Any) -> str:
    names = (member(member(data, field), _NAME) for field in _METADATA)
    return next((name for name in names if isinstance(name, str)), "")


def _bad_request(message: str, data: Mapping[str, Any]) -> Exception:
    error: Exception = litellm.BadRequestError(message, model=str(data.get("model")), llm_provider="")
    return error


def _answers(chunk: Any) -> bool:
    choices = member(chunk, "choices")
    return not isinstance(choices, list) or any(map(answers_something, choices))


def _end(sent: OrderedRequest | None) -> None:
    if sent is not None:
        sent.end()
