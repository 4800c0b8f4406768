"""The embedded engine: a Hugging Face model in this process, with a cache of documents."""

from __future__ import annotations

import gc
import random
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragorder.eval.engines.base import EngineCompletion, EngineError
from ragorder.eval.engines.prompts import PromptIds
from ragorder.eval.engines.vllm import has_fast_bfloat16

if TYPE_CHECKING:
    from ragorder.kernels.engine import Completion, Request, TieredEngine

__all__ = ["TorchEngine", "TorchModel", "need_torch"]

_WARM_UP_TOKENS = (16, 64, 256, 1024)


def need_torch() -> None:
    """Raises ImportError naming the extra to install."""
    try:
        import safetensors  # noqa: F401
        import tokenizers  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the torch engine needs {error.name}: pip install 'ragorder[torch]'", name=error.name
        ) from error


@dataclass(frozen=True, slots=True)
class TorchModel:
    """A model and its tokenizer (None: answers have no text), which several engines serve in turn."""

    model: Any
    tokenizer: Any = None

    @classmethod
    def load(cls, model: str | Path) -> TorchModel:
        """From its folder or its name on the Hub: on a GPU if there is one, in bfloat16 where that is fast and in
        float32 where it is not. Raises ImportError naming the extra to install, ValueError if there is no such model.
        """
        need_torch()
        from ragorder.kernels.engine import EngineSettings
        from ragorder.kernels.engine.loading import load_model, load_tokenizer

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
        """How many tokens there are."""
        return int(self.model.config.get_text_config().vocab_size)


class TorchEngine:
    """One embedded engine with KV of its own, one request at a time. Several live side by side and take turns, on one
    model as well; those are closed together.

    What it caches are documents: a prompt (`PromptIds`) says where they end, and a hit ends where one of them does,
    whatever the `block_size`, in which the pool is given out. A prompt that says nothing is cut into chunks. The blocks
    behind the last document, with question and answer, are free as soon as the request has ended. So it finds a few
    tokens more than an orderer predicts, which counts whole blocks.

    `capacity_tokens` is what the device holds, rounded down to whole blocks; None asks for `unlimited_tokens` (the
    caller sees to it that this is enough) and is reported as None. Documents that leave it go on to `host_tokens`, and
    from there to `disk_bytes` in the folder `disk_path`. The host keeps its copy of what comes back, so that both hold
    as much as the larger one at least, and `capacity_tokens` reports that. What goes first is said by `policy`; least
    recently used is what orderers assume.

    `served` are the engine's own completions since the last `reset`.
    """

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
        max_model_len: int | None = None,
        output_tokens: int = 1,
        unlimited_tokens: int = 65536,
    ) -> None:
        """Load the model, if it is not, and set up the pools.

        Raises ValueError for a pool without a block, for no output tokens and for a model that cannot be served
        exactly or not be loaded, ImportError naming the extra to install.
        """
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
        self._sampling = Sampling(max_tokens=output_tokens, ignore_eos=True)
        settings = {
            "block_size": block_size,
            "device_tokens": blocks * block_size,
            "host_bytes": -(-host_tokens // block_size) * block_size * loaded.bytes_per_token,
            "policy": policy,
            "max_model_len": max_model_len,
        }
        if disk_path is not None:
            settings |= {"disk_path": disk_path, "disk_bytes": disk_bytes}
        self._engine: TieredEngine | None = TieredEngine(
            loaded.model, loaded.tokenizer, EngineSettings.model_validate(settings)
        )

    @property
    def engine(self) -> TieredEngine:
        """The engine itself. Raises RuntimeError once closed."""
        if self._engine is None:
            raise RuntimeError("this engine is closed")
        return self._engine

    def request(self, token_ids: Sequence[int], output_tokens: int | None = None) -> Request:
        """A prompt as the engine takes it, to be answered with so many tokens."""
        from ragorder.kernels.engine import Request

        ends = token_ids.document_ends if isinstance(token_ids, PromptIds) else ()
        sampling = self._sampling if output_tokens is None else replace(self._sampling, max_tokens=output_tokens)
        # What was served under a unique salt is never found again.
        salt = None if self._prefix_caching else secrets.token_hex(16)
        return Request(list(token_ids), ends, sampling, salt)

    def generate(self, token_ids: Sequence[int]) -> EngineCompletion:
        """Serve one prompt. `ttft_s` is the wall time from this call to the end of the step that gave the first token.

        Raises ValueError for a prompt that is empty or does not fit, EngineError for one that was not answered, and
        RuntimeError once closed.
        """
        *_, last = self.engine.stream(self.request(token_ids))
        return self.completion(last.completion)

    def completion(self, served: Completion | None) -> EngineCompletion:
        """What the benchmarks know of a request that the engine has ended. Raises EngineError if it gave no token."""
        assert served is not None, "the last update of a request has its completion"
        if served.ttft_s is None or served.finish_reason in ("abort", "error"):
            raise EngineError(f"the engine ended a request without an answer ({served.error or served.finish_reason})")
        self.served.append(served)
        return EngineCompletion(served.ttft_s, served.cached.total, served.prompt_tokens, served.text, served.total_s)

    @contextmanager
    def answering(self, output_tokens: int) -> Iterator[None]:
        """A block in which prompts are answered, with at most so many tokens, until the model ends its answer."""
        kept = self._sampling
        self._sampling = replace(kept, max_tokens=output_tokens, ignore_eos=False)
        try:
            yield
        finally:
            self._sampling = kept

    def reset(self) -> None:
        """Forget all documents, in all tiers."""
        self.engine.clear_cache()
        self.served = []

    def warm_up(self) -> None:
        """Serve random prompts of several lengths, so that later ones are timed without first-call costs, and reset."""
        draw = random.Random(0)
        longest = min(self.engine.max_model_len, self.engine.device_tokens) - self._sampling.max_tokens
        for tokens in sorted({min(tokens, longest) for tokens in _WARM_UP_TOKENS}):
            self.generate([draw.randrange(self._vocabulary) for _ in range(tokens)])
        self.reset()

    def close(self) -> None:
        """Give back the pools. Closing twice is fine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws a bar on standard error while it loads."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
