"""Answers from reused KV: the synthetic task, the models trained for it, and the ways to reuse that are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from support.results import result_lines
from support.suites import run_suites

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("scipy")

import torch

from ragorder.benchmarks.fusion.fusion import training
from ragorder.benchmarks.fusion.fusion.cells import RATIOS, SHIPPED, Arm, checkpoint
from ragorder.benchmarks.fusion.fusion.experiment import ARMS, BASELINE, REUSE, FusionCell
from ragorder.benchmarks.fusion.fusion.prompts import Prompts, Questions, draw_questions, make_copies, measure_curves
from ragorder.benchmarks.fusion.fusion.report import make_part
from ragorder.benchmarks.fusion.fusion.served import (
    answer_on_engine,
    chain_engine,
    llama,
    llama_tokens,
    measure_on_engine,
    prepare,
    reference_arm,
)
from ragorder.benchmarks.fusion.fusion.task import (
    ALIAS_OF,
    ALIASES,
    ASK,
    DOC,
    NAMES,
    VALUES,
    WORDS,
    ChainModel,
    Level,
    compute_behind,
    compute_prompts,
    draw_corpora,
    system_prompt,
)
from ragorder.benchmarks.fusion.fusion.training import KINDS, LINKS, Stage, draw_batch, hidden_states, train
from ragorder.eval.report import make_report, render_html
from ragorder.eval.running.cells import SuiteError
from ragorder.eval.running.reading import read_results
from ragorder.eval.running.suite import load_suites

pytestmark = pytest.mark.merge

LEVELS = [Level(2, 8), Level(2, 16), Level(3, 8), Level(3, 16)]
ALIKE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def untrained() -> ChainModel:
    return ChainModel.random(0)


@pytest.fixture(scope="module")
def trained() -> ChainModel:
    return ChainModel.load(checkpoint(SHIPPED, 2, 0))


@pytest.fixture(scope="module")
def two_hops(trained: ChainModel) -> Iterator[tuple[ChainModel, Any]]:
    with chain_engine(trained) as made:
        yield trained, made


@pytest.fixture(scope="module")
def three_hops() -> Iterator[tuple[ChainModel, Any]]:
    model = ChainModel.load(checkpoint(SHIPPED, 3, 0))
    with chain_engine(model) as made:
        yield model, made


def lines_of(document: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """A document's lines as a reader finds them, without the filler."""
    tokens = list(document)
    assert tokens[0] == DOC
    place = 1
    while place < len(tokens):
        if tokens[place] in WORDS:
            place += 2
            continue
        yield tokens[place], tokens[place + 1], tokens[place + 2]
        place += 3


def follow(documents: Sequence[Sequence[int]], token: int) -> list[int]:
    """The chain from a name or alias to a value, in documents read as text."""
    table = {head: target for document in documents for head, target, _ in lines_of(document)}
    chain = [token]
    while chain[-1] not in VALUES:
        chain.append(table[chain[-1]])
    return chain


