"""Engines in this process, reused from one trace to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from ragorder.eval.data.trace import Trace
from ragorder.eval.engines.base import Engine
from ragorder.eval.engines.models import built_prompts, longest_prompt
from ragorder.eval.engines.prompts import SYSTEM_PROMPT, BuiltPrompts
from ragorder.eval.engines.torch import TorchEngine, TorchModel, need_torch
from ragorder.eval.engines.vllm import VLLMEngine

_SHORTEST_TOKENS = 2_048


class WarmedUp(Engine, Protocol):
    def warm_up(self) -> None: ...


E = TypeVar("E", bound=WarmedUp)


class EngineSize(NamedTuple):
    """What engines need in common to serve one another's traces, as their constructors name it."""

    model: Path
    block_size: int
    capacity_tokens: int | None
    output_tokens: int
    max_model_len: int
    unlimited_tokens: int


class EnginePool(ABC, Generic[E]):
    """Engines of one size, in a `with` block. A new engine takes seconds; a reset one is empty. Another size closes
    all. `system`: the prompts' system prompt; without `ignore_eos` answers end where the model ends them."""

    block_size: ClassVar[int]
    """Unless another one is given."""

    def __init__(self, *, system: str = SYSTEM_PROMPT, ignore_eos: bool = True) -> None:
        self._ignore_eos = ignore_eos
        self._size: EngineSize | None = None
        self._engines: dict[bool, list[E]] = {True: [], False: []}
        self._prompts = cache(partial(built_prompts, system=system))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def make(self, model: Path, **sizes: Any) -> E:
        """A new engine, with the arguments that all engines share."""

    def close(self) -> None:
        """The pool can be used again."""
        for engines in self._engines.values():
            for engine in engines:
                engine.close()
        self._engines = {True: [], False: []}
        self._size = None

    def take(
        self,
        model: Path,
        policies: Sequence[str],
        trace: Trace,
        capacity_tokens: int | None,
        block_size: int | None = None,
        output_tokens: int = 1,
    ) -> tuple[list[E], BuiltPrompts]:
        """An engine for each policy, and their prompts, valid until the next `take`. Raises ValueError if a prompt
        exceeds the capacity."""
        prompts = self._prompts(model)
        size = _size(model, trace, prompts, capacity_tokens, block_size or self.block_size, output_tokens)
        if size != self._size:
            self.close()
            self._size = size
        taken: dict[bool, int] = {True: 0, False: 0}
        engines = []
        for policy in policies:
            caching = policy != "none"
            open_ones = self._engines[caching]
            if taken[caching] == len(open_ones):
                made = self.make(**size._asdict(), prefix_caching=caching, ignore_eos=self._ignore_eos)
                open_ones.append(made)
                open_ones[-1].warm_up()
            engines.append(open_ones[taken[caching]])
            taken[caching] += 1
        for engine in engines:
            engine.reset()
        return engines, prompts


def _size(
    model: Path, trace: Trace, prompts: BuiltPrompts, capacity_tokens: int | None, block_size: int, output_tokens: int
) -> EngineSize:
    """Rounded up to powers of two, so that similar traces agree."""
    lengths = [
        len(prompts.token_ids(number, request, request.documents)) for number, request in enumerate(trace.requests)
    ]
    longest = max(lengths) + output_tokens
    if capacity_tokens is not None and capacity_tokens < longest:
        raise ValueError(
            f"the longest prompt of {trace.name} has {longest} tokens: raise --capacity-tokens to that at least"
        )
    everything = sum(lengths) + len(lengths) * (output_tokens + block_size) if capacity_tokens is None else 0
    return EngineSize(
        model,
        block_size,
        capacity_tokens,
        output_tokens,
        min(longest_prompt(model), max(_SHORTEST_TOKENS, _power_of_two(longest + block_size))),
        _power_of_two(everything),
    )


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class VLLMPool(EnginePool[VLLMEngine]):
    """They are closed together (see `VLLMEngine`)."""

    block_size = 32

    def make(self, model: Path, **sizes: Any) -> VLLMEngine:
        return VLLMEngine(model, **sizes)


class TorchPool(EnginePool[TorchEngine]):
    """Engines with KV of their own, `host_tokens` of host memory each, and common weights. Raises ImportError."""

    block_size = 16

    def __init__(self, host_tokens: int = 0, *, system: str = SYSTEM_PROMPT, ignore_eos: bool = True) -> None:
        need_torch()
        super().__init__(system=system, ignore_eos=ignore_eos)
        self._host_tokens = host_tokens
        self._loaded: tuple[Path, TorchModel] | None = None

    def make(self, model: Path, **sizes: Any) -> TorchEngine:
        if self._loaded is None or self._loaded[0] != model:
            self._loaded = model, TorchModel.load(model)
        return TorchEngine(self._loaded[1], host_tokens=self._host_tokens, **sizes)
