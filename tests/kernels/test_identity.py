"""The identity of a model on the disk: one value that differs is another model, and nothing else is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.inside import set_bounds
from support.small_engine import small_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragorder.kernels.engine import EngineSettings, Request, Sampling, TieredEngine
from ragorder.kernels.models.identity import identity
from ragorder.kernels.models.loading import load_model
from ragorder.kernels.paging import KVShape

pytestmark = pytest.mark.merge

VOCABULARY = 3000
SHAPE = KVShape(2, 2, 16, 16, torch.float32)
BLOCK = 16


tiny = partial(small_model, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


class _Scaled(torch.nn.Module):
    """A module with an adapter, as LoRA makes them: its scale is no parameter and no buffer."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(64, 4, bias=False)
        self.up = torch.nn.Linear(4, 64, bias=False)
        self.scaling = {"default": 2.0}
        self.active_adapters = ["default"]

    def forward(self, states: Any) -> Any:
        return self.base(states) + self.up(self.down(states)) * self.scaling["default"]


def adapted(**changes: Any) -> Any:
    model = tiny()
    module = _Scaled(model.model.layers[0].self_attn.q_proj)
    for name, value in changes.items():
        setattr(module, name, value)
    model.model.layers[0].self_attn.q_proj = module
    return model


class TestOneValueMakesAnotherModel:
    def test_any_single_number_of_any_parameter_or_buffer(self, model: Any) -> None:
        """The largest value next to it, at the first place, the last one and those that no sample would hit."""
        before = identity(model, SHAPE)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        assert {"model.rotary_emb.inv_freq", "model.embed_tokens.weight", "model.norm.weight"} <= {
            name for name, _ in tensors
        }
        seen = {before}
        for name, tensor in tensors:
            numbers = tensor.data.view(-1)
            for place in {0, 1, len(numbers) // 2 + 1, len(numbers) - 2, len(numbers) - 1} & set(range(len(numbers))):
                kept = numbers[place].clone()
                numbers[place] = torch.nextafter(kept, torch.tensor(9e9))
                found = identity(model, SHAPE)
                numbers[place] = kept
                assert found not in seen, f"{name}[{place}]"
                seen.add(found)
        assert identity(model, SHAPE) == before

    def test_every_entry_of_the_configuration(self, model: Any) -> None:
        before = identity(model, SHAPE)
        seen = {before}
        for name, value in model.config.to_dict().items():
            changed = copy.deepcopy(model)
            # Past its checks: an entry may have a value that this version does not know.
            vars(changed.config)[name] = "something else" if value is None or isinstance(value, str | dict) else [value]
            if changed.config.to_dict()[name] == value:
                # It is derived from others.
                continue
            found = identity(changed, SHAPE)
            assert (found == before) == (name in ("_name_or_path", "transformers_version")), name
            assert found not in seen - {before}, name
            seen.add(found)
        assert len(seen) > 20

    def test_what_a_module_keeps_beside_its_parameters(self, model: Any) -> None:
        models = [copy.deepcopy(model) for _ in range(6)]
        models[1].model.layers[1].input_layernorm.variance_epsilon = 1e-5
        models[2].model.rotary_emb.attention_scaling = 1.5
        models[3].model.layers[0].mlp.act_fn = torch.nn.ReLU()
        models[4].model.steering = torch.zeros(64)
        models[5].model.steering = torch.zeros(64)
        models[5].model.steering[63] = 1e-30
        assert len({identity(each, SHAPE) for each in models}) == len(models)

    def test_an_adapter_counts_with_its_weights_its_scale_and_whether_it_is_on(self) -> None:
        one = adapted()
        weights = copy.deepcopy(one)
        weights.model.layers[0].self_attn.q_proj.up.weight.data[-1, -1] += 1
        models = [tiny(), one, weights]
        for name, value in {"scaling": {"default": 4.0}, "active_adapters": []}.items():
            models.append(copy.deepcopy(one))
            setattr(models[-1].model.layers[0].self_attn.q_proj, name, value)
        found = [identity(each, SHAPE) for each in models]
        assert len(set(found)) == len(found)
        assert identity(copy.deepcopy(one), SHAPE) == found[1]

    def test_a_hook_counts_with_what_it_was_made_with(self, model: Any) -> None:
        def steered(vector: Any, make: Callable[[Any], Any]) -> str:
            changed = copy.deepcopy(model)
            changed.model.layers[0].register_forward_hook(make(vector))
            return identity(changed, SHAPE)

        makers: list[Callable[[Any], Any]] = [
            lambda vector: lambda module, inputs, output: output + vector,
            lambda vector: partial(lambda shift, module, inputs, output: output + shift, vector),
            lambda vector: lambda module, inputs, output, shift=vector: output + shift,
        ]
        found = [identity(model, SHAPE)]
        for make in makers:
            found += [steered(torch.zeros(64), make), steered(torch.ones(64), make)]
            assert steered(torch.ones(64), make) == found[-1]
        assert len(set(found)) == len(found)

    def test_which_weights_are_shared(self) -> None:
        """Of three layers two share their weights: the named parameters of both models are the same tensors."""
        found = []
        for first, second in ((0, 2), (1, 2), (0, 1)):
            shared = tiny(num_hidden_layers=3)
            shared.model.layers[second].mlp = shared.model.layers[first].mlp
            found.append(identity(shared, SHAPE))
        assert len(set(found)) == 3

    def test_tied_weights_count_once_and_are_found_again(self) -> None:
        tied = tiny(tie_word_embeddings=True)
        assert tied.lm_head.weight is tied.model.embed_tokens.weight
        before = identity(tied, SHAPE)
        assert identity(copy.deepcopy(tied), SHAPE) == before
        tied.lm_head.weight.data[VOCABULARY - 1, 0] += 1
        assert identity(tied, SHAPE) != before

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_the_dtype_counts(self, model: Any, dtype: Any) -> None:
        changed = copy.deepcopy(model).to(dtype)
        assert identity(changed, SHAPE) != identity(model, SHAPE)

    def test_the_layout_of_kv_and_the_software_count(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        found = [identity(model, SHAPE), identity(model, KVShape(2, 2, 16, 32, torch.float32))]
        for module in (torch, transformers):
            with monkeypatch.context() as patch:
                patch.setattr(module, "__version__", "99.0")
                found.append(identity(model, SHAPE))
        assert len(set(found)) == len(found)

    def test_strided_weights_are_read_whole(self, model: Any) -> None:
        strided = copy.deepcopy(model)
        projection = strided.model.layers[0].self_attn.o_proj
        projection.weight.data = projection.weight.data.t().contiguous().t()
        assert not projection.weight.is_contiguous()
        before = identity(strided, SHAPE)
        assert before == identity(model, SHAPE)
        projection.weight.data[63, 62] += 1
        assert identity(strided, SHAPE) != before

    def test_a_tensor_in_many_pieces(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        set_bounds(monkeypatch, hashed_bytes=1000)
        before = identity(model, SHAPE)
        assert identity(model, SHAPE) == before
        weights = model.model.embed_tokens.weight.data.view(-1)
        for place in (249, 250, 251, len(weights) - 1):
            kept = weights[place].clone()
            weights[place] += 1
            found = identity(model, SHAPE)
            weights[place] = kept
            assert found != before

    def test_nested_values_are_not_run_together(self, model: Any) -> None:
        found = []
        for value in ({"a": {}, "b": 1}, {"a": {"b": 1}}, ["a", ["b"]], [["a"], "b"], [], [[]], "1", 1, 1.0, True):
            changed = copy.deepcopy(model)
            changed.config.something = value
            found.append(identity(changed, SHAPE))
        assert len(set(found)) == len(found)

    def test_weights_that_are_not_in_memory_are_refused(self, model: Any) -> None:
        changed = copy.deepcopy(model)
        changed.model.norm.to("meta")
        with pytest.raises(ValueError, match="disk_path"):
            identity(changed, SHAPE)


class TestTheSameModelIsTheSame:
    @pytest.mark.slow
    def test_a_model_that_is_loaded_in_another_process_from_another_place(self, tmp_path: Path, python: Any) -> None:
        tiny(tie_word_embeddings=True).save_pretrained(tmp_path / "here")
        script = (
            "import sys, torch; from ragorder.kernels.engine import EngineSettings;"
            "from ragorder.kernels.models.loading import load_model;"
            "from ragorder.kernels.models.identity import identity; from ragorder.kernels.paging import KVShape;"
            "print(identity(load_model(sys.argv[1], EngineSettings()), KVShape(2, 2, 16, 16, torch.float32)))"
        )
        there = python("-c", script, str(tmp_path / "here")).stdout.strip()
        (tmp_path / "here").rename(tmp_path / "elsewhere")
        assert identity(load_model(tmp_path / "elsewhere", EngineSettings()), SHAPE) == there

    def test_serving_changes_nothing(self, model: Any) -> None:
        served = copy.deepcopy(model)
        before = identity(served, SHAPE)
        with TieredEngine(served, settings=EngineSettings(device_tokens=2048, host_bytes=0)) as engine:
            within = identity(served, SHAPE)
            engine.generate([Request(list(range(900)), sampling=Sampling(max_tokens=100))])
            assert identity(served, SHAPE) == within
        assert identity(served, SHAPE) == before

    def test_without_a_disk_nothing_is_read(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def never(*_: object) -> str:
            raise AssertionError("the weights are read for nothing")

        monkeypatch.setattr("ragorder.kernels.models.model.identity", never)
        TieredEngine(copy.deepcopy(model), settings=EngineSettings(device_tokens=256, host_bytes=0)).close()


class TestOnTheDisk:
    """As `e_identity.py` attacks it: another model with the first one's folder."""

    def answer(self, model: Any, disk: Path | None, document: list[int]) -> tuple[tuple[int, ...], int, dict[str, int]]:
        settings = EngineSettings(device_tokens=20 * BLOCK, host_bytes=0, disk_path=disk, verify=False)
        with TieredEngine(copy.deepcopy(model), settings=settings) as engine:
            request = Request([*document, 5, 6, 7], [len(document)], Sampling(max_tokens=6))
            [completion] = engine.generate([request])
            for other in range(4):
                engine.generate([Request([100 + other] * 160 + [9], [160], Sampling(max_tokens=1))])
            disk_stats = engine.stats().cache.disk
            refused = {} if disk_stats is None else dict(disk_stats.refused)
            return completion.token_ids, completion.cached.disk, refused

    def test_one_row_of_the_embedding_between_the_samples(self, model: Any, tmp_path: Path) -> None:
        other = copy.deepcopy(model)
        row = 1500
        other.get_input_embeddings().weight.data[row] = torch.randn(64, generator=torch.Generator().manual_seed(1))
        document = [row] * 150
        mine, found, _ = self.answer(model, tmp_path / "kv", document)
        assert found == 0
        assert self.answer(model, tmp_path / "kv", document)[:2] == (mine, 150)
        truth, _, _ = self.answer(other, None, document)
        assert truth != mine
        assert self.answer(other, tmp_path / "kv", document) == (truth, 0, {"identity": 1})
        # What was there is still there.
        assert self.answer(model, tmp_path / "kv", document)[:2] == (mine, 150)

    def test_a_folder_from_before_is_refused_by_its_format(self, model: Any, tmp_path: Path) -> None:
        folder = tmp_path / "kv"
        folder.mkdir()
        note = {"format": 1, "identity": "0" * 32}
        (folder / "identity").write_text(json.dumps(note))
        _, found, refused = self.answer(model, folder, [1500] * 150)
        assert (found, refused) == (0, {"format": 1})
        assert json.loads((folder / "identity").read_text()) == note
