"""A random-weight Qwen2 and its tokenizer, for timing engines."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ragorder.common.extras import needs
from ragorder.common.jsonl import decode

_FINGERPRINT = "fingerprint.json"
_FORMAT = 1
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SMALLEST_VOCABULARY = 256 + len(_SPECIAL_TOKENS)
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(
    folder: Path,
    *,
    texts: Iterable[str],
    layers: int = 14,
    hidden_size: int = 1024,
    vocab_size: int = 8192,
    seed: int = 0,
    max_position_embeddings: int = 32768,
) -> Path:
    """Write a bf16 Qwen2 with random weights and a byte-level BPE tokenizer trained on `texts`, replacing one made
    here. Return `folder`. Raises ValueError, ImportError, and FileExistsError for foreign files."""
    heads, kv_heads, head_dim = _heads(hidden_size)
    if layers < 1:
        raise ValueError(f"layers is {layers}: give 1 or more")
    if vocab_size < _SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size is {vocab_size}: give {_SMALLEST_VOCABULARY} or more, for bytes and special tokens"
        )
    if folder.exists() and any(folder.iterdir()) and not (folder / _FINGERPRINT).exists():
        raise FileExistsError(f"{folder} has files that were not made here: give another folder or empty it")
    texts = list(texts)
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
    }
    fingerprint = {"format": _FORMAT, "seed": seed, "texts": _digest(texts), **sizes}
    if _fingerprint_of(folder) == fingerprint:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _save_tokenizer(unfinished, texts, vocab_size)
        _save_weights(unfinished, sizes, seed)
        (unfinished / _FINGERPRINT).write_text(json.dumps(fingerprint, indent=2) + "\n", encoding="utf-8")
        unfinished.chmod(0o755)
        _put_in_place(unfinished, folder, fingerprint)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _heads(hidden_size: int) -> tuple[int, int, int]:
    head_dim = 128 if hidden_size % 128 == 0 and hidden_size >= 1024 else 64
    if hidden_size < 64 or hidden_size % head_dim:
        raise ValueError(f"hidden_size is {hidden_size}: give a multiple of 64")
    heads = hidden_size // head_dim
    return heads, 2 if heads % 2 == 0 else 1, head_dim


def _digest(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def _fingerprint_of(folder: Path) -> object:
    try:
        return decode((folder / _FINGERPRINT).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _put_in_place(made: Path, folder: Path, fingerprint: object) -> None:
    if folder.exists():
        old = made.with_name(made.name + ".old")
        os.replace(folder, old)
        shutil.rmtree(old, ignore_errors=True)
    try:
        os.replace(made, folder)
    except OSError:
        if _fingerprint_of(folder) != fingerprint:
            raise


def _save_tokenizer(folder: Path, texts: Sequence[str], vocab_size: int) -> None:
    with needs("torch", "making a model"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _save_weights(folder: Path, sizes: dict[str, Any], seed: int) -> None:
    with needs("torch", "making a model"):
        import torch
        from safetensors.torch import save_file
        from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**sizes, tie_word_embeddings=True, bos_token_id=None, eos_token_id=2, pad_token_id=0)
    config.architectures = ["Qwen2ForCausalLM"]
    config.dtype = "bfloat16"
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Qwen2ForCausalLM(config).state_dict().items()}
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        if name == "lm_head.weight":
            continue
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
        elif name.endswith(".bias"):
            weights[name] = torch.zeros(shape, dtype=torch.bfloat16)
        else:
            weights[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=random)
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=2, pad_token_id=0).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
