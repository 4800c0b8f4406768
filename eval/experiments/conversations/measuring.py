"""Cached tokens of conversations through the proxy, by where the documents stand, from the server's counters.

`python -m ragorder.eval.conversations` asks a server the same in retrieval order and through the proxy. The server is a
simulated one, or with `--engine vllm` a real one with a small random model: some minutes without a GPU.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from zlib import crc32

import click
import httpx2
from starlette.requests import Request

from ragorder.eval.data.corpora import Corpus, load_pydocs
from ragorder.eval.engines.models import load_tokenizer
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.engines.tiny_model import make_model

__all__ = ["LAYOUTS", "Outcome", "Server", "SimulatedServer", "Turn", "conversations", "main", "make_proxy", "run"]

_CHAT = "/v1/chat/completions"
_SYSTEM = {"role": "system", "content": "Answer the question from the documents."}
_TEMPLATE = '<document id="{id}">\n{text}\n</document>'
_TOPICS = 25
_NEAREST = 8
_DOCUMENTS = 5
# By so many ranks another wording may move a document.
_NOISE = 6.0
# About as long as a docstring is, in characters.
_LONGEST = 640
_LONGEST_PROMPT = 8192
_CHARACTERS = 3.75
_PREDICTED = "x-ragorder-predicted-cached-tokens"
_COUNTERS = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits")

Message = dict[str, Any]


@dataclass(slots=True)
class Turn:
    """A question, and its documents by name and text in retrieval order."""

    question: str
    documents: list[tuple[str, str]]
    answer: str = ""

    def written(self, *, ranks: bool = False) -> list[str]:
        """The documents as an application writes them; `ranks`: under the numbers of their ranks."""
        names = [str(rank) for rank, _ in enumerate(self.documents, 1)] if ranks else [id for id, _ in self.documents]
        return [_TEMPLATE.format(id=id, text=text) for id, (_, text) in zip(names, self.documents, strict=True)]

    def shown(self, *, ranks: bool = False) -> str:
        """Documents and question in one text."""
        return "\n".join([*self.written(ranks=ranks), "", self.question])


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens of all prompts by the server's own counters, those of them that it had in its cache, and those that were
    predicted (None: no proxy)."""

    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int | None = None

    @property
    def cached_share(self) -> float:
        """The part of all prompt tokens that was cached."""
        return self.cached_tokens / self.prompt_tokens


Layout = Callable[[Sequence[Turn]], dict[str, Any]]


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _chat(turns: Sequence[Turn], shown: Sequence[Any], system: str = _SYSTEM["content"]) -> dict[str, Any]:
    """A chat in which the user's messages are `shown`, and the answers those of the turns."""
    messages: list[Message] = [{"role": "system", "content": system}]
    for turn, content in zip(turns, shown, strict=True):
        messages += [_user(content), {"role": "assistant", "content": turn.answer}]
    return {"messages": messages[:-1]}


def _each_turn(turns: Sequence[Turn]) -> dict[str, Any]:
    return _chat(turns, [turn.shown() for turn in turns])


def _first_turn(turns: Sequence[Turn]) -> dict[str, Any]:
    return _chat(turns, [turns[0].shown(), *(turn.question for turn in turns[1:])])


def _system(turns: Sequence[Turn]) -> dict[str, Any]:
    documents = "\n".join([_SYSTEM["content"], *turns[-1].written()])
    return _chat(turns, [turn.question for turn in turns], documents)


def _last_turn(turns: Sequence[Turn]) -> dict[str, Any]:
    return _chat(turns, [*(turn.question for turn in turns[:-1]), turns[-1].shown()])


def _one_turn(turns: Sequence[Turn]) -> dict[str, Any]:
    return _chat(turns[-1:], [turns[-1].shown()])


def _parts(turns: Sequence[Turn]) -> dict[str, Any]:
    texts = [*turns[-1].written(), turns[-1].question]
    return _chat(turns[-1:], [[{"type": "text", "text": text} for text in texts]])


def _ranks(turns: Sequence[Turn]) -> dict[str, Any]:
    return _chat(turns[-1:], [turns[-1].shown(ranks=True)])


def _tagged(turns: Sequence[Turn]) -> dict[str, Any]:
    documents = [{"id": id, "text": text} for id, text in turns[-1].documents]
    return {"messages": [_SYSTEM], "ragorder": {"documents": documents, "query": turns[-1].question}}


