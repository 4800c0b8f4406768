"""Conversations about Python's standard library, and the places where a chat's documents can stand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ragorder.eval.data.corpora import Corpus, load_pydocs

__all__ = ["LAYOUTS", "TEMPLATE", "ChatLayout", "ChatTurn", "conversations"]

_SYSTEM = {"role": "system", "content": "Answer the question from the documents."}
TEMPLATE = '<document id="{id}">\n{text}\n</document>'
_TOPICS = 25
_NEAREST = 8
_DOCUMENTS = 5
# By so many ranks another wording may move a document.
_NOISE = 6.0
# About as long as a docstring is, in characters.
_LONGEST = 640

Message = dict[str, Any]


@dataclass(slots=True)
class ChatTurn:
    """A question, and its documents by name and text in retrieval order."""

    question: str
    documents: list[tuple[str, str]]
    answer: str = ""

    def written(self, *, ranks: bool = False) -> list[str]:
        """The documents as an application writes them; `ranks`: under the numbers of their ranks."""
        names = [str(rank) for rank, _ in enumerate(self.documents, 1)] if ranks else [id for id, _ in self.documents]
        return [TEMPLATE.format(id=id, text=text) for id, (_, text) in zip(names, self.documents, strict=True)]

    def shown(self, *, ranks: bool = False) -> str:
        """Documents and question in one text."""
        return "\n".join([*self.written(ranks=ranks), "", self.question])


Body = Callable[[Sequence[ChatTurn]], dict[str, Any]]


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _chat(turns: Sequence[ChatTurn], shown: Sequence[Any], system: str = _SYSTEM["content"]) -> dict[str, Any]:
    messages: list[Message] = [{"role": "system", "content": system}]
    for turn, content in zip(turns, shown, strict=True):
        messages += [_user(content), {"role": "assistant", "content": turn.answer}]
    return {"messages": messages[:-1]}


def _each_turn(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    return _chat(turns, [turn.shown() for turn in turns])


def _first_turn(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    return _chat(turns, [turns[0].shown(), *(turn.question for turn in turns[1:])])


def _system(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    documents = "\n".join([_SYSTEM["content"], *turns[-1].written()])
    return _chat(turns, [turn.question for turn in turns], documents)


def _last_turn(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    return _chat(turns, [*(turn.question for turn in turns[:-1]), turns[-1].shown()])


def _one_turn(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    return _chat(turns[-1:], [turns[-1].shown()])


def _parts(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    texts = [*turns[-1].written(), turns[-1].question]
    return _chat(turns[-1:], [[{"type": "text", "text": text} for text in texts]])


def _ranks(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    return _chat(turns[-1:], [turns[-1].shown(ranks=True)])


def _tagged(turns: Sequence[ChatTurn]) -> dict[str, Any]:
    documents = [{"id": id, "text": text} for id, text in turns[-1].documents]
    return {"messages": [_SYSTEM], "ragorder": {"documents": documents, "query": turns[-1].question}}


class ChatLayout(NamedTuple):
    """Request bodies in retrieval order and for the proxy, and the proxy's options."""

    retrieval: Body
    proxied: Body
    options: dict[str, Any] = {}  # noqa: RUF012


LAYOUTS = {
    "each turn": ChatLayout(_each_turn, _each_turn),
    "first turn only": ChatLayout(_first_turn, _first_turn),
    "system message replaced": ChatLayout(_system, _system),
    "last turn behind history": ChatLayout(_last_turn, _last_turn),
    "one turn": ChatLayout(_one_turn, _one_turn),
    "one turn tagged": ChatLayout(_one_turn, _tagged),
    "one turn in parts": ChatLayout(_parts, _parts),
    "one turn ids are ranks": ChatLayout(_ranks, _ranks),
    "the same --number-by-place": ChatLayout(_ranks, _ranks, {"number_by_place": True}),
}


def conversations(count: int, turns: int, seed: int = 0) -> list[list[ChatTurn]]:
    """Conversations on 25 topics of the standard library, drawn by a power law. Each turn is worded differently: five
    of the topic's eight nearest documents are found, in another order."""
    corpus = _corpus()
    rng = random.Random(seed)
    topics = rng.sample(range(len(corpus.questions)), _TOPICS)

    def ask(topic: int, number: int) -> ChatTurn:
        score = {place: rank + rng.uniform(0, _NOISE) for rank, place in enumerate(corpus.rankings[topic])}
        found = [corpus.documents[place] for place in sorted(score, key=score.__getitem__)[:_DOCUMENTS]]
        documents = [(document.id, document.text[:_LONGEST]) for document in found]
        return ChatTurn(f"{corpus.questions[topic].text} (asked in words of my own: {number})", documents)

    drawn = rng.choices(topics, [1 / rank for rank in range(1, _TOPICS + 1)], k=count)
    return [[ask(topic, rng.randrange(1000)) for _ in range(turns)] for topic in drawn]


@cache
def _corpus() -> Corpus:
    return load_pydocs(top_k=_NEAREST)
