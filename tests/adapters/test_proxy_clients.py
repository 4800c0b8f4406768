"""Foreign clients against the proxy: the SDKs of Anthropic, OpenAI, Cohere, LiteLLM and LangChain, before a far end
that speaks their protocols, and before a real vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ragorder import Orderer
from ragorder.ordering import RequestOutcome

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from support.cloud import CACHED, COMPLETION, PROMPT, Cloud
from support.rings import grid
from support.sent_requests import TEMPLATE, TEXTS, RecordingOrderer, asked, names_in, tag, user
from support.serving_app import serving
from support.waiting import eventually

from ragorder.adapters.proxy import DocumentTemplate, RepeatedDocuments, make_app

# LiteLLM would fetch its prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

SERVED = RequestOutcome(True, CACHED, PROMPT + COMPLETION, PROMPT)
KEY = "secret"


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[Any], str]]:
    with serving() as serve:
        yield serve


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def orderer() -> RecordingOrderer:
    return RecordingOrderer()


@pytest.fixture
def start(cloud: Cloud, orderer: Orderer, serve: Callable[[Any], str]) -> Callable[..., str]:
    """Starts proxies of the far end."""

    def start(**options: Any) -> str:
        options = {"upstream": serve(cloud), "template": DocumentTemplate(TEMPLATE), "api_key": KEY} | options
        return serve(make_app(orderer, **options))

    return start


class TestAnthropic:
    @pytest.fixture
    def anthropic(self) -> Any:
        return pytest.importorskip("anthropic")

    @pytest.fixture
    def connect(self, anthropic: Any, start: Callable[..., str]) -> Iterator[Callable[..., Any]]:
        """Clients of proxies with these options."""
        with ExitStack() as until_done:

            def connect(key: str = KEY, **options: Any) -> Any:
                client = anthropic.Anthropic(base_url=start(**options), api_key=key, max_retries=0)
                return until_done.enter_context(client)

            yield connect

    @pytest.fixture
    def client(self, connect: Callable[..., Any]) -> Any:
        return connect()

    def ask(self, names: str, **fields: Any) -> dict[str, Any]:
        messages = [user(asked(names))]
        return {"model": "claude", "max_tokens": 16, "system": "Be brief.", "messages": messages, **fields}

    def test_documents_in_a_message_are_ordered(self, client: Any, cloud: Cloud, orderer: RecordingOrderer) -> None:
        for names in ("abc", "cba"):
            answer = client.messages.create(**self.ask(names))
            assert (answer.content[0].text, answer.usage.cache_read_input_tokens) == ("yes", CACHED)
        assert cloud.last == self.ask("abc")
        assert eventually(lambda: orderer.finished == [SERVED, SERVED])

    def test_streams_are_streams(self, client: Any, cloud: Cloud, orderer: RecordingOrderer) -> None:
        with client.messages.stream(**self.ask("abc")) as stream:
            assert "".join(stream.text_stream) == "yes"
            message = stream.get_final_message()
        assert (message.usage.output_tokens, message.usage.cache_read_input_tokens) == (COMPLETION, CACHED)
        assert eventually(lambda: orderer.finished == [SERVED])

    def test_errors_of_the_server_are_its_own(
        self, anthropic: Any, client: Any, cloud: Cloud, orderer: RecordingOrderer
    ) -> None:
        error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}, "request_id": "r"}
        cloud.error = 529, error
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**self.ask("ab"))
        assert (caught.value.status_code, caught.value.body) == (529, error)
        assert eventually(lambda: orderer.finished == [RequestOutcome(False)])

    def test_errors_of_the_proxy_are_in_its_protocol(self, anthropic: Any, connect: Callable[..., Any]) -> None:
        with pytest.raises(anthropic.BadRequestError) as caught:
            connect().messages.create(**self.ask("ab"), extra_body={"ragorder": {"documents": 1, "query": "?"}})
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        assert "ragorder.documents" in caught.value.body["error"]["message"]
        with pytest.raises(anthropic.AuthenticationError) as caught:
            connect("wrong").messages.create(**self.ask("ab"))
        assert caught.value.body["error"]["type"] == "authentication_error"
        nowhere = connect(upstream="http://127.0.0.1:9")
        for streamed in (False, True):
            with pytest.raises(anthropic.APIStatusError) as caught:
                nowhere.messages.create(**self.ask("ab"), stream=streamed)
            assert (caught.value.status_code, caught.value.body["error"]["type"]) == (502, "api_error")

    def test_the_servers_key_is_sent(self, connect: Callable[..., Any], cloud: Cloud) -> None:
        connect(upstream_api_key="up").messages.create(**self.ask("ab"))
        assert cloud.headers[-1]["authorization"] == "Bearer up"
        assert cloud.headers[-1]["anthropic-version"]

    def test_marks_are_set_where_it_sets_none(self, connect: Callable[..., Any], cloud: Cloud) -> None:
        client = connect(marks=True)
        for names in ("abc", "abd", "bad"):
            client.messages.create(**self.ask(names))
        content = cloud.last["messages"][0]["content"]
        assert "".join(each["text"] for each in content) == asked("abd")
        assert any("cache_control" in each for each in content)


class TestOpenAIResponses:
    @pytest.fixture
    def client(self, start: Callable[..., str]) -> Iterator[Any]:
        import openai

        with openai.OpenAI(base_url=f"{start()}/v1", api_key=KEY, max_retries=0) as client:
            yield client

    def test_documents_in_the_input_are_ordered(self, client: Any, cloud: Cloud, orderer: RecordingOrderer) -> None:
        for names in ("abc", "cba"):
            answer = client.responses.create(model="gpt", instructions="Be brief.", input=asked(names))
            assert (answer.output_text, answer.usage.input_tokens_details.cached_tokens) == ("yes", CACHED)
        key = cloud.last.pop("prompt_cache_key")
        assert cloud.last == {"model": "gpt", "instructions": "Be brief.", "input": asked("abc")}
        assert (key, len(key)) == (cloud.bodies[0]["prompt_cache_key"], 32)
        assert eventually(lambda: orderer.finished == [SERVED, SERVED])

    def test_documents_in_messages_are_ordered(self, client: Any, cloud: Cloud) -> None:
        for names in ("abc", "cba"):
            parts = [{"type": "input_text", "text": asked(names)}]
            client.responses.create(model="gpt", input=[user(parts)])
        assert cloud.last["input"][0]["content"][0]["text"] == asked("abc")

    def test_streams_are_streams(self, client: Any, cloud: Cloud, orderer: RecordingOrderer) -> None:
        stream = client.responses.create(model="gpt", input=asked("abc"), stream=True)
        kinds = [event.type for event in stream]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert eventually(lambda: orderer.finished == [SERVED])

    def test_errors_of_the_server_are_its_own(self, client: Any, cloud: Cloud, orderer: RecordingOrderer) -> None:
        import openai

        cloud.error = 404, {"error": {"message": "no such route", "type": "invalid_request_error", "code": "x"}}
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="gpt", input=asked("ab"))
        assert caught.value.code == "x"
        assert eventually(lambda: orderer.finished == [RequestOutcome(False)])

    def test_errors_of_the_proxy_are_in_its_protocol(self, client: Any) -> None:
        import openai

        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="gpt", input="", extra_body={"ragorder": {"documents": 1, "query": "?"}})
        assert caught.value.param == "ragorder.documents"


class TestOpenAIChats:
    @pytest.mark.parametrize("stream", [False, True])
    def test_documents_may_be_tagged(
        self, stream: bool, start: Callable[..., str], cloud: Cloud, orderer: RecordingOrderer
    ) -> None:
        import openai

        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        with openai.OpenAI(base_url=f"{start()}/v1", api_key=KEY, max_retries=0) as client:
            for names in ("abc", "cba"):
                tagged = {"model": "m", "messages": [], "extra_body": {"ragorder": tag(names)}}
                answer = client.chat.completions.create(**tagged, **options)
                if stream:
                    text = "".join(each.choices[0].delta.content or "" for each in answer if each.choices)
                else:
                    text = answer.choices[0].message.content
                assert text == "yes"
        assert names_in(cloud.last) == "abc"
        assert eventually(lambda: orderer.finished == [SERVED, SERVED])

    def test_a_conversation_is_sent_as_it_was_and_repeats_are_named(
        self, start: Callable[..., str], cloud: Cloud, orderer: RecordingOrderer
    ) -> None:
        import openai

        naming = RepeatedDocuments(DocumentTemplate(TEMPLATE))
        with openai.OpenAI(base_url=f"{start(repeated=naming)}/v1", api_key=KEY, max_retries=0) as client:
            client.chat.completions.create(model="m", messages=[user(asked("abc"))])
            messages: list[Any] = []
            before: list[Any] = []
            for number, names in enumerate(["cba", "bd", "ad"]):
                messages.append(user(f"{asked(names)} ({number})"))
                reply = client.chat.completions.with_raw_response.create(model="m", messages=messages)
                assert cloud.last["messages"][: len(before)] == before
                messages.append({"role": "assistant", "content": reply.parse().choices[0].message.content})
                before = [*cloud.last["messages"], messages[-1]]
            assert reply.headers["x-ragorder-named"] == "0,1"
        assert names_in(before[0]) == "abc"
        assert before[-2]["content"] == "[a] is above.\n[d] is above.\nWhich? (2)"
        assert eventually(lambda: orderer.finished == [SERVED] * 4)


@pytest.mark.slow
class TestLiteLLM:
    @pytest.fixture
    def litellm(self) -> Any:
        return pytest.importorskip("litellm")

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("model", "base"), [("openai/m", "/v1"), ("anthropic/claude-sonnet-4-5", "")])
    def test_chats_and_messages(
        self, model: str, base: str, stream: bool, litellm: Any, start: Any, cloud: Cloud, orderer: RecordingOrderer
    ) -> None:
        options = {"api_base": start() + base, "api_key": KEY, "stream": stream, "num_retries": 0, "max_tokens": 16}
        if stream and base:
            options["stream_options"] = {"include_usage": True}
        for names in ("abc", "cba"):
            answer = litellm.completion(model, [user(asked(names))], **options)
            # A stream ends with a chunk of usage, without choices.
            pieces = (
                (each.choices[0].delta for each in answer if each.choices) if stream else [answer.choices[0].message]
            )
            assert "".join(each.content or "" for each in pieces) == "yes"
        if base:
            assert cloud.last["messages"] == [user(asked("abc"))]
        assert names_in(cloud.last) == "abc"
        assert eventually(lambda: orderer.finished == [SERVED, SERVED])

    def test_responses(self, litellm: Any, start: Callable[..., str], cloud: Cloud, orderer: RecordingOrderer) -> None:
        for names in ("abc", "cba"):
            answer = litellm.responses(
                input=asked(names), model="openai/gpt", api_base=f"{start()}/v1", api_key=KEY, num_retries=0
            )
            assert answer.output[0].content[0].text == "yes"
        assert names_in(cloud.last) == "abc"
        assert eventually(lambda: orderer.finished == [SERVED, SERVED])

    def test_errors(self, litellm: Any, start: Callable[..., str], cloud: Cloud) -> None:
        cloud.error = 429, {"error": {"message": "slow down", "type": "rate_limit_error"}}
        with pytest.raises(litellm.RateLimitError):
            options = {"api_base": f"{start()}/v1", "api_key": KEY, "num_retries": 0, "max_retries": 0}
            litellm.completion("openai/m", [user(asked("ab"))], **options)


@pytest.mark.slow
class TestLangChain:
    @pytest.mark.parametrize("stream", [False, True])
    def test_chats(self, stream: bool, start: Callable[..., str], cloud: Cloud, orderer: RecordingOrderer) -> None:
        openai = pytest.importorskip("langchain_openai")
        model = openai.ChatOpenAI(model="m", base_url=f"{start()}/v1", api_key=KEY, max_retries=0, stream_usage=True)
        for names in ("abc", "cba"):
            asks = [("system", "Be brief."), ("human", asked(names))]
            text = "".join(each.text for each in model.stream(asks)) if stream else model.invoke(asks).text
            assert text == "yes"
        assert [each["content"] for each in cloud.last["messages"]] == ["Be brief.", asked("abc")]
        assert eventually(lambda: orderer.finished == [SERVED, SERVED])

    def test_responses(self, start: Callable[..., str], cloud: Cloud, orderer: RecordingOrderer) -> None:
        openai = pytest.importorskip("langchain_openai")
        url = f"{start()}/v1"
        model = openai.ChatOpenAI(model="gpt", base_url=url, api_key=KEY, max_retries=0, use_responses_api=True)
        for names in ("abc", "cba"):
            assert model.invoke(asked(names)).text == "yes"
        assert names_in(cloud.last["input"]) == "abc"
        assert eventually(lambda: orderer.finished == [SERVED, SERVED])


class TestCohere:
    @pytest.fixture
    def client(self, start: Callable[..., str]) -> Any:
        cohere = pytest.importorskip("cohere")
        return cohere.ClientV2(api_key=KEY, base_url=start())

    def documents(self, names: str) -> list[dict[str, Any]]:
        return [{"id": name, "data": {"snippet": TEXTS[name]}} for name in names]

    def test_documents_of_a_chat_are_ordered(self, client: Any, cloud: Cloud, orderer: RecordingOrderer) -> None:
        messages = [{"role": "user", "content": "Which?"}]
        for names in ("abc", "cba"):
            answer = client.chat(model="command", messages=messages, documents=self.documents(names))
            assert answer.message.content[0].text == "yes"
        assert cloud.last["documents"] == self.documents("abc")
        assert eventually(lambda: [each.served for each in orderer.finished] == [True, True])

    def test_streams_are_streams(self, client: Any, cloud: Cloud) -> None:
        messages = [{"role": "user", "content": "Which?"}]
        stream = client.chat_stream(model="command", messages=messages, documents=self.documents("ab"))
        assert [event.type for event in stream] == ["message-start", "content-delta", "message-end"]


@pytest.mark.vllm
class TestOnVLLM:
    """The routes of a real vLLM."""

    def written(self, names: str) -> str:
        return "\n".join(TEMPLATE.format(id=name, text=TEXTS[name][:200]) for name in names) + "\nWhich?"

    def run(self, server: Any, serve: Callable[[Any], str], ask: Callable[[str, str], tuple[int, int]]) -> None:
        """Sends the documents in three orders; the second and third request find all but the end of their prompts."""
        import httpx2

        assert httpx2.post(f"{server.base_url}/reset_prefix_cache", timeout=60).status_code == 200
        orderer = RecordingOrderer(capacity_tokens=server.capacity_tokens, block_size=server.block_size)
        url = serve(make_app(orderer, upstream=server.base_url, template=DocumentTemplate(TEMPLATE)))
        counts = [ask(url, self.written(names)) for names in ("abcd", "dcba", "bdac")]
        assert counts[0][0] == 0
        for cached, prompt in counts[1:]:
            assert cached > prompt - 2 * server.block_size
        assert eventually(lambda: len(orderer.finished) == 3)
        assert [(each.cached_tokens, each.prompt_tokens) for each in orderer.finished] == counts

    @pytest.mark.parametrize("streamed", grid([False, True], 1))
    def test_messages(self, streamed: bool, vllm_server: Any, serve: Callable[[Any], str]) -> None:
        anthropic = pytest.importorskip("anthropic")

        def ask(url: str, content: str) -> tuple[int, int]:
            with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
                messages = [{"role": "user", "content": content}]
                request = {"model": vllm_server.model_name, "max_tokens": 4, "messages": messages}
                if streamed:
                    with client.messages.stream(**request) as stream:
                        usage = stream.get_final_message().usage
                else:
                    usage = client.messages.create(**request).usage
                cached = usage.cache_read_input_tokens or 0
                return cached, usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)

        self.run(vllm_server, serve, ask)

    @pytest.mark.parametrize("streamed", grid([False, True], 1))
    def test_responses(self, streamed: bool, vllm_server: Any, serve: Callable[[Any], str]) -> None:
        import openai

        def ask(url: str, content: str) -> tuple[int, int]:
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                request = {"model": vllm_server.model_name, "input": content, "max_output_tokens": 4}
                request |= {"temperature": 0.0, "store": False}
                if streamed:
                    *_, last = client.responses.create(**request, stream=True)
                    usage = last.response.usage
                else:
                    usage = client.responses.create(**request).usage
                return usage.input_tokens_details.cached_tokens, usage.input_tokens

        self.run(vllm_server, serve, ask)
