"""Sizes of models, from weights and from configurations, against the models themselves."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from ragorder.kernels.model_sizes import model_sizes

SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": SMALL,
    "MistralConfig": SMALL,
    "Qwen2Config": SMALL | {"tie_word_embeddings": True},
    "Qwen3Config": SMALL | {"head_dim": 32},
    "MixtralConfig": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2Config": {"vocab_size": 1000, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
}


@pytest.fixture
def small_config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path / "config.json"


def made(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, name)(**FAMILIES[name], bos_token_id=None, eos_token_id=None, pad_token_id=None)


def saved(tmp_path: Path, name: str = "LlamaConfig", **options: Any) -> tuple[Path, Any]:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(made(name)).to(torch.bfloat16)
    model.save_pretrained(tmp_path, **options)
    return tmp_path, model


def nbytes(model: Any) -> int:
    return sum(each.numel() * each.element_size() for each in model.parameters())


def in_a_buffer(layer: Any) -> int:
    """With the engine's alignment of 512 bytes."""
    return sum(-(-each.numel() * each.element_size() // 512) * 512 for each in layer.parameters())


class TestConfiguration:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_gives_the_bytes_of_the_model(self, name: str, tmp_path: Path) -> None:
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
        config = made(name)
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        sizes = model_sizes(tmp_path / "config.json", dtype="float32")
        assert sizes.weights == pytest.approx(nbytes(model), rel=0.005)
        assert len(sizes.layers) == 3

    def test_needs_no_torch(self, python: Any, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**SMALL, "dtype": "bfloat16"}))
        script = "import sys; from ragorder.kernels.model_sizes import *; print(model_sizes(sys.argv[1]).kv_token)"
        blocked = ("torch", "transformers", "numpy", "safetensors")
        done = python("-c", script, str(tmp_path / "config.json"), blocked=blocked)
        # Keys and values of 3 layers, 2 heads of 16 numbers, 2 bytes each.
        assert done.stdout.strip() == str(2 * 3 * 2 * 16 * 2), done.stderr

    def test_of_a_part_that_generates_is_the_text_models(self, small_config: Path, tmp_path: Path) -> None:
        (tmp_path / "parts.json").write_text(json.dumps({"vision_config": {"hidden_size": 9}, "text_config": SMALL}))
        assert model_sizes(tmp_path / "parts.json") == model_sizes(small_config)

    def test_a_larger_step_needs_more(self, small_config: Path) -> None:
        sizes = model_sizes(small_config)
        assert sizes.workspace(64) < sizes.workspace(100) < sizes.workspace(8192) < sizes.workspace(20_000)


class TestWeights:
    @pytest.mark.parametrize("options", [{}, {"max_shard_size": "100KB"}], ids=["one file", "shards"])
    def test_give_the_bytes_of_each_layer(self, options: dict[str, Any], tmp_path: Path) -> None:
        folder, model = saved(tmp_path, **options)
        assert len(list(folder.glob("*.safetensors"))) == 1 or options
        sizes = model_sizes(folder)
        assert sizes.layers == tuple(in_a_buffer(layer) for layer in model.model.layers)
        assert sizes.outside == nbytes(model) - sum(map(nbytes, model.model.layers))
        assert sizes.itemsize == 2

    def test_count_tied_embeddings_once(self, tmp_path: Path) -> None:
        folder, model = saved(tmp_path, "Qwen2Config")
        assert model_sizes(folder).outside == nbytes(model) - sum(map(nbytes, model.model.layers))

    def test_may_be_converted(self, tmp_path: Path) -> None:
        folder, _ = saved(tmp_path)
        stored, wide = model_sizes(folder), model_sizes(folder, dtype="float32")
        assert (wide.weights, wide.kv_token) == (2 * stored.weights, 2 * stored.kv_token)


def deeper(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


class TestBadInput:
    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (shutil.rmtree, "there is no"),
            (lambda folder: (folder / "config.json").unlink(), "no config.json"),
            (lambda folder: (folder / "model.safetensors").unlink(), r"has no weights \(\*.safetensors\).*config.json"),
            (deeper, "no list of 5 layers"),
            (cut_off, "truncated"),
        ],
    )
    def test_a_spoilt_folder(self, spoil: Any, said: str, tmp_path: Path) -> None:
        folder, _ = saved(tmp_path / "model")
        spoil(folder)
        with pytest.raises(ValueError, match=said):
            model_sizes(folder)

    @pytest.mark.parametrize(
        "content", [b"", b"\x00" * 8, struct.pack("<Q", 1 << 60), struct.pack("<Q", 4) + b"null", b"junk" * 9]
    )
    def test_weights_that_cannot_be_read(self, content: bytes, small_config: Path, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
            model_sizes(tmp_path)

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("{", "is not JSON"),
            ("[]", "not a model's configuration"),
            ("{}", "num_hidden_layers"),
            (json.dumps(SMALL | {"hidden_size": "large"}), "hidden_size"),
            (json.dumps(SMALL | {"num_attention_heads": 0}), "num_attention_heads"),
            (json.dumps(SMALL | {"num_experts_per_tok": "two"}), "num_experts_per_tok"),
        ],
    )
    def test_a_configuration_that_is_none(self, content: str, said: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=said):
            model_sizes(tmp_path / "config.json")

    def test_an_unknown_dtype(self, small_config: Path) -> None:
        with pytest.raises(ValueError, match="float32, bfloat16, float16"):
            model_sizes(small_config.parent, dtype="int3")
