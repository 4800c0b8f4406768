"""The embedded engine and the models of transformers: the same logits as without it, or a refusal by name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from support.families import DYNAMIC, FAMILIES, SIZES, VOCABULARY, WINDOW, family, make_model
from support.rings import grid
from support.small_engine import ask, exactly, tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragorder.kernels.engine import (
    EngineSettings,
    Request,
    RequestRefusedError,
    Sampling,
    TieredEngine,
    UnsupportedModelError,
)
from ragorder.kernels.models.batch import Piece, pack
from ragorder.kernels.models.graphs import MOST_TOKENS, Bucket, FixedStep, GraphCapture, StepGraphs
from ragorder.kernels.models.model import PatchedModel
from ragorder.kernels.paging import BlockPool

pytestmark = pytest.mark.merge

# transformers' SDPA leaves out the soft-cap.
EAGER = {"gemma2"}

DOCUMENTS = (37, 50, 23, 41)


def plain(model: Any, name: str = "") -> Any:
    """The same model without the engine."""
    clone = copy.deepcopy(model)
    clone.set_attn_implementation("eager" if name in EAGER else "sdpa")
    return clone


def last_logits(model: Any, prompt: Sequence[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([list(prompt)])).logits[0, -1].float()


SETTINGS = EngineSettings(device_tokens=2048, host_bytes=0)


@pytest.fixture(scope="module", params=grid(list(FAMILIES), 4))
def served(request: pytest.FixtureRequest) -> Any:
    model = family(request.param)
    reference = plain(model, request.param)
    with TieredEngine(model, settings=SETTINGS) as engine:
        yield engine, reference


class TestFamilies:
    @pytest.mark.parametrize("cached", range(len(DOCUMENTS) + 1))
    def test_logits_are_transformers_own_with_none_to_all_documents_cached(self, served: Any, cached: int) -> None:
        engine, reference = served
        documents = [tokens(length, 100 * cached + place) for place, length in enumerate(DOCUMENTS)]
        if cached:
            engine.generate([ask(documents[:cached], tokens(9, 1))])
        request = ask(documents, tokens(13, 2))
        [completion] = exactly(engine, reference, request)
        assert completion.cached.total == completion.cached.device == sum(DOCUMENTS[:cached])

    def test_answers_are_transformers_own_in_a_batch_that_shares_blocks(self, served: Any) -> None:
        engine, reference = served
        first, second, third = (tokens(length, 900 + length) for length in (45, 38, 27))
        requests = [
            ask([first, second], tokens(7, 3)),
            ask([first, third], tokens(11, 4)),
            ask([first, second, third], tokens(5, 5), max_tokens=24),
            ask([], tokens(61, 6), max_tokens=24),
        ]
        for _ in range(2):
            found = exactly(engine, reference, *requests)
            assert [each.finish_reason for each in found] == ["length"] * 4
        # Whether in the same step or one later: the first document was computed once.
        assert [each.cached.total for each in engine.generate(requests)] == [83, 72, 110, 0]


class Repeating:
    """A GPU's graphs on a CPU: the same computation on the same tensors, and the same tensor for the results."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.error: RuntimeError | None = None

    def capture(self, compute: Callable[[], Any]) -> Callable[[], Any]:
        self.captured += 1
        if self.error is not None:
            raise self.error
        results = compute()

        def replay() -> Any:
            self.replayed += 1
            with torch.inference_mode():
                return results.copy_(compute())

        return replay

    def forget(self) -> None:
        pass


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Repeating:
    """Engines that are made capture their steps."""
    repeating = Repeating()
    monkeypatch.setattr(GraphCapture, "of", lambda forward, pool: repeating)
    return repeating


@pytest.fixture
def pooled() -> Iterator[tuple[Any, BlockPool]]:
    """A model's forward, and a pool of blocks with KV."""
    model = PatchedModel(family("qwen2"), EngineSettings(verify=False))
    pool = BlockPool(model.shape, 64)
    pool.kv.normal_(generator=torch.Generator().manual_seed(0))
    yield model.forward, pool
    model.restore()


