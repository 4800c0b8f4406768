"""A stream of requests ordered by a policy for a simulated prefix cache, and answered by the chain model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from ragorder import Lengths
from ragorder.benchmarks.fusion.fusion.model import ChainModel
from ragorder.benchmarks.fusion.fusion.reference import compute_prompts
from ragorder.benchmarks.fusion.fusion.task import ASK, BOS
from ragorder.benchmarks.fusion.quality_positions.stream import Asked, Stream
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.options import SIM_LIKE
from ragorder.eval.running.policies import ORDERERS, make_policy
from ragorder.eval.suites.quality.orders import Order

__all__ = ["Answers", "Ordered", "order_stream", "rows_of"]

Prompt = tuple[int, int, tuple[int, ...]]
"""A corpus, the name asked for, and documents of the corpus."""

_BATCH_TOKENS = 1_200
"""Of prompts answered together: their attention fits into the processor's cache."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """`permutation`: for each place the rank of its document."""

    permutation: tuple[int, ...]
    cached_tokens: int
    prompt_tokens: int


def order_stream(stream: Stream, policy: str, capacity_tokens: int | None, seed: int) -> list[Ordered]:
    """The requests one after the other, each confirmed before the next, with an empty cache at first."""
    order, prompts = Order.parse(policy), NumberedPrompts()
    engine = SimEngine(capacity_tokens=capacity_tokens, like=SIM_LIKE)
    settings = {**order.guards, "strict": True} if order.policy in ORDERERS else {}
    orderer = make_policy(order.policy, engine=engine, prompts=prompts, seed=seed, settings=settings)
    found = []
    for number, asked in enumerate(stream.requests):
        request = TraceRequest(str(number), stream.documents(asked))
        ordering = orderer.order(request.documents, lengths=Lengths(suffix=prompts.suffix_tokens(request)))
        served = engine.generate(prompts.token_ids(number, request, ordering.documents))
        ordering.confirm(served.cached_tokens)
        found.append(Ordered(tuple(ordering.permutation), served.cached_tokens, served.prompt_tokens))
    return found


@dataclass
class Answers:
    """Answers of a model to the requests of a stream, each prompt once whatever policies make it."""

    model: ChainModel
    stream: Stream
    _kept: dict[Prompt, int] = field(default_factory=dict)

    def to(self, orders: Sequence[Sequence[int]]) -> list[int]:
        """The tokens answered, with the documents of each request in an order of their ranks."""
        asked: list[Prompt] = [
            (each.corpus, each.name, tuple(each.documents[rank] for rank in order))
            for each, order in zip(self.stream.requests, orders, strict=True)
        ]
        new = [key for key in dict.fromkeys(asked) if key not in self._kept]
        if new:
            prompts = torch.stack([self._prompt(*key) for key in new])
            several = max(1, _BATCH_TOKENS // prompts.shape[1])
            for keys, batch in zip(_parts(new, several), prompts.split(several), strict=True):
                logits = self.model.logits(compute_prompts(self.model, batch).hidden[:, -1])
                self._kept.update(zip(keys, logits.argmax(-1).tolist(), strict=True))
        return [self._kept[key] for key in asked]

    def _prompt(self, corpus: int, name: int, documents: Sequence[int]) -> Tensor:
        text = self.stream.tokens[corpus, list(documents)].flatten()
        return torch.cat([torch.tensor([BOS]), text, torch.tensor([ASK, name])])


def rows_of(
    stream: Stream, orders: Sequence[Ordered], answers: Answers, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Rows of a `PositionsRecord`."""
    said = answers.to([each.permutation for each in orders])
    rows: dict[str, list[float]] = {}
    for asked, order, answer in zip(stream.requests, orders, said, strict=True):
        named, *others = (_place(asked, order, gold) for gold in asked.gold)
        moved = fmean(abs(rank - place) for place, rank in enumerate(order.permutation))
        row = {
            "right": int(answer == asked.value),
            "rank": asked.documents.index(asked.gold[0]),
            "place": named,
            **({"other_place": others[0]} if others else {}),
            "displacement": round(moved, 4),
            "cached_tokens": order.cached_tokens,
            "prompt_tokens": order.prompt_tokens,
        }
        for name, value in row.items():
            rows.setdefault(name, []).append(value)
        advance()
    return rows


def _place(asked: Asked, order: Ordered, document: int) -> int:
    return order.permutation.index(asked.documents.index(document))


def _parts(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]
