"""The embedded engine: a Hugging Face model in this process, with a cache of documents."""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragorder.common.extras import install_hint, needs
from ragorder.eval.engines.base import EngineCompletion, EngineError, RequestError
from ragorder.eval.engines.prompts import PromptIds
from ragorder.eval.engines.vllm import has_fast_bfloat16

if TYPE_CHECKING:
    from ragorder.kernels.engine import Completion, Request, TieredEngine

RANDOM_WEIGHTS = "random-weights"
"""A file of this name beside a model's configuration and tokenizer: its weights are drawn when it is loaded."""

_PACKAGES = ("safetensors", "tokenizers", "torch", "transformers")
_WARM_UP_TOKENS = (16, 64, 256, 1024)


def need_torch() -> None:
    """Raises ImportError naming the extra to install."""
    with needs("torch", "the torch engine"):
        for name in _PACKAGES:
            import_module(name)


def lacks_torch() -> str | None:
    """Return the reason why the embedded engine cannot be used, without its imports, which take seconds."""
    missing = next((name for name in _PACKAGES if find_spec(name) is None), None)
    return None if missing is None else f"the torch engine needs {missing}: {install_hint('torch')}"


@dataclass(frozen=True, slots=True)
class TorchModel:
    """A model and its tokenizer (None: answers without text), shared by engines in turn."""

    model: Any
    tokenizer: Any = None

    @classmethod
    def random(cls, config: Any, tokenizer: Any = None) -> TorchModel:
        """Always with the same weights, on a GPU in bfloat16 if there is one."""
        import torch
        from transformers import AutoModelForCausalLM

        on_gpu = torch.cuda.is_available()
        with torch.random.fork_rng(), torch.device("cuda" if on_gpu else "cpu"):
            torch.manual_seed(0)
            dtype = torch.bfloat16 if on_gpu else torch.float32
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return cls(model.eval().requires_grad_(False), tokenizer)

    @classmethod
    def load(cls, model: str | Path) -> TorchModel:
        """From a folder or the Hub. Raises ImportError, ValueError for an unknown model."""
        need_torch()
        from ragorder.kernels.engine import EngineSettings
        from ragorder.kernels.models.loading import load_config, load_model, load_tokenizer

        if (Path(model) / RANDOM_WEIGHTS).is_file():
            return cls.random(load_config(model), load_tokenizer(model))
        settings = EngineSettings.model_validate({"dtype": "bfloat16" if has_fast_bfloat16() else "float32"})
        with _no_progress_bar():
            return cls(load_model(model, settings), load_tokenizer(model))

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values."""
        from ragorder.kernels.paging import KVShape

        config = self.model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return KVShape(config.num_hidden_layers, kv_heads, head_dim, 1, self.model.dtype).token_bytes

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)


class TorchEngine:
    """One embedded engine with its own KV, one request at a time; several share a model, and are closed together. Hits
    end with a document (`PromptIds`), whatever the `block_size`: a few tokens more than predicted. Question and answer
    are freed with the request. `capacity_tokens` is the device's, in whole blocks (None: `unlimited_tokens`); the
    reported one is the larger of device and host, which may hold the same. Orderers assume `policy` "lru". `profile`
    and `others` are `EngineSettings`; without `others` no node has a replica. With `ignore_eos` every answer has
    `output_tokens`, but for `answering`. `served`: completions since the last `reset`."""

    name = "torch"
    partial_blocks_first = True

    def __init__(
        self,
        model: str | Path | TorchModel,
        *,
        block_size: int = 16,
        capacity_tokens: int | None = None,
        host_tokens: int = 0,
        disk_path: Path | None = None,
        disk_bytes: int = 16 << 30,
        prefix_caching: bool = True,
        policy: str = "lru",
        profile: str | None = None,
        max_model_len: int | None = None,
        output_tokens: int = 1,
        ignore_eos: bool = True,
        unlimited_tokens: int = 65536,
        **others: Any,
    ) -> None:
        """Raises ValueError for a pool without a block, no output tokens or an unsupported model, ImportError."""
        pool_tokens = unlimited_tokens if capacity_tokens is None else capacity_tokens
        if block_size < 1 or pool_tokens < block_size:
            raise ValueError(f"a pool of {pool_tokens} tokens has no block of {block_size} tokens: raise the capacity")
        if output_tokens < 1:
            raise ValueError(f"output_tokens is {output_tokens}; the engine generates 1 or more")
        need_torch()
        from ragorder.kernels.engine import EngineSettings, Sampling, TieredEngine

        loaded = model if isinstance(model, TorchModel) else TorchModel.load(model)
        blocks = pool_tokens // block_size
        held = max(blocks * block_size, host_tokens)
        self.block_size = block_size
        self.capacity_tokens = None if capacity_tokens is None else held
        self.kept_output_tokens = 0
        self.served: list[Completion] = []
        self._prefix_caching = prefix_caching
        self._vocabulary = loaded.vocabulary
        self._sampling = Sampling(max_tokens=output_tokens, ignore_eos=ignore_eos)
        settings = {
            "block_size": block_size,
            "device_tokens": blocks * block_size,
            "host_bytes": -(-host_tokens // block_size) * block_size * loaded.bytes_per_token,
            "policy": policy,
            "replicate_nodes": 0,
            **others,
            "profile": profile,
            "max_model_len": max_model_len,
        }
        if disk_path is not None:
            settings |= {"disk_path": disk_path, "disk_bytes": disk_bytes}
        self._engine: TieredEngine | None = TieredEngine(
            loaded.model, loaded.tokenizer, EngineSettings.model_validate(settings)
        )

    @property
    def engine(self) -> TieredEngine:
        """Raises RuntimeError once closed."""
        if self._engine is None:
            raise RuntimeError("this engine is closed")
        return self._engine

    def request(self, token_ids: Sequence[int], output_tokens: int | None = None) -> Request:
        from ragorder.kernels.engine import Request

        ends = token_ids.document_ends if isinstance(token_ids, PromptIds) else ()
        sampling = self._sampling if output_tokens is None else replace(self._sampling, max_tokens=output_tokens)
        # What was served under a unique salt is never found again.
        salt = None if self._prefix_caching else secrets.token_hex(16)
        return Request(list(token_ids), ends, sampling, salt, fusion="exact")

    def generate(self, token_ids: Sequence[int]) -> EngineCompletion:
        """Raises ValueError for an empty or too long prompt, EngineError if unanswered, RuntimeError once closed."""
        *_, last = self.engine.stream(self.request(token_ids))
        return self.completion(last.completion)

    def completion(self, served: Completion | None) -> EngineCompletion:
        """Raises EngineError for an answer without a token."""
        assert served is not None, "the last update of a request has its completion"
        if served.ttft_s is None or served.finish_reason in ("abort", "error", "timeout"):
            raise EngineError(f"the engine ended a request without an answer ({served.error or served.finish_reason})")
        self.served.append(served)
        return EngineCompletion(
            served.ttft_s, served.cached.total, served.prompt_tokens, served.text, served.total_s, served.tbt_s
        )

    def answers(self, prompts: Sequence[PromptIds], output_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Texts, computed together; each ends where the model or a string of `stop` ends it. Raises EngineError."""
        sampling = replace(self._sampling, max_tokens=output_tokens, ignore_eos=False, stop=stop)
        done = self.engine.generate([replace(self.request(ids), sampling=sampling) for ids in prompts])
        failed = next((each for each in done if each.finish_reason in ("abort", "error", "timeout")), None)
        if failed is not None:
            raise EngineError(f"the engine ended a request without an answer ({failed.error or failed.finish_reason})")
        return [each.text for each in done]

    @contextmanager
    def answering(self, output_tokens: int) -> Iterator[None]:
        """A block in which answers have at most `output_tokens`, and end where the model ends them."""
        kept = self._sampling
        self._sampling = replace(kept, max_tokens=output_tokens, ignore_eos=False)
        try:
            yield
        finally:
            self._sampling = kept

    def reset(self) -> None:
        """Empty all tiers."""
        self.engine.clear_cache()
        self.served = []

    def warm_up(self) -> None:
        """Serve random prompts of several lengths, and reset, to time later ones without first-call costs."""
        draw = random.Random(0)
        longest = min(self.engine.max_model_len, self.engine.device_tokens) - self._sampling.max_tokens
        # A prompt, and one step of an answer.
        with self.answering(min(2, self._sampling.max_tokens)):
            for tokens in sorted({min(tokens, longest) for tokens in _WARM_UP_TOKENS}):
                self.generate([draw.randrange(self._vocabulary) for _ in range(tokens)])
        self.reset()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


