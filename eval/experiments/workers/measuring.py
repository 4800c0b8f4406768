"""Several orderers in front of one vLLM server, as workers or replicas of an application are: what each knows of the
others' orders, with KV events and without.

`python -m ragorder.eval.workers` starts a server of its own and counts hits by the server's counters.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from statistics import fmean
from time import perf_counter
from typing import Any, Literal

import click

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.observing.tier_stats import fetch_hits
from ragorder.adapters.openai import OrderedClient
from ragorder.eval.data.cache import cache_folder
from ragorder.eval.data.corpora import load_pydocs
from ragorder.eval.data.machine import describe_environment
from ragorder.eval.data.trace import Request
from ragorder.eval.engines.models import load_tokenizer
from ragorder.eval.engines.prompts import SYSTEM_PROMPT
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.engines.tiny_model import make_model
from ragorder.eval.running.measures import percentile

__all__ = ["main", "questions_by_topic"]

Prompts = Literal["token_ids", "messages"]

_TOPICS = 25
_BLOCKS = 511


@dataclass(frozen=True, slots=True)
class _Row:
    """What so many orderers did with one seed's questions; `ordering_ms` is the median of a call of `order`."""

    orderers: int
    knows: str
    seed: int
    cached_ratio: float
    prompt_tokens: int
    error_tokens: float
    ordering_ms: float


class _Timed(Orderer):
    """Remembers how long each ordering took, and how many tokens it predicted beside the truth."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.took_ms: list[float] = []
        self.predicted: list[int] = []

    def order(self, *args: Any, **options: Any) -> Any:
        start = perf_counter()
        ordering = super().order(*args, **options)
        self.took_ms.append(1e3 * (perf_counter() - start))
        self.predicted.append(ordering.cached_tokens)
        return ordering


def questions_by_topic(count: int, seed: int, top_k: int) -> list[Request]:
    """Questions about the standard library on 25 topics, of which some are asked about far more often (1/rank)."""
    corpus = load_pydocs(cache=cache_folder())
    topics = defaultdict(list)
    for question, ranking in zip(corpus.questions, corpus.rankings, strict=True):
        documents = [corpus.documents[place] for place in ranking[:top_k]]
        topics[question.id.partition("/")[0]].append(Request(question.text, documents))
    rng = random.Random(seed)
    asked = rng.sample(sorted(topics), _TOPICS)
    popularity = list(accumulate(1 / rank for rank in range(1, _TOPICS + 1)))
    return [rng.choice(topics[rng.choices(asked, cum_weights=popularity)[0]]) for _ in range(count)]


@contextmanager
def _orderers(count: int, knows: str, server: VLLMServer, builder: PromptBuilder, top_k: int) -> Iterator[list[_Timed]]:
    """So many, none of which knows of another but through the server."""
    options: dict[str, Any] = {"partial_blocks_first": True}
    if knows == "events":
        options |= {
            "events_endpoint": server.events_endpoint,
            "replay_endpoint": server.replay_endpoint,
            "events_topic": server.events_topic,
        }
    if knows == "retrieval order":
        options["keep_first"] = top_k
    with ExitStack() as stack:
        yield [stack.enter_context(_Timed.for_vllm(server.base_url, builder=builder, **options)) for _ in range(count)]


def _serve(
    orderers: Sequence[_Timed],
    server: VLLMServer,
    builder: PromptBuilder,
    requests: Sequence[Request],
    prompts: Prompts,
    concurrency: int,
) -> tuple[float, int, float]:
    """The share of prompt tokens that the server found cached, all of them, and how far predictions were off."""
    from openai import OpenAI

    with OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as openai:
        clients = [
            OrderedClient(openai, model=server.model_name, orderer=orderer, builder=builder, prompts=prompts)
            for orderer in orderers
        ]

        def ask(number: int) -> int:
            request = requests[number]
            client = clients[number % len(clients)]
            answer = client.generate(request.question, request.documents, max_tokens=2)
            return answer.cached_tokens or 0

        before = fetch_hits(server.base_url)
        with ThreadPoolExecutor(concurrency) as pool:
            cached = list(pool.map(ask, range(len(requests))))
        hits = fetch_hits(server.base_url) - before
    error = 0.0
    if concurrency == 1:
        predicted = [
            orderers[number % len(orderers)].predicted[number // len(orderers)] for number in range(len(cached))
        ]
        error = fmean(abs(one - other) for one, other in zip(predicted, cached, strict=True))
    return hits.device / hits.total, hits.total, error


def measure(
    counts: Sequence[int], *, questions: int, seeds: Sequence[int], top_k: int, prompts: Prompts, concurrency: int
) -> Iterator[_Row]:
    """Every set-up on every seed's questions; which is first changes with the seed, and each finds the cache empty."""
    texts = [document.text for document in load_pydocs(cache=cache_folder()).documents]
    model = make_model(cache_folder() / "random-2x256", texts=texts, layers=2, hidden_size=256)
    builder = PromptBuilder(SYSTEM_PROMPT, tokenizer=load_tokenizer(model))
    setups = [(1, "retrieval order"), *((count, knows) for count in counts for knows in ("mirror", "events"))]
    with VLLMServer(model, blocks=_BLOCKS, max_model_len=8192) as server:
        for place, seed in enumerate(seeds):
            requests = questions_by_topic(questions, seed, top_k)
            first = place % len(setups)
            for count, knows in [*setups[first:], *setups[:first]]:
                server.reset()
                with _orderers(count, knows, server, builder, top_k) as orderers:
                    figures = _serve(orderers, server, builder, requests, prompts, concurrency)
                    took = percentile([each for orderer in orderers for each in orderer.took_ms], 50)
                yield _Row(count, knows, seed, *figures, took)