# Where the documents stand; how they are sent in retrieval order, and how through the proxy; with which of its options.
LAYOUTS: dict[str, tuple[Layout, Layout, dict[str, Any]]] = {
    "each turn": (_each_turn, _each_turn, {}),
    "first turn only": (_first_turn, _first_turn, {}),
    "system message, replaced": (_system, _system, {}),
    "last turn, behind history": (_last_turn, _last_turn, {}),
    "one turn": (_one_turn, _one_turn, {}),
    "one turn, tagged": (_one_turn, _tagged, {}),
    "one turn, in parts": (_parts, _parts, {}),
    "one turn, ids are ranks": (_ranks, _ranks, {}),
    "the same, --number-by-place": (_ranks, _ranks, {"number_by_place": True}),
}


def conversations(count: int, turns: int, seed: int = 0) -> list[list[Turn]]:
    """Conversations about the standard library, each on one of 25 topics, which are drawn by a power law. Each turn
    asks in words of its own, so that retrieval finds five of the eight documents nearest to the topic, in another
    order."""
    corpus = _corpus()
    rng = random.Random(seed)
    topics = rng.sample(range(len(corpus.questions)), _TOPICS)

    def ask(topic: int, number: int) -> Turn:
        score = {place: rank + rng.uniform(0, _NOISE) for rank, place in enumerate(corpus.rankings[topic])}
        found = [corpus.documents[place] for place in sorted(score, key=score.__getitem__)[:_DOCUMENTS]]
        documents = [(document.id, document.text[:_LONGEST]) for document in found]
        return Turn(f"{corpus.questions[topic].text} (asked in words of my own: {number})", documents)

    drawn = rng.choices(topics, [1 / rank for rank in range(1, _TOPICS + 1)], k=count)
    return [[ask(topic, rng.randrange(1000)) for _ in range(turns)] for topic in drawn]


@cache
def _corpus() -> Corpus:
    return load_pydocs(top_k=_NEAREST)


class Server(Protocol):
    """The server behind the proxy; `transport` where it is in this process."""

    @property
    def base_url(self) -> str: ...

    @property
    def model_name(self) -> str: ...

    @property
    def block_size(self) -> int: ...

    @property
    def capacity_tokens(self) -> int: ...

    @property
    def transport(self) -> httpx2.AsyncBaseTransport | None: ...

    def reset(self) -> None:
        """Empty the cache."""

    def counts(self) -> tuple[float, float]:
        """Tokens of all prompts so far, and those of them that were cached."""


class RealServer(VLLMServer):
    """A vLLM on this machine."""

    transport = None

    def counts(self) -> tuple[float, float]:
        page = httpx2.get(f"{self.base_url}/metrics", timeout=60, trust_env=False).text
        queries, hits = (
            sum(map(float, re.findall(rf"^{name}(?:_total)?{{.*}} (\S+)$", page, re.MULTILINE))) for name in _COUNTERS
        )
        return queries, hits


class SimulatedServer:
    """vLLM's block pool behind an OpenAI-compatible application, without a model. A token has 3.75 characters, and an
    answer is as long as the body allows."""

    base_url = "http://simulated"
    model_name = "served"

    def __init__(self, blocks: int, block_size: int = 32) -> None:
        self.block_size = block_size
        self.capacity_tokens = blocks * block_size
        self.transport = httpx2.ASGITransport(self)
        self._engine = SimEngine(block_size=block_size, capacity_tokens=self.capacity_tokens, like="vllm-0.32")
        self._queries = self._hits = self._answers = 0

    def reset(self) -> None:
        self._engine.reset()

    def counts(self) -> tuple[float, float]:
        return self._queries, self._hits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        content = json.dumps(self._answer(await Request(scope, receive).json())).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self._answers += 1
        answer = f"{self._answers} is the number of this answer. ".ljust(int(body["max_tokens"] * _CHARACTERS), ".")
        said = "".join(f"<{each['role']}>{_text(each['content'])}</>" for each in body["messages"]) + "<assistant>"
        prompt, whole = _tokens(said), _tokens(said + answer)
        done = self._engine.generate(prompt, answer=whole[len(prompt) : -1])
        self._queries += len(prompt)
        self._hits += done.cached_tokens
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(whole) - len(prompt),
            "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        }
        return {"choices": [{"message": {"content": answer}, "finish_reason": "length"}], "usage": usage}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _tokens(text: str) -> list[int]:
    edges = [int(number * _CHARACTERS) for number in range(int(len(text) / _CHARACTERS) + 1)]
    return [crc32(text[start:end].encode()) for start, end in pairwise([*edges, len(text)]) if start < end]


