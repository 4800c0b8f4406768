"""Questions of the synthetic task, copies of their documents' KV, and answers in each of the ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from ragorder.benchmarks.fusion.fusion.cells import CORPUS_DOCUMENTS, Arm, Copies, Order
from ragorder.benchmarks.fusion.fusion.task import (
    ALIASES,
    ASK,
    BOS,
    NAMES,
    VOCABULARY,
    ChainModel,
    Computed,
    Level,
    ReferenceKV,
    compute,
    compute_behind,
    compute_prompts,
    draw_corpora,
    previous,
    system_prompt,
)

QUESTION_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Questions:
    level: Level
    corpora: Tensor
    """int64 (questions, corpus documents, document tokens)."""

    retrieved: Tensor
    """int64 (questions, documents): numbers of the prompt's documents, in their order."""

    similar: Tensor
    """int64 (questions, corpus documents, others): each document's others, the most similar first."""

    chains: Tensor
    """int64 (questions, hops): the documents that are needed, that of the link first."""

    names: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.names)

    def part(self, start: int, end: int) -> Self:
        chosen = slice(start, end)
        tensors = (self.corpora, self.retrieved, self.similar, self.chains, self.names, self.values)
        return type(self)(self.level, *(each[chosen] for each in tensors))

    @property
    def documents(self) -> Tensor:
        """int64 (questions, documents, document tokens)."""
        return self.of(self.retrieved)

    def retrieved_together(self, neighbours: int) -> float:
        """Return the share of the most similar documents of those in a prompt that are in the prompt."""
        if not neighbours:
            return 0.0
        of_prompt = self.similar.gather(1, self.retrieved[..., None].expand(-1, -1, self.similar.shape[2]))
        near = of_prompt[..., :neighbours].flatten(1)
        return float((near[..., None] == self.retrieved[:, None]).any(2).float().mean())

    def of(self, numbers: Tensor) -> Tensor:
        """Tokens of documents (questions, n) of each question's corpus."""
        return self.corpora.gather(1, numbers[..., None].expand(-1, -1, self.corpora.shape[2]))

    @property
    def prompts(self) -> Tensor:
        """int64 (questions, 1 + document tokens + 2): BOS, the documents, ASK, the name."""
        ends = torch.tensor([BOS, ASK]).expand(len(self), 2)
        return torch.cat([ends[:, :1], self.documents.flatten(1), ends[:, 1:], self.names[:, None]], 1)


def draw_questions(count: int, level: Level, order: Order, seed: int, topic: int = 0) -> Questions:
    """Draw the same questions and documents in each order: those needed, and those most similar to the first."""
    generator = torch.Generator().manual_seed(seed)
    corpora = draw_corpora(count, level, generator, topic=topic)
    chains = corpora.chains
    several = _all_different(chains.documents[..., : level.hops]) & (chains.hops == level.hops)
    picked = (torch.rand(several.shape, generator=generator) - (~several).float()).argmax(1)
    row = torch.arange(count)
    needed = chains.documents[row, picked][:, : level.hops]
    similarity = _similarity(corpora.tokens)
    if topic:
        topics = torch.arange(CORPUS_DOCUMENTS) // topic
        similarity += (topics[:, None] == topics).float()
    similarity += 1e-4 * torch.rand(similarity.shape, generator=generator)
    similarity.diagonal(dim1=1, dim2=2).fill_(-1)
    score = similarity[row, needed[:, 0]].scatter(1, needed, 2.0)
    retrieved = score.argsort(1, descending=True)[:, : level.documents]
    retrieved = retrieved.gather(1, torch.rand(retrieved.shape, generator=generator).argsort(1))
    if order != "any":
        places = (retrieved[..., None] == needed[:, None]).any(2).nonzero()[:, 1].view(count, level.hops)
        retrieved = retrieved.scatter(1, places, needed.flip(1) if order == "in front" else needed)
    return Questions(
        level,
        corpora.tokens,
        retrieved,
        similarity.argsort(2, descending=True)[..., : CORPUS_DOCUMENTS - 1],
        needed,
        chains.heads[row, picked],
        chains.values[row, picked],
    )


def _all_different(documents: Tensor) -> Tensor:
    pairs = documents[..., :, None] == documents[..., None, :]
    return pairs.sum((-2, -1)) == documents.shape[-1]


def _similarity(documents: Tensor) -> Tensor:
    """Cosines of the documents' TF-IDF vectors over names and aliases."""
    count, number, _ = documents.shape
    words = torch.zeros(count, number, VOCABULARY).scatter_(2, documents, 1.0)[..., ALIASES.start : NAMES.stop]
    weighted = normalize(words * torch.log(number / words.sum(1, keepdim=True).clamp_min(1)), dim=-1)
    return weighted @ weighted.transpose(1, 2)


EARLIER_DOCUMENTS = 3
"""Before a document in the earlier prompt that its copy is from."""


