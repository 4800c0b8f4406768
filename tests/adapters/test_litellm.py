"""LiteLLM's callback: requests as its proxy hands them over, sent by its SDK to a far end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import pytest
from support.inside import plan_of, set_bounds

from ragorder import Orderer, PromptBuilder
from ragorder.ordering import RequestOutcome

# It would fetch its prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
litellm = pytest.importorskip("litellm")
pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from support.cloud import CACHED, COMPLETION, PROMPT, Cloud
from support.sent_requests import TEMPLATE, TEXTS, RecordingOrderer, asked, tag, user
from support.serving_app import serving
from support.waiting import eventually

from ragorder.adapters.cloud_orderers import CloudOrderers
from ragorder.adapters.litellm import DocumentTemplate, OrderDocuments, RepeatedDocuments
from ragorder.adapters.proxy.bodies.parsed import digest_of

SERVED = RequestOutcome(True, CACHED, PROMPT + COMPLETION, PROMPT)
# What LiteLLM's proxy adds to each request before it calls the hooks.
PROXIED: dict[str, Any] = {"proxy_server_request": {"url": "http://proxy/v1/chat/completions", "method": "POST"}}


class FailingOnce(Cloud):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.error = None if self.bodies else (500, {"error": {"message": "no", "type": "server_error"}})
        await super().__call__(scope, receive, send)


@pytest.fixture
def orderer() -> RecordingOrderer:
    return RecordingOrderer()


@pytest.fixture
def callback(orderer: Orderer) -> OrderDocuments:
    return OrderDocuments(orderer, template=DocumentTemplate(TEMPLATE))


async def hook(callback: OrderDocuments, data: dict[str, Any], call_type: str = "acompletion", key: Any = None) -> Any:
    """As LiteLLM's proxy calls it."""
    return await callback.async_pre_call_hook(user_api_key_dict=key, cache=None, data=data, call_type=call_type)


def team_of(key: Any) -> Any:
    return key["team_id"]


def event(data: dict[str, Any]) -> dict[str, Any]:
    """What LiteLLM hands to its loggers when the request has ended."""
    metadata = {field: data[field] for field in ("metadata", "litellm_metadata") if field in data}
    return {"litellm_call_id": data.get("litellm_call_id"), "litellm_params": metadata}


