"""Cached keys moved to other positions: those that the model computes there (FusionRAG, appendix A.1)."""

from __future__ import annotations

from typing import Any

import pytest
from support.families import DYNAMIC, LONGROPE, ROTATED, VOCABULARY, family, make_model
from support.rings import grid

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor

from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.models.support import UnsupportedModelError

DOCUMENT = 41
# Where a block of 16 begins and ends, and far from it.
OFFSETS = (0, 1, 15, 16, 17, 31, 32, 33, 100, 255, 256, 257, 470)

EXACT = 1e-5


@pytest.fixture(scope="module", params=ROTATED)
def model(request: pytest.FixtureRequest) -> Any:
    kind, settings = ROTATED[request.param]
    return make_model(kind, **settings)


@pytest.fixture(scope="module")
def rotation(model: Any) -> Rotation:
    return Rotation.of(model)


def tokens(count: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(7))


def keys(model: Any, ids: Tensor, positions: Tensor) -> list[Tensor]:
    """(rows, tokens) as the model computes them: (rows x tokens, KV heads, D) of each layer."""
    with torch.inference_mode():
        # Without the configuration, a window cuts nothing off.
        cache = transformers.DynamicCache()
        model(input_ids=ids, position_ids=positions, use_cache=True, past_key_values=cache)
    return [layer.keys.transpose(1, 2).flatten(0, 1) for layer in cache.layers]


def alone(model: Any, positions: Tensor) -> list[Tensor]:
    """Each token is a sequence of its own: its keys depend on nothing but its position."""
    return keys(model, tokens(len(positions))[:, None], positions[:, None])


def error(found: Tensor, wanted: Tensor) -> float:
    """The greatest, of numbers above 1 relative to them."""
    return float(((found - wanted).abs() / wanted.abs().clamp(min=1)).max())


class TestMovedKeys:
    def test_are_those_computed_there_from_anywhere_to_anywhere(self, model: Any, rotation: Rotation) -> None:
        old = torch.arange(0, 512)
        new = (old * 37 + 11) % 512
        for layer, (before, after) in enumerate(zip(alone(model, old), alone(model, new), strict=True)):
            assert error(rotation.shift(before, new - old, layer, origin=old), after) < EXACT

    @pytest.mark.parametrize("offset", grid(OFFSETS, 5))
    def test_of_a_document_are_those_of_the_document_there(self, model: Any, rotation: Rotation, offset: int) -> None:
        ids, here = tokens(DOCUMENT)[None], torch.arange(DOCUMENT)
        before, after = keys(model, ids, here[None]), keys(model, ids, here[None] + offset)
        assert error(rotation.shift(before[0], offset, 0, origin=here), after[0]) < EXACT
        for layer, (old, new) in enumerate(zip(before, after, strict=True)):
            # From the second layer on also attention has rounded otherwise there.
            assert error(rotation.shift(old, offset, layer, origin=here), new) < 1e-3

    def test_agree_with_the_model_over_all_positions(self, model: Any, rotation: Rotation) -> None:
        rotation.verify(model)


class TestHalfPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_is_rotated_in_single_precision_and_rounded_once(self, dtype: Any) -> None:
        rotation = Rotation.of(family("llama"))
        vectors = torch.randn(50, 2, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
        found = rotation.shift(vectors, torch.arange(50), 0)
        assert found.dtype is dtype
        assert torch.equal(found, rotation.shift(vectors.float(), torch.arange(50), 0).to(dtype))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["llama", "llama-yarn", "qwen3"])
    def test_models_are_recognised_and_verified(self, name: str, dtype: Any) -> None:
        model = family(name).to(dtype)
        rotation = Rotation.of(model)
        assert all(rope is not None and not rope.adjacent for rope in rotation.ropes)
        rotation.verify(model)


class TestAModel:
    @pytest.mark.parametrize(
        ("name", "others", "reason"),
        [
            ("Llama", {"rope_parameters": DYNAMIC}, "the frequencies of dynamic RoPE depend on the length"),
            ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}, "of longrope RoPE"),
            ("GPT2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512}, "no rotary position embeddings"),
        ],
    )
    def test_whose_keys_cannot_be_moved_is_refused_by_name(
        self, name: str, others: dict[str, Any], reason: str
    ) -> None:
        sizes = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None} if name == "GPT2" else None
        with pytest.raises(UnsupportedModelError, match=f"{name}.*{reason}"):
            Rotation.of(make_model(name, sizes, **others))

    def test_that_rotates_in_another_way_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.llama import modeling_llama

        rotated = modeling_llama.apply_rotary_pos_emb

        def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
            return rotated(q, k, cos, -sin, *others)  # type: ignore[no-any-return]

        model = family("llama")
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", backwards)
        with pytest.raises(UnsupportedModelError, match="the keys of layer 0 do not rotate with their position"):
            Rotation.of(model)

    def test_with_other_frequencies_than_the_rotation_is_refused(self) -> None:
        rotation = Rotation.of(family("llama"))
        other = family("llama-llama3-rope")
        with pytest.raises(UnsupportedModelError, match="keys of layer 0 moved to another position differ"):
            rotation.verify(other)

    def test_is_left_as_it_was(self) -> None:
        model = family("llama").train()
        Rotation.of(model).verify(model)
        assert model.training
        assert model.config._attn_implementation == "sdpa"

    @pytest.mark.merge
    def test_in_an_engine_is_read_and_left_to_the_engine(self) -> None:
        from ragorder.kernels.engine import EngineSettings, Request, Sampling, TieredEngine

        model = family("qwen2")
        expected = Rotation.of(model).ropes
        with TieredEngine(model, settings=EngineSettings(device_tokens=512, host_bytes=0)) as engine:
            found = Rotation.of(model).ropes
            (done,) = engine.generate([Request(tokens(20).tolist(), sampling=Sampling(max_tokens=2))])
            assert done.error is None
        for ours, theirs in zip(found, expected, strict=True):
            assert ours is not None and theirs is not None
            assert torch.equal(ours.frequencies, theirs.frequencies)
