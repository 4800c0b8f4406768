"""What selections depend on, measured on the engine's parts: against transformers' own eager attention."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.families import FAMILIES, VOCABULARY, make_model
from support.rings import grid

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor
from transformers import DynamicCache

from ragorder.kernels.engine import EngineSettings
from ragorder.kernels.engine.scoring import Question, Scorer, ScoringInput, kv_deviation, read_question
from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.models.batch import Piece, pack
from ragorder.kernels.models.model import PatchedModel
from ragorder.kernels.paging import BlockPool

pytestmark = pytest.mark.merge

BLOCK, BLOCKS = 16, 24
# `make test` takes the second, the sixth and the ninth: one KV head, scores with a cap, normed queries and keys.
NAMES = (
    *("llama", "llama-mqa", "llama-llama3-rope", "llama-yarn", "qwen2"),
    *("gemma2", "mistral", "phi3", "qwen3", "mixtral"),
)
CAPPED = {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}
SYSTEM, DOCUMENTS = 20, (37, 50, 43)
END = SYSTEM + sum(DOCUMENTS)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def named(name: str, layers: int = 3) -> Any:
    kind, settings = ("Gemma2", CAPPED) if name == "gemma2" else FAMILIES[name]
    types = {"layer_types": ["full_attention"] * layers} if name == "gemma2" else {}
    return make_model(kind, **settings | types | {"num_hidden_layers": layers})


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Engine:
    """The parts of an engine that measure, one sequence's blocks in its pool, and the model without an engine."""

    def __init__(self, model: Any) -> None:
        self.plain = copy.deepcopy(model)
        self.plain.set_attn_implementation("eager")
        self.model = PatchedModel(model, EngineSettings(verify=False, block_size=BLOCK))
        self.pool = BlockPool(self.model.shape, 2 * BLOCKS)
        # In no order, with other blocks between them.
        self.table = self.pool.allocate(2 * BLOCKS)[::-2]
        self.blocks = torch.tensor(self.table)

    def question(self, ids: Sequence[int], start: int) -> Question:
        return read_question(self.model.forward, self.pool, Piece(ids, start, self.table, False))

    def deviation(self, ids: Sequence[int], start: int, most_tokens: int = 64) -> Tensor:
        return kv_deviation(self.model.forward, self.pool, Piece(ids, start, self.table, False), most_tokens)

    def rows(self, begin: int, end: int) -> tuple[Tensor, slice, slice, Tensor]:
        """An index of the pool's memory: these positions, in all layers, keys and values."""
        at = torch.arange(begin, end)
        return self.blocks[at // BLOCK], slice(None), slice(None), at % BLOCK

    def compute(self, ids: Sequence[int], start: int = 0) -> None:
        self.model.forward(*pack([Piece(ids, start, self.table, False)], self.pool))

    def reuse(self, begin: int = SYSTEM, end: int = END) -> None:
        """KV of other tokens, as it could come from any copies."""
        generator = torch.Generator().manual_seed(0)
        rows = self.rows(begin, end)
        self.pool.kv[rows] = torch.randn(self.pool.kv[rows].shape, generator=generator)

    def inputs(self, prompt: list[int], *spans: tuple[int, int], exact: int = SYSTEM) -> ScoringInput:
        """Of a prompt whose reused documents are `spans`, if not all."""
        table = np.asarray(self.table, dtype=np.int32)
        return ScoringInput(prompt, table, SYSTEM, exact, spans or ((SYSTEM, END),), (END, len(prompt)))

    def scorer(self, most_tokens: int = 64) -> Scorer:
        return Scorer(self.model.forward, self.pool, Rotation.of(self.plain), most_tokens)

    def eager(self, ids: Sequence[int], start: int = 0) -> Any:
        """The output of the model after the first `start` tokens in the pool."""
        cache = DynamicCache()
        held = self.pool.kv[self.rows(0, start)].permute(1, 2, 3, 0, 4)
        for layer in range(self.model.shape.layers if start else 0):
            cache.update(held[layer, 0][None].clone(), held[layer, 1][None].clone(), layer)
        positions = torch.arange(start, start + len(ids))[None]
        with torch.no_grad():
            return self.plain(
                torch.tensor([list(ids)]), position_ids=positions, past_key_values=cache, output_attentions=True
            )


def made(name: str, layers: int = 3) -> Iterator[Engine]:
    engine = Engine(named(name, layers))
    yield engine
    engine.model.restore()


@pytest.fixture(params=grid(NAMES, 3))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    yield from made(request.param)


@pytest.fixture(params=grid(NAMES, 3))
def one_layer(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """In its only layer a token's query and key depend on nothing before it."""
    yield from made(request.param, 1)


@pytest.fixture
def llama() -> Iterator[Engine]:
    yield from made("llama")


def received(output: Any, start: int) -> Tensor:
    """By each of the tokens before a question, in the last layer."""
    attention = output.attentions[-1][0, :, :, :start]
    return attention.sum(1).mean(0)


def modules_run(model: Any) -> list[str]:
    """Names of the layers whose second half, and of the head, that run from now on."""
    ran: list[str] = []
    named = {f"layer {place}": layer.mlp for place, layer in enumerate(model.model.layers)} | {"head": model.lm_head}
    for name, module in named.items():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    return ran


def test_a_forward_ends_in_the_last_layer_that_is_measured(llama: Engine) -> None:
    ran = modules_run(llama.model.model)
    llama.question(tokens(11, 2), 0)
    assert ran == ["layer 0", "layer 1"]
    ran.clear()
    llama.deviation(tokens(11, 2), 0)
    assert ran == ["layer 0"]


class TestQuestion:
    def test_its_attention_is_transformers_own_over_any_kv(self, engine: Engine) -> None:
        engine.compute(tokens(SYSTEM, 1))
        engine.reuse()
        asked = tokens(11, 2)
        found = engine.question(asked, END).attention(engine.pool, engine.blocks)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, received(engine.eager(asked, END), END), **CLOSE)

    def test_tokens_without_kv_are_left_out(self, one_layer: Engine) -> None:
        one_layer.reuse(0)
        held = torch.ones(END, dtype=torch.bool)
        held[57:80] = False
        question = one_layer.question(tokens(11, 2), END)
        everything = question.attention(one_layer.pool, one_layer.blocks)
        one_layer.pool.kv[one_layer.rows(57, 80)] = float("nan")
        found = question.attention(one_layer.pool, one_layer.blocks, held)
        assert not found[~held].any()
        # What they would have received goes to the others.
        assert (found[held] > everything[held]).all()


class TestQuestionMoved:
    """Computed after the system prompt alone, and moved to where it follows the documents."""

    def test_vectors_that_do_not_depend_on_documents_are_those_after_them(self, one_layer: Engine) -> None:
        one_layer.compute(tokens(SYSTEM, 1))
        one_layer.reuse()
        asked = tokens(11, 2)
        moved = one_layer.question(asked, SYSTEM).moved(END, Rotation.of(one_layer.plain))
        found = moved.attention(one_layer.pool, one_layer.blocks)
        torch.testing.assert_close(found, received(one_layer.eager(asked, END), END), **CLOSE)


class TestDeviation:
    @pytest.mark.parametrize("most_tokens", [7, 30, 1000])
    def test_it_is_the_distance_from_transformers_second_layer_and_writes_only_the_first(
        self, engine: Engine, most_tokens: int
    ) -> None:
        prompt = tokens(END, 1)
        engine.compute(prompt[:SYSTEM])
        engine.reuse()
        before = engine.pool.kv.clone()
        held = before[engine.rows(SYSTEM, END)][:, 1]
        found = engine.deviation(prompt[SYSTEM:], SYSTEM, most_tokens)
        assert torch.equal(engine.pool.kv[:, 1:], before[:, 1:])
        first, second, *_ = engine.eager(prompt).past_key_values.layers
        exact = torch.stack([second.keys[0, :, SYSTEM:], second.values[0, :, SYSTEM:]]).permute(2, 0, 1, 3)
        torch.testing.assert_close(found, (exact - held).square().sum((1, 2, 3)), rtol=1e-4, atol=1e-3)
        written = engine.pool.kv[engine.rows(0, END)][:, 0].permute(1, 2, 0, 3)
        torch.testing.assert_close(written, torch.stack([first.keys[0], first.values[0]]), rtol=1e-4, atol=1e-4)

    def test_tokens_without_kv_do_not_disturb_the_others(self, llama: Engine) -> None:
        prompt = tokens(END, 1)
        llama.compute(prompt[:SYSTEM])
        llama.reuse()
        expected = llama.deviation(prompt[SYSTEM:], SYSTEM, 30)
        llama.pool.kv[llama.rows(57, 80)] = float("nan")
        found = llama.deviation(prompt[SYSTEM:], SYSTEM, 30)
        without = slice(57 - SYSTEM, 80 - SYSTEM)
        assert found[without].isnan().all()
        found[without] = expected[without]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    def test_a_model_of_one_layer_has_none(self, one_layer: Engine) -> None:
        one_layer.reuse(0)
        assert torch.equal(one_layer.deviation(tokens(11, 2), 30), torch.zeros(11))


def assemble(engine: Engine) -> list[int]:
    """Return a prompt. In the pool: its system prompt, and each document's KV as computed after that alone, its keys
    rotated to where it stands."""
    prompt = tokens(END + 11, 1)
    rotation, start, rows = Rotation.of(engine.plain), SYSTEM, []
    for length in DOCUMENTS:
        engine.compute([*prompt[:SYSTEM], *prompt[start : start + length]])
        own = engine.pool.kv[engine.rows(SYSTEM, SYSTEM + length)].clone()
        turn = rotation.turn(start - SYSTEM, torch.arange(SYSTEM, SYSTEM + length))
        for layer in range(engine.model.shape.layers):
            own[:, layer, 0] = turn.apply(own[:, layer, 0], layer)
        rows.append(own)
        start += length
    engine.pool.kv[engine.rows(SYSTEM, END)] = torch.cat(rows)
    return prompt


class TestScorer:
    def test_the_question_is_measured_after_documents_that_all_have_kv(self, engine: Engine) -> None:
        prompt = assemble(engine)
        facts = engine.scorer().measure("question", engine.inputs(prompt, (SYSTEM, 57), (57, 107), (107, END)))
        assert facts.reused.tolist() == list(range(SYSTEM, END))
        expected = received(engine.eager(prompt[END:], END), END)[SYSTEM:]
        torch.testing.assert_close(facts.scores, expected, **CLOSE)

    def test_a_document_in_the_exact_prefix_is_not_among_the_reused(self, llama: Engine) -> None:
        prompt, scorer = assemble(llama), llama.scorer()
        whole = scorer.measure("question", llama.inputs(prompt, (SYSTEM, 57), (57, 107), (107, END)))
        facts = scorer.measure("question", llama.inputs(prompt, (57, 107), (107, END), exact=57))
        assert facts.reused.tolist() == list(range(57, END))
        torch.testing.assert_close(facts.scores, whole.scores[57 - SYSTEM :], **CLOSE)

    def test_after_documents_without_kv_it_is_the_question_after_the_system_prompt(self, llama: Engine) -> None:
        prompt = assemble(llama)
        llama.pool.kv[llama.rows(57, 107)] = float("nan")
        moved = llama.question(prompt[END:], SYSTEM).moved(END, Rotation.of(llama.plain))
        held = torch.ones(END, dtype=torch.bool)
        held[57:107] = False
        expected = moved.attention(llama.pool, llama.blocks, held)
        facts = llama.scorer().measure("question", llama.inputs(prompt, (SYSTEM, 57), (107, END)))
        assert torch.equal(facts.scores, expected[facts.reused])
        assert facts.reused.tolist() == [*range(SYSTEM, 57), *range(107, END)]
        assert facts.scores.isfinite().all()

    def test_it_may_be_asked_for_while_documents_are_awaited(self, llama: Engine) -> None:
        prompt = assemble(llama)
        moved = llama.question(prompt[END:], SYSTEM).moved(END, Rotation.of(llama.plain))
        found = llama.scorer().attention(llama.inputs(prompt), alone=True)
        assert torch.equal(found, moved.attention(llama.pool, llama.blocks))

    def test_a_part_of_the_system_prompt_suffices(self, llama: Engine) -> None:
        """Copies may be there while the system prompt before them is not."""
        prompt = assemble(llama)
        llama.pool.kv[llama.rows(0, SYSTEM)] = float("nan")
        facts = llama.scorer().measure("question", llama.inputs(prompt, exact=0))
        assert facts.scores.isfinite().all() and float(facts.scores.sum()) > 0

    def test_of_a_long_question_the_last_tokens_count(self, llama: Engine) -> None:
        prompt = assemble(llama)
        found = llama.scorer(4).attention(llama.inputs(prompt))
        expected = llama.question(prompt[-4:], END).attention(llama.pool, llama.blocks)
        assert torch.equal(found, expected)

    def test_deviation_is_of_the_reused_tokens(self, llama: Engine) -> None:
        prompt = assemble(llama)
        every = llama.deviation(prompt[SYSTEM:END], SYSTEM)
        facts = llama.scorer(30).measure("two layers", llama.inputs(prompt, (57, 70), (107, END - 5), exact=57))
        torch.testing.assert_close(facts.scores, every[facts.reused - SYSTEM], rtol=1e-4, atol=1e-4)

    def test_what_needs_nothing_has_no_scores(self, llama: Engine) -> None:
        assert llama.scorer().measure("nothing", llama.inputs(tokens(END + 11, 1))).scores is None


def ended(steps: Generator[int, None, Tensor]) -> tuple[list[int], Tensor]:
    """The tokens of each forward, and the result."""
    sizes = []
    while True:
        try:
            sizes.append(next(steps))
        except StopIteration as end:
            return sizes, end.value


class TestAttending:
    """What tokens of the documents attend to, over all layers."""

    ROWS = np.array([25, 26, 60, 61, 62, 100, 129])

    @pytest.mark.parametrize(("most_tokens", "sizes"), [(1000, [7]), (3, [3, 3, 1])])
    def test_it_is_transformers_own_mean_over_heads_and_layers_and_their_kv_is_written(
        self, engine: Engine, most_tokens: int, sizes: list[int]
    ) -> None:
        prompt = tokens(END + 9, 1)
        engine.compute(prompt)
        before = engine.pool.kv.clone()
        for row in self.ROWS:
            engine.pool.kv[engine.rows(row, row + 1)] = float("nan")
        found = ended(engine.scorer().attending(engine.inputs(prompt), self.ROWS, most_tokens))
        assert found[0] == sizes
        torch.testing.assert_close(engine.pool.kv, before, rtol=1e-4, atol=1e-4)
        expected = torch.stack(engine.eager(prompt).attentions).mean((0, 2))[0, self.ROWS].sum(0)
        torch.testing.assert_close(found[1], expected[:END], **CLOSE)