class TestHook:
    @pytest.mark.parametrize(
        ("call_type", "field", "content"),
        [
            ("acompletion", "messages", lambda names: [user(asked(names))]),
            ("completion", "messages", lambda names: [user(asked(names))]),
            ("anthropic_messages", "messages", lambda names: [user([{"type": "text", "text": asked(names)}])]),
            ("anthropic_messages", "system", asked),
            ("aanthropic_messages", "messages", lambda names: [user(asked(names))]),
            ("aresponses", "input", asked),
            ("atext_completion", "prompt", asked),
        ],
    )
    async def test_documents_of_every_kind_of_call_are_ordered(
        self, call_type: str, field: str, content: Callable[[str], Any], callback: OrderDocuments
    ) -> None:
        others = {"model": "m", "messages": [], "temperature": 0.5}
        for names in ("abc", "cba"):
            marker = object()
            data = {**others, field: content(names), "metadata": {"of": marker}}
            ordered = await hook(callback, data, call_type)
            assert data["metadata"] == {"of": marker}, "the caller's is not changed"
        assert ordered.pop("metadata")["of"] is marker
        # A response's topic, for a router.
        assert bool(ordered.pop("prompt_cache_key", None)) == (field == "input")
        assert ordered == {**others, field: content("abc")}

    @pytest.mark.parametrize("kept", [object(), None, "text"], ids=["an object", "null", "a text"])
    async def test_metadata_of_another_kind_stay(
        self, kept: Any, callback: OrderDocuments, orderer: RecordingOrderer
    ) -> None:
        ordered = await hook(callback, {"messages": [user(asked("abc"))], "metadata": kept})
        assert ordered["metadata"] is kept
        await callback.async_log_success_event(event(ordered), {}, None, None)
        assert orderer.finished == [RequestOutcome(True)]

    @pytest.mark.parametrize("call_type", ["generate_content", "agenerate_content_stream"])
    async def test_contents_of_gemini_are_ordered_without_breakpoints(
        self, call_type: str, orderer: RecordingOrderer
    ) -> None:
        callback = OrderDocuments(orderer, template=DocumentTemplate(TEMPLATE), marks=True)
        image = {"inline_data": {"mime_type": "image/png", "data": "AAAA"}}

        def request(names: str) -> dict[str, Any]:
            contents = [
                {"role": "user", "parts": [{"text": asked(names)}, image]},
                {"role": "model", "parts": [{"text": "a"}]},
                {"parts": [{"text": "And then?"}]},
            ]
            return {"model": "gemini-3", "contents": contents, "systemInstruction": {"parts": [{"text": "Be brief."}]}}

        for names in ("abc", "cba"):
            given = request(names)
            ordered = await hook(callback, given, call_type)
            assert given == request(names), "the caller's is not changed"
            assert ordered == {**request("abc"), "metadata": ordered["metadata"]}

    @pytest.mark.parametrize(
        ("data", "call_type"),
        [
            # What Gemini would refuse, other calls, and no documents.
            *(
                ({"contents": contents}, "agenerate_content")
                for contents in (None, "text", ["text"], [{"role": "user"}], {"parts": []})
            ),
            *(
                ({"messages": [user(asked("ab"))]}, call_type)
                for call_type in ("embeddings", "aembedding", "moderation", "mcp_call", "new")
            ),
            ({"messages": [user("Hello")]}, "acompletion"),
        ],
    )
    async def test_other_requests_go_on_as_they_came(
        self, data: dict[str, Any], call_type: str, callback: OrderDocuments, orderer: RecordingOrderer
    ) -> None:
        assert await hook(callback, data, call_type) is data
        assert not orderer.degraded and not orderer.finished

    async def test_tagged_documents_of_gemini_become_its_last_content(self, orderer: RecordingOrderer) -> None:
        hello = {"role": "user", "parts": [{"text": "Hello"}]}
        data = {"contents": [hello], "ragorder": tag("ab")}
        ordered = await hook(OrderDocuments(orderer), data, "agenerate_content")
        assert ordered["contents"][0] == hello and ordered["contents"][1]["role"] == "user"
        assert ordered["contents"][1]["parts"][0]["text"].startswith("[a]\na") and "messages" not in ordered

    async def test_documents_may_be_tagged_with_a_tenant_for_the_engine(self, orderer: RecordingOrderer) -> None:
        for scope in ({}, {"scope": "acme"}):
            data = {"messages": [user("Hello")], "ragorder": tag("ab") | scope}
            ordered = await hook(OrderDocuments(orderer), data)
            assert "ragorder" not in ordered and ordered.get("cache_salt") == scope.get("scope")
            assert [each["content"][:5] for each in ordered["messages"]] == ["Hello", "[a]\na"]

    async def test_half_a_character_stays_what_it_is(self, callback: OrderDocuments) -> None:
        cut = {name: f"{TEXTS[name]} \ud83d" for name in "abc"}
        for names in ("abc", "cba"):
            content = "\n".join(TEMPLATE.format(id=name, text=cut[name]) for name in names)
            ordered = await hook(callback, {"messages": [user(content)], "user": "\udfff"})
        expected = "\n".join(TEMPLATE.format(id=name, text=cut[name]) for name in "abc")
        assert (ordered["messages"], ordered["user"]) == ([user(expected)], "\udfff")

    @pytest.mark.parametrize(
        ("call_type", "content", "tagged", "scope", "words"),
        [
            ("acompletion", object(), tag("a"), None, "ragorder: "),
            ("acompletion", "Hello", tag("a"), team_of, "ragorder: "),
            ("aembedding", "Hello", tag("a"), None, "ragorder: "),
            ("acompletion", "Hello", {"documents": 1, "query": "?"}, None, r"ragorder\.documents: "),
        ],
        ids=["an object", "an unknown tenant", "another route", "a malformed tag"],
    )
    async def test_tagged_documents_are_never_left_out(
        self, call_type: str, content: Any, tagged: Any, scope: Any, words: str, orderer: RecordingOrderer
    ) -> None:
        callback = OrderDocuments(orderer, scope=scope)
        with pytest.raises(litellm.BadRequestError, match=words):
            await hook(callback, {"messages": [user(content)], "ragorder": tagged}, call_type, key={})

    async def test_tenants_share_no_order(self, orderer: RecordingOrderer) -> None:
        callback = OrderDocuments(orderer, template=DocumentTemplate(TEMPLATE), scope=team_of)
        for names, team in (("abc", "one"), ("cba", "two"), ("cba", "one")):
            ordered = await hook(callback, {"messages": [user(asked(names))]}, key={"team_id": team})
            assert "cache_salt" not in ordered
            assert ordered["messages"] == [user(asked("cba" if team == "two" else "abc"))]

    @pytest.mark.parametrize("field", ["cache_salt", "scope of a tag"])
    async def test_a_caller_without_a_tenant_takes_none(self, field: str, orderer: RecordingOrderer) -> None:
        """Whatever the caller gives as a name: the order of a tenant's documents would tell what it asked."""
        callback = OrderDocuments(orderer, template=DocumentTemplate(TEMPLATE), scope=team_of)
        await hook(callback, {"messages": [user(asked("abc"))]}, key={"team_id": "acme"})
        for name in ("acme", digest_of("acme").hex()):
            if field == "cache_salt":
                data = {"messages": [user(asked("cba"))], "cache_salt": name}
                ordered = await hook(callback, data, key={"team_id": None})
                assert ordered["messages"] == [user(asked("cba"))]
                assert ordered["cache_salt"] == name, "the engine's salt is LiteLLM's to send"
            else:
                data = {"messages": [], "ragorder": tag("a") | {"scope": name}}
                with pytest.raises(litellm.BadRequestError, match=r"ragorder\.scope"):
                    await hook(callback, data, key={"team_id": None})

    async def test_repeated_documents_are_named(self, orderer: RecordingOrderer) -> None:
        template = DocumentTemplate(TEMPLATE)
        callback = OrderDocuments(orderer, template=template, repeated=RepeatedDocuments(template))
        answer = {"role": "assistant", "content": "a"}
        data = {"messages": [user(asked("ab")), answer, user(asked("a"))]}
        assert (await hook(callback, data))["messages"][-1] == user("[a] is above.\nWhich?")

    async def test_marks_are_set_for_models_of_anthropic(self) -> None:
        orderer = RecordingOrderer(feedback=False)
        callback = OrderDocuments(orderer, template=DocumentTemplate(TEMPLATE), marks=True)
        for names in ("abc", "bad"):
            ordered = await hook(callback, {"messages": [user(asked(names))]})
            await callback.async_log_success_event(event(ordered), {}, None, None)
        parts = ordered["messages"][0]["content"]
        assert "".join(part["text"] for part in parts) == asked("abd")
        assert parts[1]["cache_control"] == {"type": "ephemeral"}

    @pytest.mark.parametrize("broken", [1j, object(), [object()]], ids=["number", "object", "in a list"])
    async def test_what_cannot_be_read_goes_on_as_it_came_and_is_told(
        self, broken: Any, callback: OrderDocuments, orderer: RecordingOrderer
    ) -> None:
        data = {"messages": broken}
        assert await hook(callback, data) is data
        assert len(orderer.degraded) == 1
        assert "LiteLLM" in orderer.degraded[0]

    async def test_an_unknown_tenant_is_not_taken_for_none(self, orderer: RecordingOrderer) -> None:
        callback = OrderDocuments(orderer, template=DocumentTemplate(TEMPLATE), scope=team_of)
        data = {"messages": [user(asked("ab"))]}
        assert await hook(callback, data, key={}) is data
        assert orderer.degraded

    def test_a_builder_with_a_system_prompt_is_refused(self) -> None:
        with pytest.raises(ValueError, match="system prompt"):
            OrderDocuments(Orderer(), builder=PromptBuilder("Be kind."))

    def test_litellm_finds_the_hook_in_the_class(self) -> None:
        """It calls no inherited one."""
        assert "async_pre_call_hook" in vars(OrderDocuments)


