"""Checkpoints read by layer: the bytes are those of the whole model's weights, or the error says what is wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.families import STREAMED, family
from support.rings import grid
from support.streamed import saved

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragorder.kernels.models.support import UnsupportedModelError
from ragorder.kernels.offload import (
    Checkpoint,
    CheckpointError,
    LayerReadError,
    LayerStore,
    LayerTiers,
    ModelMemory,
)
from ragorder.kernels.offload.layout import CheckpointMap
from ragorder.kernels.offload.model_memory import decoder_layers, skeleton
from ragorder.trie.residency import TierLevel


def read_layer(store: LayerStore, layer: int, buffer: Any) -> int:
    return sum(store.read(chunk, buffer) for chunk in store.chunks(layer))


def parts_of(folder: Path, dtype: Any = None) -> tuple[Any, str, Any, Checkpoint]:
    """What a map is made from: the model without weights, the prefix of its layers, the layers, and the files."""
    empty = skeleton(transformers.AutoConfig.from_pretrained(folder), dtype)
    return empty, *decoder_layers(empty), Checkpoint(folder)


def opened(folder: Path, dtype: Any = None) -> LayerStore:
    empty, prefix, layers, checkpoint = parts_of(folder, dtype)
    return LayerStore.of(checkpoint, CheckpointMap(empty, prefix, layers, checkpoint), layers)


class TestLayers:
    def test_weights_that_are_turned_when_loaded_or_shared_are_refused_by_name(self, tmp_path: Path) -> None:
        from transformers import conversion_mapping
        from transformers.core_model_loading import Transpose, WeightConverter

        empty, prefix, layers, checkpoint = parts_of(saved(family("llama"), tmp_path / "model"))
        turned = WeightConverter(".mlp.up_proj.weight", ".mlp.up_proj.weight", [Transpose(0, 1)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda _: [turned])
            with pytest.raises(UnsupportedModelError, match=r"up_proj.*converted when it is loaded \(Transpose\)"):
                CheckpointMap(empty, prefix, layers, checkpoint)
        layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
        with pytest.raises(
            UnsupportedModelError, match=r"LlamaForCausalLM cannot be streamed: .*0.*and.*2.*same weights"
        ):
            CheckpointMap(empty, prefix, layers, checkpoint)
        checkpoint.close()


class TestModelMemory:
    @pytest.mark.parametrize("name", grid(list(STREAMED), 6))
    def test_is_that_of_the_weights(self, name: str) -> None:
        model = family(name)
        size = ModelMemory.of(model.config, torch.float32)
        assert size.weights == sum(each.numel() * 4 for each in model.parameters())
        _, layers = decoder_layers(model)
        assert size.layers == tuple(sum(each.numel() * 4 for each in layer.parameters()) for layer in layers)
        assert size.embedding == model.get_input_embeddings().weight.numel() * 4
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert size.head == (0 if tied else size.embedding)
        assert ModelMemory.of(model.config, "bfloat16").weights * 2 == size.weights

    def test_kv_and_workspace_grow_with_tokens(self) -> None:
        size = ModelMemory.of(family("llama").config, "float32")
        assert size.kv_token == 3 * 2 * 2 * 16 * 4
        assert 0 < size.workspace(1) < size.workspace(64) < size.workspace(8192)

    def test_sizes_have_other_names_in_some_families(self) -> None:
        config = transformers.DbrxConfig(
            n_layers=2,
            d_model=64,
            n_heads=4,
            vocab_size=256,
            attn_config={"kv_n_heads": 2, "rope_theta": 10_000.0},
            ffn_config={"moe_num_experts": 2},
        )
        size = ModelMemory.of(config, "float32")
        assert size.kv_token == 2 * 2 * 2 * 16 * 4
        assert (size.shape.layers, size.shape.hidden, size.shape.heads) == (2, 64, 4)

    def test_a_model_without_one_list_of_layers_is_refused(self) -> None:
        config = family("llama").config
        model = skeleton(config)
        model.model.layers = model.model.layers[:2]
        with pytest.raises(UnsupportedModelError, match="it has 0 lists of 3 layers"):
            decoder_layers(model)


INDEX = "model.safetensors.index.json"


def weights_changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """All weights in one file, after this change."""

    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights: dict[str, Any] = {}
        for file in folder.glob("model-*.safetensors"):
            weights |= load_file(file)
        change(weights)
        (folder / INDEX).unlink()
        save_file(weights, folder / "model.safetensors")

    return spoil


def wider(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}), "utf-8")


def cut_short(folder: Path) -> None:
    last = max(folder.glob("model-*.safetensors"))
    os.truncate(last, last.stat().st_size - 100)


UP = "model.layers.1.mlp.up_proj.weight"
FIRST = "model-00001-of-*.safetensors"


class TestBadFolders:
    @pytest.mark.parametrize(
        ("spoil", "said"),
        [
            (
                lambda folder: next(folder.glob(FIRST)).unlink(),
                r"lacks 1 of the \d+ files with its weights: model-00001",
            ),
            (lambda folder: (folder / INDEX).write_text("{}", "utf-8"), r"index.json cannot be read"),
            (cut_short, r"truncated: it has \d+ bytes, but .* ends at \d+"),
            (weights_changed(lambda weights: weights.pop(UP)), rf"lacks 1 of its weights: {UP}"),
            (wider, r"is \(192, 64\) in the configuration, but \(128, 64\) in the"),
            (
                weights_changed(lambda weights: weights.update({UP: weights[UP].T.contiguous()})),
                r"up_proj.weight is \(128, 64\) in the configuration, but \(64, 128\)",
            ),
        ],
    )
    def test_of_a_model_are_refused(self, tmp_path: Path, spoil: Callable[[Path], object], said: str) -> None:
        folder = saved(family("llama"), tmp_path / "model", max_shard_size="100KB")
        spoil(folder)
        with pytest.raises(CheckpointError, match=said):
            opened(folder)

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("none", b"", "no weights that can be streamed: give a folder with model.safetensors, or"),
            ("pytorch_model.bin", b"x", "pytorch_model.bin has another format"),
            *(
                ("model.safetensors", content, "not a safetensors file")
                for content in (b"", b"12345678", (10**12).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"[]")
            ),
        ],
    )
    def test_without_one_are_refused(self, tmp_path: Path, name: str, content: bytes, said: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=said):
            Checkpoint(tmp_path)


class TestFaults:
    def test_a_file_that_is_replaced_by_name_is_not_the_one_that_is_read_and_after_closing_none_is(
        self, tmp_path: Path
    ) -> None:
        folder = saved(family("llama"), tmp_path / "model")
        store = opened(folder)
        buffer, again = (torch.empty(store.slot_bytes, dtype=torch.uint8) for _ in range(2))
        read_layer(store, 0, buffer)
        shutil.copy(folder / "model.safetensors", tmp_path / "other")
        (folder / "model.safetensors").unlink()
        os.replace(tmp_path / "other", folder / "model.safetensors")
        read_layer(store, 0, again)
        nbytes = store.layouts[0].parameters[0].nbytes
        assert torch.equal(buffer[:nbytes], again[:nbytes])
        store.close()
        with pytest.raises(LayerReadError, match="closed"):
            read_layer(store, 0, again)


class TestResidency:
    @pytest.mark.parametrize(("layers", "device", "host"), [(24, 0, 0), (24, 24, 0), (24, 6, 6), (5, 2, 3), (7, 3, 1)])
    def test_layers_that_stay_are_spread(self, layers: int, device: int, host: int) -> None:
        residency = LayerTiers.spread(layers, device, host)
        counts = [residency.count(place) for place in TierLevel]
        assert counts == [device, host, layers - device - host]
        held = [layer for layer in range(layers) if residency[layer] is TierLevel.DEVICE]
        gaps = [
            after - before for before, after in zip(held, [*held[1:], *(held[:1] and [held[0] + layers])], strict=True)
        ]
        assert not gaps or max(gaps) - min(gaps) <= 1

    def test_a_move_reads_and_copies_no_layer_more_than_it_must(self) -> None:
        for places, device in product(product(TierLevel, repeat=4), range(5)):
            before = LayerTiers(places)
            on_device, in_host = before.count(TierLevel.DEVICE), before.count(TierLevel.HOST)
            for host in range(5 - device):
                after = before.with_counts(device, host)
                assert [after.count(place) for place in TierLevel] == [device, host, 4 - device - host]
                moved = Counter(zip(before.places, after.places, strict=True))
                read = moved[TierLevel.DISK, TierLevel.DEVICE] + moved[TierLevel.DISK, TierLevel.HOST]
                assert read == max(0, device + host - on_device - in_host)
                leaving = max(0, on_device - device)
                assert moved[TierLevel.DEVICE, TierLevel.HOST] == min(leaving, max(0, host - in_host))

    @pytest.mark.parametrize(("device", "host"), [(-1, 0), (3, -1), (4, 2)])
    def test_more_than_all_is_refused(self, device: int, host: int) -> None:
        with pytest.raises(ValueError, match="exceed 5 layers"):
            LayerTiers.spread(5, device, host)