_Answer = asyncio.Future[EngineCompletion]


class AsyncTorchEngine:
    """A `TorchEngine` for concurrent requests, which join between steps. Steps run in a thread."""

    def __init__(self, engine: TorchEngine) -> None:
        self.name = engine.name
        self.block_size = engine.block_size
        self.capacity_tokens = engine.capacity_tokens
        self.kept_output_tokens = engine.kept_output_tokens
        self.partial_blocks_first = engine.partial_blocks_first
        self._engine = engine
        self._arrived: list[tuple[Sequence[int], int | None, float, _Answer]] = []
        self._running: dict[int, tuple[float, _Answer]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def complete(self, token_ids: Sequence[int], output_tokens: int | None = None) -> EngineCompletion:
        """`ttft_s` includes the wait for the current step. Raises RequestError for a refused prompt, EngineError for a
        failed step."""
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._arrived.append((token_ids, output_tokens, time.perf_counter(), answer))
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step())
        return await answer

    async def _step(self) -> None:
        engine = self._engine.engine
        try:
            while self._arrived or self._running:
                self._admit()
                if not self._running:
                    continue
                for update in await asyncio.to_thread(engine.step):
                    if update.completion is not None:
                        self._end(update.completion)
        except Exception as error:  # whatever ends the engine ends the run, and not in silence
            self._fail(EngineError(f"a step of the engine failed ({type(error).__name__}: {error})"))
        finally:
            self._stepping = None

    def _admit(self) -> None:
        arrived, self._arrived = self._arrived, []
        for token_ids, output_tokens, at, answer in arrived:
            try:
                number = self._engine.engine.add(self._engine.request(token_ids, output_tokens))
            except ValueError as error:
                answer.set_exception(RequestError(str(error)))
            else:
                self._running[number] = (time.perf_counter() - at, answer)

    def _end(self, served: Completion) -> None:
        waited_s, answer = self._running.pop(served.request_id)
        if answer.done():
            return
        try:
            completion = self._engine.completion(served)
        except EngineError as error:
            answer.set_exception(RequestError(str(error)))
            return
        assert completion.ttft_s is not None and completion.total_s is not None
        answer.set_result(
            EngineCompletion(
                waited_s + completion.ttft_s,
                completion.cached_tokens,
                completion.prompt_tokens,
                completion.text,
                waited_s + completion.total_s,
                completion.tbt_s,
            )
        )

    def _fail(self, error: EngineError) -> None:
        answers = [arrived[-1] for arrived in self._arrived] + [running[-1] for running in self._running.values()]
        for answer in answers:
            if not answer.done():
                answer.set_exception(error)
        self._arrived, self._running = [], {}
