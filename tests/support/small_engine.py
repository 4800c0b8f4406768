"""A small model on the embedded engine, its requests, and what transformers answers to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from support.families import VOCABULARY, make_model

if TYPE_CHECKING:
    from ragorder.kernels.engine import Completion, Request, TieredEngine

BLOCK = 16

Make = Callable[..., "TieredEngine"]


def small_model(**changes: Any) -> Any:
    """Two layers of random weights, large enough for attention to matter. `changes`: of its configuration."""
    sizes = {"intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    return make_model("Qwen2", **sizes | changes)


def tokens(count: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCABULARY) for _ in range(count)]


def ask(
    documents: Sequence[Sequence[int]], question: Sequence[int], salt: str | None = None, **sampling: Any
) -> Request:
    from ragorder.kernels.engine import Request, Sampling

    prompt = [token for document in documents for token in document]
    ends = [sum(map(len, documents[: place + 1])) for place in range(len(documents))]
    return Request([*prompt, *question], ends, Sampling(**{"max_tokens": 1} | sampling), salt, keep_logits=True)


def difference(completion: Completion, plain: Any, request: Request) -> float:
    """Of the first token's logits from those of the model without an engine."""
    import torch

    assert completion.error is None, completion.error
    with torch.no_grad():
        expected = plain(torch.tensor([list(request.token_ids)])).logits[0, -1]
    return float((completion.logits - expected).abs().max())


def greedy(plain: Any, request: Request) -> list[int]:
    """What transformers answers."""
    import torch

    prompt = torch.tensor([list(request.token_ids)])
    with torch.no_grad():
        answer = plain.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.sampling.max_tokens,
            do_sample=False,
        )
    return answer[0, prompt.shape[1] :].tolist()


def exactly(engine: TieredEngine, plain: Any, *requests: Request) -> list[Completion]:
    """The engine's completions, which are those of transformers: logits and greedy answers."""
    found = engine.generate(requests)
    for completion, request in zip(found, requests, strict=True):
        assert difference(completion, plain, request) <= 1e-4
        if request.sampling.max_tokens > 1:
            assert list(completion.token_ids) == greedy(plain, request)
    return found


def crowd(engine: TieredEngine, seeds: Iterable[int] = range(10, 13)) -> None:
    """Have documents of 90 tokens evict others."""
    for seed in seeds:
        engine.generate([ask([tokens(90, seed)], tokens(9, 3))])


def run(engine: TieredEngine) -> dict[int, Completion]:
    """Step until nothing is left."""
    done = {}
    while engine.has_unfinished:
        for update in engine.step():
            if update.completion is not None:
                done[update.request_id] = update.completion
    return done


def block_bytes(model: Any) -> int:
    config = model.config
    return BLOCK * config.num_hidden_layers * 2 * config.num_key_value_heads * (64 // 4) * 4


def small_tiers(model: Any, folder: Path, blocks: int) -> dict[str, Any]:
    """Settings of an engine with so many blocks on the device and in the host, and a disk for all."""
    return {
        "device_tokens": blocks * BLOCK,
        "host_bytes": blocks * block_bytes(model),
        "disk_path": folder / "kv",
        "disk_bytes": 1 << 24,
    }