class TestTask:
    @pytest.mark.parametrize("level", LEVELS, ids=str)
    def test_a_question_is_answered_by_a_chain_over_so_many_documents(self, level: Level) -> None:
        questions = draw_questions(20, level, "any", seed=3)
        for each in range(len(questions)):
            documents = questions.documents[each].tolist()
            assert len(documents) == level.documents
            assert {len(document) for document in documents} == {level.document_tokens}
            chain = follow(documents, int(questions.names[each]))
            assert chain[0] in NAMES
            assert all(alias in ALIASES for alias in chain[1:-1])
            assert (len(chain) - 1, chain[-1]) == (level.hops, int(questions.values[each]))
            heads = [[head for head, *_ in lines_of(document)] for document in documents]
            owners = [next(n for n, found in enumerate(heads) if token in found) for token in chain[:-1]]
            assert len(set(owners)) == level.hops

    def test_nothing_can_be_memorised(self) -> None:
        questions = draw_questions(300, Level(2, 8), "any", seed=0)
        by_name: dict[int, set[int]] = {}
        for name, value in zip(questions.names.tolist(), questions.values.tolist(), strict=True):
            by_name.setdefault(name, set()).add(value)
        several = [values for values in by_name.values() if len(values) > 1]
        assert len(several) > len(by_name) / 2

    @pytest.mark.parametrize("level", LEVELS[::2], ids=str)
    def test_orders_differ_in_where_the_chain_stands_alone(self, level: Level) -> None:
        found = {order: draw_questions(30, level, order, seed=1) for order in ("in front", "behind", "any")}
        any_order = found["any"]
        for order, questions in found.items():
            assert questions.names.tolist() == any_order.names.tolist()
            assert questions.retrieved.sort(1).values.equal(any_order.retrieved.sort(1).values)
            at = (questions.retrieved[:, None] == questions.chains[..., None]).float().argmax(2)
            if order != "any":
                steps = at.diff(dim=1)
                assert bool((steps < 0).all() if order == "in front" else (steps > 0).all())
        others = (any_order.retrieved[:, None] != any_order.chains[..., None]).all(1)
        assert found["behind"].retrieved[others].equal(any_order.retrieved[others])

    def test_similar_documents_are_others_that_share_names_or_aliases(self) -> None:
        questions = draw_questions(40, Level(2, 8), "any", seed=2)
        for each in range(len(questions)):
            link = int(questions.chains[each, 0])
            assert link not in questions.similar[each, link]
            words = [set(document[1:]) - set(WORDS) for document in questions.corpora[each].tolist()]
            shared = [len(words[link] & words[other] & {*ALIASES, *NAMES}) for other in questions.similar[each, link]]
            assert shared[0] > 0
            assert shared[0] >= shared[-1]

    @pytest.mark.parametrize("hops", [2, 3])
    def test_documents_of_a_topic_refer_only_to_each_other(self, hops: int) -> None:
        generator = torch.Generator().manual_seed(5)
        documents = draw_corpora(4, Level(hops, 8), generator, topic=6).chains.documents
        assert (documents // 6 == documents[..., :1] // 6).all()
        assert (documents[..., 0] != documents[..., 1]).all()
        questions = draw_questions(4, Level(hops, 6), "any", seed=5, topic=6)
        assert (questions.retrieved // 6 == questions.retrieved[:, :1] // 6).all()
        assert (questions.similar[..., :5] // 6 == torch.arange(24)[:, None] // 6).all()

    @pytest.mark.parametrize(("hops", "documents"), [(1, 8), (4, 8), (2, 1), (3, 25)])
    def test_refuses_levels_without_questions(self, hops: int, documents: int) -> None:
        with pytest.raises(ValueError, match="give"):
            Level(hops, documents)

    def test_spelt_out_values_are_those_at_the_end_of_the_chain(self) -> None:
        corpora = draw_corpora(5, Level(3, 4), torch.Generator().manual_seed(0), documents=4, shown=1.0)
        for documents in corpora.tokens.tolist():
            lines = [line for document in documents for line in lines_of(document)]
            shown = [(head, third) for head, target, third in lines if target in ALIASES]
            assert len(shown) == 4 * 4
            assert all(follow(documents, head)[-1] == third for head, third in shown)


class TestBatches:
    @pytest.mark.parametrize("level", [Level(2, 4), Level(3, 5)], ids=str)
    def test_everything_that_must_be_predicted_follows_from_the_documents_in_front(self, level: Level) -> None:
        batch = draw_batch(12, level, torch.Generator().manual_seed(0))
        seen = set()
        for tokens, kinds in zip(batch.tokens.tolist(), batch.kinds.tolist(), strict=True):
            size = level.document_tokens
            documents = [tokens[start : start + size] for start in range(1, batch.start, size)]
            assert len(documents) == level.documents
            for place, kind in enumerate(kinds):
                if not kind:
                    continue
                seen.add(KINDS[kind - 1])
                head, answer = tokens[place], tokens[place + 1]
                if kind in LINKS:
                    assert place < batch.start
                    # The line's own alias, resolved by what stands in front of its document.
                    assert follow(documents[: (place - 1) // size], head)[-1] == answer
                elif KINDS[kind - 1] == "alias":
                    assert tokens[place - 1] == ALIAS_OF
                    assert follow(documents, head)[1] == answer
                else:
                    assert tokens[place - 1] == ASK
                    chain = follow(documents, head)
                    assert (len(chain) - 1, chain[-1]) == (kind, answer)
        assert seen == set(KINDS) - (set() if level.hops == 3 else {"three hops", "link over a relay"})


class TestModel:
    def test_a_saved_model_is_the_rounded_one_and_below_a_megabyte(self, untrained: ChainModel, tmp_path: Path) -> None:
        untrained.save(tmp_path / "model.safetensors")
        assert (tmp_path / "model.safetensors").stat().st_size < 1_000_000
        loaded = ChainModel.load(tmp_path / "model.safetensors")
        assert (loaded.heads, loaded.passes) == (untrained.heads, untrained.passes)
        for name, weight in untrained.rounded().weights.items():
            assert loaded.weights[name].equal(weight)

    @pytest.mark.parametrize("content", [b"", b"no model at all", b"\x02\0\0\0\0\0\0\0{}"])
    def test_another_file_is_refused_by_name(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "other.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"other.safetensors is no model of .* fusion-training"):
            ChainModel.load(tmp_path / "other.safetensors")

    def test_is_a_stock_llama(self, untrained: ChainModel) -> None:
        prompts = draw_questions(4, Level(2, 8), "any", seed=0).prompts
        ours = untrained.logits(compute_prompts(untrained, prompts).hidden[:, -1])
        stock = llama(untrained)
        ids = torch.tensor([llama_tokens(prompt) for prompt in prompts.tolist()])
        theirs = stock(input_ids=ids).logits[:, -1, : ours.shape[1]]
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-3)


def dense(model: ChainModel, prompts: torch.Tensor) -> torch.Tensor:
    """Logits of whole prompts by the training's own forward."""
    return model.logits(hidden_states(model, prompts, None)[0][:, -1])


class TestReference:
    """With random weights: what holds for all."""

    @pytest.fixture(scope="class")
    def questions(self) -> Questions:
        return draw_questions(6, Level(2, 5), "any", seed=5)

    @pytest.fixture
    def prompts(self, untrained: ChainModel, questions: Questions) -> Prompts:
        return Prompts(untrained, questions, neighbours=2, seed=0)

    def test_full_attention_is_the_model_that_was_trained(self, untrained: ChainModel, prompts: Prompts) -> None:
        torch.testing.assert_close(
            prompts.answer(Arm(), prompts.reused_tokens(Arm())), dense(untrained, prompts.questions.prompts), **ALIKE
        )

    @pytest.mark.parametrize("arm", ARMS.values(), ids=str)
    def test_all_computed_anew_is_full_attention(self, untrained: ChainModel, prompts: Prompts, arm: Arm) -> None:
        found = prompts.answer(arm, prompts.budget(arm, 1.0))
        torch.testing.assert_close(found, dense(untrained, prompts.questions.prompts), **ALIKE)

    def test_reuse_of_one_document_is_exact(self, untrained: ChainModel) -> None:
        """It stands where it was computed."""
        one = Questions(Level(2, 2), *_first_documents(draw_questions(4, Level(2, 2), "any", seed=0), 1))
        alone = compute_behind(untrained, one.documents[:, 0], system_prompt(untrained, 4)).kv
        whole = compute_prompts(untrained, one.prompts).kv.part(1, 1 + one.documents.shape[2])
        for ours, theirs in zip((*alone.keys, *alone.values), (*whole.keys, *whole.values), strict=True):
            torch.testing.assert_close(ours, theirs, **ALIKE)

    def test_reused_kv_deviates_behind_the_first_document_alone(self, prompts: Prompts) -> None:
        length = prompts.questions.level.document_tokens
        found = prompts.deviation(Arm())
        assert found[:, :length].max() < 1e-6
        assert found[:, length:].view(6, 4, length).amax(2).min() > 1e-3

    def test_an_exact_prefix_does_not_deviate_and_is_not_computed_anew(self, prompts: Prompts) -> None:
        arm = Arm(exact=0.4)
        size = prompts.questions.level.document_tokens
        assert prompts.reused_tokens(arm) == 3 * size
        assert prompts.deviation(arm)[:, : 2 * size].max() < 1e-6
        assert prompts.selected(arm, 7).min() > 2 * size

    @pytest.mark.parametrize("arm", ARMS.values(), ids=str)
    def test_selections_are_positions_of_the_documents_as_many_as_allowed(self, prompts: Prompts, arm: Arm) -> None:
        for ratio in RATIOS:
            chosen = prompts.selected(arm, prompts.budget(arm, ratio))
            assert chosen.shape == (6, round(ratio * prompts.reused_tokens(arm)))
            assert bool((chosen.diff(dim=1) > 0).all())
            assert bool(((chosen >= 1) & (chosen <= prompts.questions.level.tokens)).all())

    def test_the_deviation_of_the_second_layer_is_what_cacheblend_takes(self, prompts: Prompts) -> None:
        arm = Arm("deviation")
        deviation, chosen = prompts.deviation(arm), prompts.selected(arm, 5)
        for each in range(6):
            inside = deviation[each, chosen[each] - 1]
            rest = deviation[each].clone()
            rest[chosen[each] - 1] = -1
            assert inside.min() >= rest.max()

    def test_epic_takes_the_first_tokens_of_every_document(self, prompts: Prompts) -> None:
        size = prompts.questions.level.document_tokens
        places = [1 + place * size for place in range(5)]
        assert prompts.selected(Arm("head"), 5).tolist() == [places] * 6
        assert prompts.selected(Arm("head"), 7).tolist() == [sorted([*places, places[0] + 1, places[1] + 1])] * 6

    def test_further_rounds_keep_what_was_selected(self, prompts: Prompts) -> None:
        once, twice = Arm(), Arm(rounds=2)
        for first, both in zip(prompts.selected(once, 4).tolist(), prompts.selected(twice, 8).tolist(), strict=True):
            assert set(first) < set(both)
            assert len(both) == 8
        assert not prompts.selected(twice, 8).equal(prompts.selected(once, 8))

    def test_copies_behind_no_neighbour_are_those_alone(self, untrained: ChainModel, questions: Questions) -> None:
        none, alone = (make_copies(untrained, questions, copies, 0, 0).kv for copies in ("similar", "alone"))
        for ours, theirs in zip(none, alone, strict=True):
            assert ours.values[-1].equal(theirs.values[-1])

    def test_copies_behind_the_very_documents_in_front_deviate_first_in_the_third_layer(self, prompts: Prompts) -> None:
        """Equation 10 takes neighbours' KV as it was computed alone: what the first layer reads of it is exact."""
        arm = ARMS["behind those in front of it"]
        assert float(prompts.deviation(arm).max()) < 1e-6
        assert float(prompts.deviation(ARMS[REUSE]).max()) > 0.1
        assert not torch.allclose(prompts.answer(arm, 0), prompts.answer(ARMS[BASELINE], prompts.reused_tokens(arm)))

    def test_neighbours_stand_in_the_order_that_is_asked_for(self, untrained: ChainModel, questions: Questions) -> None:
        orders = [make_copies(untrained, questions, kind, 2, 0) for kind in ("similar", "similar, best first")]
        assert not torch.equal(orders[0].kv[0].values[1], orders[1].kv[0].values[1])
        orders = [make_copies(untrained, questions, kind, 1, 0) for kind in ("similar", "similar, best first")]
        torch.testing.assert_close(orders[0].kv[0].values[1], orders[1].kv[0].values[1])

    def test_cache_craft_has_copies_of_other_prompts_and_what_crossed_in_them(
        self, untrained: ChainModel, questions: Questions
    ) -> None:
        served = make_copies(untrained, questions, "served", 0, 0)
        assert served.crossed.shape == (6, questions.level.tokens)
        assert served.crossed.min() > 0 and served.crossed.max() < 1
        again = make_copies(untrained, questions, "served", 0, 0)
        other = make_copies(untrained, questions, "served", 0, 1)
        assert served.crossed.equal(again.crossed)
        assert not served.crossed.equal(other.crossed)


def _first_documents(questions: Questions, count: int) -> tuple[Any, ...]:
    return (
        questions.corpora,
        questions.retrieved[:, :count],
        questions.similar,
        questions.chains,
        questions.names,
        questions.values,
    )


class TestShippedModels:
    @pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.safetensors")), ids=lambda path: path.stem)
    def test_need_other_documents_while_they_read(self, path: Path) -> None:
        """Full attention answers, full reuse does not, and few tokens by the question's attention restore it."""
        assert path.stat().st_size < 1_000_000
        model = ChainModel.load(path)
        asked = {name: replace(ARMS[name], ratios=ratios) for name, ratios in _ASKED.items()}
        for order in ("in front", "behind"):
            questions = draw_questions(40, Level(2, 8), order, seed=99)
            found = measure_curves(model, questions, asked, neighbours=4, seed=99)
            right = {name: fmean(next(iter(each.rows.values()))) for name, each in found.items()}
            assert right[REUSE] <= 0.15
            if order == "in front":
                assert right[BASELINE] >= 0.95
                assert right["FusionRAG, online only"] >= 0.9
                assert right["random"] < 0.5

    def test_three_hops_need_a_second_round(self) -> None:
        """The question attends to the link alone; the relay is what the link attends to."""
        model, questions = ChainModel.load(checkpoint(SHIPPED, 3, 0)), draw_questions(40, Level(3, 8), "in front", 99)
        asked = {name: replace(ARMS[name], ratios=(0.05,)) for name in ("FusionRAG, online only", "two rounds")}
        asked |= {name: ARMS[name] for name in (BASELINE, REUSE)}
        found = measure_curves(model, questions, asked, neighbours=0, seed=99)
        right = {name: fmean(next(iter(each.rows.values()))) for name, each in found.items()}
        assert right[BASELINE] >= 0.95
        assert right[REUSE] <= 0.15
        assert right["FusionRAG, online only"] <= 0.4
        assert right["two rounds"] >= 0.9

    @pytest.mark.parametrize(
        ("hops", "arm"),
        [
            (2, Arm(exact=1 / 8)),
            (2, Arm("deviation", exact=1 / 2)),
            (3, Arm(rounds=2, exact=1 / 8)),
            (3, Arm("deviation", rounds=3, exact=1 / 8)),
        ],
        ids=["query", "deviation", "two rounds", "three rounds"],
    )
    def test_the_engine_fuses_as_the_reference_does(self, hops: int, arm: Arm, request: pytest.FixtureRequest) -> None:
        """A document that was computed behind the system prompt is an exact prefix where it comes first."""
        model, engine = request.getfixturevalue("two_hops" if hops == 2 else "three_hops")
        questions = draw_questions(2, Level(hops, 8), "any", seed=4 + hops)
        prompts = Prompts(model, questions, neighbours=0, seed=0)
        for number in range(len(questions)):
            prepare(engine, questions, number, arm)
            for ratio in (0.0, 0.05, 0.15, 1.0):
                done = answer_on_engine(engine, questions, number, arm, ratio, keep_logits=True)
                assert done.cached.total == 1 + questions.level.tokens - prompts.reused_tokens(arm)
                assert done.fused.total == prompts.reused_tokens(arm)
                budget = prompts.budget(arm, ratio)
                assert done.recomputed == budget
                expected = prompts.answer(arm, budget)[number]
                torch.testing.assert_close(done.logits[: len(expected)], expected, **ALIKE)

    def test_many_questions_are_compared_with_the_reference(self, trained: ChainModel) -> None:
        """Layers that do nothing take time, and change no answer."""
        questions = draw_questions(3, Level(2, 8), "any", seed=8)
        names = ("random", "FusionRAG, online only", "with ordering")
        arms = {name: replace(ARMS[name], ratios=(0.0, 0.15, 1.0)) for name in names}
        found = measure_on_engine(trained, questions, arms, idle_layers=1)
        for name, served in found.items():
            facts = served.facts
            # The engine draws other tokens at random.
            assert facts["compared"] == (6 if name == "random" else 9)
            assert facts["others"] == 0
            assert facts["apart"] < 1e-4
            for kind in ("", "wall_ms ", "cpu_ms "):
                assert all(len(served.rows[f"{kind}{ratio}"]) == 3 for ratio in ("0", "0.15", "1"))
        like = reference_arm(arms["with ordering"], questions)
        expected = Prompts(trained, questions, neighbours=0, seed=0)
        right = expected.answer(like, expected.budget(like, 0.15)).argmax(-1) == questions.values
        assert found["with ordering"].rows["0.15"] == right.float().tolist()

    def test_the_engine_answers_exactly(self, two_hops: tuple[ChainModel, Any]) -> None:
        from ragorder.kernels.engine import Request, Sampling

        trained, engine = two_hops
        questions = draw_questions(8, Level(2, 8), "in front", seed=4)
        logits = trained.logits(compute_prompts(trained, questions.prompts).hidden[:, -1])
        size = questions.level.document_tokens
        ends = [1 + place * size for place in range(1, questions.level.documents + 1)]
        requests = [
            Request(
                llama_tokens(prompt),
                ends,
                Sampling(max_tokens=1, ignore_eos=True),
                keep_logits=True,
                prefix_tokens=1,
                fusion="exact",
            )
            for prompt in questions.prompts.tolist()
        ]
        engine.clear_cache()
        for least, most in ((0, 1), (ends[-1], ends[-1])):
            done = engine.generate(requests)
            assert [each.token_ids[0] for each in done] == logits.argmax(-1).tolist()
            for each, expected in zip(done, logits, strict=True):
                assert least <= each.cached.total <= most
                torch.testing.assert_close(each.logits[: len(expected)], expected, rtol=0, atol=1e-3)


_ASKED = {
    BASELINE: (1.0,),
    REUSE: (0.0,),
    "FusionRAG, online only": (0.05,),
    "random": (0.05,),
}


class TestTraining:
    @pytest.fixture
    def brief(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stages = (Stage([Level(2, 3)], 5), Stage([Level(2, 3), Level(2, 4)], 4, settles=True))
        monkeypatch.setitem(training.CURRICULA, 2, stages)
        monkeypatch.setattr(training, "STEP_TOKENS", 300)

    def test_the_same_seed_gives_the_same_model(self, brief: None) -> None:
        models = [list(train(seed, training.CURRICULA[2], lambda point: None))[-1] for seed in (1, 1, 2)]
        same = [all(models[0].weights[name].equal(other.weights[name]) for name in other.weights) for other in models]
        assert same == [True, True, False]

    def test_ends_a_stage_as_soon_as_it_is_learnt(self, brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training, "LEARNT", -1.0)
        points: list[Any] = []
        list(train(0, training.CURRICULA[2], points.append))
        assert [point.documents for point in points[:3]] == [3, 3, 4]
        assert len(points) == 5

    def test_goes_on_from_an_earlier_model(self, brief: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """From one of fewer hops with the stages that it lacks, from one of as many with the last one."""
        more = (Stage([Level(3, 3)], 3), Stage([Level(3, 4)], 2, settles=True))
        monkeypatch.setitem(training.CURRICULA, 3, (*training.CURRICULA[2], *more))
        assert training.remaining(3, None) == training.CURRICULA[3]
        assert training.remaining(3, 2) == more
        assert training.remaining(3, 3) == more[-1:]
        run_suites(tmp_path / "first", "fusion-training", "--seeds", 5)
        run_suites(tmp_path / "then", "fusion-training", "--seeds", "5,6", hops=3, start=tmp_path / "first")
        [line] = result_lines(tmp_path / "then", "fusion-training")
        assert (line["seed"], line["facts"]["steps"]) == (5, 5)
        [missing] = result_lines(tmp_path / "then", "unavailable")
        assert "no model of seed 6" in missing["reason"]
        first, then = checkpoint(tmp_path / "first", 2, 5), checkpoint(tmp_path / "then", 3, 5)
        moved = ChainModel.load(then).weights["qkv"] - ChainModel.load(first).weights["qkv"]
        assert 0 < float(moved.abs().max()) < 0.2

    def test_a_trained_model_is_measured(self, brief: None, tmp_path: Path) -> None:
        options = ("--seeds", 5, "--limit", 4)
        run_suites(tmp_path, "fusion-training", *options)
        assert checkpoint(tmp_path, 2, 5).is_file()
        options += ("--policy", REUSE, "--policy", "random")
        run_suites(tmp_path, "fusion-quality", *options, models=tmp_path, documents=3)
        assert {line["policy"] for line in result_lines(tmp_path, "fusion")} == {REUSE, "random"}
        assert "Right predictions at the end of training" in render_html(
            make_report(read_results(tmp_path), load_suites())
        )


class TestSuite:
    def test_measures_every_arm_at_every_ratio_and_reports_what_a_toy_cannot_show(self, tmp_path: Path) -> None:
        run_suites(tmp_path, "fusion-quality", "--reduced", "--limit", "5", "--seeds", "0")
        lines = result_lines(tmp_path, "fusion")
        assert {line["cell"]["order"] for line in lines} == {"in front", "behind"}
        for line in lines:
            arm = ARMS[line["policy"]]
            assert set(line["rows"]) == {f"{ratio:g}" for ratio in arm.ratios} | {"deviation"}
            assert all(len(column) == 5 for column in line["rows"].values())
        results = read_results(tmp_path)
        part = make_part(load_suites()["fusion-quality"], results)
        assert "What this cannot show" in part.words[0]
        assert len(part.tables) == 4
        assert all("Every row was computed by a reference in plain torch." in table.note for table in part.tables)
        titles = [picture.title for picture in part.pictures()]
        for order in ("in front", "behind"):
            for title in ("Right answers", "Deviation of reused KV"):
                assert f"{title} (2 hops, 8 documents, definitions {order})" in titles

    def test_says_how_to_train_a_model_that_is_not_there(self, tmp_path: Path) -> None:
        run_suites(tmp_path, "fusion-quality", "--reduced", "--limit", "2", "--seeds", "0,41", "--policy", REUSE)
        assert {line["seed"] for line in result_lines(tmp_path, "fusion")} == {0}
        missing = result_lines(tmp_path, "unavailable")
        assert {line["policy"] for line in missing} == {"seed 41"}
        assert all("ragorder eval run fusion-training --set hops=2 --seeds 41" in line["reason"] for line in missing)

    @pytest.mark.slow
    def test_the_engine_is_measured_as_well(self, tmp_path: Path) -> None:
        run_suites(tmp_path, "fusion-quality", "--reduced", "--limit", "2", "--seeds", "0", by="engine")
        lines = result_lines(tmp_path, "fusion")
        assert {line["policy"] for line in lines} == {
            name for name in load_suites()["fusion-quality"].policies if ARMS[name].on_engine
        }
        assert {line["engine"]["name"] for line in lines} == {"torch"}
        assert all("take by = reference" in line["reason"] for line in result_lines(tmp_path, "unavailable"))
        part = make_part(load_suites()["fusion-quality"], read_results(tmp_path))
        assert "embedded engine" in part.tables[0].title
        assert all("Every row was computed by the embedded engine." in table.note for table in part.tables[:2])
        assert len(part.pictures()) == 2

    def test_times_are_compared_at_the_same_share_and_at_the_same_answers(self, tmp_path: Path) -> None:
        arms = (BASELINE, REUSE, "FusionRAG, online only", "with ordering")
        policies = [word for arm in arms for word in ("--policy", arm)]
        run_suites(tmp_path, "fusion-seconds", "--reduced", "--limit", 10, "--seeds", 0, *policies)
        part = make_part(load_suites()["fusion-seconds"], read_results(tmp_path))
        [seconds] = [table for table in part.tables if table.title.startswith("Time to the first token")]
        ours, theirs = (["EM at 5 %", "CPU ms", "times sooner, CPU", "wall"], [row[0].text for row in seconds.rows])
        assert list(seconds.headings[1:5]) == ours
        assert theirs == ["FusionRAG, online only", "with ordering"]
        assert "×" in seconds.rows[1][3].text
        assert "1 layers more" in seconds.note
        [beside] = [table for table in part.tables if table.title.startswith("The engine beside the reference")]
        assert {row[3].text for row in beside.rows} == {"0"}

    def test_preprocessing_is_compared_with_what_it_cannot_know(self, tmp_path: Path) -> None:
        run_suites(tmp_path, "fusion-preprocessing", "--reduced", "--limit", "10", "--seeds", "0")
        [table] = make_part(load_suites()["fusion-preprocessing"], read_results(tmp_path)).tables
        removed = {tuple(entry.text for entry in row[:3]): float(row[4].text) for row in table.rows}
        for topic in ("anywhere", "within topics of 8"):
            assert removed["behind those in front of it", topic, "–"] > 99
            assert removed["FusionRAG", topic, "7"] < removed["behind those in front of it", topic, "–"]
        # What stands behind a document in the prompt, full attention has not seen.
        assert all(float(row[5].text) > float(row[4].text) for row in table.rows if row[0].text.startswith("FusionRAG"))
        # Nor has the first document anything to have seen.
        assert all(float(row[6].text) > float(row[4].text) for row in table.rows if row[0].text.startswith("FusionRAG"))
        assert len(table.rows) == 2 * (2 * 2 + 2)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"hops": 4},
            {"documents": 1},
            {"hops": 3, "documents": 2},
            {"order": "prefix"},
            {"idle_layers": 2},
            {"topic": 5},
            {"topic": 2, "hops": 3},
        ],
    )
    def test_refuses_cells_without_questions(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(SuiteError):
            FusionCell.read(wrong, "here")
