"""The model, the prompts, the right answers, and the servers that are asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragorder.adapters.vllm_tiers import TierSettings
from ragorder.eval.engines.server import Launch, VLLMServer, launch_process
from ragorder.kernels.random_model import make_model
from support.chaos.asking import DTYPE, Answer, ask
from support.chaos.prompts import Prompts, make_prompts

_BLOCK_SIZE = 32
_BLOCKS = 64
_LONGEST = 1024
_CHUNKS = {"host_bytes": 96, "disk_bytes": 500}
_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""Otherwise each server begins with compiling a function of vLLM's for logarithms: that takes longer than its start."""

_TEXT = "Nothing that is tokenised here is ever read: prompts are made of token ids. " * 40


@dataclass(frozen=True, slots=True)
class Site:
    """One model with its prompts and `expected` answers, which a server without any cache gave."""

    model: Path
    prompts: Prompts
    expected: Sequence[Answer]
    chunk_bytes: int
    launch: Launch = launch_process

    def server(self, disk: Path, launch: Launch | None = None, **settings: Any) -> VLLMServer:
        """A server with tiers, not started: a pool of three prompts and a half, a host of five, a disk of thirty."""
        sizes = {name: chunks * self.chunk_bytes for name, chunks in _CHUNKS.items()}
        tiers = TierSettings.model_validate({"disk_path": disk, **sizes, **settings})
        return VLLMServer(
            self.model,
            blocks=_BLOCKS,
            block_size=_BLOCK_SIZE,
            max_model_len=_LONGEST,
            dtype=DTYPE,
            kv_transfer_config=tiers.kv_transfer_config(),
            environment=_ENVIRONMENT,
            launch=launch or self.launch,
        )


def make_site(folder: Path, prompts: int = 60, *, seed: int = 0, launch: Launch = launch_process) -> Site:
    """Make a model (another `seed`: another model of the same shape) and have each prompt answered once, uncached.
    `launch` is how its servers come to run.

    Starts a server for that. Raises EngineError, ImportError naming the extra to install.
    """
    import httpx2

    model = make_model(
        folder, texts=[_TEXT], layers=2, hidden_size=256, vocab_size=2048, max_position_embeddings=4096, seed=seed
    )
    drawn = make_prompts(prompts)
    plain = VLLMServer(
        model,
        blocks=_BLOCKS,
        block_size=_BLOCK_SIZE,
        max_model_len=_LONGEST,
        dtype=DTYPE,
        prefix_caching=False,
        environment=_ENVIRONMENT,
        launch=launch,
    )
    with plain, httpx2.Client(timeout=60) as client:
        expected = [ask(client, plain.base_url, plain.model_name, prompt) for prompt in drawn.prompts]
    # Two layers of keys and values for two heads of 64, in float32.
    bytes_per_token = 2 * 2 * 2 * 64 * 4
    return Site(model, drawn, expected, _BLOCK_SIZE * bytes_per_token, launch)