def composition(rng: Random, pool: BlockPool) -> list[Piece]:
    """Requests in blocks of their own: prompts, ends of prompts, and answers."""
    blocks, pieces = rng.sample(range(pool.blocks), pool.blocks), []
    for _ in range(rng.randint(1, 9)):
        count, start = rng.choice((1, 1, 1, rng.randint(2, 30))), rng.choice((0, rng.randint(1, 60)))
        table = [blocks.pop() for _ in range(pool.shape.blocks_for(start + count))]
        pieces.append(Piece(tokens(count, rng.randrange(1_000)), start, table, rng.random() < 0.8))
    return pieces


class TestStepsOfFixedShape:
    def test_have_the_logits_and_the_kv_of_steps_of_their_own_shape(self, pooled: tuple[Any, BlockPool]) -> None:
        forward, pool = pooled
        rng, before, steps = Random(0), pool.kv.clone(), {}
        for _ in range(60):
            pieces = composition(rng, pool)
            bucket = Bucket.of(pieces)
            assert bucket is not None
            pool.kv.copy_(before)
            wanted, computed = forward(*pack(pieces, pool)), pool.kv.clone()
            pool.kv.copy_(before)
            step = steps.setdefault(bucket, FixedStep(bucket, pool))
            count = step.fill(pieces)
            found = forward(*step.arguments)[:count]
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
            torch.testing.assert_close(pool.kv, computed, atol=1e-5, rtol=0)
        # Steps of other lengths were computed on the same tensors.
        assert len(steps) < 40

    @pytest.mark.parametrize("name", grid(list(FAMILIES), 3))
    def test_serve_what_transformers_answers(self, name: str, graphs: Repeating) -> None:
        model = family(name)
        reference = plain(model, name)
        documents = [tokens(length, length) for length in DOCUMENTS]
        with TieredEngine(model, settings=SETTINGS) as engine:
            engine.generate([ask(documents, tokens(9, 1))])
            for seed in range(4):
                requests = [ask(documents[:count], tokens(5 + count, seed)) for count in (4, 2, 1)]
                exactly(engine, reference, *requests)
            requests = [ask(documents, tokens(9, 1), max_tokens=12), ask([], tokens(30, 6), max_tokens=12)]
            exactly(engine, reference, *requests)
        assert graphs.captured and graphs.replayed > graphs.captured

    def test_that_cannot_be_captured_are_computed(self, graphs: Repeating, caplog: pytest.LogCaptureFixture) -> None:
        graphs.error = RuntimeError("operation not permitted when stream is capturing")
        model = family("qwen2")
        reference = plain(model)
        request = ask([tokens(40, 1)], tokens(9, 2), max_tokens=9)
        with TieredEngine(model, settings=SETTINGS) as engine, caplog.at_level(logging.WARNING):
            for _ in range(2):
                exactly(engine, reference, request)
        assert (graphs.captured, graphs.replayed) == (1, 0)
        [warning] = [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]
        assert "operation not permitted" in warning

    def test_are_captured_again_after_the_pool_has_moved(self, pooled: tuple[Any, BlockPool]) -> None:
        forward, pool = pooled
        repeating = Repeating()
        steps = StepGraphs(forward, pool, repeating)
        blocks = pool.allocate(3)
        piece = Piece(tokens(5, 1), 30, blocks, True)
        for size, captured in ((64, 1), (96, 2)):
            pool.resize(size)
            for _ in range(4):
                found = steps.compute([piece])
                torch.testing.assert_close(found, forward(*pack([piece], pool)), atol=1e-4, rtol=0)
            assert repeating.captured == captured

    def test_are_none_on_a_cpu_nor_of_many_tokens_nor_at_any_positions(self, pooled: tuple[Any, BlockPool]) -> None:
        forward, pool = pooled
        assert GraphCapture.of(forward, pool) is None
        assert StepGraphs(forward, pool, None).compute([Piece([1], 0, [0], True)]) is None
        assert Bucket.of([Piece([1] * (MOST_TOKENS + 1), 0, range(32), True)]) is None
        assert Bucket.of([Piece([1, 2], 0, [0], True, [0, 5])]) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_near_as_half_precision_can_be(dtype: str) -> None:
    model = family("qwen2").to(getattr(torch, dtype))
    reference = plain(model)
    same = 0
    with TieredEngine(model, settings=SETTINGS) as engine:
        for seed in range(20):
            documents = [tokens(37, seed), tokens(41, seed + 1)]
            engine.generate([ask(documents[:1], tokens(5, seed + 2))])
            request = ask(documents, tokens(12, seed + 3))
            [completion] = engine.generate([request])
            assert completion.cached.total == 37
            expected = last_logits(reference, request.token_ids)
            assert float((completion.logits - expected).norm() / expected.norm()) < 0.05
            same += completion.token_ids[0] == int(expected.argmax())
    assert same >= 17


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_that_of_the_weights_and_not_of_the_positions(dtype: str) -> None:
    """Rotary frequencies that are rounded like weights turn keys by other angles than the model was trained with."""
    model = family("llama")
    frequencies = model.model.rotary_emb.inv_freq.clone()
    with TieredEngine(model, settings=SETTINGS.model_copy(update={"dtype": dtype})):
        assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
        assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def test_longrope_is_served_up_to_its_original_window_and_refused_beyond() -> None:
    with TieredEngine(family("phi3-longrope"), settings=SETTINGS) as engine:
        assert engine.max_model_len == 256
        with pytest.raises(RequestRefusedError, match="context of 256"):
            engine.add(Request(tokens(250, 1), sampling=Sampling(max_tokens=10)))
    with pytest.raises(ValueError, match=r"max_model_len is 300.*up to 256"):
        TieredEngine(family("phi3-longrope"), settings=EngineSettings(device_tokens=2048, max_model_len=300))


