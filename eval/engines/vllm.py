"""vLLM in this process, one request at a time."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragorder.common.extras import install_hint
from ragorder.eval.engines.base import EngineCompletion, time_between_tokens
from ragorder.kernels import random_model

_SMALLEST_CPU_BLOCK = 32
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_WARM_UP_TOKENS = (16, 64, 256, 1024)


class VLLMEngine:
    """One vLLM with its own KV pool; several take turns, and are closed together: closing one destroys the process
    groups that all share. `capacity_tokens` is the pool, in whole blocks; None reserves `unlimited_tokens`. Output is
    greedy. With `ignore_eos` every answer has `output_tokens`, but for `answering`."""

    name = "vllm"
    partial_blocks_first = True

    def __init__(
        self,
        model: str | Path,
        *,
        block_size: int = 32,
        capacity_tokens: int | None = None,
        prefix_caching: bool = True,
        max_model_len: int = 8192,
        output_tokens: int = 1,
        ignore_eos: bool = True,
        unlimited_tokens: int = 65536,
        dtype: str | None = None,
        gpu_memory_utilization: float | None = None,
        at_once: int = 1,
    ) -> None:
        """`dtype` None is bfloat16 where that is fast, else float32. `gpu_memory_utilization` is the share of a GPU's
        memory to find free, `at_once` the prompts that `answers` computes together. Raises ValueError for an impossible
        pool or block, ImportError."""
        pool_tokens = unlimited_tokens if capacity_tokens is None else capacity_tokens
        if block_size < 1 or pool_tokens < block_size:
            raise ValueError(f"a pool of {pool_tokens} tokens has no block of {block_size} tokens: raise the capacity")
        if output_tokens < 1:
            raise ValueError(f"output_tokens is {output_tokens}; vLLM generates 1 or more")
        vllm, on_cpu = _import_vllm(local=Path(model).is_dir())
        if on_cpu and block_size < _SMALLEST_CPU_BLOCK:
            raise ValueError(f"block_size is {block_size}; on a CPU vLLM needs {_SMALLEST_CPU_BLOCK} or more")

        blocks = pool_tokens // block_size
        self.block_size = block_size
        self.capacity_tokens = None if capacity_tokens is None else blocks * block_size
        self._longest = min(max_model_len, blocks * block_size)
        # The last token of an answer is never computed upon.
        self.kept_output_tokens = output_tokens - 1
        self._output_tokens = output_tokens
        self._requests = 0
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": dtype or ("bfloat16" if has_fast_bfloat16() else "float32"),
            "enforce_eager": True,
            "block_size": block_size,
            # vLLM keeps one block of the pool for itself, as its null block.
            "num_gpu_blocks_override": blocks + 1,
            "max_model_len": self._longest,
            # A whole prompt is one prefill step.
            "max_num_batched_tokens": self._longest,
            "max_num_seqs": at_once,
            "enable_prefix_caching": prefix_caching,
            # A step scheduled ahead would hold a block that a request does not need.
            "async_scheduling": False,
            # The override above sizes the pool; any number here keeps vLLM from profiling and claiming memory.
            "kv_cache_memory_bytes": 1 << 26,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if gpu_memory_utilization is not None:
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        self._engine: Any = _start(vllm, arguments)
        self._sampling = vllm.SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=ignore_eos)
        self._vocabulary = int(self._engine.model_config.get_vocab_size())

    def generate(self, token_ids: Sequence[int]) -> EngineCompletion:
        """Raises ValueError for an empty or too long prompt, RuntimeError once closed."""
        engine = self._open()
        room = self._longest - self._output_tokens
        if not 1 <= len(token_ids) <= room:
            raise ValueError(f"the prompt has {len(token_ids)} tokens; this engine takes 1 to {room}")
        self._requests += 1
        started = time.perf_counter()
        engine.add_request(str(self._requests), {"prompt_token_ids": list(token_ids)}, self._sampling)
        ttft_s: float | None = None
        latest_s, tokens = 0.0, 0
        output: Any = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                before, tokens = tokens, len(output.outputs[0].token_ids)
                if tokens > before:
                    latest_s = time.perf_counter() - started
                    ttft_s = latest_s if ttft_s is None else ttft_s
        if ttft_s is None:
            raise RuntimeError(f"vLLM ended request {self._requests} without a token")
        total_s = time.perf_counter() - started
        tbt_s = time_between_tokens(ttft_s, latest_s, tokens)
        text = output.outputs[0].text
        return EngineCompletion(ttft_s, output.num_cached_tokens or 0, len(token_ids), text, total_s, tbt_s)

    def answers(self, prompts: Sequence[Sequence[int]], output_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Texts, computed together; each ends where the model or a string of `stop` ends it."""
        engine = self._open()
        texts: dict[str, str] = {}
        sampling = type(self._sampling)(max_tokens=output_tokens, temperature=0.0, stop=list(stop))
        names = [str(self._requests + number) for number in range(1, len(prompts) + 1)]
        self._requests += len(prompts)
        for name, ids in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": list(ids)}, sampling)
        while engine.has_unfinished_requests():
            texts |= {output.request_id: output.outputs[0].text for output in engine.step() if output.finished}
        return [texts[name] for name in names]

    @contextmanager
    def answering(self, output_tokens: int) -> Iterator[None]:
        """A block in which answers end where the model ends them, or after `output_tokens`."""
        kept = self._sampling, self._output_tokens, self.kept_output_tokens
        self._sampling = type(self._sampling)(max_tokens=output_tokens, temperature=0.0)
        self._output_tokens, self.kept_output_tokens = output_tokens, output_tokens - 1
        try:
            yield
        finally:
            self._sampling, self._output_tokens, self.kept_output_tokens = kept

    def reset(self) -> None:
        """Raises RuntimeError if blocks are in use."""
        if not self._open().reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: blocks are still in use")

    def warm_up(self) -> None:
        """Serve random prompts of several lengths, and reset, to time later ones without first-call costs."""
        draw = random.Random(0)
        room = self._longest - self._output_tokens
        for tokens in sorted({min(tokens, room) for tokens in _WARM_UP_TOKENS}):
            self.generate([draw.randrange(self._vocabulary) for _ in range(tokens)])
        self.reset()

    def close(self) -> None:
        if self._engine is None:
            return
        self._engine.engine_core.shutdown()
        self._engine = None
        gc.collect()

    def _open(self) -> Any:
        if self._engine is None:
            raise RuntimeError("this engine is closed")
        return self._engine


