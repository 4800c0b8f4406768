"""vLLM with a hybrid model of random weights, in a process of its own: prompts in, cached tokens out.

It tells the size of its blocks before it reads the prompts: vLLM makes them as large as the state of a layer, in the
units of the processor's kernels.

python hybrid_engine.py FOLDER ['{"max_num_batched_tokens": 640}'] < prompts.json   # a list of lists of token ids
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 1024


def save_config(folder: Path) -> None:
    """Of Qwen3-Next: three layers of gated delta nets (GDN), and one with attention. vLLM's kernels for a CPU take
    heads of 128 values."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16384,
        intermediate_size=256,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    )
    config.architectures = ["Qwen3NextForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)


def main(folder: Path, changes: dict[str, Any]) -> None:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    save_config(folder)
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 28,
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": True,
    }
    engine = LLM(model=str(folder), **options | changes)
    cache = engine.llm_engine.vllm_config.cache_config
    sys.stdout.write(f"BLOCK {cache.block_size}\n")
    sys.stdout.flush()
    prompts = json.load(sys.stdin)
    sampling = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, detokenize=False)
    cached = []
    for ids in prompts:
        (answer,) = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        cached.append(answer.num_cached_tokens or 0)
    found = {"block_size": cache.block_size, "mode": cache.mamba_cache_mode, "cached": cached}
    sys.stdout.write(f"FOUND {json.dumps(found)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