@dataclass(frozen=True, slots=True)
class DocumentCopies:
    kv: Sequence[ReferenceKV]
    """For each of a prompt's documents, in its order."""

    crossed: Tensor
    """(questions, document tokens of the prompt): the share of attention that went to other documents."""


def make_copies(model: ChainModel, questions: Questions, copies: Copies, neighbours: int, seed: int) -> DocumentCopies:
    if copies == "served":
        return _from_earlier_prompts(model, questions, seed)
    made = []
    for place, numbers in enumerate(questions.retrieved.unbind(1)):
        made.append(_behind(model, questions, numbers, _in_front(questions, place, copies, neighbours)))
    return DocumentCopies(made, torch.zeros(len(questions), questions.level.tokens))


def _in_front(questions: Questions, place: int, copies: Copies, neighbours: int) -> Sequence[Tensor]:
    """Return the documents, one a question each, whose KV this document is computed after."""
    retrieved = questions.retrieved
    if copies == "alone":
        return []
    if copies == "in front":
        return [*retrieved[:, :place].unbind(1)]
    if copies == "retrieved":
        return [*retrieved[:, :place].unbind(1), *retrieved[:, place + 1 :].unbind(1)]
    similar = questions.similar[torch.arange(len(questions)), retrieved[:, place]][:, :neighbours]
    return [*(similar if copies == "similar, best first" else similar.flip(1)).unbind(1)]


def _behind(model: ChainModel, questions: Questions, numbers: Tensor, in_front: Sequence[Tensor]) -> ReferenceKV:
    """Of one document a question, after the KV of others that were computed alone (Eq. 10)."""
    system = system_prompt(model, len(questions))
    others = [questions.of(other[:, None])[:, 0] for other in in_front]
    alone = [compute_behind(model, document, system).kv for document in others]
    own = questions.of(numbers[:, None])[:, 0]
    return compute_behind(model, own, ReferenceKV.joined(system, *alone)).kv


