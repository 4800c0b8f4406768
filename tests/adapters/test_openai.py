"""The client of OpenAI-compatible servers: what it sends, and what it reads of an answer."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai import AsyncOrderedClient, OrderedClient
from ragorder.ordering import RequestOutcome

openai = pytest.importorskip("openai")
from support.openai_clients import (
    CONFIRMED,
    CONFIRMED_GOOD,
    DISCARDED,
    DOCUMENTS,
    QUERY,
    Async,
    Connect,
    Sync,
    connecting,
)
from support.scripted_chat import GOOD, ROLE, STOP, Response, cached, chat, error, usage


@pytest.fixture(params=[Sync, Async])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    with connecting(request.param) as connect:
        yield connect


class TestRequest:
    def test_asks_a_chat_for_a_stream_with_usage_with_documents_in_order(self, connect: Connect) -> None:
        client, server = connect(), connect.server
        client.generate(QUERY, [DOCUMENTS[2], DOCUMENTS[0]])
        answer = client.generate(QUERY, [DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[2]])
        assert [document.id for document in answer.ordering.documents] == ["d2", "d0", "d1"]
        assert server.paths == ["/v1/chat/completions"] * 2
        assert server.requests[1] == {
            "model": "served",
            "messages": connect.builder.build(QUERY, answer.ordering).messages,
            "max_tokens": 256,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def test_token_ids_go_through_completions_as_the_builder_made_them(
        self, connect: Connect, tokenizers: dict[str, Any]
    ) -> None:
        builder = PromptBuilder(tokenizer=tokenizers["chatml"])
        connect.server.plays(
            Response([{"choices": [{"text": "Hel"}]}, {"choices": [{"text": "lo", "finish_reason": "stop"}]}])
        )
        answer = connect(builder=builder, prompts="token_ids").generate(QUERY, DOCUMENTS)
        assert answer.text == "Hello"
        assert connect.server.paths == ["/v1/completions"]
        assert connect.server.requests[0]["prompt"] == builder.build(QUERY, answer.ordering).token_ids
        assert "messages" not in connect.server.requests[0]

    @pytest.mark.parametrize(
        ("options", "sent"),
        [
            (
                {"seed": 7, "stop": ["."], "n": 1, "extra_body": {"top_k": 3}},
                {"max_tokens": 256, "temperature": 0.0, "seed": 7, "stop": ["."], "n": 1, "top_k": 3},
            ),
            ({"max_completion_tokens": 9}, {"max_completion_tokens": 9, "temperature": 0.0}),
            ({"max_tokens": None, "temperature": None, "extra_body": None}, {}),
        ],
        ids=str,
    )
    def test_other_options_are_passed_on_and_none_leaves_one_to_the_server(
        self, connect: Connect, options: dict[str, Any], sent: dict[str, Any]
    ) -> None:
        answer = connect().generate(QUERY, [], **options)
        assert (answer.text, answer.ordering.documents) == ("Hello world", [])
        (request,) = connect.server.requests
        assert QUERY in request["messages"][-1]["content"]
        own = request.keys() - {"model", "messages", "stream", "stream_options"}
        assert {name: request[name] for name in own} == sent

    def test_waiting_requests_and_scope_reach_the_orderer(self, connect: Connect) -> None:
        connect().generate(QUERY, DOCUMENTS, waiting=[DOCUMENTS[1:]], scope="tenant")
        assert connect.orderer.calls[0]["waiting"] == [DOCUMENTS[1:]]
        assert connect.orderer.calls[0]["scope"] == "tenant"

    @pytest.mark.parametrize(
        ("refused", "raised", "words"),
        [
            *(({name: "x"}, TypeError, name) for name in ("messages", "prompt", "model", "stream", "stream_options")),
            ({"n": 2}, ValueError, "n is not 1"),
        ],
        ids=str,
    )
    def test_what_the_client_sets_and_more_than_one_answer_are_refused(
        self, connect: Connect, refused: dict[str, Any], raised: type[Exception], words: str
    ) -> None:
        client = connect()
        for options in (refused, {"extra_body": refused}):
            for ask in (client.generate, client.stream):
                with pytest.raises(raised, match=words):
                    ask(QUERY, DOCUMENTS, **options)
        assert connect.orderer.orderings == []

    def test_an_unknown_option_of_the_openai_client_discards(self, connect: Connect) -> None:
        with pytest.raises(TypeError, match="no_such_option"):
            connect().generate(QUERY, DOCUMENTS, no_such_option=1)
        assert connect.orderer.finished == [DISCARDED]


# Scopes that vLLM refuses as a salt, and the longest and the oddest that it does not.
NO_SALTS = ["", "someone@example.org", "org/team", "org\\team", "tenant\0", "x" * 129]
SALTS = ["x" * 128, "Müller & Söhne: 100 % \n", hashlib.sha256(b"someone@example.org").hexdigest()]


class TestScope:
    @pytest.mark.parametrize(
        ("scope", "given", "salt"),
        [
            *[(salt, None, salt) for salt in ("tenant", *SALTS)],
            (None, None, None),
            (("model", 1), None, None),
            ("tenant", "tenant", "tenant"),
            (("model", "tenant"), "own", "own"),
        ],
        ids=ascii,
    )
    def test_a_string_is_sent_as_cache_salt(
        self, connect: Connect, scope: Any, given: str | None, salt: str | None
    ) -> None:
        body = {"top_k": 3} if given is None else {"top_k": 3, "cache_salt": given}
        before = dict(body)
        connect().generate(QUERY, DOCUMENTS, scope=scope, extra_body=body)
        assert (connect.server.requests[0].get("cache_salt"), connect.server.requests[0]["top_k"]) == (salt, 3)
        assert body == before, "the caller's dictionary is left alone"

    @pytest.mark.parametrize("scope", NO_SALTS, ids=ascii)
    def test_what_vllm_refuses_as_a_salt_is_sent_to_servers_without_salts_alone(
        self, connect: Connect, scope: str
    ) -> None:
        client = connect()
        for method in (client.generate, client.stream):
            with pytest.raises(ValueError, match=r"give None for no tenant, .*hashlib\.sha256") as raised:
                method(QUERY, DOCUMENTS, scope=scope)
            assert not scope or scope not in str(raised.value)
        assert connect.orderer.orderings == []
        assert connect.server.requests == []
        connect(send_salt=False).generate(QUERY, DOCUMENTS, scope=scope)
        assert "cache_salt" not in connect.server.requests[0]
        assert connect.orderer.calls[0]["scope"] == scope

    @pytest.mark.parametrize("scope", [None, "tenant"])
    def test_another_salt_than_the_scope_is_refused(self, connect: Connect, scope: str | None) -> None:
        with pytest.raises(ValueError, match="cache_salt") as raised:
            connect().generate(QUERY, DOCUMENTS, scope=scope, extra_body={"cache_salt": "hidden"})
        assert "hidden" not in str(raised.value)
        assert "tenant" not in str(raised.value)
        assert connect.orderer.orderings == []


class TestRoom:
    """The room in the cache that the orderer is asked for: the question's, and the expected answer's but for its last
    token, which is never computed on."""

    LONG = "Where? " * 100

    def asked(self, connect: Connect) -> list[int]:
        """The tokens of answers that room was asked for, one request each."""
        return [options["lengths"].suffix - connect.builder.suffix_tokens(QUERY) for options in connect.orderer.calls]

    def answers(self, *lengths: Any) -> list[Response]:
        return [Response([chat("Yes"), STOP, usage(completion_tokens=length)]) for length in lengths]

    @pytest.mark.parametrize("unlimited", [{}, {"max_tokens": None}, {"max_tokens": -1}], ids=str)
    def test_at_first_it_is_what_the_settings_say(self, connect: Connect, unlimited: dict[str, Any]) -> None:
        client = connect()
        for question in (QUERY, self.LONG):
            client.generate(question, DOCUMENTS, **unlimited)
        short, long = (options["lengths"].suffix for options in connect.orderer.calls)
        assert short == connect.orderer.settings.suffix_tokens - 1
        assert long >= connect.builder.suffix_tokens(self.LONG) > connect.orderer.settings.suffix_tokens

    @pytest.mark.parametrize(
        ("limit", "tokens"),
        [({"max_tokens": 0}, 0), ({"max_tokens": 1}, 0), ({"max_tokens": 9}, 8), ({"max_completion_tokens": 9}, 8)],
        ids=str,
    )
    def test_it_is_never_more_than_the_limit(self, connect: Connect, limit: dict[str, int], tokens: int) -> None:
        connect.server.plays(*self.answers(1000))
        client = connect()
        for _ in range(2):
            client.generate(QUERY, DOCUMENTS, **limit)
        assert self.asked(connect) == [tokens, tokens]

    def test_then_it_follows_the_answers_slowly(self, connect: Connect) -> None:
        connect.server.plays(*self.answers(33, 49, 2, 2))
        client = connect()
        for _ in range(4):
            client.generate(QUERY, DOCUMENTS)
        assert self.asked(connect)[1:] == [33 - 1, 34 - 1, 32 - 1]

    @pytest.mark.parametrize(
        "unknown", [None, "many", -1, 1 << 40, 10**400], ids=["null", "text", "-1", "2**40", "1e400"]
    )
    def test_answers_of_unknown_length_or_that_broke_off_change_nothing(self, connect: Connect, unknown: Any) -> None:
        running = chat("Yes") | {"usage": usage(completion_tokens=1)["usage"]}
        connect.server.plays(*self.answers(33, unknown), Response([running], "cut"))
        client = connect()
        client.stream(QUERY, DOCUMENTS)
        for _ in range(2):
            client.generate(QUERY, DOCUMENTS)
        assert self.asked(connect)[1:] == [32] * 3


class TestAnswer:
    def test_holds_what_the_server_said(self, connect: Connect) -> None:
        answer = connect().generate(QUERY, DOCUMENTS)
        assert (answer.text, answer.finish_reason) == ("Hello world", "stop")
        assert (answer.cached_tokens, answer.prompt_tokens, answer.completion_tokens) == (64, 100, 2)
        assert answer.ttft_s is not None
        assert sorted(answer.ordering.documents, key=lambda document: document.id) == DOCUMENTS
        assert connect.orderer.finished == [CONFIRMED_GOOD]

    def test_odd_chunks_are_passed_over(self, connect: Connect) -> None:
        odd: list[Any] = [{}, {"choices": None}, {"choices": "x"}, {"choices": ["x"]}, {"choices": [{"delta": "x"}]}]
        odd += [[], None, "x", 5, {"choices": [{"delta": {"content": 5}}]}, {"choices": [], "usage": "x"}]
        odd += [chat(None, reasoning_content="Hm."), chat(None, reasoning="Hm."), chat(None, tool_calls=None)]
        connect.server.plays(Response([ROLE, *odd, chat("Yes"), STOP]))

        answer = connect().generate(QUERY, DOCUMENTS)
        assert (answer.text, answer.cached_tokens) == ("Yes", None)

    def test_done_ends_an_answer_whose_end_has_no_reason(self, connect: Connect) -> None:
        connect.server.plays(Response([ROLE, chat("Yes")]))
        answer = connect(retries=0).generate(QUERY, DOCUMENTS)
        assert (answer.text, answer.finish_reason) == ("Yes", None)
        assert connect.orderer.finished == [CONFIRMED]


RUNNING = chat("") | {"usage": usage(100, 1, prompt_tokens_details={"cached_tokens": 16})["usage"]}


class TestUsage:
    @pytest.mark.parametrize(
        ("reports", "counts"),
        [
            ([cached(0)], (0, 100, 2)),
            ([cached(100)], (100, 100, 2)),
            ([usage(prompt_tokens_details={"cached_tokens": 64, "audio_tokens": 0})], (64, 100, 2)),
            *(([usage(prompt_tokens_details=details)], (None, 100, 2)) for details in (None, "x")),
            *(([cached(impossible)], (None, 100, 2)) for impossible in (None, -1, "many", 64.5, 101)),
            ([usage("x", prompt_tokens_details={"cached_tokens": 64})], (None, None, 2)),
            ([usage(-1, "two")], (None, None, None)),
            ([], (None, None, None)),
            # Of several reports the last counts.
            ([RUNNING, STOP | {"usage": None}, cached(32)], (32, 100, 2)),
        ],
        ids=str,
    )
    def test_confirms_what_the_server_reports_if_it_can_be(
        self, connect: Connect, reports: list[Any], counts: tuple[int | None, ...]
    ) -> None:
        connect.server.plays(Response([ROLE, chat("Yes"), STOP, *reports]))
        answer = connect().generate(QUERY, DOCUMENTS)
        assert answer.text == "Yes"
        assert (answer.cached_tokens, answer.prompt_tokens, answer.completion_tokens) == counts
        total_tokens = None if None in counts[1:] else 102
        assert answer.total_tokens == total_tokens
        assert connect.orderer.finished == [RequestOutcome(True, counts[0], total_tokens, counts[1])]

    @pytest.mark.parametrize("reports", ["never", "now and then"])
    def test_a_server_that_never_reports_what_was_expected_is_warned_of_once(
        self, connect: Connect, reports: str
    ) -> None:
        """A server may leave out a zero; and where nothing was expected, nothing is missed."""
        client = connect()
        silent = Response([ROLE, chat("Yes"), STOP, usage()])
        connect.server.plays(*[GOOD if reports == "now and then" and not number else silent for number in range(24)])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for number in range(12):
                client.generate(QUERY, [Document(f"{number}", "New.")])
            assert connect.orderer.degraded == ()
            for _ in range(12):
                client.generate(QUERY, DOCUMENTS)
        told = [str(each.message) for each in warned if each.category.__name__ == "DegradedWarning"]
        assert told == list(connect.orderer.degraded)
        assert len(told) == (reports == "never")
        assert all("--enable-prompt-tokens-details" in reason for reason in told)


PYDANTIC = {"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"], "msg": "Extra inputs"}]}


class TestStreamOptions:
    @pytest.mark.parametrize(
        "refusal",
        [
            error(400, "Unrecognized request argument supplied: stream_options"),
            error(400, "invalid", param="stream_options.include_usage"),
            error(400, "unknown field `include_usage`"),
            Response([PYDANTIC], "", 422),
        ],
        ids=["argument", "param", "field", "pydantic"],
    )
    def test_a_server_that_refuses_them_is_asked_without_from_then_on(
        self, connect: Connect, refusal: Response
    ) -> None:
        connect.server.plays(refusal)
        client = connect(retries=0)
        assert [client.generate(QUERY, DOCUMENTS).text for _ in range(2)] == ["Hello world"] * 2
        assert ["stream_options" in request for request in connect.server.requests] == [True, False, False]
        assert connect.orderer.finished == [DISCARDED, CONFIRMED_GOOD, CONFIRMED_GOOD]
        assert connect.slept == []

    def test_a_server_that_refuses_both_is_not_asked_a_third_time(self, connect: Connect) -> None:
        connect.server.plays(error(400, "bad temperature in {'stream_options': …}"), error(400, "bad temperature"))
        client = connect()
        with pytest.raises(openai.BadRequestError):
            client.generate(QUERY, DOCUMENTS)
        client.generate(QUERY, DOCUMENTS)
        # It was not remembered.
        assert ["stream_options" in request for request in connect.server.requests] == [True, False, True]
        assert connect.orderer.finished == [DISCARDED, DISCARDED, CONFIRMED_GOOD]


class TestSecrecy:
    def test_logs_and_errors_quote_no_prompt(self, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "ragorder")
        connect.server.plays(Response([ROLE, chat("Hel")], "eof"), Response([ROLE, chat("Hel")], "eof"))
        with pytest.raises(openai.APIConnectionError) as raised:
            connect().generate(QUERY, DOCUMENTS, scope="tenant")
        messages = [record.getMessage() for record in caplog.records if record.name.startswith("ragorder")]
        assert len(messages) == 1, "a retry is logged"
        for message in [*messages, str(raised.value)]:
            assert not any(secret in message for secret in ("tenant", "secret", "Secret", "d0", "Hel", "key"))


class TestConstruction:
    def test_the_other_kind_of_client_is_refused(self) -> None:
        options: dict[str, Any] = {"model": "m", "orderer": Orderer(), "builder": PromptBuilder()}
        with pytest.raises(TypeError, match="use AsyncOrderedClient"):
            OrderedClient(openai.AsyncOpenAI(api_key="key"), **options)
        with pytest.raises(TypeError, match="use OrderedClient"):
            AsyncOrderedClient(openai.OpenAI(api_key="key"), **options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"prompts": "text"}, "'text'"), ({"prompts": "token_ids"}, "tokenizer"), ({"retries": -1}, "-1")],
    )
    def test_wrong_options_are_named(self, connect: Connect, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            connect(**options)


# ---------------------------------------------------------------- a real server


@pytest.fixture(scope="module")
def served_builder(vllm_model: Any) -> PromptBuilder:
    from transformers import AutoTokenizer

    return PromptBuilder("Answer briefly.", tokenizer=AutoTokenizer.from_pretrained(vllm_model))


def text_document(number: int, words: int) -> Document:
    return Document(f"doc-{number}", " ".join(f"fact {number} {word}" for word in range(words)))


@pytest.mark.vllm
class TestVLLM:
    """Random weights: what is answered means nothing, but tokens and cache hits are real."""

    DOCUMENTS = [text_document(number, 12 + number) for number in range(4)]  # noqa: RUF012
    # The likeliest token of random weights may be one without text, for ever.
    TALKATIVE = {"temperature": 1.0, "seed": 1, "extra_body": {"ignore_eos": True}}  # noqa: RUF012

    @pytest.fixture(params=[Sync, Async])
    def connect(
        self, request: pytest.FixtureRequest, vllm_server: Any, served_builder: PromptBuilder
    ) -> Iterator[Connect]:
        vllm_server.reset()
        sizes = {"capacity_tokens": vllm_server.capacity_tokens, "block_size": vllm_server.block_size}
        sizes |= {"prefix_tokens": served_builder.prefix_tokens, "tokens": served_builder.document_tokens}
        with connecting(request.param, f"{vllm_server.base_url}/v1", **sizes) as connect:
            connect.builder = served_builder
            yield connect

    @pytest.mark.parametrize("prompts", ["messages", "token_ids"])
    def test_predicted_cached_tokens_are_reported(self, connect: Connect, vllm_server: Any, prompts: str) -> None:
        client = connect(prompts=prompts)
        first = client.generate(QUERY, self.DOCUMENTS, max_tokens=4)
        again = client.generate(QUERY, self.DOCUMENTS[::-1], max_tokens=4)
        assert (first.cached_tokens, first.ordering.cached_tokens) == (0, 0)
        assert again.ordering.documents == self.DOCUMENTS
        assert again.ordering.cached_tokens >= 3 * vllm_server.block_size
        assert again.cached_tokens is not None
        assert abs(again.cached_tokens - again.ordering.cached_tokens) <= vllm_server.block_size
        answers = (first, again)
        reported = [RequestOutcome(True, each.cached_tokens, each.total_tokens, each.prompt_tokens) for each in answers]
        assert connect.orderer.finished == reported
        assert first.total_tokens == first.prompt_tokens + first.completion_tokens
        if prompts == "token_ids":
            token_ids = connect.builder.build(QUERY, again.ordering).token_ids
            assert token_ids is not None
            assert again.prompt_tokens == len(token_ids)

    @pytest.mark.slow
    def test_a_stream_that_is_closed_leaves_its_prompt_in_the_cache(self, connect: Connect) -> None:
        client = connect(prompts="token_ids")
        _, pieces = client.stream(QUERY, self.DOCUMENTS, take=1, max_tokens=500, **self.TALKATIVE)
        assert len(pieces) == 1
        again = client.generate(QUERY, self.DOCUMENTS, max_tokens=1)
        assert again.ordering.cached_tokens > 0
        assert again.cached_tokens is not None
        assert again.cached_tokens >= again.ordering.cached_tokens
        assert connect.orderer.finished[0] == CONFIRMED

    def test_tenants_share_nothing(self, connect: Connect) -> None:
        client = connect(prompts="token_ids")
        reported, predicted = [], []
        for scope in ("a", "b", "a", None):
            answer = client.generate(QUERY, self.DOCUMENTS, scope=scope, max_tokens=1)
            reported.append(bool(answer.cached_tokens))
            predicted.append(bool(answer.ordering.cached_tokens))
        assert reported == predicted == [False, False, True, False]

    @pytest.mark.slow
    def test_exactly_the_scopes_that_the_server_refuses_are_not_sent(self, connect: Connect) -> None:
        client = connect()
        with openai.OpenAI(base_url=connect.url, api_key="key") as direct:
            for scope in NO_SALTS:
                with pytest.raises(openai.BadRequestError, match="cache_salt"):
                    direct.completions.create(model="served", prompt="x", extra_body={"cache_salt": scope})
                with pytest.raises(ValueError, match="cache_salt"):
                    client.generate(QUERY, self.DOCUMENTS, scope=scope)
        assert connect.orderer.orderings == []
        for scope in SALTS:
            client.generate(QUERY, self.DOCUMENTS, scope=scope, max_tokens=1)
