"""Models with random weights, their prompts, and clocks."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, TypeVar

from ragorder.document import Document
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.prompts import PromptIds
from ragorder.eval.engines.torch import TorchModel

ONE_THREAD = "CPU, 1 thread"
"""On which CPU time is a measure of time."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of one of transformers' families; `large` ones need a GPU."""

    name: str
    family: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    vocabulary: int
    longest_tokens: int = 32_768
    large: bool = False

    @property
    def obstacle(self) -> str | None:
        import torch

        if not self.large or torch.cuda.is_available():
            return None
        small = " or ".join(name for name, shape in SHAPES.items() if not shape.large)
        return f"the shape {self.name} needs a GPU, and there is none here: take shape {small}"

    def make(self) -> TorchModel:
        """Always with the same weights. Raises EngineError for a large model without a GPU."""
        if self.obstacle:
            raise EngineError(self.obstacle)
        return TorchModel.random(self.config())

    def config(self) -> Any:
        """As transformers has it."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.family,
            num_hidden_layers=self.layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.longest_tokens,
            sliding_window=None,
            tie_word_embeddings=False,
        )


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("tiny", "qwen2", 2, 128, 256, 2, 1, 512),
        ModelShape("narrow", "qwen2", 4, 256, 768, 4, 1, 4_096),
        ModelShape("small", "qwen2", 8, 512, 1_536, 8, 2, 8_192),
        ModelShape("smollm2", "llama", 30, 576, 1_536, 9, 3, 49_152),
        ModelShape("qwen2.5-7b", "qwen2", 28, 3_584, 18_944, 28, 4, 152_064, large=True),
        ModelShape("mistral-7b", "mistral", 32, 4_096, 14_336, 32, 8, 32_000, large=True),
        ModelShape("llama2-7b", "llama", 32, 4_096, 11_008, 32, 32, 32_000, large=True),
    )
}
"""By name: the models of RAGCache's Table 1 and of RAGCache++ (appendix A), though Llama 2 takes no prompts of 32,768
tokens, and SmolLM2-135M; "small" is as wide as prefill must be to dominate on a CPU; "narrow" is for many requests, and
"tiny" for tests."""


def hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    threads = torch.get_num_threads()
    return ONE_THREAD if threads == 1 else f"CPU, {threads} threads"


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt's parts and their tokens."""

    documents: int = 5
    document_tokens: int = 200
    system_tokens: int = 50
    question_tokens: int = 30

    @property
    def tokens(self) -> int:
        return self.end(self.documents) + self.question_tokens

    def end(self, documents: int) -> int:
        """The tokens of the system prompt and the first `documents`."""
        return self.system_tokens + documents * self.document_tokens

    @property
    def ends(self) -> list[int]:
        return [self.end(documents) for documents in range(self.documents + 1)]


def draw_prompt(layout: Layout, vocabulary: int, rng: random.Random) -> PromptIds:
    return PromptIds(rng.choices(range(vocabulary), k=layout.tokens), layout.ends)


def ask_again(prompt: PromptIds, layout: Layout, documents: int, vocabulary: int, rng: random.Random) -> PromptIds:
    """Another question on the first `documents` of a prompt."""
    end = layout.end(documents)
    question = rng.choices(range(vocabulary), k=layout.question_tokens)
    # Another first token, so that nothing after the documents is the same.
    question[0] = (prompt[end] + 1) % vocabulary
    return PromptIds([*prompt[:end], *question], layout.ends[: documents + 1])


class RandomPrompts:
    """Prompts of a trace: each document's own random tokens, and a question for each request's place."""

    prefix_tokens = 64
    question_tokens = 20

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._drawn: dict[str, array[int]] = {}

    document_tokens = staticmethod(attrgetter("token_count"))

    def suffix_tokens(self, request: TraceRequest) -> int:
        return self.question_tokens

    def token_ids(self, number: int, request: TraceRequest, documents: Sequence[Document]) -> PromptIds:
        parts = [self._part("system", self.prefix_tokens)]
        parts += [self._part(document.key, document.token_count) for document in documents]
        question = _draw(f"question {number}", self._vocabulary, self.question_tokens)
        return PromptIds([id for part in [*parts, question] for id in part], accumulate(map(len, parts)))

    def _part(self, key: str, tokens: int) -> array[int]:
        if key not in self._drawn:
            self._drawn[key] = _draw(key, self._vocabulary, tokens)
        return self._drawn[key]


def _draw(key: str, vocabulary: int, tokens: int) -> array[int]:
    return array("i", random.Random(key).choices(range(vocabulary), k=tokens))


def timed(call: Callable[[], T]) -> tuple[T, float, float]:
    """A call's result, wall time and CPU time of this process in ms."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    given = call()
    return given, 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Threads of torch. With more than one, CPU time is no measure: waiting threads count as busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