@click.command()
@click.option(
    "--orderers", type=click.IntRange(min=1), multiple=True, default=(1, 4, 8), show_default=True, help="How many."
)
@click.option("--questions", type=click.IntRange(min=1), default=120, show_default=True, help="Of each seed.")
@click.option(
    "--seed", "seeds", type=int, multiple=True, default=(0, 1, 2), show_default=True, help="Of topics and questions."
)
@click.option("--top-k", type=click.IntRange(min=1), default=5, show_default=True, help="Documents a question.")
@click.option(
    "--prompts",
    type=click.Choice(["token_ids", "messages"]),
    default="token_ids",
    show_default=True,
    help="How they are sent.",
)
@click.option("--concurrency", type=click.IntRange(min=1), default=1, show_default=True, help="Questions in flight.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
def main(
    orderers: Sequence[int],
    questions: int,
    seeds: Sequence[int],
    top_k: int,
    prompts: Prompts,
    concurrency: int,
    as_json: bool,
) -> None:
    """Hits of several orderers in front of one server, questions in turn to each."""
    environment = describe_environment()
    rows = list(
        measure(orderers, questions=questions, seeds=seeds, top_k=top_k, prompts=prompts, concurrency=concurrency)
    )
    if as_json:
        click.echo(json.dumps({"environment": environment, "rows": [asdict(row) for row in rows]}))
        return
    click.echo(
        f"{questions} questions, top-{top_k}, {prompts}, {concurrency} in flight, {_BLOCKS} blocks of 32 tokens:"
    )
    for count, knows in sorted({(row.orderers, row.knows) for row in rows}, key=lambda setup: (setup[1], setup[0])):
        ours = [row for row in rows if (row.orderers, row.knows) == (count, knows)]
        click.echo(
            f"{count} x {knows:15} {fmean(row.cached_ratio for row in ours):.1%} cached"
            f" ({' '.join(f'{row.cached_ratio:.1%}' for row in ours)}),"
            f" predictions off by {fmean(row.error_tokens for row in ours):.1f} tokens a request,"
            f" order p50 {fmean(row.ordering_ms for row in ours):.2f} ms"
        )
    click.echo(", ".join(f"{name}: {value}" for name, value in environment.items()))


if __name__ == "__main__":
    main()
