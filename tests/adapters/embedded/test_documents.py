"""Requests to the embedded engine that say where their documents end: they are found again, or fused."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from support.commands import run_command
from support.embedded_app import (
    COMPLETIONS,
    SYSTEM,
    TEXTS,
    Client,
    Load,
    chat,
    complete,
    facts,
    prompt_of,
    reaching,
    refusal,
)
from support.serving_app import serving
from support.waiting import eventually

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.embedded import EngineWorker, make_engine_app
from ragorder.adapters.embedded.app import translator_of
from ragorder.adapters.openai.pipelined import PipelinedClient, Question
from ragorder.cli import main
from ragorder.kernels.engine import EngineSettings
from ragorder.kernels.preprocessing.builder import FusionBuilder, SourceDocument
from ragorder.kernels.preprocessing.neighbours import GivenNeighbours
from ragorder.pipelining import plain_retrieval

pytestmark = pytest.mark.merge


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

    @pytest.mark.parametrize("prefix", [-1, -(10**9), 10**9, 10**400, True, "7"], ids=lambda each: str(each)[:12])
    async def test_a_false_prefix_is_not_believed(self, worker: EngineWorker, prefix: Any) -> None:
        """A negative one would put its request before all others."""
        translator = translator_of(worker.engine)
        chatting = {"messages": [SYSTEM, {"role": "user", "content": TEXTS["a"]}]}
        for translate, asked in ((translator.completion, {"prompt": TEXTS["a"]}), (translator.chat, chatting)):
            without, false = (
                translate(json.dumps({**asked, **facts(30, **said)}).encode()).requests[0]
                for said in ({}, {"prefix": prefix})
            )
            assert false == without


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

    async def test_usage_and_metrics_count_reused_and_recomputed_tokens(self, fusing: EngineWorker) -> None:
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
        stats = fusing.engine.stats()
        async with reaching(make_engine_app(fusing)) as client:
            text = (await client.get("/metrics")).text
        assert f'ragorder_engine_fused_tokens_total{{tier="device"}} {stats.fused.device:.1f}' in text
        assert f"ragorder_engine_recomputed_tokens_total {stats.recomputed:.1f}" in text
        sources = dict(re.findall(r'ragorder_engine_prompt_tokens_total{source="(\w+)"} ([0-9.]+)', text))
        assert float(sources["fused"]) == stats.fused.total - stats.recomputed > 0
        assert sum(map(float, sources.values())) == stats.prompt_tokens

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