DEEPSEEK = dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 16)
DEEPSEEK |= {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32}
DEEPSEEK |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
LINEAR_ATTENTION = dict.fromkeys(["head_dim", "linear_key_head_dim", "linear_value_head_dim"], 16)
LINEAR_ATTENTION |= {"num_hidden_layers": 4, "num_experts": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
T5 = {"vocab_size": 64, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 32}
BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2}


@pytest.mark.parametrize(
    ("name", "sizes", "others", "reason"),
    [
        ("Llama", None, {"rope_parameters": DYNAMIC}, "rotary positions .dynamic NTK."),
        ("DeepseekV3", None, DEEPSEEK, "multi-head latent attention"),
        ("Qwen3Next", None, LINEAR_ATTENTION, "linear attention"),
        ("Mamba", MAMBA, {}, "recurrent state"),
        ("GptOss", None, {"head_dim": 16, "num_local_experts": 4}, "attention sinks"),
        ("Llama4", None, {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 64}, "attention in chunks"),
        ("T5", T5, {}, "an encoder and cross attention"),
        ("Bloom", BLOOM, {}, "its own attention"),
        ("DiffLlama", None, {}, "attends more than once"),
        ("Doge", None, {}, "attention_mask"),
    ],
)
def test_a_model_that_cannot_be_served_exactly_is_refused_by_name(
    name: str, sizes: dict[str, Any] | None, others: dict[str, Any], reason: str
) -> None:
    if name == "Llama4":
        config = transformers.Llama4TextConfig(**SIZES | others)
        model = transformers.Llama4ForCausalLM(config)
    else:
        model = make_model(name, sizes, **others)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=f"{name}.*{reason}"):
        TieredEngine(model, settings=SETTINGS)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("effect", "given"),
    [
        ("s_aux", lambda: torch.zeros(4)),
        ("position_bias", lambda: torch.zeros(1, 4, 8, 8)),
        ("attention_mask", lambda: torch.zeros(1, 1, 8, 8)),
        ("dropout", lambda: 0.1),
        ("is_causal", lambda: False),
        ("a_name_of_tomorrow", lambda: 3),
    ],
)
def test_attention_options_of_a_layer_are_applied_or_refused(effect: str, given: Any) -> None:
    """The function itself, with all that a model may pass to it."""
    from ragorder.kernels.models.attention import IMPLEMENTATION, STEP, AttentionCall, register

    class Step:
        def attend(self, call: AttentionCall) -> Any:
            assert call.layer == 1
            return call.query

    register()
    attention = transformers.AttentionInterface()[IMPLEMENTATION]
    module = torch.nn.Module()
    module.layer_idx = 1
    query, key = torch.ones(1, 4, 8, 16), torch.ones(1, 2, 8, 16)
    harmless = {"position_ids": torch.arange(8), "use_cache": False, STEP: Step(), "s_aux": None}
    arguments = {"attention_mask": None, "scaling": 0.25, "dropout": 0.0} | harmless
    out, weights = attention(module, query, key, key, **arguments)
    assert out.shape == (1, 8, 4, 16)
    assert weights is None
    with pytest.raises(UnsupportedModelError, match=effect):
        attention(module, query, key, key, **arguments | {effect: given()})