class TestOutcomes:
    @pytest.fixture
    def registered(self, callback: OrderDocuments) -> Iterator[OrderDocuments]:
        """As in `litellm_settings: callbacks`."""
        before, litellm.callbacks = litellm.callbacks, [callback]
        yield callback
        litellm.callbacks = before
        for kind in ("success_callback", "failure_callback", "_async_success_callback", "_async_failure_callback"):
            setattr(litellm, kind, [each for each in getattr(litellm, kind) if each is not callback])

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("model", ["openai/m", "anthropic/claude-sonnet-4-5"])
    async def test_an_answer_is_reported(
        self, model: str, stream: bool, registered: OrderDocuments, orderer: RecordingOrderer
    ) -> None:
        cloud = Cloud()
        with serving() as serve:
            url = serve(cloud)
            for names in ("abc", "cba"):
                data = await hook(registered, {"model": model, "messages": [user(asked(names))], "stream": stream})
                base = f"{url}/v1" if model.startswith("openai") else url
                options = {"stream_options": {"include_usage": True}} if stream else {}
                answer = await litellm.acompletion(**data, **options, api_base=base, api_key="none", max_tokens=16)
                if stream:
                    assert (
                        "".join([each.choices[0].delta.content or "" async for each in answer if each.choices]) == "yes"
                    )
                else:
                    assert answer.choices[0].message.content == "yes"
            await wait_for(lambda: len(orderer.finished) == 2)
        assert orderer.finished == [SERVED, SERVED]
        assert "".join(dict.fromkeys(re.findall(r"(\w) is a document", str(cloud.last)))) == "abc"

    async def test_an_answer_of_gemini_is_reported(
        self, registered: OrderDocuments, orderer: RecordingOrderer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # LiteLLM imports a package for audio here, which its SDK does not install.
        monkeypatch.setitem(sys.modules, "soundfile", ModuleType("soundfile"))
        bodies = []

        def contents(names: str) -> Any:
            return [{"role": "user", "parts": [{"text": asked(names)}]}]

        async def gemini(request: Request) -> JSONResponse:
            bodies.append(await request.json())
            usage = {
                "promptTokenCount": PROMPT,
                "cachedContentTokenCount": CACHED,
                "candidatesTokenCount": COMPLETION,
                "totalTokenCount": PROMPT + COMPLETION,
            }
            said = {"content": {"role": "model", "parts": [{"text": "yes"}]}, "finishReason": "STOP", "index": 0}
            return JSONResponse({"candidates": [said], "usageMetadata": usage})

        with serving() as serve:
            url = serve(Starlette(routes=[Route("/{path:path}", gemini, methods=["POST"])]))
            for names in ("abc", "cba"):
                given = {"model": "gemini/gemini-2.5-flash", "contents": contents(names)}
                data = await hook(registered, given, "agenerate_content")
                await litellm.google_genai.agenerate_content(**data, api_base=url, api_key="none")
            await wait_for(lambda: len(orderer.finished) == 2)
        assert orderer.finished == [SERVED, SERVED]
        assert [body["contents"] for body in bodies] == [contents("abc")] * 2
        assert "ragorder" not in json.dumps(bodies)

    async def test_a_failed_request_is_discarded(self, registered: OrderDocuments, orderer: RecordingOrderer) -> None:
        cloud = Cloud()
        cloud.error = 400, {"error": {"message": "no", "type": "invalid_request_error"}}
        with serving() as serve:
            data = await hook(registered, {"model": "openai/m", "messages": [user(asked("ab"))]})
            with pytest.raises(litellm.BadRequestError):
                await litellm.acompletion(**data, api_base=f"{serve(cloud)}/v1", api_key="none", max_retries=0)
            await wait_for(lambda: orderer.finished)
        assert orderer.finished == [RequestOutcome(False)]

    async def test_an_answer_at_the_second_attempt_is_reported(
        self, registered: OrderDocuments, orderer: RecordingOrderer
    ) -> None:
        cloud = FailingOnce()
        with serving() as serve:
            params = {"model": "openai/m", "api_base": f"{serve(cloud)}/v1", "api_key": "none", "max_retries": 0}
            models = [{"model_name": "m", "litellm_params": params}]
            router = litellm.Router(model_list=models, num_retries=2, retry_after=0)
            data = await hook(registered, {"model": "m", "messages": [user(asked("abc"))], **PROXIED})
            answer = await router.acompletion(**data)
            assert answer.choices[0].message.content == "yes" and len(cloud.bodies) == 2
            await wait_for(lambda: orderer.finished)
        assert orderer.finished == [SERVED]

    async def test_a_request_whose_last_attempt_fails_is_discarded(
        self, callback: OrderDocuments, orderer: RecordingOrderer
    ) -> None:
        data = await hook(callback, {"messages": [user(asked("ab"))], **PROXIED})
        for _ in range(3):
            await callback.async_log_failure_event(event(data), None, None, None)
        assert orderer.finished == []
        await callback.async_post_call_failure_hook(data, ValueError("the last one's"), None)
        assert orderer.finished == [RequestOutcome(False)]

    async def test_a_stream_that_fails_after_its_beginning_is_not_tried_again(
        self, callback: OrderDocuments, orderer: RecordingOrderer
    ) -> None:
        """A response may tell of its failure in its last event, which is no error for the proxy."""

        async def stream() -> AsyncIterator[Any]:
            yield {"choices": [{"delta": {"content": "yes"}}]}
            await callback.async_log_failure_event(event(data), None, None, None)

        data = await hook(callback, {"messages": [user(asked("ab"))], **PROXIED})
        assert [chunk async for chunk in callback.async_post_call_streaming_iterator_hook(None, stream(), data)]
        assert orderer.finished == [RequestOutcome(False)]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_answer_of_litellms_own_cache_is_none_of_the_engine(
        self,
        stream: bool,
        registered: OrderDocuments,
        orderer: RecordingOrderer,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # LiteLLM imports a package for audio here, which its SDK does not install.
        monkeypatch.setitem(sys.modules, "soundfile", ModuleType("soundfile"))
        monkeypatch.setattr(litellm, "cache", litellm.Cache(type="local"))
        cloud = Cloud()
        with serving() as serve:
            options = {"api_base": f"{serve(cloud)}/v1", "api_key": "none", "caching": True, "stream": stream}
            if stream:
                options["stream_options"] = {"include_usage": True}
            for finished in (1, 2):
                data = await hook(registered, {"model": "openai/m", "messages": [user(asked("abc"))]})
                answer = await litellm.acompletion(**data, **options)
                if stream:
                    assert [chunk async for chunk in answer]
                await wait_for(partial(has_finished, orderer, finished))
        assert len(cloud.bodies) == 1 and orderer.finished == [SERVED, RequestOutcome(False)]

    async def test_a_request_that_litellm_refuses_itself_is_discarded(
        self, callback: OrderDocuments, orderer: RecordingOrderer
    ) -> None:
        data = await hook(callback, {"messages": [user(asked("ab"))]})
        await callback.async_post_call_failure_hook(data, ValueError("budget"), None)
        assert orderer.finished == [RequestOutcome(False)]

    async def test_an_event_counts_once(self, callback: OrderDocuments, orderer: RecordingOrderer) -> None:
        data = await hook(callback, {"messages": [user(asked("ab"))]})
        for _ in range(2):
            await callback.async_log_success_event(event(data), {"usage": {}}, None, None)
            await callback.async_log_failure_event(event(data), None, None, None)
            await callback.async_log_success_event({}, None, None, None)
        assert orderer.finished == [RequestOutcome(True)]

    async def test_those_without_an_event_are_bounded_and_count_as_served(
        self, callback: OrderDocuments, orderer: RecordingOrderer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        set_bounds(monkeypatch, pending_calls=5)
        for number in range(20):
            await hook(callback, {"messages": [user(f"{asked('ab')} {number}")]})
        assert orderer.finished == [RequestOutcome(True)] * 15

    async def test_a_call_id_that_clients_choose_says_nothing(
        self, callback: OrderDocuments, orderer: RecordingOrderer
    ) -> None:
        """LiteLLM takes it from the header x-litellm-call-id."""
        usage = {"prompt_tokens": 500, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 400}}
        requests = [{"messages": [user(f"{asked('ab')} {number}")], "litellm_call_id": "same"} for number in range(30)]
        sent = [await hook(callback, data) for data in requests]
        for failed in (requests[0], {"litellm_call_id": "same"}, {"metadata": {"ragorder_request": "same"}}):
            await callback.async_post_call_failure_hook(failed, ValueError("a stranger's"), None)
            await callback.async_log_failure_event(event(failed), None, None, None)
        assert orderer.finished == [], "nobody ends another's request"
        for data in reversed(sent):
            assert data["litellm_call_id"] == "same", "it is the client's, for its own records"
            await callback.async_log_success_event(event(data), {"usage": usage}, None, None)
        assert orderer.finished == [RequestOutcome(True, 400, 505, 500)] * 30

    async def test_a_request_that_is_ordered_twice_ends_twice(
        self, callback: OrderDocuments, orderer: RecordingOrderer
    ) -> None:
        once = await hook(callback, {"messages": [user(asked("ab"))]})
        twice = await hook(callback, once)
        assert orderer.finished == [RequestOutcome(False)]
        await callback.async_log_success_event(event(twice), {}, None, None)
        assert orderer.finished == [RequestOutcome(False), RequestOutcome(True)]


def has_finished(orderer: RecordingOrderer, count: int) -> bool:
    return len(orderer.finished) == count


async def wait_for(condition: Callable[[], object]) -> None:
    """LiteLLM reports in tasks of its own."""
    assert await asyncio.to_thread(eventually, condition)


class TestClouds:
    """Marks by the rules of a request's model."""

    LONG: ClassVar = {name: f"{name} is a document about {name}. " * 80 for name in "abcd"}

    def chat(self, names: str, model: str) -> dict[str, Any]:
        text = "\n".join(TEMPLATE.format(id=name, text=self.LONG[name]) for name in names)
        return {
            "model": model,
            "messages": [{"role": "system", "content": "Be brief. " * 300}, user(f"{text}\nWhich?")],
        }

    @pytest.mark.parametrize(
        ("model", "field"),
        [("anthropic/claude-opus-5", "cache_control"), ("openai/gpt-5.6", "prompt_cache_breakpoint")],
    )
    async def test_are_set_where_they_are_read(self, model: str, field: str, orderer: RecordingOrderer) -> None:
        callback = OrderDocuments(orderer, template=DocumentTemplate(TEMPLATE), clouds=CloudOrderers())
        for names in ("abc", "cba"):
            ordered = await hook(callback, self.chat(names, model))
            usage = {"prompt_tokens": 3000, "completion_tokens": 5, "cache_read_input_tokens": 0}
            await callback.async_log_success_event(event(ordered), {"usage": usage}, None, None)
        assert 0 < json.dumps(ordered["messages"]).count(f'"{field}"') <= 4
        assert ("prompt_cache_options" in ordered) == (field != "cache_control")
        assert not orderer.finished, "the models' own orderers have them"

    async def test_those_of_the_configuration_stay(self, orderer: RecordingOrderer) -> None:
        callback = OrderDocuments(orderer, template=DocumentTemplate(TEMPLATE), clouds=CloudOrderers())
        points = [{"location": "message", "role": "system"}]
        for _ in range(2):
            data = {**self.chat("abc", "claude-opus-5"), "cache_control_injection_points": points}
            ordered = await hook(callback, data)
            assert ordered["messages"] == data["messages"]

    async def test_others_read_from_the_first_token_of_a_stream_on(self, orderer: RecordingOrderer) -> None:
        clouds = CloudOrderers()
        callback = OrderDocuments(orderer, template=DocumentTemplate(TEMPLATE), clouds=clouds)
        ordered = await hook(callback, self.chat("abc", "claude-opus-5"))
        found = clouds.of("claude-opus-5")
        assert found is not None
        plan = plan_of(callback)
        opening = {"choices": [{"delta": {"role": "assistant"}}]}
        chunks = [opening, {"choices": [{"delta": {"content": "yes"}}]}, {"choices": []}]

        async def stream() -> AsyncIterator[Any]:
            for chunk in chunks:
                yield chunk

        passed = callback.async_post_call_streaming_iterator_hook(None, stream(), ordered)
        seen = [(chunk, plan.readable) async for chunk in passed]
        assert [chunk for chunk, _ in seen] == chunks
        assert [readable for _, readable in seen] == [False, True, True]
