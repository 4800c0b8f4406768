"""Answers taken from a corpus, for graphs whose engine generates nothing of sense.

Each question has a gold passage. What a model would write (a plan, a guess, an answer) is a part of that passage, so
that queries made of it are real text near the passage, as the paper's are. Marks in the prompts say what is asked:
"@17" the request, "#sub" the node, "~2" the round. They are not embedded.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragorder.adapters.openai.prompts import PromptRequest
from ragorder.adapters.workflows import WorkflowPrompts
from ragorder.document import Document
from ragorder.eval.data.corpora import Corpus
from ragorder.pipelining import CommittedRequest
from ragorder.pipelining.workflow import CompiledGraph, NodeQuestion, RAGraph, hyde, irg, multistep, one_shot, recomp

_ROUNDS = 3
_MARKS = ("@", "#", "~")
_NODES = frozenset(("#answer", "#compress", "#draft", "#guess", "#plan", "#sub"))


def _hyde(top_k: int) -> RAGraph:
    return hyde(
        topk=top_k,
        guess_prompt="#guess Write a short passage that answers: {query}",
        prompt="#answer Answer using {docs}: {query}",
    )


def _multistep(top_k: int) -> RAGraph:
    return multistep(
        topk=top_k,
        rounds=_ROUNDS + 1,
        plan_prompt="#plan Split into simpler questions, one a line: {query}",
        prompt="#sub Answer using {docs}: {subquestion} Known so far: {notes}",
    )


def _irg(top_k: int) -> RAGraph:
    graph = irg(topk=top_k, rounds=_ROUNDS, prompt="#draft ~{round} Answer using {docs}: {query}")
    graph.inputs = ("round",)
    return graph


def _recomp(top_k: int) -> RAGraph:
    return recomp(
        topk=top_k,
        compress_prompt="#compress Sum up what {docs} say about: {query}",
        prompt="#answer {summary} Answer using this summary: {query}",
    )


WORKFLOWS: dict[str, Callable[[int], RAGraph]] = {
    "one_shot": lambda top_k: one_shot(topk=top_k, prompt="#answer Answer using {docs}: {query}"),
    "multistep": _multistep,
    "irg": _irg,
    "hyde": _hyde,
    "recomp": _recomp,
}


def compiled(workflow: str, top_k: int) -> tuple[CompiledGraph, dict[str, Any]]:
    """The graph, and what its requests' states begin with."""
    graph = WORKFLOWS[workflow](top_k).compile()
    return graph, dict.fromkeys(graph.inputs, 0)


def without_marks(text: str) -> str:
    return " ".join(word for word in text.split() if not word.startswith(_MARKS))


class Script:
    """What each request asks, and what is answered: the same for every system. Lengths vary with `seed`."""

    def __init__(self, corpus: Corpus, seed: int = 0) -> None:
        self._corpus = corpus
        self._seed = seed

    def question(self, number: int) -> str:
        return f"@{number} {self._corpus.questions[number % len(self._corpus.questions)].text}"

    def answer(self, prompt: Sequence[str]) -> list[str]:
        """The words that follow a prompt."""
        node = max(place for place, word in enumerate(prompt) if word in _NODES)
        tail = prompt[node + 1 :]
        number = next(int(word[1:]) for word in tail if word[0] == "@" and word[1:].isdigit())
        step = next((int(word[1:]) for word in tail if word[0] == "~" and word[1:].isdigit()), None)
        if prompt[node] == "#draft" and step is None:
            return self._window(number, prompt[:node])
        step = step or 0
        draw = random.Random(f"{self._seed} {number} {prompt[node]} {step}")
        gold = self._gold(number)
        if prompt[node] == "#plan":
            return list(self._plan(number, gold, draw))
        if prompt[node] == "#draft":
            # Each draft holds more of the passage.
            return gold[: round(len(gold) * (step + 1) / (_ROUNDS + 1))]
        if prompt[node] == "#guess":
            return gold[: draw.randint(32, 96)]
        if prompt[node] == "#compress":
            return gold[: draw.randint(24, 64)]
        first = step * len(gold) // (_ROUNDS + 1)
        return gold[first : first + draw.randint(24, 96)] or gold[-24:]

    def _window(self, number: int, shown: Sequence[str]) -> list[str]:
        """Return a part of the passage that depends on the documents shown, in any order."""
        gold, draw = self._gold(number), random.Random(f"{self._seed} {number} {' '.join(sorted(shown))}")
        first = draw.randrange(max(1, len(gold) - 24))
        return gold[first : first + draw.randint(24, 96)]

    def _gold(self, number: int) -> list[str]:
        question = number % len(self._corpus.questions)
        text = self._corpus.documents[self._corpus.rankings[question][0]].text
        return without_marks(text).split()

    def _plan(self, number: int, gold: list[str], draw: random.Random) -> Iterable[str]:
        question = without_marks(self.question(number)).split()
        for step in range(1, draw.randint(1, _ROUNDS) + 1):
            known = gold[: max(4, len(gold) * step // (2 * _ROUNDS))]
            yield from (f"~{step}", f"@{number}", *question, *known[:-1], known[-1] + "\n")


class WordTokenizer:
    """A token for each word: prompts on a virtual clock need no model's tokenizer."""

    def __init__(self) -> None:
        self.all_special_tokens: list[str] = []
        self.added_tokens_decoder: dict[int, Any] = {}
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str, **_: object) -> list[int]:
        return [self._id(word) for word in text.split()]

    def words(self, token_ids: Iterable[int]) -> list[str]:
        return [self._words[token] for token in token_ids]

    def _id(self, word: str) -> int:
        found = self._ids.setdefault(word, len(self._words))
        if found == len(self._words):
            self._words.append(word)
        return found


Vectors = NDArray[np.float32]


class Embedder:
    """Vectors of texts without their marks, shape (1, dimensions), each embedded once. `save` keeps them in `file`."""

    def __init__(self, encode: Callable[[Sequence[str]], Vectors], file: Path | None = None) -> None:
        self._encode = encode
        self._file = file
        self._known: dict[str, Vectors] = {}
        self._saved = 0
        if file is not None:
            with suppress(OSError, ValueError), np.load(file) as kept:
                self._known = dict(zip(kept["keys"].tolist(), kept["vectors"][:, None], strict=True))
                self._saved = len(self._known)

    def __call__(self, text: str) -> Vectors:
        text = without_marks(text)
        key = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        if key not in self._known:
            self._known[key] = self.compute(text)
        return self._known[key]

    def compute(self, text: str) -> Vectors:
        """Computed, whether it is known or not."""
        return np.ascontiguousarray(self._encode([without_marks(text)]), dtype=np.float32)

    def save(self) -> None:
        if self._file is None or len(self._known) == self._saved:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._file.with_suffix(f".{os.getpid()}.npz")
        np.savez(unfinished, keys=list(self._known), vectors=np.concatenate(list(self._known.values())))
        unfinished.replace(self._file)
        self._saved = len(self._known)


@dataclass(frozen=True, slots=True)
class RankedPrompts:
    """What a system without ordering sends."""

    prompts: WorkflowPrompts

    def preview(self, question: NodeQuestion, documents: Sequence[Document], /) -> PromptRequest:
        return self.prompts.preview(replace(question, ordered=False), documents)

    def commit(self, question: NodeQuestion, documents: Sequence[Document], /) -> CommittedRequest[PromptRequest]:
        return self.prompts.commit(replace(question, ordered=False), documents)