def test_a_window_that_the_configuration_has_but_a_layer_does_not_is_refused() -> None:
    """The engine has no masks, which would say it, and the layer does not: only a look at the layers tells."""
    model = make_model("Qwen3", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    model.model.layers[1].self_attn.sliding_window = None
    with pytest.raises(UnsupportedModelError, match=f"layer 1 uses a window of None.*has {WINDOW}"):
        TieredEngine(model, settings=SETTINGS)


def test_a_model_whose_layers_have_different_heads_is_refused() -> None:
    model = make_model("Llama")
    attention = model.model.layers[1].self_attn
    size, width = model.config.hidden_size, 2 * attention.q_proj.out_features
    attention.q_proj, attention.o_proj = torch.nn.Linear(size, width), torch.nn.Linear(width, size)
    attention.num_key_value_groups *= 2
    with pytest.raises(UnsupportedModelError, match="the shapes of heads differ between its layers"):
        TieredEngine(model, settings=SETTINGS)


def test_a_model_with_an_undeclared_effect_is_refused_by_its_logits() -> None:
    model = make_model("Llama")
    forward = type(model.model.layers[0].self_attn).forward

    def biased(self: Any, *arguments: Any, **named: Any) -> Any:
        """Transformers' own attention with a bias on top, ours without."""
        out, weights = forward(self, *arguments, **named)
        return (out * 1.5 if self.config._attn_implementation == "eager" else out), weights

    attention = model.model.layers[2].self_attn
    attention.forward = biased.__get__(attention)
    with pytest.raises(UnsupportedModelError, match="the logits differ"):
        TieredEngine(model, settings=SETTINGS)
    assert model.config._attn_implementation == "sdpa"


def test_the_model_is_given_back_as_it_was() -> None:
    model = make_model("Llama").train()
    prompt = torch.tensor([tokens(20, 1)])
    with TieredEngine(model, settings=SETTINGS):
        assert not model.training
        with pytest.raises(UnsupportedModelError, match="outside the engine"):
            model(prompt)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert model(prompt).logits.shape == (1, 20, VOCABULARY)


def test_a_model_with_two_engines_is_given_back_by_the_last() -> None:
    model = make_model("Llama")
    prompt = torch.tensor([tokens(20, 1)])
    with torch.inference_mode():
        expected = int(model(prompt).logits[0, -1].argmax())
    first, second = (TieredEngine(model, settings=SETTINGS) for _ in range(2))
    first.close()
    (done,) = second.generate([Request(prompt[0].tolist(), sampling=Sampling(max_tokens=1, ignore_eos=True))])
    assert done.token_ids == (expected,)
    assert model.config._attn_implementation != "sdpa"
    second.close()
    assert model.config._attn_implementation == "sdpa"
