"""A synthetic task: corpora whose questions are answered by chains of two or three documents.

A document has lines of three tokens: definitions `alias value ;`, links `name alias ;` whose alias another document
defines, for three hops relays `alias alias ;` between them, and a line of filler. `ASK name` asks for the value. Names,
aliases and values are drawn for each corpus, so no answer can be memorised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragorder.benchmarks.fusion.fusion.arms import CORPUS_DOCUMENTS

__all__ = [
    "ALIASES",
    "ALIAS_OF",
    "ASK",
    "BOS",
    "CORPUS_DOCUMENTS",
    "DOC",
    "NAMES",
    "OPENING",
    "VALUES",
    "VOCABULARY",
    "WORDS",
    "Chains",
    "Corpora",
    "Level",
    "draw_corpora",
]

BOS, DOC, END, ASK, ALIAS_OF = range(5)
OPENING = (DOC, ASK, ALIAS_OF)
VALUES = range(5, 37)
ALIASES = range(37, 165)
NAMES = range(165, 293)
WORDS = range(293, 309)
VOCABULARY = 309

_DEFINITIONS = 2
_LINE_TOKENS = 3
_FILLER_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Level:
    """Documents that a question needs, and those of its prompt. Raises ValueError."""

    hops: int
    documents: int

    def __post_init__(self) -> None:
        if self.hops not in (2, 3):
            raise ValueError(f"hops is {self.hops}: give 2 or 3")
        if not self.hops <= self.documents <= CORPUS_DOCUMENTS:
            raise ValueError(f"documents is {self.documents}: give {self.hops} to {CORPUS_DOCUMENTS}")

    @property
    def relays(self) -> int:
        """Lines of a document that lead from one alias to another."""
        return 2 if self.hops == 3 else 0

    @property
    def links(self) -> int:
        return 2 if self.hops == 3 else 3

    @property
    def document_tokens(self) -> int:
        return 1 + _LINE_TOKENS * (_DEFINITIONS + self.relays + self.links) + _FILLER_TOKENS

    @property
    def tokens(self) -> int:
        """Of all documents of a prompt."""
        return self.documents * self.document_tokens

    @property
    def answer_tokens(self) -> int:
        """Of the lines that a question needs."""
        return _LINE_TOKENS * self.hops


@dataclass(frozen=True, slots=True)
class Chains:
    """What relays and links lead to, (corpora, lines) each: the relays of all documents, then the links."""

    heads: Tensor
    """The name or alias that the line begins with."""

    aliases: Tensor
    """The alias that it refers to."""

    ends: Tensor
    """The alias of the definition at the end."""

    values: Tensor
    shown: Tensor
    """Whether the line spells the value out."""

    hops: Tensor
    """(lines,)"""

    documents: Tensor
    """(corpora, lines, 3): of the line, of the line that it refers to, and of the definition."""


@dataclass(frozen=True, slots=True)
class Corpora:
    tokens: Tensor
    """int64 (corpora, documents, document tokens)."""

    lines: Tensor
    """As `tokens`: at a line's second token 1 + the number of its chain, elsewhere 0."""

    chains: Chains


def draw_corpora(
    count: int,
    level: Level,
    generator: torch.Generator,
    *,
    documents: int = CORPUS_DOCUMENTS,
    shown: float = 0.0,
    topic: int = 0,
) -> Corpora:
    """Corpora of so many documents; a share `shown` of the links and relays spells its value out. So many consecutive
    documents, of one `topic`, refer only to each other (0: all do)."""
    topic = topic or documents
    definitions, relays, links = (documents * each for each in (_DEFINITIONS, level.relays, level.links))
    aliases = _distinct(count, ALIASES, definitions + relays, generator)
    heads = _distinct(count, NAMES, links, generator)
    values = torch.randint(VALUES.start, VALUES.stop, (count, definitions), generator=generator)
    if level.relays:
        # A relay refers to a definition, a link to a relay.
        defined = _elsewhere(count, documents, topic, level.relays, _DEFINITIONS, generator)
        relayed = _elsewhere(count, documents, topic, level.links, level.relays, generator)
        referred = torch.cat([defined, definitions + relayed], 1)
        middle = torch.cat([defined // _DEFINITIONS, relayed // level.relays], 1)
        ends = torch.cat([defined, defined.gather(1, relayed)], 1)
        heads = torch.cat([aliases[:, definitions:], heads], 1)
    else:
        referred = ends = _elsewhere(count, documents, topic, level.links, _DEFINITIONS, generator)
        middle = ends // _DEFINITIONS
    own = torch.cat([_owners(documents, level.relays), _owners(documents, level.links)])
    chains = Chains(
        heads=heads,
        aliases=aliases.gather(1, referred),
        ends=aliases.gather(1, ends),
        values=values.gather(1, ends),
        shown=torch.rand(heads.shape, generator=generator) < shown,
        hops=torch.cat([torch.full((relays,), 2), torch.full((links,), level.hops)]),
        documents=torch.stack([own.expand_as(ends), middle, ends // _DEFINITIONS], -1),
    )
    third = torch.where(chains.shown, chains.values, END)
    defining = torch.stack([aliases[:, :definitions], values, torch.full_like(values, END)], -1)
    referring = torch.stack([chains.heads, chains.aliases, third], -1)
    numbers = torch.zeros_like(referring)
    numbers[..., 1] = 1 + torch.arange(relays + links)
    filler = torch.randint(WORDS.start, WORDS.stop, (count, documents, _FILLER_TOKENS), generator=generator)
    parts = (_DEFINITIONS, defining), (level.relays, referring[:, :relays]), (level.links, referring[:, relays:])
    text = [part.reshape(count, documents, lines * _LINE_TOKENS) for lines, part in parts]
    marks = [torch.zeros_like(defining), numbers[:, :relays], numbers[:, relays:], torch.zeros_like(filler)]
    marks = [mark.reshape(count, documents, -1) for mark in marks if mark.numel()]
    # Each line moves as a whole: its tokens share a key, and the sort is stable.
    lengths = [_LINE_TOKENS] * (_DEFINITIONS + level.relays + level.links) + [_FILLER_TOKENS]
    keys = torch.rand(count, documents, len(lengths), generator=generator)
    order = keys.repeat_interleave(torch.tensor(lengths), 2).argsort(stable=True, dim=2)
    first = torch.full((count, documents, 1), DOC)
    return Corpora(
        tokens=torch.cat([first, torch.cat([*text, filler], 2).gather(2, order)], 2),
        lines=torch.cat([torch.zeros_like(first), torch.cat(marks, 2).gather(2, order)], 2),
        chains=chains,
    )


def _distinct(count: int, among: range, taken: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, len(among), generator=generator).argsort(1)[:, :taken] + among.start


def _owners(documents: int, lines: int) -> Tensor:
    return torch.arange(documents * lines) // max(1, lines)


def _elsewhere(count: int, documents: int, topic: int, lines: int, others: int, generator: torch.Generator) -> Tensor:
    """For each of `lines` a document, one of `others` a document, in another document of its topic."""
    drawn = torch.randint((topic - 1) * others, (count, documents * lines), generator=generator)
    own = _owners(documents, lines)
    drawn += own // topic * topic * others
    return drawn + others * (drawn // others >= own)
