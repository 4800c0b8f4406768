"""Exactness of the simulated engine: its cached tokens against those of vLLM, request by request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Literal

from ragorder.eval.data.workloads import document_tokens, make_workload
from ragorder.eval.engines.sim import SimEngine
from support.inside import vllm_of

if TYPE_CHECKING:
    from ragorder.eval.engines.vllm import VLLMEngine

Reason = Literal["nothing was evicted yet", "last block of a whole prompt", "vLLM kept it", "vLLM evicted it"]

_LONGEST_CONVERSATION = 600
_request_numbers = count()


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to vLLM. Its prompt is `token_ids`, behind the prompt and the answer of the request number `follows`.

    It is answered with `output_tokens` tokens, 1 or more; if it is `aborted`, it would have been answered with more.
    """

    token_ids: Sequence[int]
    output_tokens: int = 1
    follows: int | None = None
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """A request as vLLM served it: its whole prompt, its answer, and the tokens of the prompt that were cached."""

    token_ids: Sequence[int]
    answer: Sequence[int]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A request for which the two found different numbers of cached tokens, and how that may be.

    Where an earlier request differs, the two caches may differ since, and what follows is the consequence.
    """

    row: int
    prompt_tokens: int
    vllm_tokens: int
    sim_tokens: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Exactness:
    """What was compared, and how it came out. `working_set_tokens` are those of all different whole blocks of the
    prompts, `evicted_blocks` those that the simulated engine gave up."""

    requests: int
    prompt_tokens: int
    vllm_tokens: int
    sim_tokens: int
    working_set_tokens: int
    capacity_tokens: int | None
    evicted_blocks: int
    differences: list[Difference] = field(default_factory=list)

    @property
    def identical_share(self) -> float:
        """The share of requests for which both found the same number of cached tokens; 1 where there was none."""
        return 1 - len(self.differences) / self.requests if self.requests else 1.0


def serve_on_vllm(engine: VLLMEngine, asks: Sequence[Ask]) -> list[Served]:
    """Serve requests one after another on a vLLM with an empty cache. Raises ValueError for one that does not fit."""
    engine.reset()
    served: list[Served] = []
    for ask in asks:
        before = served[ask.follows] if ask.follows is not None else None
        token_ids = [*before.token_ids, *before.answer, *ask.token_ids] if before else list(ask.token_ids)
        served.append(_serve(engine, token_ids, ask))
    return served


def _serve(engine: VLLMEngine, token_ids: list[int], ask: Ask) -> Served:
    """`VLLMEngine.generate` for an answer of the request's own length, or for the beginning of one."""
    from vllm import SamplingParams

    vllm, longest = vllm_of(engine)
    room = longest - ask.output_tokens - ask.aborted
    if not 1 <= len(token_ids) <= room:
        raise ValueError(f"the prompt has {len(token_ids)} tokens; with this answer the engine takes 1 to {room}")
    name = f"exactness-{next(_request_numbers)}"
    max_tokens = ask.output_tokens + ask.aborted
    vllm.add_request(name, {"prompt_token_ids": token_ids}, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    answer: list[int] = []
    cached_tokens = 0
    while len(answer) < ask.output_tokens:
        for output in vllm.step():
            answer = list(output.outputs[0].token_ids)
            cached_tokens = output.num_cached_tokens or 0
    if ask.aborted:
        vllm.abort_request([name])
    return Served(token_ids, answer, cached_tokens)


def compare(served: Sequence[Served], engine: SimEngine) -> Exactness:
    """Serve on a simulated engine, from an empty cache on, what vLLM has served."""
    engine.reset()
    size = engine.block_size
    hashes: set[int] = set()
    differences = []
    sim_tokens = 0
    for row, request in enumerate(served):
        # The last token of an answer is never computed upon.
        evicted_blocks = engine.evicted_blocks
        found = engine.generate(request.token_ids, answer=request.answer[:-1]).cached_tokens
        hashes.update(engine.block_hashes(request.token_ids))
        sim_tokens += found
        if found != request.cached_tokens:
            reason: Reason = _reason(request, found, size) if evicted_blocks else "nothing was evicted yet"
            differences.append(Difference(row, len(request.token_ids), request.cached_tokens, found, reason))
    return Exactness(
        requests=len(served),
        prompt_tokens=sum(len(request.token_ids) for request in served),
        vllm_tokens=sum(request.cached_tokens for request in served),
        sim_tokens=sim_tokens,
        working_set_tokens=len(hashes) * size,
        capacity_tokens=engine.capacity_tokens,
        evicted_blocks=engine.evicted_blocks,
        differences=differences,
    )


def _reason(request: Served, found: int, size: int) -> Reason:
    tokens = len(request.token_ids)
    if tokens % size == 0 and {request.cached_tokens, found} == {tokens - size, tokens}:
        return "last block of a whole prompt"
    return "vLLM kept it" if request.cached_tokens > found else "vLLM evicted it"


@dataclass(frozen=True, slots=True)
class _Draw:
    """Where a trace's tokens and lengths come from."""

    rng: random.Random
    seed: int
    requests: int
    vocabulary: int
    block_size: int
    pool_blocks: int
    document_scale: float
    longest_answer: int

    def ids(self, tokens: int) -> list[int]:
        return self.rng.choices(range(self.vocabulary), k=tokens)

    def recalled(self, blocks: Sequence[int]) -> Iterator[int]:
        """Numbers of items of so many blocks: each new, or one that is about to leave a pool of `pool_blocks`, or just
        left it. That is where a cache shows what it does: one block more or less, and another request misses."""
        fresh = iter(range(len(blocks)))
        used: list[int] = []
        for _ in range(self.requests):
            number = self._leaving(used, blocks) if self.rng.random() < 0.6 else None
            used.append(next(fresh) if number is None else number)
            yield used[-1]

    def _leaving(self, used: list[int], blocks: Sequence[int]) -> int | None:
        """Take out of the items in order of use the one with about a pool of others behind it, if there is one."""
        room = self.pool_blocks + self.rng.randint(-10, 4)
        for place in reversed(range(len(used))):
            room -= blocks[used[place]]
            if room <= 0:
                return used.pop(place)
        return None


def make_asks(
    name: str,
    seed: int,
    requests: int,
    *,
    vocabulary: int,
    block_size: int,
    pool_blocks: int,
    document_scale: float = 1.0,
    longest_answer: int = 40,
) -> list[Ask]:
    """Draw the requests of one of `TRACES`, for a pool of so many blocks.

    Token ids are below `vocabulary`. Documents have about 200 tokens, times `document_scale`; answers of more than one
    token have up to `longest_answer`. Raises KeyError for another name.
    """
    rng = random.Random(seed)
    draw = _Draw(rng, seed, requests, vocabulary, block_size, pool_blocks, document_scale, longest_answer)
    return TRACES[name](draw)


def _workload(name: str) -> Callable[[_Draw], list[Ask]]:
    def asks(draw: _Draw) -> list[Ask]:
        workload = make_workload(name, draw.seed, top_k=5, requests=draw.requests)
        lengths = [max(1, round(document_tokens(d) * draw.document_scale)) for d in range(len(workload.documents))]
        documents = [draw.ids(length) for length in lengths]
        system = draw.ids(64)
        return [
            Ask([*system, *(token for d in ranking for token in documents[d]), *draw.ids(20)])
            for ranking in workload.rankings[: draw.requests]
        ]

    return asks


def _whole_blocks(draw: _Draw) -> list[Ask]:
    """Prompts that are multiples of the block size, some of them the beginnings of others, asked again and again."""
    size = draw.block_size
    heads = [draw.ids(size * draw.rng.randint(1, 3)) for _ in range(draw.requests // 4 + 1)]
    prompts = [draw.rng.choice(heads) + draw.ids(size * draw.rng.choice((0, 1, 2))) for _ in range(draw.requests)]
    return [Ask(prompts[number]) for number in draw.recalled([len(prompt) // size for prompt in prompts])]


def _repeats(draw: _Draw) -> list[Ask]:
    """Prompts of any length from one token on, asked again and again."""
    prompts = [draw.ids(draw.rng.randint(1, 4 * draw.block_size)) for _ in range(draw.requests)]
    return [Ask(prompts[number]) for number in draw.recalled([len(prompt) // draw.block_size for prompt in prompts])]


def _answers(draw: _Draw) -> list[Ask]:
    """Conversations: answers of many tokens, some of them aborted, and prompts that go on where the last one ended or
    start over."""
    prompts = [draw.ids(draw.rng.randint(1, 4 * draw.block_size)) for _ in range(draw.requests)]
    blocks = [len(prompt) // draw.block_size for prompt in prompts]
    last: dict[int, tuple[int, int]] = {}
    asks: list[Ask] = []
    for row, number in enumerate(draw.recalled(blocks)):
        follows, tokens = last.get(number, (None, 0))
        more = draw.ids(draw.rng.randint(1, 2 * draw.block_size))
        output_tokens = draw.rng.randint(1, draw.longest_answer)
        ask = Ask(prompts[number], output_tokens, aborted=draw.rng.random() < 0.2)
        if follows is not None and draw.rng.random() < 0.6 and tokens < _LONGEST_CONVERSATION:
            ask = replace(ask, token_ids=more, follows=follows)
        else:
            tokens = 0
        asks.append(ask)
        tokens += len(ask.token_ids) + output_tokens
        last[number] = row, tokens
        blocks[number] = tokens // draw.block_size
    return asks


TRACES: dict[str, Callable[[_Draw], list[Ask]]] = {
    "paper-shuf": _workload("paper-shuf"),
    "zipf": _workload("zipf10"),
    "whole-blocks": _whole_blocks,
    "repeats": _repeats,
    "answers": _answers,
}
