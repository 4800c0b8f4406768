"""The toy models of suite quality-positions: their task, what they have learnt, and their training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.results import result_lines
from support.suites import run_suites

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("scipy")

import torch

from ragorder.benchmarks.fusion.toy import training
from ragorder.benchmarks.fusion.toy.task import (
    ALIAS_OF,
    ALIASES,
    ASK,
    DOC,
    DOCUMENT_TOKENS,
    NAMES,
    VALUES,
    WORDS,
    ChainModel,
    draw_corpora,
    hidden_states,
)
from ragorder.benchmarks.fusion.toy.training import KINDS, LINK, Stage, draw_batch, train
from ragorder.benchmarks.fusion.toy.weights import SHIPPED, checkpoint
from ragorder.eval.report import make_report, render_html
from ragorder.eval.running.reading import read_results
from ragorder.eval.running.suite import load_suites

pytestmark = pytest.mark.merge


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def untrained() -> ChainModel:
    return ChainModel.random(0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
    def test_each_link_leads_to_a_value_in_another_document(self) -> None:
        corpora = draw_corpora(5, 6, seeded(3))
        chains = corpora.chains
        for corpus, documents in enumerate(corpora.tokens.tolist()):
            assert {len(document) for document in documents} == {DOCUMENT_TOKENS}
            heads = [[head for head, *_ in lines_of(document)] for document in documents]
            for link, name in enumerate(chains.names[corpus].tolist()):
                alias, value = int(chains.aliases[corpus, link]), int(chains.values[corpus, link])
                assert name in NAMES and alias in ALIASES
                assert follow(documents, name) == [name, alias, value]
                owners = [next(n for n, found in enumerate(heads) if token in found) for token in (name, alias)]
                assert owners == chains.documents[corpus, link].tolist()
                assert owners[0] != owners[1]

    def test_nothing_can_be_memorised(self) -> None:
        chains = draw_corpora(100, 8, seeded(0)).chains
        by_name: dict[int, set[int]] = {}
        for name, value in zip(chains.names.flatten().tolist(), chains.values.flatten().tolist(), strict=True):
            by_name.setdefault(name, set()).add(value)
        several = [values for values in by_name.values() if len(values) > 1]
        assert len(several) > len(by_name) / 2

    def test_documents_of_a_topic_refer_only_to_each_other(self) -> None:
        documents = draw_corpora(4, 24, seeded(5), topic=6).chains.documents
        assert (documents[..., 0] // 6 == documents[..., 1] // 6).all()
        assert (documents[..., 0] != documents[..., 1]).all()

    def test_spelt_out_values_are_those_at_the_end_of_the_chain(self) -> None:
        corpora = draw_corpora(5, 4, seeded(0), shown=1.0)
        for documents in corpora.tokens.tolist():
            lines = [line for document in documents for line in lines_of(document)]
            shown = [(head, third) for head, target, third in lines if target in ALIASES]
            assert len(shown) == 3 * 4
            assert all(follow(documents, head)[-1] == third for head, third in shown)


class TestBatches:
    def test_everything_that_must_be_predicted_follows_from_the_documents_in_front(self) -> None:
        batch = draw_batch(12, 4, seeded(0))
        seen = set()
        for tokens, kinds in zip(batch.tokens.tolist(), batch.kinds.tolist(), strict=True):
            starts = range(1, batch.start, DOCUMENT_TOKENS)
            documents = [tokens[start : start + DOCUMENT_TOKENS] for start in starts]
            assert len(documents) == 4
            for place, kind in enumerate(kinds):
                if not kind:
                    continue
                seen.add(KINDS[kind - 1])
                head, answer = tokens[place], tokens[place + 1]
                if kind == LINK:
                    assert place < batch.start
                    # The line's own alias, resolved by what stands in front of its document.
                    assert follow(documents[: (place - 1) // DOCUMENT_TOKENS], head)[-1] == answer
                elif KINDS[kind - 1] == "alias":
                    assert tokens[place - 1] == ALIAS_OF
                    assert follow(documents, head)[1] == answer
                else:
                    assert tokens[place - 1] == ASK
                    chain = follow(documents, head)
                    assert (len(chain) - 1, chain[-1]) == (kind, answer)
        assert seen == set(KINDS)


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
        with pytest.raises(ValueError, match=r"other.safetensors is no model of .* toy-training"):
            ChainModel.load(tmp_path / "other.safetensors")

    def test_what_comes_later_changes_nothing(self, untrained: ChainModel) -> None:
        tokens = draw_batch(3, 4, seeded(1)).tokens
        other = torch.cat([tokens[:, :40], tokens[:, 40:].flip(1)], 1)
        found, expected = (hidden_states(untrained, each)[0][:, :40] for each in (other, tokens))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_those_that_come_with_ragorder_have_learnt_their_task(self, seed: int) -> None:
        path = checkpoint(SHIPPED, seed)
        assert path.stat().st_size < 1_000_000
        model, batch = ChainModel.load(path), draw_batch(20, 8, seeded(99))
        said = model.logits(hidden_states(model, batch.tokens)[0]).argmax(-1)
        for kind in ("one hop", "two hops"):
            asked = batch.kinds[:, :-1] == KINDS.index(kind) + 1
            assert float((said[:, :-1] == batch.tokens[:, 1:])[asked].float().mean()) > 0.9


class TestTraining:
    @pytest.fixture
    def brief(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training, "CURRICULUM", (Stage([3], 5), Stage([3, 4], 4, settles=True)))
        monkeypatch.setattr(training, "STEP_TOKENS", 300)

    def test_the_same_seed_gives_the_same_model(self, brief: None) -> None:
        models = [list(train(seed, training.CURRICULUM, lambda point: None))[-1] for seed in (1, 1, 2)]
        same = [all(models[0].weights[name].equal(other.weights[name]) for name in other.weights) for other in models]
        assert same == [True, True, False]

    def test_ends_a_stage_as_soon_as_it_is_learnt(self, brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training, "LEARNT", -1.0)
        points: list[Any] = []
        list(train(0, training.CURRICULUM, points.append))
        assert [point.documents for point in points[:3]] == [3, 3, 4]
        assert len(points) == 5

    def test_a_trained_model_is_asked(self, brief: None, tmp_path: Path) -> None:
        options = ("--seeds", 5)
        run_suites(tmp_path, "toy-training", *options)
        assert checkpoint(tmp_path, 5).is_file()
        [line] = result_lines(tmp_path, "toy-training")
        assert line["facts"]["steps"] == 9
        run_suites(tmp_path, "quality-positions", "--reduced", *options, models=tmp_path, requests=25)
        assert {line["seed"] for line in result_lines(tmp_path, "quality-positions")} == {5}
        page = render_html(make_report(read_results(tmp_path), load_suites()))
        assert "Right predictions at the end of training" in page