def _import_vllm(*, local: bool) -> tuple[Any, bool]:
    """The module, quiet and in-process, and whether it runs on a CPU. vLLM reads the environment on import."""
    set_environment()
    if local:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ImportError(
            f"the vllm engine needs {error.name}: {install_hint('vllm')}, "
            "or on a machine without a GPU `make vllm` in the repository",
            name=error.name,
        ) from error
    return vllm, bool(current_platform.is_cpu())


def set_environment() -> None:
    """vLLM and torch read these variables once."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_LOGGING_LEVEL"] == "ERROR":
        logging.getLogger("vllm").setLevel(logging.ERROR)


def _start(vllm: Any, arguments: dict[str, Any]) -> Any:
    import torch

    set_num_threads = torch.set_num_threads
    try:
        with warnings.catch_warnings(), _hidden("llvmlite.binding.ffi"):
            warnings.simplefilter("ignore", FutureWarning)
            return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
    finally:
        # On a CPU vLLM replaces it with a function that does nothing, for the whole process.
        torch.set_num_threads = set_num_threads


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Hide a module from vLLM, which calls `vars()` on every attribute of every module: llvmlite refuses that."""
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module


def has_fast_bfloat16() -> bool:
    """As in `ragorder.kernels.random_model`, with torch and vLLM quiet from their first import on."""
    set_environment()
    return random_model.has_fast_bfloat16()
