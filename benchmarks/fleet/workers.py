"""Several orderers on one vLLM server, as the workers of an application have them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from time import perf_counter
from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.openai.tokenizer import load_tokenizer
from ragorder.benchmarks.chats.talks import TOPICS, draw_topics
from ragorder.common.files import cache_folder
from ragorder.eval.data.corpora import load_pydocs
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.engines.prompts import SYSTEM_PROMPT
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.load import rotated
from ragorder.eval.running.record import RunRecord
from ragorder.eval.running.suite import Experiment, Job, Line, Suite
from ragorder.kernels.random_model import make_model

_BLOCKS = 511


class WorkersCell(SuiteCell):
    """`orderers` answer the questions in turn, `concurrency` of them at a time; `prompts` is how they are sent."""

    orderers: int = Field(1, ge=1)
    questions: int = Field(120, ge=1)
    top_k: int = Field(5, ge=1)
    prompts: Literal["token_ids", "messages"] = "token_ids"
    concurrency: int = Field(1, ge=1)


class TimedOrderer(Orderer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.took_us: list[float] = []
        self.predicted: list[int] = []

    def order(self, *args: Any, **options: Any) -> Any:
        start = perf_counter()
        ordering = super().order(*args, **options)
        self.took_us.append(round(1e6 * (perf_counter() - start), 1))
        self.predicted.append(ordering.cached_tokens)
        return ordering


class SeveralOrderers(Experiment):
    """Retrieval order, or orderers with the mirror or KV events. Without concurrency, predictions are known."""

    kind = "workers"
    base = RunRecord
    cell = WorkersCell
    policies: ClassVar[Any] = ("retrieval", "mirror", "events")
    sized_by = "questions"
    one_job = True

    def obstacle(self, suite: Suite, cell: WorkersCell, policy: str) -> str | None:
        if self.options.engine != "openai" or self.options.base_url is not None:
            return "a server is started: use --engine openai without --base-url"
        return None

    def applies(self, suite: Suite, cell: WorkersCell, policy: str) -> bool:
        """Retrieval order is the same with any number of orderers."""
        return policy != "retrieval" or cell == suite.cells[0]

    def in_order(self, jobs: Sequence[Job]) -> list[Job]:
        """Seed by seed: a machine that gets busier does so for all numbers of orderers."""
        return sorted(jobs, key=lambda job: job.seed)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: WorkersCell = job.cell
        requests = questions_by_topic(job.requests, job.seed, cell.top_k)
        server, builder = self.kept(None, self.start)
        for policy in rotated(job.policies, job.seed):
            server.reset()
            with ExitStack() as stack:
                options = _options(policy, server, cell.top_k)
                orderers = [
                    stack.enter_context(TimedOrderer.for_vllm(server.base_url, builder=builder, **options))
                    for _ in range(cell.orderers)
                ]
                rows = serve(cell, orderers, server, builder, requests, advance)
            yield {
                "policy": policy,
                "engine": {
                    "name": "openai",
                    "model": str(self.options.model or "random weights"),
                    "block_size": server.block_size,
                    "capacity_tokens": server.capacity_tokens,
                },
                "rows": rows,
            }

    def start(self) -> tuple[VLLMServer, PromptBuilder]:
        model = self.options.model
        if model is None:
            texts = [document.text for document in load_pydocs(cache=cache_folder()).documents]
            model = make_model(cache_folder() / "random-2x256", texts=texts, layers=2, hidden_size=256)
        builder = PromptBuilder(SYSTEM_PROMPT, tokenizer=load_tokenizer(model))
        return self.resources.enter_context(VLLMServer(model, blocks=_BLOCKS, max_model_len=8192)), builder


def questions_by_topic(count: int, seed: int, top_k: int) -> list[TraceRequest]:
    """Questions about the standard library on 25 topics, some of them far more popular."""
    corpus = load_pydocs(cache=cache_folder())
    topics = defaultdict(list)
    for question, ranking in zip(corpus.questions, corpus.rankings, strict=True):
        documents = [corpus.documents[place] for place in ranking[:top_k]]
        topics[question.id.partition("/")[0]].append(TraceRequest(question.text, documents))
    rng = random.Random(seed)
    asked = rng.sample(sorted(topics), TOPICS)
    return [rng.choice(topics[draw_topics(rng, asked, 1)[0]]) for _ in range(count)]


def _options(policy: str, server: VLLMServer, top_k: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if policy == "events":
        options |= {name: getattr(server, name) for name in ("events_endpoint", "replay_endpoint", "events_topic")}
    if policy == "retrieval":
        options["keep_first"] = top_k
    return options


def serve(
    cell: WorkersCell,
    orderers: Sequence[TimedOrderer],
    server: VLLMServer,
    builder: PromptBuilder,
    requests: Sequence[TraceRequest],
    advance: Callable[[], None],
) -> dict[str, list[Any]]:
    from openai import OpenAI

    from ragorder.adapters.openai import Answer, OrderedClient

    with OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as openai:
        clients = [
            OrderedClient(openai, model=server.model_name, orderer=orderer, builder=builder, prompts=cell.prompts)
            for orderer in orderers
        ]

        def generate(number: int) -> Answer:
            request = requests[number]
            answer = clients[number % len(clients)].generate(request.question, request.documents, max_tokens=2)
            advance()
            return answer

        with ThreadPoolExecutor(cell.concurrency) as pool:
            answers = list(pool.map(generate, range(len(requests))))

    def of_orderers(name: str) -> list[Any]:
        lists = [getattr(orderer, name) for orderer in orderers]
        return [lists[number % len(lists)][number // len(lists)] for number in range(len(answers))]

    rows: dict[str, list[Any]] = {
        "prompt_tokens": [answer.prompt_tokens for answer in answers],
        "cached_tokens": [answer.cached_tokens or 0 for answer in answers],
        "order_us": of_orderers("took_us"),
    }
    if cell.concurrency == 1:
        rows["predicted_tokens"] = of_orderers("predicted")
    return rows