def _from_earlier_prompts(model: ChainModel, questions: Questions, seed: int) -> DocumentCopies:
    """Of each document, computed exactly after others of its corpus."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(questions.similar.shape, generator=generator).argsort(2)[..., :EARLIER_DOCUMENTS]
    others, row = questions.similar.gather(2, drawn), torch.arange(len(questions))
    made, crossed = [], []
    for numbers in questions.retrieved.unbind(1):
        documents = questions.of(torch.cat([others[row, numbers], numbers[:, None]], 1))
        prompts = torch.cat([torch.full((len(questions), 1), BOS), documents.flatten(1)], 1)
        start = prompts.shape[1] - documents.shape[2]
        found = compute_prompts(model, prompts)
        made.append(found.kv.part(start, prompts.shape[1]))
        crossed.append(torch.stack([each[:, :, start:, 1:start].sum(-1).mean(1) for each in found.attention]).mean(0))
    return DocumentCopies(made, torch.cat(crossed, 1))


_DEVIATION_LAYER = 1
T = TypeVar("T")


@dataclass
class Prompts:
    """`neighbours`: how many similar documents preprocessing takes; `seed`: of random choices."""

    model: ChainModel
    questions: Questions
    neighbours: int
    seed: int
    _kept: dict[object, object] = field(default_factory=dict)

    def right(self, arm: Arm, ratio: float) -> Tensor:
        """float (questions,): 1 for each right answer."""
        count = self.budget(arm, ratio)
        first, end = self._candidates(arm)
        if count == end - first:
            # The same for any copies.
            arm = Arm()
            count = self.reused_tokens(arm)
        # For every selection, nothing and everything are the same.
        select = (arm.select, arm.rounds) if 0 < count < self.reused_tokens(arm) else None
        key = ("right", arm.copies, arm.exact, count, select)
        return self._once(key, lambda: (self.answer(arm, count).argmax(-1) == self.questions.values).float())

    def answer(self, arm: Arm, count: int) -> Tensor:
        """Return logits (questions, vocabulary) with `count` of the reused tokens recomputed."""
        slots = self.selected(arm, count) if count else None
        return self.model.logits(self._compute(arm, slots).hidden[:, -1])

    def budget(self, arm: Arm, ratio: float) -> int:
        return round(ratio * self.reused_tokens(arm))

    def reused_tokens(self, arm: Arm) -> int:
        return 1 + self.questions.level.tokens - self._first_reused(arm)

    def selected(self, arm: Arm, count: int) -> Tensor:
        """int64 (questions, count): positions in the prompts, sorted."""
        ranked = self._once(("ranked", arm.select, arm.copies, arm.exact), lambda: self._ranked(arm))
        chosen = ranked[:, : -(-count // arm.rounds)].sort(1).values
        for number in range(2, arm.rounds + 1):
            attention = self._compute(arm, chosen).attention
            looked = torch.stack(attention).mean((0, 2))[:, : chosen.shape[1]].sum(1)
            first, end = self._candidates(arm)
            score = looked.scatter(1, chosen, torch.inf)[:, first:end]
            more = first + score.argsort(stable=True, dim=1, descending=True)
            chosen = more[:, : -(-count * number // arm.rounds)].sort(1).values
        return chosen

    def deviation(self, arm: Arm) -> Tensor:
        """(questions, document tokens): squared, of the reused KV in the second layer from that of full attention."""
        reused, full, layer = self._reused(arm), self._full.kv, _DEVIATION_LAYER
        squares = [
            (ours[layer] - theirs[layer]).square().sum((1, 3))
            for ours, theirs in ((reused.keys, full.keys), (reused.values, full.values))
        ]
        return (squares[0] + squares[1])[:, 1 : 1 + self.questions.level.tokens]

    def _first_reused(self, arm: Arm) -> int:
        level = self.questions.level
        return 1 + round(arm.exact * level.documents) * level.document_tokens

    def _candidates(self, arm: Arm) -> tuple[int, int]:
        """Positions that may be selected."""
        return self._first_reused(arm), 1 + self.questions.level.tokens

    def _ranked(self, arm: Arm) -> Tensor:
        first, end = self._candidates(arm)
        return first + self._score(arm)[:, first:end].argsort(stable=True, dim=1, descending=True)

    def _score(self, arm: Arm) -> Tensor:
        """(questions, tokens of the prompt or fewer)"""
        level, prompts = self.questions.level, len(self.questions)
        if arm.select == "query":
            return self._compute(arm, None).attention[-1].sum(2).mean(1)
        if arm.select == "deviation":
            score = self.deviation(arm)
        elif arm.select == "inter":
            score = self._made(arm).crossed
        elif arm.select == "head":
            score = -(torch.arange(level.tokens) % level.document_tokens).float().expand(prompts, -1)
        else:
            score = torch.rand(prompts, level.tokens, generator=torch.Generator().manual_seed(self.seed))
        return pad(score, (1, 0))

    def _compute(self, arm: Arm, slots: Tensor | None) -> Computed:
        tokens = self._tokens
        rows = torch.arange(tokens.shape[1] - QUESTION_TOKENS, tokens.shape[1]).expand(len(tokens), -1)
        if slots is not None:
            rows = torch.cat([slots, rows], 1)
        return compute(
            self.model,
            tokens.gather(1, rows),
            previous(tokens).gather(1, rows),
            rows,
            self._reused(arm),
        )

    def _reused(self, arm: Arm) -> ReferenceKV:
        """All documents' KV before anything is recomputed."""

        def put_together() -> ReferenceKV:
            first = self._first_reused(arm)
            copies = self._made(arm).kv[first // self.questions.level.document_tokens :]
            question = ReferenceKV.empty(self.model, len(self.questions), QUESTION_TOKENS)
            return ReferenceKV.joined(self._full.kv.part(0, first), *copies, question)

        return self._once(("reused", arm.copies, arm.exact), put_together)

    def _made(self, arm: Arm) -> DocumentCopies:
        return self._once(
            arm.copies, lambda: make_copies(self.model, self.questions, arm.copies, self.neighbours, self.seed)
        )

    def _once(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # type: ignore[return-value]

    @cached_property
    def _tokens(self) -> Tensor:
        return self.questions.prompts

    @cached_property
    def _full(self) -> Computed:
        return compute_prompts(self.model, self._tokens)


DEVIATION = "deviation"
_TOGETHER = 50


@dataclass(slots=True)
class Measured:
    """Rows by question: 1.0 where the answer is right, by ratio, and the deviation of reused KV in the second layer."""

    rows: dict[str, list[float]] = field(default_factory=dict)
    by_position: list[float] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """What a record has of it beside `rows`."""
        return {DEVIATION: [round(value, 3) for value in self.by_position]}


def measure_curves(
    model: ChainModel,
    questions: Questions,
    arms: Mapping[str, Arm],
    *,
    neighbours: int,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Measured]:
    found = {name: Measured(by_position=[0.0] * questions.level.tokens) for name in arms}
    for start in range(0, len(questions), _TOGETHER):
        prompts = Prompts(model, questions.part(start, start + _TOGETHER), neighbours, seed + start)
        for name, arm in arms.items():
            deviation = prompts.deviation(arm)
            columns = {f"{ratio:g}": prompts.right(arm, ratio) for ratio in arm.ratios}
            columns[DEVIATION] = deviation.sum(1)
            for key, values in columns.items():
                found[name].rows.setdefault(key, []).extend(round(value, 3) for value in values.tolist())
            shares = (deviation.sum(0) / len(questions)).tolist()
            found[name].by_position = [sum(pair) for pair in zip(found[name].by_position, shares, strict=True)]
        for _ in prompts.questions.names:
            advance()
    return found
