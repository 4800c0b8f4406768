"""SmolLM2 from question to answer: neither speculation nor the cache changes a word."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("starlette")

from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker, make_engine_app
from ragorder.adapters.openai import AsyncOrderedClient
from ragorder.adapters.openai.pipelined import OrderedPrompts, Question, ordered_pipeline
from ragorder.adapters.workflows import WorkflowPrompts, ordered_workflows
from ragorder.kernels.engine import EngineSettings, TieredEngine
from ragorder.kernels.random_model.documentation import chunks_of, library_modules, read_entries
from ragorder.pipelining import ContinuousIVF, StagedIVF, staged_retrieval
from ragorder.pipelining.workflow import WorkflowTrace, interpret, multistep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

MODULES = ("bisect", "calendar", "csv", "heapq", "shutil", "statistics", "tempfile", "textwrap")
WIDTH = 128
CHUNK = 16
SETTINGS = EngineSettings(
    device_tokens=8192, host_bytes=0, dtype="float32", device="cpu", verify=False, chunk_tokens=CHUNK
)
SYSTEM = "Answer from the documents, in one short sentence."

Load = Callable[[], EngineWorker]


def embed(text: str) -> Any:
    """A bag of words."""
    vector = np.zeros(WIDTH, np.float32)
    for word in re.findall(r"\w{3,}", text.lower()):
        vector[zlib.crc32(word.encode()) % WIDTH] += 1
    return vector / (np.linalg.norm(vector) or 1)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """The documentation of some modules of Python."""
    sources = library_modules()
    chunks = [chunk for module in MODULES for chunk in chunks_of(module, read_entries(module, sources[module]))]
    return [Document(chunk.id, chunk.text[:400]) for chunk in chunks]


@pytest.fixture(scope="module")
def index(documents: list[Document]) -> Any:
    vectors = np.stack([embed(document.text) for document in documents])
    index = faiss.index_factory(WIDTH, "IVF8,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    index.nprobe = 8
    return index


@pytest.fixture(scope="module")
def plain(smollm2_folder: Path) -> Any:
    """The model without an engine."""
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()


@pytest.fixture
def load(smollm2_folder: Path) -> Iterator[Load]:
    """Loads engines, in which nothing is cached, each with a worker."""
    workers: list[EngineWorker] = []

    def loaded() -> EngineWorker:
        workers.append(EngineWorker(TieredEngine.load(smollm2_folder, SETTINGS)))
        return workers[-1]

    yield loaded
    for worker in workers:
        worker.close()


def parts(worker: EngineWorker, template: str) -> tuple[PromptBuilder, Orderer]:
    builder = PromptBuilder(SYSTEM, question_template=template, tokenizer=worker.engine.tokenizer)
    orderer = Orderer(capacity_tokens=8192, prefix_tokens=builder.prefix_tokens, tokens=builder.document_tokens)
    return builder, orderer


class TestSpeculation:
    QUESTIONS = (
        "What does textwrap.dedent remove?",
        "What does heapq.heappush do with the heap?",
        "Which function copies a whole directory tree?",
        "What does tempfile.mkdtemp create?",
    )

    async def answers(
        self, worker: EngineWorker, index: Any, documents: Sequence[Document], **options: Any
    ) -> list[Any]:
        builder, orderer = parts(worker, "Question: {query}")

        def embed_question(question: Question) -> Any:
            return embed(question.query)

        search = staged_retrieval(StagedIVF(index, stages=4), embed_question, documents.__getitem__, top_k=2)
        engine = EmbeddedStreams(worker)
        pipeline = ordered_pipeline(
            engine, orderer=orderer, builder=builder, retrieval=search, requests=engine.requests, **options
        )
        try:
            return [await pipeline.answer(Question(each, None, 16, 0.0, {})) for each in self.QUESTIONS]
        finally:
            await pipeline.close()

    async def test_answers_are_those_without_it(self, load: Load, index: Any, documents: list[Document]) -> None:
        awaited = await self.answers(load(), index, documents, speculate=False, warm_up=False)
        begun = await self.answers(load(), index, documents, cautious=False, max_prefill_bs=4)
        assert [stream.text for stream in begun] == [stream.text for stream in awaited]
        assert all(stream.text for stream in awaited)
        assert any(stream.trace.right for stream in begun), "some began before their search had ended"


class TestAWorkflow:
    QUESTIONS = (
        "Which functions of heapq add an item, and which remove one?",
        "How do shutil.copy and copytree differ?",
    )
    GRAPH = multistep(topk=2, rounds=3, plan_tokens=32, max_tokens=16).compile()

    async def test_answers_as_stage_by_stage(self, load: Load, index: Any, documents: list[Document]) -> None:
        async def retrieve(query: str, topk: int) -> list[Document]:
            return [documents[place] for place in index.search(embed(query)[None], topk)[1][0].tolist()]

        worker = load()
        builder, orderer = parts(worker, "{query}")
        prompts = WorkflowPrompts(OrderedPrompts(orderer, builder, "token_ids"))
        stages = [
            await interpret(self.GRAPH, question, engine=EmbeddedStreams(worker), prompts=prompts, retrieve=retrieve)
            for question in self.QUESTIONS
        ]

        worker = load()
        builder, orderer = parts(worker, "{query}")
        engine, traces = EmbeddedStreams(worker), list[WorkflowTrace]()
        search = ContinuousIVF(index, nprobe=8)
        async with ordered_workflows(
            engine,
            search,
            embed,
            documents.__getitem__,
            orderer=orderer,
            builder=builder,
            prompts="token_ids",
            requests=engine.requests,
            observers=[traces.append],
        ) as server:
            wavefront = [await server.run(self.GRAPH, question) for question in self.QUESTIONS]
        for one, other in zip(wavefront, stages, strict=True):
            assert (one.text, dict(one.state)) == (other.text, dict(other.state))
            assert one.state["notes"], "there was more than one step"
        assert sum(piece.cached_tokens or 0 for trace in traces for piece in trace.pieces) > 0


class TestAConversation:
    async def test_finds_its_history_and_says_what_the_model_says_without_a_cache(
        self, load: Load, documents: list[Document], plain: Any
    ) -> None:
        worker = load()
        builder, orderer = parts(worker, "Question: {query}")
        tokenizer: Any = worker.engine.tokenizer
        about = [document for document in documents if document.id.startswith("textwrap")][:3]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=make_engine_app(worker))) as http:
            server = openai.AsyncOpenAI(base_url="http://embedded/v1", api_key="none", http_client=http)
            client = AsyncOrderedClient(
                server, model=worker.engine.model_name, orderer=orderer, builder=builder, send_facts=True
            )
            chat, before = client.conversation(), 0
            for number, (question, shown) in enumerate(
                [
                    ("What does textwrap do?", about[:2]),
                    ("And what does wrap return?", about[1:]),
                    ("Can it keep tabs?", about[::-1]),
                ]
            ):
                answer = await chat.ask(question, shown, max_tokens=12)
                *sent, said = chat.messages
                prompt = tokenizer.apply_chat_template(sent, add_generation_prompt=True, return_dict=True)["input_ids"]
                given = torch.tensor([prompt])
                with torch.no_grad():
                    made = plain.generate(
                        given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False
                    )
                expected = tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True)
                assert (answer.text, said["content"]) == (expected, expected)
                assert answer.prompt_tokens == len(prompt)
                # All of the last turn's prompt, but for the piece in which it ends.
                assert answer.cached_tokens is not None and answer.cached_tokens > before - CHUNK
                before = answer.prompt_tokens
                assert len(chat.turn.repeated) == (0, 1, 3)[number]
