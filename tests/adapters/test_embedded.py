"""The embedded engine as a server: OpenAI's API on a real engine with a small model, alone and through the proxy."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bodies import Bodies
from support.commands import run_command
from support.http_server import Handler, LocalServer
from support.inside import memory_of
from support.rings import examples
from support.serve_process import ServeProcess, launching
from support.serving_app import serving
from support.waiting import eventually

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

import httpx
import httpx2
import psutil

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.embedded import (
    AppTransport,
    EngineStoppedError,
    EngineWorker,
    hosted,
    make_engine_app,
)
from ragorder.adapters.http_server.untrusted_json import MAX_VALUES
from ragorder.adapters.observing.tier_stats import TierStats
from ragorder.adapters.openai.pipelined import PipelinedClient, Question
from ragorder.adapters.proxy import Timeouts, make_app
from ragorder.cli import main
from ragorder.kernels.engine import EngineSettings, Request, Sampling, TieredEngine
from ragorder.kernels.models import loading
from ragorder.kernels.preprocessing.builder import FusionBuilder, SourceDocument
from ragorder.kernels.preprocessing.neighbours import GivenNeighbours
from ragorder.kernels.random_model import make_model
from ragorder.pipelining import plain_retrieval
from ragorder.trie.profile import PrefillProfile

pytestmark = pytest.mark.merge

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SYSTEM = {"role": "system", "content": "Answer from the documents, please."}
TEXTS = {name: f"{name} is a document about {name}. " * 12 for name in "abcdefgh"}
LONGEST = 2048
COMMAND = (sys.executable, "-c", "from ragorder.cli import main; main()")
WORD = "Zanzibar"
Client = httpx2.AsyncClient
Load = Callable[..., EngineWorker]
Serving = Callable[..., "Command"]
Launch = Callable[..., "Served"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "embedded"
    texts = [*TEXTS.values(), "Answer from the documents, please. Question: which?"]
    return make_model(folder, texts=texts, layers=2, hidden_size=64, vocab_size=600, max_position_embeddings=LONGEST)


@pytest.fixture(scope="module")
def load(model: Path) -> Iterator[Load]:
    """Loads engines, each with a worker."""
    workers: list[EngineWorker] = []

    def load(max_unfinished: int = 64, folder: Path = model, **changes: Any) -> EngineWorker:
        sizes: dict[str, Any] = {"device_tokens": 8192, "host_bytes": 4 << 20, "dtype": "float32", "device": "cpu"}
        engine = TieredEngine.load(folder, EngineSettings(**sizes | changes))
        workers.append(EngineWorker(engine, max_unfinished=max_unfinished))
        return workers[-1]

    yield load
    for worker in workers:
        worker.close()


@pytest.fixture(scope="module")
def shared_worker(load: Load) -> EngineWorker:
    return load()


@pytest.fixture
def worker(shared_worker: EngineWorker) -> EngineWorker:
    """An engine with nothing cached."""
    shared_worker.engine.clear_cache()
    return shared_worker


@pytest.fixture
async def client(worker: EngineWorker) -> AsyncIterator[Client]:
    async with reaching(make_engine_app(worker)) as client:
        yield client


@asynccontextmanager
async def reaching(app: Any) -> AsyncIterator[Client]:
    async with httpx2.AsyncClient(transport=AppTransport(app), base_url="http://embedded", timeout=60) as client:
        yield client


@asynccontextmanager
async def pipelined(worker: EngineWorker, search: Any, prompts: Any, **options: Any) -> AsyncIterator[PipelinedClient]:
    """A client whose warm-ups run while `search` does."""
    builder = PromptBuilder(SYSTEM["content"], tokenizer=deepcopy(worker.engine.tokenizer))
    orderer = Orderer(
        prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens, capacity_tokens=8192, **options
    )
    transport = httpx.ASGITransport(app=make_engine_app(worker))
    async with (
        httpx.AsyncClient(transport=transport) as http_client,
        PipelinedClient(
            openai.AsyncOpenAI(base_url="http://embedded/v1", api_key="none", http_client=http_client),
            model=worker.engine.model_name,
            orderer=orderer,
            builder=builder,
            retrieval=plain_retrieval(search),
            prompts=prompts,
            report_load=False,
            send_facts=True,
        ) as client,
    ):
        yield client


async def complete(client: Client, prompt: Any = "a is a document", **fields: Any) -> Any:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}
    response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def chat(client: Client, content: Any = "Which document?", **fields: Any) -> Any:
    messages = [SYSTEM, {"role": "user", "content": content}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, **fields}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(client: Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, which must end as one does."""
    response = await client.post(path, json={"temperature": 0, "max_tokens": 8, **body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def fails_in_a_stream(client: Client, body: dict[str, Any], fail: Callable[[], Any] = lambda: None) -> Any:
    """The error at the end of a stream, which fails after its first piece."""
    async with client.stream("POST", COMPLETIONS, json={**body, "stream": True, "ignore_eos": True}) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["choices"]
        fail()
        *_, last = [line async for line in lines if line]
    return json.loads(last.removeprefix("data: "))["error"]


async def refusal(client: Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await client.post(path, content=content)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def facts(*ends: int, **others: Any) -> dict[str, Any]:
    """What says where documents end."""
    return {"kv_transfer_params": {"ragorder": {"documents": list(ends), **others}}}


def prompt_of(worker: EngineWorker, names: str, question: str = "Which?") -> tuple[list[int], list[int]]:
    """Tokens, and where the beginning and each document end."""
    encode = worker.engine.tokenizer.encode
    tokens = encode("Answer from the documents, please. ")
    ends = [len(tokens)]
    for name in names:
        tokens += encode(TEXTS[name])
        ends.append(len(tokens))
    return tokens + encode(question), ends


def expected(worker: EngineWorker, prompt: str, tokens: int = 8, **options: Any) -> str:
    """What transformers' own greedy decoding gives for a prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = worker.engine.tokenizer
    plain = AutoModelForCausalLM.from_pretrained(worker.engine.model_name, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(prompt, **options)])
    made = plain.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


class TestCompletions:
    async def test_are_those_of_the_model(self, client: Client, worker: EngineWorker) -> None:
        answer = await complete(client)
        assert answer["choices"] == [
            {"index": 0, "text": expected(worker, "a is a document"), "logprobs": None, "finish_reason": "length"}
        ]
        assert (answer["object"], answer["model"]) == ("text_completion", worker.engine.model_name)
        assert answer["id"].startswith("cmpl-")
        tokens = len(worker.engine.tokenizer.encode("a is a document"))
        assert answer["usage"] == {
            "prompt_tokens": tokens,
            "completion_tokens": 8,
            "total_tokens": tokens + 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    async def test_take_several_prompts_as_texts_or_tokens(self, client: Client, worker: EngineWorker) -> None:
        prompts = ["a is", "b is a document about", "c"]
        tokens = [worker.engine.tokenizer.encode(each) for each in prompts]
        answer = await complete(client, prompts)
        assert (await complete(client, tokens))["choices"] == answer["choices"]
        alone = [(await complete(client, each)) for each in (*prompts[:2], tokens[2])]
        texts = [each["choices"][0]["text"] for each in alone]
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)
        assert answer["usage"]["completion_tokens"] == 24

    async def test_have_16_tokens_unless_more_are_asked_for(self, client: Client) -> None:
        assert (await complete(client, max_tokens=None, ignore_eos=True))["usage"]["completion_tokens"] == 16

    @pytest.mark.parametrize("fields", [{}, {"logprobs": 1, "stream_options": {"include_usage": True}}])
    async def test_stream_the_same(self, client: Client, fields: dict[str, Any]) -> None:
        whole = await complete(client, ["a is", "b is"], logprobs=fields.get("logprobs"))
        events = await streamed(client, COMPLETIONS, {"prompt": ["a is", "b is"], **fields})
        if fields:
            last = events.pop()
            assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert all("usage" not in event for event in events)
        assert len({event["id"] for event in events}) == 1
        for choice in whole["choices"]:
            pieces = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
            assert len(pieces) > 1
            assert "".join(piece["text"] for piece in pieces) == choice["text"]
            assert pieces[-1]["finish_reason"] == choice["finish_reason"]
            for field in ("tokens", "token_logprobs") if fields else ():
                told = [each for piece in pieces for each in piece["logprobs"][field]]
                assert told == pytest.approx(choice["logprobs"][field])

    async def test_stop_before_a_text(self, client: Client) -> None:
        whole = (await complete(client, max_tokens=32))["choices"][0]["text"]
        stop = whole[len(whole) // 2 :][:3]
        assert stop
        choice = (await complete(client, max_tokens=32, stop=[stop]))["choices"][0]
        assert choice["text"] == whole[: whole.index(stop)]
        assert choice["finish_reason"] == "stop"
        events = await streamed(client, COMPLETIONS, {"prompt": "a is a document", "max_tokens": 32, "stop": stop})
        assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]

    async def test_are_drawn_by_default_and_the_same_with_the_same_seed(self, client: Client) -> None:
        drawn = [
            (await complete(client, temperature=None, seed=seed, max_tokens=24))["choices"][0]["text"]
            for seed in (1, 1, None, None, None)
        ]
        assert drawn[0] == drawn[1]
        assert len(set(drawn[2:])) > 1

    async def test_tell_logprobs(self, client: Client) -> None:
        choice = (await complete(client, logprobs=2, ignore_eos=True))["choices"][0]
        logprobs = choice["logprobs"]
        tokens, tops = logprobs["tokens"], logprobs["top_logprobs"]
        assert "".join(tokens) == choice["text"]
        assert logprobs["text_offset"][0] == 0
        assert [len(top) for top in tops] == [2] * 8
        for token, logprob, top in zip(tokens, logprobs["token_logprobs"], tops, strict=True):
            assert logprob <= 0
            assert max(top, key=top.__getitem__) == token, "greedy takes the likeliest"
            assert top[token] == pytest.approx(logprob, abs=1e-5)


class TestChats:
    async def test_are_rendered_by_the_models_template(self, client: Client, worker: EngineWorker) -> None:
        answer = await chat(client)
        messages = [SYSTEM, {"role": "user", "content": "Which document?"}]
        prompt = worker.engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text = expected(worker, prompt, add_special_tokens=False)
        message = {"role": "assistant", "content": text, "refusal": None}
        assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
        assert answer["usage"]["prompt_tokens"] == len(worker.engine.tokenizer.encode(prompt, add_special_tokens=False))

    async def test_take_texts_in_parts(self, client: Client) -> None:
        parts = [{"type": "text", "text": "Which"}, {"type": "text", "text": "document?"}]
        answer, plain = await chat(client, parts), await chat(client, "Which\ndocument?")
        assert (answer["choices"], answer["usage"]) == (plain["choices"], plain["usage"])

    async def test_stream_the_same(self, client: Client) -> None:
        whole = await chat(client)
        body = {"messages": [SYSTEM, {"role": "user", "content": "Which document?"}]}
        *pieces, last = await streamed(client, CHAT, body | {"stream_options": {"include_usage": True}})
        deltas = [piece["choices"][0]["delta"] for piece in pieces]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
        assert pieces[-1]["choices"][0]["finish_reason"] == "length"
        assert last["usage"] == whole["usage"]

    async def test_have_as_many_tokens_as_asked_for_or_the_whole_context(self, load: Load) -> None:
        async with reaching(make_engine_app(load(max_model_len=64))) as client:
            for limits, end in (({"max_tokens": 3}, 3), ({"max_completion_tokens": 3}, 3), ({}, None)):
                usage = (await chat(client, **{"max_tokens": None, **limits}, ignore_eos=True))["usage"]
                assert usage["completion_tokens"] == (end or 64 - usage["prompt_tokens"])

    async def test_tell_logprobs(self, client: Client) -> None:
        for options, number in (({"top_logprobs": 2}, 2), ({}, 0)):
            content = (await chat(client, logprobs=True, **options))["choices"][0]["logprobs"]["content"]
            assert len(content) == 8
            for each in content:
                likeliest = [other["token"] for other in each["top_logprobs"]]
                assert bytes(each["bytes"]).decode() == each["token"]
                assert len(likeliest) == number
                assert likeliest[:1] == [each["token"]][:number]

    async def test_special_tokens_are_what_the_tokenizer_makes_of_them(
        self, client: Client, worker: EngineWorker
    ) -> None:
        """The proxy breaks them up in documents; what else is in a message is the client's own, as in vLLM."""
        plain, special = await chat(client, "x"), await chat(client, "x<|im_end|>")
        assert special["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 1

    async def test_options_of_the_template_reach_it(self, load: Load) -> None:
        worker = load()
        template = worker.engine.tokenizer.chat_template
        worker.engine.tokenizer.chat_template = template + "{% if thinking %}thinking {% endif %}"
        async with reaching(make_engine_app(worker)) as client:
            plain = await chat(client)
            more = await chat(client, chat_template_kwargs={"thinking": True})
            own = {"messages": [SYSTEM], "chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}
            error = await refusal(client, CHAT, own)
        assert more["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
        assert error["param"] == "chat_template_kwargs.chat_template"

    async def test_show_the_calls_and_the_reasoning_of_earlier_turns(self, load: Load) -> None:
        """As templates expect them: reasoning under either name, arguments as an object. So the proxy counts them."""
        worker = load()
        tokenizer = worker.engine.tokenizer
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }} {{ m.reasoning_content }} {{ m.content }}"
            "{% for c in m.tool_calls %} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
            " {{ m.tool_call_id }}\n{% endfor %}"
        )
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": [1, "x"]}'}}
        broken = {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{at"}}
        found = "".join(f"<doc>{TEXTS[name]}</doc>" for name in "ab")
        turn = [
            {"role": "user", "content": "Which?"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call, broken]},
            {"role": "tool", "tool_call_id": "c1", "content": "a"},
            {"role": "assistant", "reasoning": "so", "content": "a", "tool_calls": None, "refusal": None},
            {"role": "user", "content": f"{found} And then?"},
        ]
        lines = [
            "user  Which? ",
            'assistant hm  look {"at": [1, "x"]} look "{at" ',
            "tool  a c1",
            "assistant so a ",
            f"user  {found} And then? ",
            "",
        ]
        bodies = Bodies("<doc>{text}</doc>", tokenizer=deepcopy(tokenizer))
        parsed = bodies.parse("chat", json.dumps({"messages": turn}).encode())
        async with reaching(make_engine_app(worker)) as client:
            answer = (await client.post("/tokenize", json={"messages": turn})).json()
            assert tokenizer.decode(answer["tokens"]) == "\n".join(lines)
            body = {"messages": turn, "max_tokens": 2, "ignore_eos": True}
            usage = (await client.post(CHAT, json=body)).json()["usage"]
        assert usage == {**usage, "prompt_tokens": answer["count"], "completion_tokens": 2}
        assert parsed is not None
        assert tokenizer.decode(answer["tokens"][: parsed.prefix_tokens]) == "\n".join([*lines[:-2], "user  "])

    async def test_what_the_template_refuses_is_refused(self, load: Load) -> None:
        worker = load()
        worker.engine.tokenizer.chat_template = "{{ raise_exception('Roles must alternate') }}"
        async with reaching(make_engine_app(worker)) as client:
            error = await refusal(client, CHAT, {"messages": [SYSTEM]})
            assert "Roles must alternate" in error["message"]
            worker.engine.tokenizer.chat_template = None
        async with reaching(make_engine_app(worker)) as client:
            assert (await refusal(client, CHAT, {"messages": [SYSTEM]}))["code"] == "no_chat_template"


class TestDocuments:
    """Requests that say where their documents end find them again, to the token."""

    async def cached(self, client: Client, tokens: list[int], said: dict[str, Any], **fields: Any) -> int:
        usage = (await complete(client, tokens, max_tokens=1, **said, **fields))["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    async def test_are_cached_from_the_second_request_on(self, client: Client, worker: EngineWorker) -> None:
        tokens, ends = prompt_of(worker, "abc")
        assert await self.cached(client, tokens, facts(*ends)) == 0
        other, _ = prompt_of(worker, "abc", "And which not?")
        assert await self.cached(client, other, facts(*ends)) == ends[-1]
        fewer, ends_of_fewer = prompt_of(worker, "abd")
        for length in (ends[2], ends_of_fewer[-1]):
            # An end beyond the prompt is ignored.
            assert await self.cached(client, fewer, facts(*ends_of_fewer, 10**9)) == length

    async def test_what_precedes_them_is_shared_by_all(self, client: Client, worker: EngineWorker) -> None:
        for names, found in (("ab", False), ("ba", True)):
            tokens, (prefix, *ends) = prompt_of(worker, names)
            assert await self.cached(client, tokens, facts(*ends, prefix=prefix)) == prefix * found

    async def test_what_precedes_them_in_a_chat_is_found_by_the_engine(
        self, client: Client, worker: EngineWorker
    ) -> None:
        tokenizer = worker.engine.tokenizer
        front = tokenizer.apply_chat_template([SYSTEM, {"role": "user", "content": "@"}], tokenize=False)
        front_tokens = len(tokenizer.encode(front.partition("@")[0], add_special_tokens=False))
        for number, name in enumerate("ab"):
            end = front_tokens + len(tokenizer.encode(TEXTS[name]))
            usage = (await chat(client, TEXTS[name] + "Which?", **facts(end)))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == number * front_tokens

    @pytest.mark.parametrize("prompts", ["token_ids", "messages"])
    async def test_a_warm_up_leaves_what_precedes_them(self, worker: EngineWorker, prompts: Any) -> None:
        def ended() -> int:
            finished = worker.stats().finished
            return finished.get("length", 0) + finished.get("stop", 0)

        before = ended()

        async def search(question: Question) -> list[Document]:
            assert await asyncio.to_thread(eventually, lambda: ended() > before, 60)
            return [Document("a", TEXTS["a"])]

        async with pipelined(worker, search, prompts, block_size=1) as client:
            stream = await client.answer("Which?", max_tokens=2)
        assert stream.trace.warmed_up
        builder = PromptBuilder(SYSTEM["content"], tokenizer=deepcopy(worker.engine.tokenizer))
        assert stream.usage.cached_tokens == builder.prefix_tokens

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    async def test_stats_and_doctor_show_why_requests_do_not_use_a_build(
        self, load: Load, model: Path, tmp_path: Path, dtype: str
    ) -> None:
        settings = EngineSettings(device_tokens=2048, dtype=dtype, device="cpu", verify=False, profile=None)
        prefix, documents = list(range(5, 15)), [list(range(start, start + 20)) for start in (20, 60)]
        with FusionBuilder.load(
            model, tmp_path / "kv", prefix, GivenNeighbours({"0": ["1"]}), engine=settings
        ) as builder:
            builder.plan(
                [SourceDocument(str(n), "", each) for n, each in enumerate(documents)], {"recipe": {"model": "org/m"}}
            )
            list(builder.build())
        worker = load(reuse="fused", disk_path=tmp_path / "kv")
        prompt = [9, *prefix, *documents[0], *documents[1], 4]
        said = facts(len(prefix) + 21, len(prompt) - 1, prefix=len(prefix) + 1)
        with serving() as serve:
            url = serve(make_engine_app(worker))
            async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
                await complete(client, prompt, max_tokens=1, **said)
            shown = await asyncio.to_thread(run_command, main, "stats", url)
            examined = await asyncio.to_thread(run_command, main, "doctor", url, "--json")
        words = {
            "float32": "1 have another system prompt or cache_salt (built for one of 10 tokens, asked for one of 11)",
            "bfloat16": "1 have another model, or the same one set up differently "
            f"(built for org/m, asked for {worker.engine.model_name})",
        }[dtype]
        assert f"of 1 requests that could use the build, {words}" in " ".join(shown.stdout.split())
        [finding] = [each for each in json.loads(examined.stdout)["findings"] if each["check"] == "build"]
        assert (finding["verdict"], finding["found"]) == ("bad", f"of 1 requests that could use it, {words}")
        assert "--system" in finding["advice"]

    async def test_of_tenants_are_apart(self, client: Client, worker: EngineWorker) -> None:
        tokens, ends = prompt_of(worker, "abc")
        salts: list[str | None] = [None, "red", "blue", "red", None]
        found = [await self.cached(client, tokens, facts(*ends), cache_salt=salt) for salt in salts]
        assert found == [0, 0, 0, ends[-1], ends[-1]]

    async def test_are_found_on_the_disk_by_the_next_engine(self, load: Load, tmp_path: Path) -> None:
        small = {"device_tokens": 256, "host_bytes": 256 << 10, "disk_path": tmp_path / "kv"}
        worker = load(**small)
        tokens, ends = prompt_of(worker, "ab")
        async with reaching(make_engine_app(worker)) as client:
            text = (await complete(client, tokens, **facts(*ends[1:])))["choices"]
            for names in ("cd", "ef", "gh", "de", "fg"):
                other, ends_of_other = prompt_of(worker, names)
                await self.cached(client, other, facts(*ends_of_other[1:]))
            assert worker.stats().cache.disk.nodes > 0
        worker.close()
        worker = load(**small)
        async with reaching(make_engine_app(worker)) as client:
            answer = await complete(client, tokens, **facts(*ends[1:]))
        assert answer["choices"] == text
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == worker.stats().cached.disk > 0

    @pytest.mark.parametrize(
        "said",
        [7, "text", {"ragorder": 7}, {"ragorder": {"documents": "abc"}}, {"ragorder": {"documents": [5, 3]}}],
        ids=ascii,
    )
    async def test_malformed_facts_refuse_no_request(self, said: Any, client: Client) -> None:
        plain = await complete(client)
        assert (await complete(client, kv_transfer_params=said))["choices"] == plain["choices"]


UNSUPPORTED = [
    ("n", 2),
    ("best_of", 2),
    ("echo", True),
    ("suffix", "x"),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "json_object"}),
    ("structured_outputs", {"regex": "a"}),
    ("guided_json", {}),
    ("frequency_penalty", 0.5),
    ("presence_penalty", -1),
    ("repetition_penalty", 1.1),
    ("top_k", 5),
    ("min_p", 0.1),
    ("min_tokens", 3),
    ("logit_bias", {"5": 1}),
    ("stop_token_ids", [1]),
    ("skip_special_tokens", False),
    ("truncate_prompt_tokens", 5),
    ("reasoning_effort", "high"),
    ("continue_final_message", True),
    ("chat_template", "{{ messages }}"),
    ("no_such_field", 1),
]
NEUTRAL = {
    "n": 1,
    "echo": False,
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "frequency_penalty": 0.0,
    "presence_penalty": 0,
    "repetition_penalty": 1.0,
    "top_k": -1,
    "logit_bias": {},
    "seed": None,
    "user": "somebody",
    "metadata": {"a": "b"},
    "reasoning_effort": None,
}


class TestFusion:
    """`--reuse fused`: documents' KV is reused wherever it was computed, and counted."""

    @pytest.fixture(scope="class")
    def fusing(self, load: Load) -> EngineWorker:
        return load(reuse="fused", recompute=0.25)

    async def ask(self, worker: EngineWorker, names: str, exact: Any = None, **fields: Any) -> Any:
        tokens, (prefix, *ends) = prompt_of(worker, names)
        own = facts(*ends, prefix=prefix) if exact is None else facts(*ends, prefix=prefix, exact=exact)
        async with reaching(make_engine_app(worker)) as client:
            answer = await complete(client, tokens, **own, **fields)
        return answer["choices"][0], answer["usage"]["prompt_tokens_details"]

    async def test_usage_counts_reused_and_recomputed_tokens(self, fusing: EngineWorker) -> None:
        fusing.engine.clear_cache()
        assert (await self.ask(fusing, "a"))[1] == {"cached_tokens": 0}
        _, first = await self.ask(fusing, "b")
        length = len(fusing.engine.tokenizer.encode(TEXTS["a"]))
        prefix = first["cached_tokens"]
        _, details = await self.ask(fusing, "ba")
        assert details == {
            "cached_tokens": prefix + len(fusing.engine.tokenizer.encode(TEXTS["b"])),
            "fused_tokens": length,
            "recomputed_tokens": round(0.25 * length),
        }
        for share in (0.5, 0, 1):
            _, details = await self.ask(fusing, "ba", recompute=share)
            assert details.get("recomputed_tokens", 0) == round(share * length)

    async def test_a_request_says_how_recomputed_tokens_are_selected(self, fusing: EngineWorker) -> None:
        fusing.engine.clear_cache()
        for names in ("a", "b"):
            await self.ask(fusing, names)
        fields: list[dict[str, Any]] = [{}, {"select": "deviation"}, {"select_rounds": 2}, {}]
        answers = [await self.ask(fusing, "ba", logprobs=0, **chosen) for chosen in fields]
        *chances, again = [choice["logprobs"]["token_logprobs"] for choice, _ in answers]
        # As many tokens, and others.
        assert len({details["recomputed_tokens"] for _, details in answers}) == 1
        assert again == chances[0] and len(set(map(tuple, chances))) == 3

    async def test_leading_documents_are_exact_if_the_facts_say_so(self, fusing: EngineWorker) -> None:
        fusing.engine.clear_cache()
        encode = fusing.engine.tokenizer.encode
        for names in ("a", "b", "c"):
            prefix = (await self.ask(fusing, names))[1]["cached_tokens"]
        for malformed in (0, -1, True, "1", [1]):
            _, details = await self.ask(fusing, "cab", exact=malformed)
            assert details["fused_tokens"] == len(encode(TEXTS["a"])) + len(encode(TEXTS["b"]))
        _, details = await self.ask(fusing, "cab", exact=2)
        assert details["cached_tokens"] == prefix + len(encode(TEXTS["c"]))
        assert details["fused_tokens"] == len(encode(TEXTS["b"]))
        _, details = await self.ask(fusing, "cab")
        assert details["cached_tokens"] == prefix + len(encode(TEXTS["c"])) + len(encode(TEXTS["a"]))

    async def test_an_exact_request_has_the_models_answer(self, fusing: EngineWorker, worker: EngineWorker) -> None:
        for names in ("a", "b", "ba", "cba"):
            await self.ask(fusing, names)
        answer, details = await self.ask(fusing, "cba", reuse="exact")
        assert answer == (await self.ask(worker, "cba"))[0]
        assert "fused_tokens" not in details

    async def test_is_in_the_metrics(self, fusing: EngineWorker) -> None:
        for names in ("a", "b", "ba"):
            await self.ask(fusing, names)
        stats = fusing.engine.stats()
        async with reaching(make_engine_app(fusing)) as client:
            text = (await client.get("/metrics")).text
        assert f'ragorder_engine_fused_tokens_total{{tier="device"}} {stats.fused.device:.1f}' in text
        assert f"ragorder_engine_recomputed_tokens_total {stats.recomputed:.1f}" in text
        sources = dict(re.findall(r'ragorder_engine_prompt_tokens_total{source="(\w+)"} ([0-9.]+)', text))
        assert float(sources["fused"]) == stats.fused.total - stats.recomputed > 0
        assert sum(map(float, sources.values())) == stats.prompt_tokens

    @pytest.mark.parametrize("prompts", ["token_ids", "messages"])
    async def test_a_warm_up_computes_the_question_early(self, fusing: EngineWorker, prompts: Any) -> None:
        fusing.engine.clear_cache()
        before = fusing.stats()
        names = iter(["a", "b", "ab"])
        asked = itertools.count(1)

        async def search(question: Question) -> list[Document]:
            kept = before.questions_kept + next(asked)
            assert await asyncio.to_thread(eventually, lambda: fusing.stats().questions_kept == kept, 60)
            return [Document(name, TEXTS[name]) for name in next(names)]

        async with pipelined(fusing, search, prompts, reuse="fused") as client:
            for query in ("Which?", "What?", "Which?"):
                stream = await client.answer(query, max_tokens=2)
                assert stream.trace.warmed_up
        stats = fusing.stats()
        assert (stats.questions_kept - before.questions_kept, stats.questions_used - before.questions_used) == (3, 1)
        assert stats.recomputed > before.recomputed
        async with reaching(make_engine_app(fusing)) as client:
            text = (await client.get("/metrics")).text
        assert f'ragorder_engine_questions_total{{event="used"}} {stats.questions_used:.1f}' in text

    async def test_refused_fields_are_named(self, fusing: EngineWorker, client: Client) -> None:
        refused: dict[str, list[Any]] = {
            "recompute": [1.5, -0.1, "much"],
            "reuse": ["both"],
            "select": ["qurey", "random", "x" * 65],
            "select_rounds": [0, 1 << 40],
        }
        bodies = [(name, {name: value}) for name, values in refused.items() for value in values]
        bodies += [(name, {"reuse": "exact", name: value}) for name, value in (("recompute", 0.1), ("select", "query"))]
        async with reaching(make_engine_app(fusing)) as fused:
            for name, fields in bodies:
                assert (await refusal(fused, COMPLETIONS, {"prompt": "a", **fields}))["param"] == name
        await complete(client, reuse="exact")
        for option in ({"reuse": "fused"}, {"recompute": 0.1}, {"select": "deviation"}):
            error = await refusal(client, COMPLETIONS, {"prompt": "a", **option})
            assert "start it with --reuse fused" in error["message"] and error["param"] in option


REFUSED: dict[str, list[Any]] = {
    "max_tokens": [0, "5"],
    "temperature": [-1],
    "top_p": [0, 1.5],
    "seed": [2**70],
    "stop": ["", ["x"] * 17],
    "logprobs": [21],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "deadline_s": [0, -1, "soon"],
    "cache_salt": ["a/b", ""],
}


class TestRefusals:
    @pytest.mark.parametrize(("name", "value"), UNSUPPORTED, ids=lambda value: value if isinstance(value, str) else "")
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    async def test_an_unsupported_field_is_named(self, path: str, name: str, value: Any, client: Client) -> None:
        body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [SYSTEM]}
        error = await refusal(client, path, body | {name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_field")
        assert name in error["message"]

    async def test_fields_that_change_nothing_are_accepted(self, client: Client) -> None:
        assert (await complete(client, **NEUTRAL))["choices"] == (await complete(client))["choices"]
        assert (await chat(client, **NEUTRAL))["choices"] == (await chat(client))["choices"]

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            (COMPLETIONS, {}, "prompt"),
            (COMPLETIONS, {"prompt": []}, "prompt"),
            (COMPLETIONS, {"prompt": [[]]}, None),
            (COMPLETIONS, {"prompt": ""}, None),
            (COMPLETIONS, {"prompt": 5}, "prompt"),
            (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
            (COMPLETIONS, {"prompt": [True]}, "prompt[0]"),
            (COMPLETIONS, {"prompt": [-1]}, None),
            (COMPLETIONS, {"prompt": [10**6]}, None),
            (COMPLETIONS, {"prompt": [10**40]}, None),
            (COMPLETIONS, {"prompt": [[1, 2], [10**6]]}, None),
            (COMPLETIONS, {"prompt": "a", "max_tokens": 10**6}, None),
            *((COMPLETIONS, {"prompt": "a", name: value}, name) for name, each in REFUSED.items() for value in each),
            (CHAT, {}, "messages"),
            (CHAT, {"messages": []}, "messages"),
            (CHAT, {"messages": "hello"}, "messages"),
            (CHAT, {"messages": [{}]}, "messages[0]"),
            (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
            (CHAT, {"messages": [SYSTEM | {"tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]"),
            (CHAT, {"messages": [SYSTEM | {"reasoning": 1}]}, "messages[0].reasoning"),
            (CHAT, {"messages": [SYSTEM | {"audio": {"id": "1"}}]}, "messages[0]"),
            (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
            (CHAT, {"messages": [SYSTEM], "top_logprobs": 3}, "top_logprobs"),
            (CHAT, {"messages": [SYSTEM], "logprobs": 3}, "logprobs"),
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ],
        ids=ascii,
    )
    async def test_a_wrong_field_is_named(
        self, path: str, body: Any, param: str | None, client: Client, worker: EngineWorker
    ) -> None:
        assert (await refusal(client, path, body))["param"] == param
        assert eventually(lambda: not worker.engine.has_unfinished)

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"prompt": NaN}', b'{"prompt": "\xff"}'],
        ids=ascii,
    )
    async def test_only_json_objects_are_read(self, body: bytes, client: Client) -> None:
        assert (await refusal(client, COMPLETIONS, body))["code"] == "invalid_json"

    @pytest.mark.parametrize(
        ("path", "body", "status", "code"),
        [
            (COMPLETIONS, b'{"prompt": "a", "response_format": "\xff"}', 400, "unsupported_field"),
            (COMPLETIONS, {"prompt": "a", "model": "gpt"}, 404, "model_not_found"),
            (COMPLETIONS, {"prompt": "a" * 1000}, 413, "body_too_large"),
            ("/v1/embeddings", {}, 404, "not_found"),
        ],
    )
    async def test_other_refusals_have_a_status_and_a_code(
        self, path: str, body: Any, status: int, code: str, worker: EngineWorker
    ) -> None:
        async with reaching(make_engine_app(worker, body_limit=1000)) as client:
            assert (await refusal(client, path, body, status=status))["code"] == code
            assert await complete(client, model=worker.engine.model_name)
            assert (await client.get(COMPLETIONS)).status_code == 405

    @pytest.mark.parametrize("length", [3 * LONGEST, 2_000_000])
    async def test_a_prompt_beyond_the_context_is_refused(self, length: int, client: Client) -> None:
        began = time.process_time()
        messages = [{"role": "user", "content": "a " * length}]
        prompts = [(COMPLETIONS, {"prompt": "a " * length}), (COMPLETIONS, {"prompt": [5] * length})]
        errors = [await refusal(client, *each) for each in (*prompts, (CHAT, {"messages": messages}))]
        assert {error["code"] for error in errors} == {"context_length_exceeded"}
        assert str(LONGEST) in errors[0]["message"]
        assert time.process_time() - began < 20

    async def test_a_model_without_a_tokenizer_takes_tokens(self, load: Load, model: Path, tmp_path: Path) -> None:
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            (tmp_path / name).symlink_to(model / name)
        async with reaching(make_engine_app(load(folder=tmp_path))) as client:
            answer = await complete(client, [5, 6, 7], logprobs=1, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 8
            assert (await refusal(client, COMPLETIONS, {"prompt": "a"}))["code"] == "no_tokenizer"
            assert (await refusal(client, COMPLETIONS, {"prompt": [5], "stop": "a"}))["code"] == "request_refused"
            assert (await refusal(client, CHAT, {"messages": [SYSTEM]}))["code"] == "no_chat_template"


def names(count: int) -> str:
    return ",".join(f'"{number:x}":0' for number in range(count))


class TestBodies:
    """What a body may be, and how much of it becomes objects."""

    @pytest.mark.parametrize(
        ("path", "frame"),
        [
            (COMPLETIONS, '{"prompt":"a","metadata":{ITEMS}}'),
            (COMPLETIONS, '{"prompt":"a",ITEMS}'),
            (COMPLETIONS, f'{{"prompt":"{"," * MAX_VALUES}",ITEMS}}'),
            (COMPLETIONS, '{"prompt":"a","kv_transfer_params":{ITEMS}}'),
            (COMPLETIONS, '{"prompt":[7],"stop":[{ITEMS}]}'),
            (CHAT, '{"messages":[{ITEMS}]}'),
            (CHAT, '{"messages":[],"chat_template_kwargs":{ITEMS}}'),
            ("/tokenize", '{"prompt":"a","x":[{ITEMS}]}'),
        ],
    )
    async def test_more_values_than_are_read_are_refused(self, path: str, frame: str, client: Client) -> None:
        error = await refusal(client, path, frame.replace("ITEMS", names(MAX_VALUES)).encode())
        assert (error["code"], error["param"]) == ("too_many_values", None)
        assert f"{MAX_VALUES:,}" in error["message"]

    @pytest.mark.parametrize("field", ["kv_transfer_params", "chat_template_kwargs"])
    async def test_options_that_are_kept_have_fewer(self, field: str, client: Client) -> None:
        body = f'{{"messages":[{{"role":"user","content":"a"}}],"{field}":{{{names(20_000)}}}}}'
        error = await refusal(client, CHAT, body.encode())
        assert (error["code"], error["param"]) == ("too_many_values", field)

    async def test_so_have_arguments_of_calls_together(self, client: Client) -> None:
        """They are JSON in a text of the body."""
        call = {"function": {"name": "look", "arguments": f"{{{names(9_000)}}}"}}
        messages = [SYSTEM, *({"role": "assistant", "tool_calls": [call]} for _ in range(2))]
        error = await refusal(client, CHAT, {"messages": messages})
        assert (error["code"], error["param"]) == ("too_many_values", "messages[2].tool_calls")
        deep = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": '{"a":' * 10_000}}]}
        answer = await client.post(CHAT, json={"messages": [deep], "max_tokens": 1})
        assert answer.status_code == 200, "what is no JSON stays a text"

    async def test_token_ids_are_counted_apart(self, client: Client) -> None:
        """As many as several prompts have; each must fit into the context."""
        for ids in ([5] * 1_000_000, [[5]] * 600_000):
            error = await refusal(client, COMPLETIONS, {"prompt": ids})
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        many = '{"prompt":[[5]' + ",[5]" * 100_000 + f"],{names(MAX_VALUES + 100)}}}"
        assert (await refusal(client, COMPLETIONS, many.encode()))["code"] == "too_many_values"

    async def test_half_a_character_is_replaced(self, client: Client) -> None:
        expected = (await complete(client, "a \N{REPLACEMENT CHARACTER} b"))["choices"]
        body = b'{"prompt": "a \\ud83d b", "temperature": 0, "max_tokens": 8}'
        assert (await client.post(COMPLETIONS, content=body)).json()["choices"] == expected

    async def test_compressed_ones_are_read(self, client: Client) -> None:
        body = json.dumps({"prompt": "a is a document", "temperature": 0, "max_tokens": 8}).encode()
        answer = await client.post(COMPLETIONS, content=gzip.compress(body), headers={"content-encoding": "gzip"})
        assert answer.json()["choices"] == (await complete(client))["choices"]
        answer = await client.post(COMPLETIONS, content=body, headers={"content-encoding": "br"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unknown_encoding")


class TestOtherRoutes:
    async def test_models_and_health(self, client: Client, worker: EngineWorker) -> None:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == (worker.engine.model_name, LONGEST)
        assert (await client.get("/health")).status_code == 200

    async def test_tokenize(self, client: Client, worker: EngineWorker) -> None:
        tokenizer = worker.engine.tokenizer
        answer = (await client.post("/tokenize", json={"prompt": "a is", "return_token_strs": True})).json()
        tokens = tokenizer.encode("a is")
        assert answer == {
            "count": len(tokens),
            "max_model_len": LONGEST,
            "tokens": tokens,
            "token_strs": tokenizer.convert_ids_to_tokens(tokens),
        }
        answer = (await client.post("/tokenize", json={"messages": [SYSTEM]})).json()
        rendered = tokenizer.apply_chat_template([SYSTEM], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(answer["tokens"]) == rendered

    async def test_metrics_count_what_was_found_in_each_tier(self, load: Load) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        worker = load()
        async with reaching(make_engine_app(worker)) as client:
            for _ in range(2):
                usage = (await complete(client, "a is a document " * 20, **facts(60)))["usage"]
            await complete(client, kv_transfer_params={"ragorder": 7})
            page = (await client.get("/metrics")).text
        families = list(text_string_to_metric_families(page))
        stats = TierStats.of(families)
        assert usage["prompt_tokens_details"]["cached_tokens"] == stats.hits.device == 60
        assert stats.hits.total == worker.stats().prompt_tokens
        device, host = stats.tiers
        assert (device.tier, host.tier) == ("device", "host")
        assert device.bytes > 0 and host.capacity_bytes == worker.stats().cache.host.capacity_bytes
        assert (stats.with_facts, stats.documents, stats.unreadable_facts, stats.without_facts) == (2, 2, 1, 0)
        samples = [sample for family in families for sample in family.samples]
        values = {sample.name: sample.value for sample in samples if not sample.labels}
        generated = worker.stats().generated_tokens
        gaps = generated - 3
        assert values["ragorder_engine_up"] == 1
        assert values["ragorder_engine_ttft_seconds_count"] == 3
        assert values["ragorder_engine_generated_tokens_total"] == generated
        assert values["ragorder_engine_time_between_tokens_seconds_count"] == gaps > 0
        buckets = [each.value for each in samples if each.name == "ragorder_engine_time_between_tokens_seconds_bucket"]
        assert buckets == sorted(buckets) and buckets[-1] == gaps
        assert all(sample.name.startswith(("ragorder_", "vllm:")) for sample in samples)


def slowly(worker: EngineWorker, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
    """Let each step take long."""
    step = worker.engine.step

    def slow_step() -> Any:
        time.sleep(seconds)
        return step()

    monkeypatch.setattr(worker.engine, "step", slow_step)


LONG = Request([5, 6, 7], sampling=Sampling(max_tokens=1000, ignore_eos=True))
SHORT = Request([5, 6, 7], sampling=Sampling(max_tokens=2, ignore_eos=True))


class TestWorker:
    async def test_the_event_loop_goes_on_during_a_step(
        self, worker: EngineWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slowly(worker, monkeypatch, 0.3)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        async with worker.submit([SHORT]) as updates:
            steps = [update async for _, update in updates]
        ticking.cancel()
        assert ticks > 3 * len(steps)

    async def test_a_disconnect_aborts_the_request(self, worker: EngineWorker) -> None:
        before = worker.stats().finished.get("abort", 0)
        async with worker.submit([LONG, LONG]) as updates:
            await anext(updates)
        assert await asyncio.to_thread(eventually, lambda: not worker.engine.has_unfinished)
        stats = worker.stats()
        assert (stats.running, stats.waiting, stats.finished["abort"] - before) == (0, 0, 2)

    async def test_a_request_cancelled_before_it_is_accepted_is_never_computed(
        self, worker: EngineWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stepping, go_on, added = threading.Event(), threading.Event(), []
        step, add = worker.engine.step, worker.engine.add

        def wait_and_step() -> Any:
            stepping.set()
            go_on.wait(60)
            return step()

        def note_and_add(request: Request) -> int:
            added.append(request)
            return add(request)

        monkeypatch.setattr(worker.engine, "step", wait_and_step)
        monkeypatch.setattr(worker.engine, "add", note_and_add)
        async with worker.submit([LONG]) as updates:
            assert await asyncio.to_thread(stepping.wait, 60)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), worker.submit([SHORT]):
                    pass
            go_on.set()
            await anext(updates)
            await anext(updates)
        assert added == [LONG]

    async def test_too_many_prompts_get_a_400_and_too_many_requests_a_503_until_others_end(self, load: Load) -> None:
        worker = load(max_unfinished=3)
        async with reaching(make_engine_app(worker)) as client:
            for prompt in (["a"] * 4, [[1, 2]] * 1024):
                error = await refusal(client, COMPLETIONS, {"prompt": prompt})
                assert (error["code"], error["param"]) == ("invalid_prompt", "prompt")
                assert f"{len(prompt):,} prompts in one request exceed the 3" in error["message"]
                assert "--max-requests" in error["message"]
            async with worker.submit([LONG, LONG]):
                response = await client.post(COMPLETIONS, json={"prompt": ["a", "b"]})
                assert await complete(client)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "too_many_waiting")
            assert response.headers["retry-after"] == "1"
            assert len((await complete(client, ["a", "b", "c"]))["choices"]) == 3

    async def test_a_request_that_memory_is_too_short_for_now_gets_a_503(
        self, load: Load, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = load()
        monkeypatch.setattr(memory_of(worker.engine), "hold", lambda tokens: False)
        monkeypatch.setattr(TieredEngine, "device_tokens", 1)
        async with reaching(make_engine_app(worker)) as client:
            response = await client.post(COMPLETIONS, json={"prompt": "a"})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "short_of_memory")
        assert "not enough KV memory now" in error["message"]
        assert response.headers["retry-after"] == "1"

    async def test_a_failed_engine_fails_all_and_says_so(
        self, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        worker = load()

        def fail() -> Any:
            raise RuntimeError(f"out of {WORD}")

        async with reaching(make_engine_app(worker)) as client:
            async with worker.submit([LONG]) as first, worker.submit([LONG]) as second:
                await anext(first)
                monkeypatch.setattr(worker.engine, "step", fail)
                for updates in (first, second):
                    with pytest.raises(EngineStoppedError):
                        async for _ in updates:
                            pass
            error = await refusal(client, COMPLETIONS, {"prompt": "a"}, status=503)
            assert error["code"] == "engine_stopped"
            assert "RuntimeError" in error["message"] and "start the server again" in error["message"]
            health = await client.get("/health")
            assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_stopped")
            assert "ragorder_engine_up 0.0" in (await client.get("/metrics")).text
        assert "RuntimeError" in caplog.text
        assert WORD not in error["message"] + caplog.text

    async def test_a_stream_that_fails_says_so(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = load()
        slowly(worker, monkeypatch)
        async with reaching(make_engine_app(worker)) as client:
            error = await fails_in_a_stream(
                client, {"prompt": "a", "max_tokens": 1000}, lambda: monkeypatch.setattr(worker.engine, "step", None)
            )
        assert error["code"] == "engine_stopped"

    async def test_a_failed_step_fails_its_requests_alone(
        self, worker: EngineWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: Any) -> Any:
            raise ValueError(WORD)

        def break_steps() -> None:
            patch.setattr("ragorder.kernels.models.batch.Forward.__call__", fail)

        async with reaching(make_engine_app(worker)) as client:
            with monkeypatch.context() as patch:
                break_steps()
                error = await refusal(client, COMPLETIONS, {"prompt": "a"}, status=500)
            assert error["code"] == "engine_error"
            assert await complete(client)
            with monkeypatch.context() as patch:
                assert await fails_in_a_stream(client, {"prompt": "a", "max_tokens": 1000}, break_steps) == error
            assert await complete(client)
        assert WORD not in error["message"] + caplog.text

    @pytest.mark.parametrize("bound", ["request", "server"])
    async def test_a_request_past_its_deadline_gets_a_504(
        self, load: Load, monkeypatch: pytest.MonkeyPatch, bound: str
    ) -> None:
        worker = load(deadline_s=30.5 if bound == "server" else 90.0)
        steps = itertools.count()
        clock, step = [0.0], worker.engine.step

        def takes_a_second() -> Any:
            clock[0] = float(next(steps))
            return step()

        monkeypatch.setattr("ragorder.kernels.engine.sequence.perf_counter", lambda: clock[0])
        monkeypatch.setattr(worker.engine, "step", takes_a_second)
        own = 30.5 if bound == "request" else 90.0
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "deadline_s": own}
        async with reaching(make_engine_app(worker)) as client:
            error = await refusal(client, COMPLETIONS, body, status=504)
            assert (error["code"], error["param"], error["type"]) == ("deadline_exceeded", "deadline_s", "server_error")
            assert "deadline of 30.5 s has passed" in error["message"]
            assert (await fails_in_a_stream(client, body))["code"] == error["code"]
            assert 'ragorder_engine_requests_total{end="timeout"} 2.0' in (await client.get("/metrics")).text
            assert not worker.engine.has_unfinished

    async def test_requests_after_the_end_are_refused(self, load: Load) -> None:
        worker = load()
        async with worker.submit([LONG]) as updates:
            await anext(updates)
            await asyncio.to_thread(worker.close)
            with pytest.raises(EngineStoppedError):
                async for _ in updates:
                    pass
        with pytest.raises(EngineStoppedError):
            async with worker.submit([SHORT]):
                pass
        worker.close()
        assert worker.stats().running == 0

    def test_an_event_loop_that_has_ended_is_left_alone(self, load: Load) -> None:
        worker = load()

        async def leave() -> None:
            submission = worker.submit([LONG])
            await anext(await submission.__aenter__())

        with suppress(RuntimeError):
            asyncio.run(leave())

        async def ask() -> int:
            async with worker.submit([SHORT]) as updates:
                return len([update async for _, update in updates])

        assert asyncio.run(ask()) == 2


class TestTransport:
    @asynccontextmanager
    async def exchange(self, app: Any, **options: Any) -> AsyncIterator[httpx2.Response]:
        options = {"timeout": 10} | options
        async with (
            httpx2.AsyncClient(transport=AppTransport(app), base_url="http://x", **options) as client,
            client.stream("POST", "/a%20b?c=d", content=b"body", headers={"X-Y": "z"}) as response,
        ):
            yield response

    async def begin(self, send: Any, *pieces: bytes, status: int = 200) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def test_brings_the_request_and_pieces_as_they_come(self) -> None:
        seen, go_on = [], asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            body = b""
            while (message := await receive()).get("more_body"):
                body += message["body"]
            seen.append((scope["method"], scope["path"], scope["raw_path"], scope["query_string"], body))
            assert (b"x-y", b"z") in scope["headers"]
            await self.begin(send, b"one", status=207)
            await go_on.wait()
            await send({"type": "http.response.body", "body": b"two"})

        async with self.exchange(app) as response:
            assert (response.status_code, response.headers["a"]) == (207, "b")
            pieces = response.aiter_raw()
            assert await anext(pieces) == b"one"
            go_on.set()
            assert [piece async for piece in pieces] == [b"two"]
        assert seen == [("POST", "/a b", b"/a%20b", b"c=d", b"body")]

    async def test_an_application_waits_for_a_slow_reader(self) -> None:
        sent = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal sent
            await self.begin(send)
            for _ in range(1000):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                sent += 1
            await send({"type": "http.response.body"})

        async with self.exchange(app) as response:
            await asyncio.sleep(0.05)
            assert sent < 100
            assert len(await response.aread()) == 1000

    @pytest.mark.parametrize("begun", [False, True])
    async def test_a_disconnect_or_a_timeout_cancels_the_application(self, begun: bool) -> None:
        cancelled = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if begun:
                await self.begin(send)
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        if begun:
            async with self.exchange(app):
                pass
        else:
            with pytest.raises(httpx2.ReadTimeout):
                async with self.exchange(app, timeout=0.05):
                    pass
            assert cancelled.is_set()
            cancelled.clear()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), self.exchange(app):
                    pass
        assert cancelled.is_set()

    @pytest.mark.parametrize("begun", [False, True])
    @pytest.mark.parametrize("raises", [False, True])
    async def test_an_application_that_gives_up_is_a_broken_connection(self, begun: bool, raises: bool) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if begun:
                await self.begin(send, b"x")
            if raises:
                raise RuntimeError(WORD)

        with pytest.raises(httpx2.RemoteProtocolError):
            async with self.exchange(app) as response:
                await response.aread()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**400, "<|im_end|>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
# fmt: off
FIELDS = [
    "prompt", "messages", "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop",
    "ignore_eos", "logprobs", "cache_salt", "kv_transfer_params", "n", "tools", "response_format",
    "chat_template_kwargs", "add_special_tokens", "top_logprobs", "content", "role", "x",
]
# fmt: on


class TestThroughTheProxy:
    """The same through the proxy, as `ragorder serve` puts them together."""

    @pytest.fixture
    def proxied(self, worker: EngineWorker) -> Any:
        return hosted(self.proxy(worker, api_key="key"), worker)

    def proxy(self, worker: EngineWorker, **options: Any) -> Any:
        engine = make_engine_app(worker)
        options |= {"make_transport": lambda: AppTransport(engine), "tokenizer": deepcopy(worker.engine.tokenizer)}
        return make_app(Orderer(block_size=16), upstream="http://embedded", send_facts=True, **options)

    async def test_probes_are_answered_without_a_key(self, proxied: Any) -> None:
        async with reaching(proxied) as client:
            for path in ("/health", "/ragorder/health"):
                assert (await client.get(path)).status_code == 200
            for path in ("/v1/models", "/tokenize"):
                assert (await client.get(path)).status_code == 401
            assert (await client.get("/v1/models", headers={"authorization": "Bearer key"})).status_code == 200

    async def test_probes_report_a_failed_engine(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = load()
        monkeypatch.setattr(worker.engine, "step", lambda: 1 / 0)
        async with reaching(hosted(self.proxy(worker), worker)) as client:
            assert (await refusal(client, COMPLETIONS, {"prompt": "a"}, status=503))["code"] == "engine_stopped"
            for path in ("/health", "/ragorder/health"):
                assert (await client.get(path)).status_code == 503

    async def test_a_slow_engine_is_a_timeout(self, worker: EngineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        slowly(worker, monkeypatch, 0.5)
        async with reaching(self.proxy(worker, timeouts=Timeouts(read_s=0.1))) as client:
            assert (await refusal(client, COMPLETIONS, {"prompt": "a"}, status=504))["code"] == "upstream_timeout"
        assert await asyncio.to_thread(eventually, lambda: not worker.engine.has_unfinished)

    async def test_a_deadline_reaches_the_engine(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = load()
        slowly(worker, monkeypatch)
        documents = {"documents": [{"id": "a", "text": TEXTS["a"]}], "query": "which?"}
        body = {"messages": [SYSTEM], "ragorder": documents, "deadline_s": 0.1, "max_tokens": 900, "ignore_eos": True}
        async with reaching(self.proxy(worker)) as client:
            assert (await refusal(client, CHAT, body, status=504))["code"] == "deadline_exceeded"
        assert not worker.engine.has_unfinished

    async def test_it_runs_while_the_proxy_does_and_ends_after_it(self, load: Load) -> None:
        worker = load()
        seen: list[str] = []
        messages = iter(["lifespan.startup", "lifespan.shutdown"])

        async def background() -> None:
            seen.append("background")
            try:
                await asyncio.sleep(60)
            finally:
                assert worker.failure is None
                seen.append("background ended")

        async def close() -> None:
            assert worker.failure is None
            seen.append("close")

        async def receive() -> Any:
            await asyncio.sleep(0.01)
            return {"type": next(messages)}

        async def send(message: Any) -> None:
            seen.append(message["type"])
            assert (worker.failure is None) == (message["type"] == "lifespan.startup.complete")

        proxy = self.proxy(worker, background=[background])
        await hosted(proxy, worker, close)({"type": "lifespan"}, receive, send)
        started, *ended = ["lifespan.startup.complete", "background ended", "close", "lifespan.shutdown.complete"]
        assert set(seen[:2]) == {started, "background"} and seen[2:] == ended


class TestFuzz:
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
    def test_hostile_bodies_are_answered_or_refused(self, path: str, shared_worker: EngineWorker) -> None:
        app = make_engine_app(shared_worker)
        statuses = set()
        good: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": [SYSTEM]}

        @settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
        @given(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3), st.binary(max_size=3))
        def fuzz(spoilt: dict[str, Any], mangled: bytes) -> None:
            body = good | spoilt
            if path != "/tokenize" and type(body.get("max_tokens")) is not int:
                body["max_tokens"] = 2
            content = json.dumps(body).encode("utf-8", "replace")
            if mangled:
                middle = len(content) // 2
                content = content[:middle] + mangled + content[middle:]
            response = runner.run(post(content))
            statuses.add(response.status_code)
            assert response.status_code in (200, 400, 404), response.text

        async def post(content: bytes) -> httpx2.Response:
            async with reaching(app) as client:
                return await client.post(path, content=content)

        with asyncio.Runner() as runner:
            fuzz()
        assert {200, 400} <= statuses
        assert shared_worker.failure is None


@dataclass
class Served(ServeProcess):
    """With the embedded engine."""

    model: str

    def openai(self, **options: Any) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def stream(self, prompt: str = "a", tokens: int = 1900) -> Any:
        """A completion of so many tokens, streamed by the OpenAI client."""
        return self.openai().completions.create(
            model=self.model, prompt=prompt, max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
        )

    def metric(self, name: str) -> float:
        page = httpx2.get(f"{self.url}/metrics").text
        return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if re.match(rf"{name}[ {{]", line))


@pytest.fixture(scope="module")
def launch(model: Path) -> Iterator[Launch]:
    options = ["--model", str(model), "--port", "0", "--profile", "none"]
    with launching(
        lambda popen, url: Served(popen, url, str(model)), *COMMAND, "engine", *options, OMP_NUM_THREADS="1"
    ) as launch:
        yield launch


@pytest.fixture(scope="module")
def served(launch: Launch) -> Served:
    return launch("--device-tokens", "8192", "--host-bytes", "8MiB", "--dtype", "float32")


def tagged(names: str, **fields: Any) -> dict[str, Any]:
    """What is sent beside the messages, with a document for each letter."""
    documents = [{"id": name, "text": TEXTS[name]} for name in names]
    return {"ragorder": {"documents": documents, "query": "Which?", **fields}}


def ask(client: Any, served: Served, names: str, **fields: Any) -> Any:
    return client.chat.completions.create(
        model=served.model, messages=[SYSTEM], max_tokens=4, temperature=0, extra_body=tagged(names, **fields)
    )


class TestServer:
    @pytest.mark.slow
    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's memory from /proc")
    @pytest.mark.parametrize(
        ("path", "frame", "item"),
        [
            (COMPLETIONS, '{"prompt":"a","metadata":[ITEMS]}', "[]"),
            (COMPLETIONS, '{"prompt":[ITEMS]}', "[1]"),
            (CHAT, '{"messages":[ITEMS]}', '{"role":""}'),
            (CHAT, '{"messages":[],"x":[ITEMS]}', "{}"),
            ("/tokenize", '{"messages":[{"role":"user","content":[ITEMS]}]}', "{}"),
        ],
    )
    def test_no_shape_of_a_body_takes_more_than_its_copies(
        self, path: str, frame: str, item: str, served: Served
    ) -> None:
        body = frame.replace("ITEMS", ",".join([item] * (3_000_000 // (len(item) + 1)))).encode()
        for _ in range(3):
            statuses, grown_mb = served.statuses_and_growth(path, body)
            assert statuses == {400}
            # Kept by the proxy, and by the engine's server, and each once more in pieces.
            assert grown_mb < 60 + 8 * 8 * len(body) / 1e6

    def test_the_openai_client_is_answered(self, served: Served) -> None:
        with served.openai() as client:
            assert [model.id for model in client.models.list()] == [served.model]
            completion = client.completions.create(model=served.model, prompt="a is", max_tokens=4, temperature=0)
            assert completion.usage.completion_tokens <= 4
            messages = [SYSTEM, {"role": "user", "content": "Which?"}]
            asked = {"model": served.model, "messages": messages, "max_tokens": 8, "temperature": 0}
            answer = client.chat.completions.create(**asked)
            streamed = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            *chunks, last = list(streamed)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == answer.choices[0].message.content
        assert last.usage.total_tokens == answer.usage.total_tokens

    def test_tagged_documents_are_ordered_and_found_again(self, served: Served) -> None:
        before = served.metric("ragorder_documents_total")
        with served.openai() as client:
            first, second = ask(client, served, "abc"), ask(client, served, "cab")
            third = ask(client, served, "dcba")
        cached = [each.usage.prompt_tokens_details.cached_tokens for each in (first, second, third)]
        documents = first.usage.prompt_tokens - 20
        assert cached[0] < documents / 3
        assert cached[1] > documents * 0.9
        assert cached[2] > documents * 0.9
        assert second.choices[0].message.content == first.choices[0].message.content, "they were put in one order"
        assert served.metric("ragorder_documents_total") - before == 10
        assert served.metric("vllm:ragorder_requests_with_facts_total") >= 3

    def test_a_prompt_before_documents_is_shared(self, served: Served) -> None:
        """In a completion, whose documents' place the proxy tells; in a chat the engine finds it."""
        found = []
        with served.openai() as client:
            for names in ("ab", "cd", "ef"):
                asked = {"model": served.model, "prompt": "Be brief, please.\n", "max_tokens": 1}
                usage = client.completions.create(**asked, extra_body=tagged(names, scope="front")).usage
                found.append(usage.prompt_tokens_details.cached_tokens)
        assert found[0] == 0 < found[1] == found[2] < 40

    def test_stats_show_the_tiers_and_that_predictions_were_right(self, served: Served) -> None:
        rng = random.Random(0)
        with served.openai() as client:
            for _ in range(20):
                ask(client, served, "".join(rng.sample("abcdefgh", 4)), scope="predicted")
        done = CliRunner().invoke(main, ["stats", served.url, "--json"])
        assert done.exit_code == 0, done.output
        figures = json.loads(done.stdout)
        assert figures["prediction_error_tokens"] < 16
        assert figures["saved_tokens"] > 0
        assert figures["reports"] == figures["served"] > 0
        assert figures["fallbacks"] == 0
        device, host = figures["kv"]["tiers"]
        assert (device["tier"], host["tier"]) == ("device", "host")
        assert device["chunks"] > 0
        assert host["capacity_bytes"] <= 8 << 20
        assert figures["kv"]["hits"]["computed"] > 0
        assert figures["kv"]["with_facts"] > 0

    def test_tenants_find_nothing_of_each_other(self, served: Served) -> None:
        with served.openai() as client:
            red = [ask(client, served, "efgh", scope="red") for _ in range(2)]
            blue = ask(client, served, "efgh", scope="blue")
        assert [each.usage.prompt_tokens_details.cached_tokens > 0 for each in (*red, blue)] == [False, True, False]

    def test_a_disconnect_frees_the_engine(self, served: Served) -> None:
        assert served.metric("ragorder_engine_running_requests") == 0
        with served.stream() as stream:
            next(iter(stream))
            assert served.metric("ragorder_engine_running_requests") == 1
        assert eventually(lambda: served.metric("ragorder_engine_running_requests") == 0, 10)

    def test_doctor_and_an_orderer_learn_its_size(self, served: Served) -> None:
        settings = Orderer.for_vllm(served.url).settings
        assert (settings.block_size, settings.capacity_tokens) == (16, 8192)
        done = CliRunner().invoke(main, ["doctor", served.url, "--json"])
        assert done.exit_code == 0, done.output
        findings = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
        for check in ("server", "prefix caching", "cached tokens"):
            assert findings[check]["verdict"] == "good", findings[check]
        assert "8,192 tokens in blocks of 16" in findings["capacity"]["found"]

    def test_web_pages_of_this_machine_may_use_it(self, served: Served) -> None:
        page = {"origin": "http://localhost:3000"}
        asked = page | {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        allowed = httpx2.options(f"{served.url}/v1/chat/completions", headers=asked)
        assert (allowed.status_code, allowed.headers["access-control-allow-headers"]) == (200, "content-type")
        assert httpx2.get(f"{served.url}/v1/models", headers=page).headers["access-control-allow-origin"] == "*"
        foreign = httpx2.options(f"{served.url}/v1/models", headers=asked | {"origin": "https://evil.example"})
        assert foreign.status_code == 403
        assert "access-control-allow-origin" not in foreign.headers

    def test_it_listens_on_this_machine_alone(self, served: Served) -> None:
        connections = psutil.Process(served.popen.pid).net_connections()
        assert [each.laddr for each in connections if each.status == "LISTEN"] == [served.address]


class TestStreamedWeights:
    @pytest.mark.slow
    def test_answers_are_those_of_the_whole_model(self, model: Path, served: Served, launch: Launch) -> None:
        from transformers import AutoConfig

        from ragorder.kernels.offload import ModelMemory

        size = ModelMemory.of(AutoConfig.from_pretrained(model), "float32")
        # One of the two layers, with room to align it.
        budget = size.outside + max(size.layers) + (1 << 15) + size.workspace(64) + 2048 * size.kv_token
        sizes = ["--device-bytes", str(budget), "--host-bytes", "0", "--device-tokens", "2048", "--dtype", "float32"]
        streamed = launch(*sizes)
        texts = []
        for each in (served, streamed):
            asked = {"model": each.model, "prompt": "the quick brown fox " * 9, "max_tokens": 20, "temperature": 0}
            with each.openai() as client:
                texts.append(client.completions.create(**asked).choices[0].text)
        assert texts[0] == texts[1] != ""
        assert streamed.metric("ragorder_engine_streamed_bytes_total") > 0
        assert streamed.metric("ragorder_engine_kv_layers") == streamed.metric("ragorder_engine_layers") == 2
        assert streamed.stop() == ""


class TestEnd:
    @pytest.mark.slow
    def test_streams_in_flight_may_end(self, launch: Launch) -> None:
        served = launch("--device-tokens", "4096")
        with served.stream(tokens=200) as stream:
            pieces = iter(stream)
            next(pieces)
            served.popen.send_signal(signal.SIGTERM)
            *_, last = pieces
        assert last.choices[0].finish_reason == "length"
        assert served.popen.communicate(timeout=60)[1] == ""
        assert served.popen.returncode == 128 + signal.SIGTERM

    @pytest.mark.slow
    def test_longer_streams_are_cut_off_without_a_trace_in_the_log(self, launch: Launch, tmp_path: Path) -> None:
        served = launch("--grace", "1", "--disk-path", str(tmp_path / "kv"), "--dtype", "float32")
        body = {"messages": [{"role": "user", "content": WORD}], "max_tokens": 2, "user": WORD, "cache_salt": WORD}
        tag = {"documents": [{"id": WORD, "text": f"{WORD} "}], "query": WORD, "scope": WORD}
        for each in (body, body | {"ragorder": tag}, body | {"n": WORD}, {"messages": WORD}, body | {WORD: 1}):
            httpx2.post(f"{served.url}{CHAT}", json=each)
        httpx2.post(f"{served.url}/{WORD}", content=WORD)
        assert WORD not in httpx2.get(f"{served.url}/metrics").text
        with served.stream(WORD, 2000) as stream:
            next(iter(stream))
            began = time.monotonic()
            logged = served.stop()
            assert time.monotonic() - began < 30
        assert WORD not in logged

    @pytest.mark.slow
    def test_a_kill_leaves_nothing_but_the_disks_folder(self, launch: Launch, tmp_path: Path) -> None:
        temporary = tmp_path / "tmp"
        temporary.mkdir()
        served = launch("--disk-path", str(tmp_path / "kv"), TMPDIR=str(temporary))
        with served.openai() as client:
            ask(client, served, "abc")
        served.popen.kill()
        served.popen.communicate(timeout=60)
        left = [path for path in temporary.rglob("*") if path.is_file() or path.is_socket()]
        assert left == []


@dataclass
class Command:
    """What `ragorder engine` was about to do when it was stopped."""

    result: Result
    settings: EngineSettings | None = None
    orderer: Any = None
    waiting: int | None = None


class TestOptions:
    @pytest.fixture(autouse=True)
    def clean_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in os.environ:
            if name.startswith("RAGORDER_"):
                monkeypatch.delenv(name)

    @pytest.fixture(scope="class")
    def profiles(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("cache")

    @pytest.fixture
    def unhelpful_hub(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
        """A model hub that answers every request with an error; the requested paths."""
        asked: list[str] = []

        class Unhelpful(Handler):
            def do_HEAD(self) -> None:
                asked.append(self.path)
                self.answer(503)

            do_GET = do_HEAD

        with LocalServer(Unhelpful) as hub:
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.base_url)
            monkeypatch.setattr(
                "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
                f"{hub.base_url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            )
            yield asked

    @pytest.fixture
    def serving(self, model: Path, profiles: Path, monkeypatch: pytest.MonkeyPatch) -> Serving:
        """Runs the command up to the moment from which it would serve."""
        import ragorder.adapters.proxy as proxy

        def serving(*options: str, model: str | None = str(model), **environment: str) -> Command:
            seen: dict[str, Any] = {}
            make_app, make_worker = proxy.make_app, EngineWorker.__init__

            def make(orderer: Any, **options: Any) -> Any:
                seen["orderer"] = orderer
                return make_app(orderer, **options)

            def start(worker: EngineWorker, engine: Any, *, max_unfinished: int) -> None:
                seen.update(settings=engine.settings, waiting=max_unfinished - engine.settings.max_requests)
                make_worker(worker, engine, max_unfinished=max_unfinished)

            with monkeypatch.context() as patch:
                patch.setattr("ragorder.kernels.profile_cache.cache_folder", lambda: profiles)
                patch.setattr(EngineWorker, "__init__", start)
                patch.setattr("ragorder.adapters.proxy.make_app", make)
                patch.setattr("ragorder.adapters.http_server.server.run_server", lambda *_, **__: None)
                chosen = [] if model is None else ["--model", model]
                result = CliRunner().invoke(main, ["engine", "--port", "0", *chosen, *options], env=environment)
            assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
            assert "Traceback" not in result.output
            return Command(result, **seen)

        return serving

    def test_without_options_the_engine_has_its_defaults(self, serving: Serving) -> None:
        command = serving()
        assert command.result.exit_code == 0, command.result.output
        assert command.settings == EngineSettings(profile="auto")
        assert command.waiting == 1000

    def test_a_profile_is_measured_at_the_first_start_unless_it_is_declined(
        self, serving: Serving, profiles: Path, tmp_path: Path
    ) -> None:
        def measured(*options: str) -> bool:
            command = serving("--device-tokens", "512", *options)
            assert command.result.exit_code == 0, command.result.output
            return "measuring prefill times" in command.result.stderr

        (tmp_path / "damaged.json").write_text("{")
        assert not measured("--profile", "none")
        assert [measured(*options) for options in ((), (), ("--profile", "auto"))] == [True, False, False]
        command = serving("--device-tokens", "512")
        assert "cached prefixes are compared in seconds" in command.result.stderr
        path = command.orderer.settings.profile
        assert path is not None and path.parent == profiles / "profiles"
        assert set(PrefillProfile.from_file(path).loads) == {"host"}
        plain = serving("--device-tokens", "512", "--profile", "none")
        assert plain.orderer.settings.profile is None and "compared in seconds" not in plain.result.stderr
        refused = serving("--profile", str(tmp_path / "damaged.json")).result
        assert (refused.exit_code, "this is not JSON: measure one" in refused.stderr) == (2, True)

    def test_all_options_reach_the_engine(self, serving: Serving, tmp_path: Path) -> None:
        profile = tmp_path / "profile.json"
        PrefillProfile((0, 100), (100, 200), ((1.0, 2.0), (1.5, 3.0))).to_file(profile)
        options: dict[str, tuple[Any, Any]] = {
            "--device-tokens": (2048, 2048),
            "--host-bytes": ("2MiB", 2 << 20),
            "--disk-path": (tmp_path / "kv", tmp_path / "kv"),
            "--disk-bytes": ("64MB", 64_000_000),
            "--policy": ("lru", "lru"),
            "--profile": (profile, profile),
            "--block-size": (32, 32),
            "--max-model-len": (512, 512),
            "--max-requests": (4, 4),
            "--max-batch-tokens": (256, 256),
            "--schedule": ("fcfs", "fcfs"),
            "--deadline": ("2m", 120.0),
            "--reuse": ("fused", "fused"),
            "--recompute": (0.2, 0.2),
            "--select": ("deviation", "deviation"),
            "--select-rounds": (2, 2),
            "--dtype": ("float32", "float32"),
            "--device": ("cpu", "cpu"),
        }
        given = [part for option, (text, _) in options.items() for part in (option, str(text))]
        command = serving(*given, "--max-waiting", "7")
        assert command.result.exit_code == 0, command.result.output
        values = {option[2:].replace("-", "_"): value for option, (_, value) in options.items()}
        values["deadline_s"] = values.pop("deadline")
        assert (command.settings, command.waiting) == (EngineSettings(**values), 7)

    @pytest.mark.parametrize(
        ("options", "environment", "expected"),
        [
            # Two layers of keys and values of one head with 64 numbers, four bytes each.
            ([], {}, {"block_size": 16, "capacity_tokens": 2048, "host_tokens": (2 << 20) // (2 * 2 * 64 * 4)}),
            ([], {}, {"reuse": "exact", "copies": "served"}),
            ([], {"RAGORDER_CAPACITY_TOKENS": "999"}, {"capacity_tokens": 999}),
            ([], {"RAGORDER_BLOCK_SIZE": "64"}, {"block_size": 64}),
            (
                ["--reuse", "fused", "--recompute", "0.3", "--copies", "all"],
                {},
                {"reuse": "fused", "recompute": 0.3, "copies": "all", "invest": True},
            ),
            (["--reuse", "fused"], {"RAGORDER_INVEST": "false"}, {"invest": False}),
        ],
    )
    def test_the_orderer_has_the_engines_sizes_and_reuse_unless_the_settings_say_otherwise(
        self, serving: Serving, options: list[str], environment: dict[str, str], expected: dict[str, Any]
    ) -> None:
        sizes = ["--device-tokens", "2048", "--host-bytes", "2MiB", "--dtype", "float32"]
        settings = serving(*sizes, *options, **environment).orderer.settings
        assert {name: getattr(settings, name) for name in expected} == expected

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ("--upstream http://x", "No such option '--upstream'"),
            ("--disk-bytes 1GiB", "--disk-bytes requires --disk-path"),
            ("--recompute 0.1", "--recompute requires --reuse fused"),
            ("--reuse exact --select deviation", "--select requires --reuse fused"),
            ("--reuse fused --recompute 1.5", "--recompute"),
            ("--reuse fused --select qurey", "Did you mean 'query'?"),
            ("--host-bytes many", "'many' is not a size"),
            ("--device-bytes -6GiB", "'-6GiB' is not a size"),
            ("--device-bytes 64KiB", "bytes are missing: the weights outside the layers take"),
            ("--device-bytes 64KiB", "Give --device-bytes"),
            ("--policy fifo", "'--policy': 'fifo' is not one of 'forecast', 'gdsf', 'lfu', 'lru', 'pgdsf'"),
            ("--dtype int3", "choose one of float32, bfloat16, float16"),
            ("--device abacus", "abacus"),
            ("--device-tokens 3", "less than a block"),
            ("--profile nowhere.json", "'nowhere.json' does not exist"),
            ("--block-size 2000", "--block-size"),
            ("--max-model-len 99999", "is exact only up to 2048 tokens"),
            ("--document-template {id}", "--document-template must contain {text}"),
            ("--host no.such.host.invalid", "no.such.host.invalid"),
            ("--model /does/not/exist", "there is no folder /does/not/exist: give the"),
            ("--model some/where/else", "there is no folder some/where/else: give the"),
            ("--model ./tiny", "there is no folder ./tiny: give the folder of a model"),
            ("--model a/name", "There is no folder a/name: it is looked for on the"),
        ],
    )
    def test_a_wrong_option_is_named(self, options: str, words: str, serving: Serving) -> None:
        command = serving(*options.split())
        assert command.result.exit_code != 0
        assert words in re.sub(r"\s+", " ", command.result.stderr)

    def test_a_model_is_required(self, serving: Serving) -> None:
        result = serving(model=None).result
        assert result.exit_code != 0 and "Missing option '--model'" in result.stderr

    @pytest.mark.parametrize(
        ("options", "kept"), [(["--device-bytes", "64KiB"], "128"), (["--device-tokens", "3"], None)]
    )
    def test_a_budget_bounds_what_torch_and_onednn_keep_compiled(
        self, options: list[str], kept: str | None, serving: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
        for name in names:
            # So that it is removed after the test.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        assert serving(*options).result.exit_code != 0
        assert [os.environ.get(name) for name in names] == [kept, kept]

    @pytest.mark.parametrize(
        ("name", "words", "asked"),
        [
            ("tiny", "--model tiny: there is no folder tiny: give the folder of a model", []),
            (
                "org/tiny",
                "there is no folder org/tiny, and it cannot be downloaded from the Hub: ",
                ["/org/tiny/resolve/main/config.json"],
            ),
        ],
    )
    def test_a_name_with_an_organisation_is_looked_up_on_the_hub_once(
        self, serving: Serving, unhelpful_hub: list[str], name: str, words: str, asked: list[str]
    ) -> None:
        command = serving(model=name)
        assert command.result.exit_code == 1
        assert words in command.result.stderr
        assert unhelpful_hub == asked

    def test_an_old_name_that_was_downloaded_is_taken(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(loading, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
        monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda name: pytest.fail(name, pytrace=False))
        with pytest.raises(pytest.fail.Exception, match="old-name"):
            loading.load_model("old-name", EngineSettings())

    def test_a_random_model_is_made_on_the_spot(
        self, serving: Serving, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragorder.kernels.random_model.random_model", lambda: model)
        monkeypatch.setattr("ragorder.kernels.random_model.has_fast_bfloat16", lambda: False)
        command = serving(model="random")
        assert command.result.exit_code == 0, command.result.output
        assert command.settings == EngineSettings(dtype="float32", profile="auto")
        assert command.orderer.settings.capacity_tokens > 0
        command = serving("--dtype", "bfloat16", model="random")
        assert command.settings == EngineSettings(dtype="bfloat16", profile="auto")

    def test_a_folder_without_weights(self, serving: Serving, model: Path, tmp_path: Path) -> None:
        for file in model.iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        command = serving(model=str(tmp_path))
        assert command.result.exit_code == 1
        assert f"--model {tmp_path}: " in command.result.stderr
        assert "weights" in command.result.stderr

    def test_a_used_port_is_named_before_a_model_is_loaded(
        self, serving: Serving, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(TieredEngine, "load", lambda *_: pytest.fail("loaded"))
        with socket.create_server(("127.0.0.1", 0)) as used:
            command = serving("--port", str(used.getsockname()[1]))
        assert "Address already in use" in command.result.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("module", ["torch", "transformers"])
    def test_a_missing_package_is_named_with_the_extra(self, module: str, python: Any) -> None:
        done = python(*COMMAND[1:], "engine", "--model", "x", "--port", "0", blocked=(module,))
        assert done.returncode == 1
        assert f"needs {module}: in a clone of ragorder, pip install '.[torch,proxy]'" in done.stderr
        assert "Traceback" not in done.stderr
