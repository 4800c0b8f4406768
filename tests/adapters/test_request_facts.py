"""Facts in requests to a vLLM with tiers (document ends, tenant), from all clients."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai import AsyncOrderedClient, OrderedClient
from ragorder.adapters.openai.pipelined import OpenAIStreams, OrderedPrompts, Question
from ragorder.adapters.request_facts import tenant_digest, with_facts
from ragorder.adapters.vllm_tiers import RequestFacts, read_facts

pytest.importorskip("openai")
pytest.importorskip("httpx2")

DOCUMENTS = [Document(f"d{number}", f"Secret {number} is kept in drawer {number}. " * 3) for number in range(4)]
QUERY = "What is kept where?"
ONCE = (1.0,) * len(DOCUMENTS)


def ends_of(builder: PromptBuilder, documents: Sequence[Document]) -> list[int]:
    return [span.end for span in builder.build(QUERY, documents).spans]


RED = tenant_digest("red")
OWN = {"cost": 0.5, "documents": [3]}


class TestTheFacts:
    @pytest.mark.parametrize(
        ("own", "known", "exact", "sent", "read"),
        [
            (None, ([7, 19], "red"), 0, {"documents": [7, 19], "tenant": RED}, RequestFacts((7, 19), RED)),
            (None, ([7, 19], None), 0, {"documents": [7, 19]}, RequestFacts((7, 19))),
            (
                None,
                ([7, 19], None, [12.34567, 0.5]),
                0,
                {"documents": [7, 19], "expected": [12.346, 0.5]},
                RequestFacts((7, 19), expected=(12.346, 0.5)),
            ),
            # A forecast is one of all documents, and at most what a server believes.
            (None, ([7, 19], None, [1.0]), 0, {"documents": [7, 19]}, RequestFacts((7, 19))),
            (None, ([7, 19], None, [1.0, 2.0, 3.0]), 0, {"documents": [7, 19]}, RequestFacts((7, 19))),
            (None, ([7], None, [1e9]), 0, {"documents": [7], "expected": [1000]}, RequestFacts((7,), expected=(1000,))),
            (None, ([7, 19], None), 1, {"documents": [7, 19], "exact": 1}, RequestFacts((7, 19))),
            # The caller's own documents have no forecast of ours, and ours are not sent.
            (OWN, ([7, 19], None, [2.0, 1.0]), 1, OWN, RequestFacts((3,), cost=0.5)),
            (OWN, ([7], "red"), 0, OWN | {"tenant": RED}, RequestFacts((3,), RED, 0.5)),
        ],
    )
    def test_are_read_as_they_were_written(self, own: Any, known: Any, exact: int, sent: Any, read: Any) -> None:
        params = {"other": 1} if own is None else {"other": 1, "ragorder": own}
        given = {"kv_transfer_params": params, "top_k": 5}
        before = copy.deepcopy(given)
        found = with_facts(given, *known, exact_documents=exact)
        assert found == {"kv_transfer_params": {"other": 1, "ragorder": sent}, "top_k": 5}
        assert read_facts(found["kv_transfer_params"]) == read
        assert given == before

    def test_are_none_where_nothing_is_known(self) -> None:
        assert with_facts({"n": 1}, (), None) == with_facts({"n": 1}, (), None, exact_documents=1) == {"n": 1}

    @pytest.mark.parametrize("scope", ["Acme GmbH", b"\xff\x00", ("eu", 7), "\udcff"], ids=ascii)
    def test_have_a_digest_for_a_tenant_and_not_its_name(self, scope: Any) -> None:
        digest = tenant_digest(scope)
        assert digest is not None and len(digest) == 32
        assert digest == tenant_digest(scope) != tenant_digest("other")
        assert str(scope) not in json.dumps(with_facts({}, [1], scope))

    def test_have_another_digest_in_another_process(self, python: Any) -> None:
        show = "from ragorder.adapters.request_facts import tenant_digest as f; print(f('red'))"
        assert python("-c", show).stdout.strip() not in ("", tenant_digest("red"))

    @pytest.mark.parametrize("params", ["text", [1], {"ragorder": 7}, {"ragorder": None}], ids=ascii)
    def test_leave_alone_what_they_cannot_be_added_to(self, params: Any) -> None:
        assert with_facts({"kv_transfer_params": params}, [7], "red") == {"kv_transfer_params": params}


CHUNK = {"choices": [{"text": "yes", "finish_reason": "stop"}]}


class Response(nullcontext[Any]):
    """A stream of one chunk."""

    def __init__(self) -> None:
        super().__init__(self)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        yield CHUNK

    async def __aiter__(self) -> AsyncIterator[Mapping[str, Any]]:
        yield CHUNK


class FarEnd:
    """Keeps what the openai clients are told to send."""

    def __init__(self, asynchronous: bool = False) -> None:
        self.sent: list[dict[str, Any]] = []
        create = self._create_async if asynchronous else self._create
        self.completions = SimpleNamespace(create=create)
        self.chat = SimpleNamespace(completions=self.completions)

    def _create(self, **options: Any) -> Response:
        self.sent.append(options)
        return Response()

    async def _create_async(self, **options: Any) -> Response:
        return self._create(**options)

    def facts(self) -> RequestFacts | None:
        return read_facts(self.sent[-1]["extra_body"].get("kv_transfer_params"))


@pytest.fixture
def builder(tokenizers: dict[str, Any]) -> PromptBuilder:
    return PromptBuilder("Be careful.", tokenizer=tokenizers["chatml"])


@pytest.fixture
def orderer() -> Orderer:
    return Orderer(block_size=16, strict=True)


class ExactFirst(Orderer):
    """Has the first document computed exactly."""

    def order(self, *arguments: Any, **options: Any) -> Any:
        ordering = super().order(*arguments, **options)
        ordering.exact_documents = 1
        return ordering


def client_of(orderer: Orderer, builder: PromptBuilder, **options: Any) -> tuple[FarEnd, OrderedClient]:
    end = FarEnd()
    return end, OrderedClient(end, model="m", orderer=orderer, builder=builder, **{"send_facts": True} | options)


class TestTheClients:
    @pytest.mark.parametrize("prompts", ["messages", "token_ids"])
    def test_send_facts_if_enabled(self, builder: PromptBuilder, orderer: Orderer, prompts: Any) -> None:
        end, client = client_of(orderer, builder, prompts=prompts)
        client.generate(QUERY, DOCUMENTS[:3])
        answer = client.generate(QUERY, [DOCUMENTS[3], DOCUMENTS[1], DOCUMENTS[0]], scope="red")
        ends = ends_of(builder, answer.ordering.documents)
        assert end.facts() == RequestFacts(tuple(ends), tenant_digest("red"), expected=(1, 1, 1))
        client.generate(QUERY, [DOCUMENTS[3], DOCUMENTS[2]], scope="red")
        facts = end.facts()
        assert facts is not None and facts.expected == (2, 1), "the first document is that of the request before"
        assert end.sent[-1]["extra_body"]["cache_salt"] == "red"
        end, client = client_of(orderer, builder, prompts=prompts, send_facts=False)
        client.generate(QUERY, DOCUMENTS, scope="red")
        assert end.sent[-1]["extra_body"] == {"cache_salt": "red"}

    async def test_send_them_from_coroutines(self, builder: PromptBuilder, orderer: Orderer) -> None:
        end = FarEnd(asynchronous=True)
        client = AsyncOrderedClient(end, model="m", orderer=orderer, builder=builder, send_facts=True)
        await client.generate(QUERY, DOCUMENTS)
        assert end.facts() == RequestFacts(tuple(ends_of(builder, DOCUMENTS)), expected=ONCE)

    @pytest.mark.parametrize("prompts", ["messages", "token_ids"])
    def test_say_which_documents_are_to_be_exact(self, builder: PromptBuilder, prompts: Any) -> None:
        for orderer, exact in ((ExactFirst(strict=True), 1), (Orderer(strict=True), None)):
            end, client = client_of(orderer, builder, prompts=prompts)
            client.generate(QUERY, DOCUMENTS)
            assert end.sent[-1]["extra_body"]["kv_transfer_params"]["ragorder"].get("exact") == exact

    def test_keep_what_the_caller_sends_there(self, builder: PromptBuilder, orderer: Orderer) -> None:
        end, client = client_of(orderer, builder)
        client.generate(QUERY, DOCUMENTS, extra_body={"kv_transfer_params": {"other": 1, "ragorder": {"cost": 0.25}}})
        assert end.sent[-1]["extra_body"]["kv_transfer_params"]["other"] == 1
        assert end.facts() == RequestFacts(tuple(ends_of(builder, DOCUMENTS)), cost=0.25, expected=ONCE)

    def test_leave_out_unknown_document_ends(self, orderer: Orderer) -> None:
        end, client = client_of(orderer, PromptBuilder("Be careful."))
        client.generate(QUERY, DOCUMENTS, scope="red")
        assert end.facts() == RequestFacts((), tenant_digest("red"))


class TestPipelines:
    async def test_send_them_to_a_server(self, builder: PromptBuilder, orderer: Orderer) -> None:
        end = FarEnd(asynchronous=True)
        request = OrderedPrompts(orderer, builder, "token_ids").preview(Question(QUERY, "red"), DOCUMENTS)
        for send_facts, expected in (
            (False, None),
            (True, RequestFacts(tuple(ends_of(builder, DOCUMENTS)), tenant_digest("red"))),
        ):
            async for _ in OpenAIStreams(end, "m", send_facts=send_facts).stream(request):
                pass
            assert end.facts() == expected

    @pytest.mark.vllm
    @pytest.mark.parametrize("tiers", [True, False])
    async def test_give_them_to_engines_with_tiers(self, builder: PromptBuilder, orderer: Orderer, tiers: bool) -> None:
        pytest.importorskip("vllm")
        from ragorder.adapters.vllm.async_engine import AsyncVLLM

        given: list[Any] = []

        async def generate(prompt: Any, params: Any, id: str) -> AsyncIterator[Any]:
            given.append(params)
            answer = SimpleNamespace(token_ids=[1], text="yes", finish_reason="stop")
            yield SimpleNamespace(outputs=[answer], finished=True, num_cached_tokens=0, prompt_token_ids=[1])

        connector = SimpleNamespace(kv_connector_extra_config={"ragorder": {}} if tiers else {})
        engine = SimpleNamespace(generate=generate, vllm_config=SimpleNamespace(kv_transfer_config=connector))
        question = Question(QUERY, "red", options={"extra_args": {"own": 1}})
        request = OrderedPrompts(orderer, builder, "token_ids").preview(question, DOCUMENTS)
        async for _ in AsyncVLLM(engine).stream(request):
            pass
        own = with_facts({"own": 1}, ends_of(builder, DOCUMENTS), "red") if tiers else {"own": 1}
        assert given[0].extra_args == own


Post = Callable[..., dict[str, Any]]


class TestTheProxy:
    @pytest.fixture
    def post(self, orderer: Orderer) -> Post:
        """Sends a body through a proxy with these options; returns what the server is sent."""
        pytest.importorskip("starlette")
        from support.sent_requests import echo, post_to, proxy_to

        def post(body: Mapping[str, Any], *, orderer: Orderer = orderer, **options: Any) -> dict[str, Any]:
            answer = post_to(proxy_to(echo, orderer, **{"send_facts": True} | options), body)
            assert answer.status_code == 200, answer.text
            sent: dict[str, Any] = answer.json()
            return sent

        return post

    def tagged(self, **fields: Any) -> dict[str, Any]:
        documents = [{"id": each.id, "text": each.text} for each in DOCUMENTS]
        system = {"role": "system", "content": "Be careful."}
        return {"model": "m", "messages": [system], "ragorder": {"documents": documents, "query": QUERY}, **fields}

    def test_facts_are_sent_if_enabled(self, post: Post, builder: PromptBuilder, tokenizers: dict[str, Any]) -> None:
        sent = post(self.tagged(cache_salt="red"), tokenizer=tokenizers["chatml"])
        facts = read_facts(sent["kv_transfer_params"])
        assert facts == RequestFacts(tuple(ends_of(builder, DOCUMENTS)), tenant_digest("red"), expected=ONCE)
        assert "ragorder" not in sent
        by_default = post(self.tagged(cache_salt="red"), tokenizer=tokenizers["chatml"], send_facts=False)
        assert "kv_transfer_params" not in by_default

    def test_the_number_of_exact_documents_is_sent(self, post: Post, tokenizers: dict[str, Any]) -> None:
        sent = post(self.tagged(), orderer=ExactFirst(strict=True), tokenizer=tokenizers["chatml"])
        assert sent["kv_transfer_params"]["ragorder"]["exact"] == 1
        assert "kv_transfer_params" not in post(self.tagged(), orderer=ExactFirst(strict=True))

    def test_estimated_ends_are_not_sent(self, post: Post) -> None:
        sent = post(self.tagged(cache_salt="red"))
        assert read_facts(sent["kv_transfer_params"]) == RequestFacts((), tenant_digest("red"))
        assert "kv_transfer_params" not in post(self.tagged())

    def test_ends_of_documents_in_a_message_are_sent(self, post: Post, tokenizers: dict[str, Any]) -> None:
        from ragorder.adapters.proxy import DocumentTemplate

        tokenizer = tokenizers["chatml"]
        written = [f"<d>{each.text}</d>" for each in DOCUMENTS]
        content = "\n\n".join([f"These: {written[0]}", *written[1:], QUERY])
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        sent = post(body, tokenizer=tokenizer, template=DocumentTemplate("<d>{text}</d>"))
        assert sent["messages"] == body["messages"]
        facts = read_facts(sent["kv_transfer_params"])
        assert facts is not None
        for end, document in zip(facts.documents, written, strict=True):
            front = content[: content.index(document) + len(document)]
            whole = tokenizer.apply_chat_template([{"role": "user", "content": front}], tokenize=False)
            upto = len(tokenizer.encode(whole[: whole.index(front) + len(front)], add_special_tokens=False))
            # Where pieces meet, a tokenizer may join what we count apart.
            assert abs(end - upto) <= len(DOCUMENTS)

    @pytest.mark.parametrize(
        ("params", "sent"),
        [
            ({"x": 1}, {"x": 1, "ragorder": {"tenant": RED}}),
            ({"ragorder": {"documents": [5]}}, {"ragorder": {"documents": [5], "tenant": RED}}),
            # Nothing can be added to these.
            *((params, params) for params in (7, "text", [1], {"ragorder": 7}, {"ragorder": None})),
        ],
    )
    def test_what_the_client_sends_there_is_kept(self, post: Post, params: Any, sent: Any) -> None:
        assert post(self.tagged(cache_salt="red", kv_transfer_params=params))["kv_transfer_params"] == sent

    @pytest.mark.parametrize("options", [(), ("--tiers",)], ids=str)
    def test_the_command_line_enables_facts(self, run_serve: Callable[..., Any], options: tuple[str, ...]) -> None:
        pytest.importorskip("uvicorn")
        served = run_serve(*options, "--capacity-tokens", "9", "--block-size", "9")
        assert (served.exit_code, served.app["send_facts"]) == (0, bool(options)), served.said


@pytest.mark.slow
@pytest.mark.vllm
class TestARealServer:
    """vLLM without tiers, which does nothing with them."""

    @pytest.mark.parametrize("prompts", ["messages", "token_ids"])
    def test_answers_the_same_with_them(self, vllm_server: Any, vllm_model: Any, prompts: Any) -> None:
        import openai

        from ragorder.eval.engines.models import load_tokenizer

        builder = PromptBuilder("Be careful.", tokenizer=load_tokenizer(vllm_model))
        answers = []
        with openai.OpenAI(base_url=f"{vllm_server.base_url}/v1", api_key="none", max_retries=0) as server:
            for send_facts in (False, True):
                setup = {"model": "served", "builder": builder, "orderer": Orderer(block_size=32, strict=True)}
                client = OrderedClient(server, prompts=prompts, send_facts=send_facts, **setup)
                answers.append(client.generate(QUERY, DOCUMENTS, scope="facts", max_tokens=8))
        assert answers[0].text == answers[1].text
        assert answers[0].prompt_tokens == answers[1].prompt_tokens