async def run(
    server: Server, made: Sequence[Sequence[Turn]], layout: Layout, *, max_tokens: int, proxy: Any = None
) -> Outcome:
    """Ask every conversation's first question, then every second one, and so on; of the server itself, or through
    `proxy`, an application in front of it."""
    server.reset()
    before = server.counts()
    predicted: list[int] = []
    transport = server.transport if proxy is None else httpx2.ASGITransport(proxy)
    common = {"model": server.model_name, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    async with httpx2.AsyncClient(base_url=server.base_url, timeout=600, trust_env=False, transport=transport) as http:
        for number in range(len(made[0])):
            for turns in made:
                response = await http.post(_CHAT, json=layout(turns[: number + 1]) | common)
                response.raise_for_status()
                turns[number].answer = response.json()["choices"][0]["message"]["content"]
                if _PREDICTED in response.headers:
                    predicted.append(int(response.headers[_PREDICTED]))
    queries, hits = (after - known for after, known in zip(server.counts(), before, strict=True))
    return Outcome(round(queries), round(hits), sum(predicted) if predicted else None)


def make_proxy(server: Server, tokenizer: Any = None, **options: Any) -> Any:
    """The proxy in front of a server, with the template of the layouts."""
    from ragorder.adapters.proxy import DocumentTemplate, make_app
    from ragorder.orderer import Orderer

    orderer = Orderer(capacity_tokens=server.capacity_tokens, block_size=server.block_size)
    if server.transport is not None:
        options["make_transport"] = lambda: server.transport
    return make_app(
        orderer, upstream=server.base_url, template=DocumentTemplate(_TEMPLATE), tokenizer=tokenizer, **options
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


@click.command()
@click.option(
    "--engine", type=click.Choice(["simulated", "vllm"]), default="simulated", show_default=True, help="What is asked."
)
@click.option("--conversations", "count", type=click.IntRange(min=1), default=15, show_default=True, help="How many.")
@click.option("--turns", type=click.IntRange(min=1), default=3, show_default=True, help="Questions in each of them.")
@click.option("--blocks", type=click.IntRange(min=1), default=511, show_default=True, help="Blocks of the cache.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=24, show_default=True, help="Tokens of an answer.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of topics and questions.")
@click.option("--tokenizer", is_flag=True, help="Give the proxy the tokenizer of the vLLM's model.")
@click.option("--layout", "layouts", multiple=True, type=click.Choice(list(LAYOUTS)), help="Only this. [default: all]")
def main(
    engine: str,
    count: int,
    turns: int,
    blocks: int,
    max_tokens: int,
    seed: int,
    tokenizer: bool,
    layouts: tuple[str, ...],
) -> None:
    """Cached tokens of conversations, by where the documents stand: in retrieval order and by the proxy."""
    if tokenizer and engine != "vllm":
        raise click.UsageError("--tokenizer goes with --engine vllm")
    made = conversations(count, turns, seed)
    with ExitStack() as until_done:
        loaded = None
        server: Server = SimulatedServer(blocks)
        if engine == "vllm":
            model = _model(made, Path(until_done.enter_context(TemporaryDirectory())))
            loaded = load_tokenizer(str(model)) if tokenizer else None
            server = until_done.enter_context(RealServer(model, blocks=blocks, max_model_len=_LONGEST_PROMPT))
        click.echo(f"{'documents':30}{'tokens':>9}{'retrieval order':>17}{'ragorder':>10}{'predicted':>11}")
        for name in layouts or LAYOUTS:
            plain, sent, options = LAYOUTS[name]
            retrieval = asyncio.run(run(server, made, plain, max_tokens=max_tokens))
            proxy = make_proxy(server, loaded, **options)
            ordered = asyncio.run(run(server, made, sent, max_tokens=max_tokens, proxy=proxy))
            predicted = (ordered.predicted_tokens or 0) / ordered.prompt_tokens
            figures = f"{_percent(retrieval.cached_share):>17}{_percent(ordered.cached_share):>10}"
            click.echo(f"{name:30}{ordered.prompt_tokens:9,}{figures}{_percent(predicted):>11}")


def _model(made: Sequence[Sequence[Turn]], folder: Path) -> Path:
    texts = [text for turns in made for turn in turns for _, text in turn.documents]
    shape = {"layers": 2, "hidden_size": 256, "vocab_size": 4096, "max_position_embeddings": _LONGEST_PROMPT}
    return make_model(folder / "model", texts=texts, **shape)


if __name__ == "__main__":
    main()
