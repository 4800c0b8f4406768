"""Answer quality: a corpus' questions, the official scores, every question in every order, and whether anything was
measured."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.commands import run_command
from support.http_server import Handler, LocalServer
from support.results import result_lines

pytest.importorskip("scipy")

from ragorder.eval.cli.eval import eval as evaluate
from ragorder.eval.cli.quality import quality as command
from ragorder.eval.data.corpora import CorpusError
from ragorder.eval.data.corpora.folder import load_folder
from ragorder.eval.data.trace import trace_of_corpus
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.report import make_report, read_results
from ragorder.eval.running.load import Progress, silent
from ragorder.eval.suites.quality.answering import SYSTEM, Builders, OnceAnswers
from ragorder.eval.suites.quality.asking import ask_questions, serve_quality
from ragorder.eval.suites.quality.compare import (
    bootstrap_difference,
    compare_orders,
    gold_places,
    judge,
    judge_previous,
    mcnemar_exact,
    summarise,
)
from ragorder.eval.suites.quality.metrics import SCORERS, extract_answer
from ragorder.eval.suites.quality.orders import (
    DEFAULT_ORDERS,
    FusedReuse,
    GradedQuestion,
    Order,
    QualityError,
    fused_orders,
    normalised_scores,
    place_orders,
)
from ragorder.eval.suites.quality.questions import DATASETS, QuestionSet
from ragorder.eval.suites.quality.questions import load_questions as load
from ragorder.eval.suites.quality.specs import AnswererSpec, QualityBench, QuestionsSpec, model_facts

JSON = dict[str, Any]
Ask = Callable[..., list[JSON]]


def load_questions(name: str, data: Path | None = None, **options: Any) -> QuestionSet:
    return load(QuestionsSpec(dataset=name, data=data, **options))


def make_bench(name: str, data: Path, **options: Any) -> QualityBench:
    """A benchmark of the fields of both specifications and its own."""
    questions, engine = (
        {field: options.pop(field) for field in list(options) if field in model.model_fields}
        for model in (QuestionsSpec, AnswererSpec)
    )
    return QualityBench(QuestionsSpec(dataset=name, data=data, **questions), AnswererSpec(**engine), **options)


def run_quality(bench: QualityBench, progress: Progress = silent) -> list[JSON]:
    """The lines of all orders, and their comparison."""
    lines = list(serve_quality(bench, progress))
    return lines + summarise(lines, progress)


# --- questions --------------------------------------------------------------------------------------------------------


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def titles(question: GradedQuestion) -> list[str]:
    return [document.id for document in question.documents]


def paragraphs(number: int) -> list[tuple[str, list[str]]]:
    """Two of the four are in every question; every other question has them the other way round."""
    found = [
        ("Radio City", ["Radio City is a radio station.", " It started in 1999."]),
        (f"First for Women {number}", [f"First for Women {number} started in 1989."]),
        ("Arthur's Magazine", ["Arthur's Magazine was started in 1844.", " It ended in 1846."]),
        (f"Echosmith {number}", [f"Echosmith {number} is a band."]),
    ]
    return found[:: -1 if number % 2 else 1]


def hotpot_folder(
    folder: Path, numbers: Sequence[int] = range(6), answers: Mapping[int, str] | None = None, times: int = 1
) -> Path:
    """A corpus of these questions, the text of each paragraph so many times."""
    folder.mkdir()
    texts = {title: "".join(sentences * times) for number in numbers for title, sentences in paragraphs(number)}
    written(folder / "documents.jsonl", *({"id": id, "title": id, "text": text} for id, text in texts.items()))
    asked = [
        {
            "id": f"5a7a{number}",
            "question": f"Which magazine was started first, number {number}?",
            "answers": [(answers or {}).get(number, "Arthur's Magazine")],
            "supporting": ["Arthur's Magazine", f"First for Women {number}"],
        }
        for number in numbers
    ]
    written(folder / "questions.jsonl", *asked)
    run = ({"id": f"5a7a{number}", "chunks": [title for title, _ in paragraphs(number)]} for number in numbers)
    written(folder / "run_own.jsonl", *run)
    return folder


def corpus_folder(folder: Path, questions: int = 4, **fields: Any) -> Path:
    """A corpus as in docs/corpora.md, of which each question has one document, ranked third of three."""
    folder.mkdir()
    texts = [{"id": f"d{number}", "title": f"Lamp {number}", "text": f"It has {number} watts."} for number in range(8)]
    asked = [
        {"id": f"q{number}", "question": f"How many watts has lamp {number}?", "answers": [f"{number} watts"]}
        | {"supporting": [f"d{number}"]}
        | fields
        for number in range(questions)
    ]
    run = [{"id": f"q{number}", "chunks": ["d7", "d6", f"d{number}"]} for number in range(questions)]
    for name, lines in (("documents", texts), ("questions", asked), ("run_mine", run)):
        written(folder / f"{name}.jsonl", *lines)
    return folder


class TestACorpus:
    def test_has_documents_as_its_run_ranks_them(self, tmp_path: Path) -> None:
        folder = corpus_folder(tmp_path / "c")
        first, *_ = load_questions("corpus", folder, top_k=3).questions
        assert (first.id, first.text, first.answers) == ("q0", "How many watts has lamp 0?", ("0 watts",))
        assert titles(first) == ["Lamp 7", "Lamp 6", "Lamp 0"]
        assert first.documents[2].text == "It has 0 watts."
        assert first.gold == ("Lamp 0",)
        fewer = load_questions("corpus", folder, top_k=2).questions
        assert [(len(each.documents), each.gold) for each in fewer] == [(2, ())] * 4, "without gold it is asked as well"

    def test_without_supporting_documents_gold_is_what_has_an_answer(self, tmp_path: Path) -> None:
        folder = corpus_folder(tmp_path / "c", supporting=None, answers=["6 watts"])
        assert load_questions("corpus", folder, top_k=3).questions[0].gold == ("Lamp 6",)

    def test_of_a_supporting_document_in_parts_gold_is_the_part_with_an_answer(self, tmp_path: Path) -> None:
        folder = corpus_folder(tmp_path / "c", questions=1)
        whole = {"id": "d0", "title": "Lamp 0", "text": "It is red. It has 0 watts."}
        written(folder / "documents.jsonl", whole)
        parts = [(0, 10), (11, 26)]
        chunks = [{"cid": place, "doc": "d0", "start": a, "end": b, "tokens": 4} for place, (a, b) in enumerate(parts)]
        written(folder / "chunks.jsonl", *chunks)
        written(folder / "run_mine.jsonl", {"id": "q0", "chunks": [0, 1]})
        (question,) = load_questions("corpus", folder, top_k=2).questions
        assert titles(question) == ["Lamp 0", "Lamp 0 (2)"]
        assert question.gold == ("Lamp 0 (2)",)

    def test_questions_without_an_answer_are_counted(self, tmp_path: Path) -> None:
        folder = corpus_folder(tmp_path / "c")
        lines = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
        written(folder / "questions.jsonl", *lines[:3], lines[3] | {"answers": []})
        loaded = load_questions("corpus", folder, top_k=3)
        assert (len(loaded.questions), loaded.passed_over) == (3, {"questions without an answer": 1})

    @pytest.mark.parametrize("order", ["data", "random", "recurring", "topics"])
    def test_the_stream_is_the_one_on_which_cached_tokens_are_measured(self, tmp_path: Path, order: Any) -> None:
        folder = corpus_folder(tmp_path / "c")
        trace = trace_of_corpus(load_folder(folder), top_k=3, order=order, seed=3, limit=20)
        asked = load_questions("corpus", folder, top_k=3, question_order=order, seed=3, limit=20).questions
        assert [each.text for each in asked] == [each.question for each in trace.requests]

    def test_one_without_an_answer_says_what_to_change(self, tmp_path: Path) -> None:
        with pytest.raises(CorpusError, match=r"no question has answers and documents: add answers to"):
            load_questions("corpus", corpus_folder(tmp_path / "c", answers=None), top_k=3)

    def test_a_text_of_a_known_title_has_a_name_of_its_own(self, tmp_path: Path) -> None:
        folder = corpus_folder(tmp_path / "c", questions=1)
        texts = [{"id": f"d{place}", "title": "Lamp", "text": text} for place, text in enumerate("xyx")]
        written(folder / "documents.jsonl", *texts)
        written(folder / "run_mine.jsonl", {"id": "q0", "chunks": ["d0", "d1", "d2"]})
        assert titles(load_questions("corpus", folder, top_k=3).questions[0]) == ["Lamp", "Lamp (2)"]

    def test_a_retriever_ranks_the_documents_of_all_questions(self, tmp_path: Path) -> None:
        pytest.importorskip("bm25s")
        folder = hotpot_folder(tmp_path / "hotpotqa", range(8))
        loaded = load_questions("hotpotqa", folder, top_k=5, retriever="bm25")
        assert all(len(question.documents) == 5 for question in loaded.questions)
        assert all(set(question.gold) <= set(titles(question)) for question in loaded.questions)


class Hub:
    """In place of the packages `datasets` and `huggingface_hub`: gives the rows, as the Hub has them, and remembers
    what it was asked for. The Hub itself is `away` where it cannot be reached."""

    def __init__(self, *rows: JSON, error: Exception | None = None, away: Exception | None = None) -> None:
        self.rows, self.error, self.away = rows, error, away
        self.asked: list[Any] = []
        self.HfApi = lambda: self

    def dataset_info(self, repo_id: str, *, timeout: float) -> None:
        assert 0 < timeout <= 30
        if self.away is not None:
            raise self.away

    def load_dataset(self, path: str, name: str | None = None, *, split: str) -> Iterator[JSON]:
        self.asked.append((path, name, split))
        if self.error is not None:
            raise self.error
        return iter(self.rows)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def put(*rows: JSON, error: Exception | None = None, away: Exception | None = None) -> Hub:
        stand_in = Hub(*rows, error=error, away=away)
        for package in ("datasets", "huggingface_hub"):
            monkeypatch.setitem(sys.modules, package, stand_in)  # type: ignore[arg-type]
        return stand_in

    return put


def multihop_row() -> JSON:
    context = paragraphs(0)
    return {
        "id": "5a7a0",
        "question": "Which magazine was started first, number 0?",
        "answer": "Arthur's Magazine",
        "supporting_facts": {"title": ["Arthur's Magazine", "First for Women 0"], "sent_id": [0, 0]},
        "context": {"title": [title for title, _ in context], "sentences": [sentences for _, sentences in context]},
    }


class TestTheHub:
    @pytest.mark.parametrize("name", ["hotpotqa", "2wikimultihopqa"])
    def test_a_question_has_its_paragraphs_as_they_stand(self, hub: Callable[..., Hub], name: str) -> None:
        there = hub(multihop_row())
        (question,) = load_questions(name).questions
        assert (question.id, question.answers) == ("5a7a0", ("Arthur's Magazine",))
        assert titles(question) == ["Radio City", "First for Women 0", "Arthur's Magazine", "Echosmith 0"]
        assert question.documents[0].text == "Radio City is a radio station. It started in 1999."
        assert question.gold == ("First for Women 0", "Arthur's Magazine")
        assert load_questions(name).questions == [question]
        assert len(there.asked) == 1, "it is converted once"

    def test_aliases_are_accepted_and_unanswerable_questions_counted(self, hub: Callable[..., Hub]) -> None:
        titled = [("Grant's First Stand", False), ("Green", True), ("Green", False), ("Miquette Giraudy", True)]
        row = {
            "id": "2hop__460946_294723",
            "question": "Who is the spouse of the Green performer?",
            "paragraphs": [
                {"idx": place, "title": title, "paragraph_text": f"Text {place}.", "is_supporting": supports}
                for place, (title, supports) in enumerate(titled)
            ],
            "answer": "Miquette Giraudy",
            "answer_aliases": ["Giraudy", "Miquette Giraudy"],
            "answerable": True,
        }
        hub(row | {"id": "a", "answerable": False}, row)
        loaded = load_questions("musique")
        (question,) = loaded.questions
        assert question.answers == ("Miquette Giraudy", "Giraudy")
        assert titles(question) == ["Grant's First Stand", "Green", "Green (2)", "Miquette Giraudy"]
        assert question.gold == ("Green", "Miquette Giraudy")
        assert loaded.passed_over == {"questions without an answer": 1}

    @pytest.mark.parametrize("how", ["error", "away"])
    def test_one_that_cannot_be_reached_says_what_to_give(self, hub: Callable[..., Hub], how: str) -> None:
        hub(**{how: ConnectionError("https://secret@host")})
        with pytest.raises(CorpusError, match=r"cannot be loaded \(ConnectionError\): give --data") as caught:
            load_questions("hotpotqa")
        assert "secret" not in str(caught.value)
        hub(multihop_row())
        assert load_questions("hotpotqa").questions, "nothing half converted is left"


# --- scores and answers -----------------------------------------------------------------------------------------------


EVERY = set(SCORERS)
CLOSED = {"hotpotqa", "2wikimultihopqa"}


class TestScores:
    """As the official scripts score, which differ in few things."""

    @pytest.mark.parametrize(
        ("answer", "accepted", "alike"),
        [
            ("The Beatles", "beatles", EVERY),
            ("beatles!", "Beatles", EVERY),
            ("an  apple\ta day", "apple day", EVERY),
            ("1,000", "1,000", EVERY),
            ("1,000", "1000", EVERY),
            ("1000", "1000.5", set()),
            ("Yes.", "yes", EVERY),
            ("", "the", EVERY),
            ("", "Paris", set()),
            ("Paris, France", "Paris", set()),
            ("theatre", "atre", set()),
            ("two", "2", set()),
            ("U.S.A.", "USA", EVERY),
            ("1914–18", "191418", set()),
            # Composed and decomposed letters are alike for NQ-open alone.
            ("Ro\u0308ntgen", "Röntgen", {"nq"}),
            ("Rontgen", "Röntgen", set()),
            ("İ", "i\u0307", EVERY),
        ],
    )
    def test_exact_match_is_about_words(self, answer: str, accepted: str, alike: set[str]) -> None:
        assert {name for name, scorer in SCORERS.items() if scorer.exact_match(answer, [accepted])} == alike

    @pytest.mark.parametrize(
        ("answer", "accepted", "f1"),
        [
            ("the cat sat", "cat", 2 / 3),
            ("cat cat", "cat", 2 / 3),
            ("a b c d", "c d e", 2 / 3),
            ("b c d e", "b d", 2 * 0.5 / 1.5),
            ("dog", "cat", 0),
            ("", "cat", 0),
            ("cat", "", 0),
            ("Paris in France", "Paris, France", 0.8),
        ],
    )
    def test_f1_is_the_overlap_in_words(self, answer: str, accepted: str, f1: float) -> None:
        assert {name: scorer.f1(answer, [accepted]) for name, scorer in SCORERS.items()} == pytest.approx(
            dict.fromkeys(SCORERS, f1)
        )

    @pytest.mark.parametrize(
        ("answer", "accepted"), [("yes it is", "yes"), ("no", "no one"), ("noanswer here", "noanswer")]
    )
    def test_hotpotqa_and_two_wiki_take_yes_no_and_noanswer_whole(self, answer: str, accepted: str) -> None:
        assert {name for name, scorer in SCORERS.items() if scorer.f1(answer, [accepted]) == 0} == CLOSED
        assert all(scorer.f1("Yes!", ["yes"]) == 1 for scorer in SCORERS.values())

    def test_any_accepted_answer_will_do(self) -> None:
        for scorer in SCORERS.values():
            for score in (scorer.exact_match, scorer.f1):
                assert (score("the Strip", ["boulevard", "strip"]), score("x", [])) == (1, 0)

    def test_two_answers_without_a_word_agree_for_musique_alone(self) -> None:
        assert {name for name, scorer in SCORERS.items() if scorer.f1("the", ["a"])} == {"musique"}

    @pytest.mark.parametrize("name", SCORERS)
    @given(answer=st.text(), accepted=st.text())
    def test_f1_is_a_share_and_1_where_words_match_exactly(self, name: str, answer: str, accepted: str) -> None:
        scorer = SCORERS[name]
        f1 = scorer.f1(answer, [accepted])
        assert 0 <= f1 <= 1
        assert f1 == pytest.approx(scorer.f1(accepted, [answer]))
        if scorer.exact_match(answer, [accepted]) and not scorer.is_empty([accepted]):
            assert f1 == 1


class TestExtraction:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            (" Paris \n", "Paris"),
            ("\n\nParis\nBecause the documents say so.", "Paris"),
            ("Answer: Paris", "Paris"),
            ("FINAL ANSWER: Paris", "Paris"),
            ("The answer is Paris.", "Paris."),
            ("Answer is: no", ": no"),
            ("answering machine", "answering machine"),
            ("<think>London? No.\nAnswer: Rome</think>\n\nParis", "Paris"),
            ("it thinks</think>Paris", "Paris"),
            ("<think>London? No. And so", ""),
            ("", ""),
            ("Answer:", ""),
            ("The answer is:\n\nParis", "Paris"),
            ("A: Paris", "Paris"),
        ],
    )
    def test_takes_the_first_line_without_thoughts_and_label(self, text: str, answer: str) -> None:
        assert extract_answer(text) == answer

    @given(st.text(alphabet=st.characters(exclude_categories=["Cc", "Zl", "Zp", "Cs"])).map(str.strip))
    def test_leaves_a_bare_answer_as_it_is(self, text: str) -> None:
        if "answer" not in text.lower() and not text.lower().startswith("a:") and "think>" not in text:
            assert extract_answer(text) == text


# --- orders -----------------------------------------------------------------------------------------------------------


class TestOrders:
    @pytest.mark.parametrize(
        ("name", "policy", "guards", "state_ranking"),
        [
            ("free", "free", {}, False),
            ("free+keep_first=2", "free", {"keep_first": 2}, False),
            ("greedy+keep_last=1+max_displacement=3", "greedy", {"keep_last": 1, "max_displacement": 3}, False),
            ("earned+keep_groups+state_ranking", "earned", {"keep_groups": True}, True),
            ("retrieval+state_ranking", "retrieval", {}, True),
            ("earned+best=last+best_tokens=64", "earned", {"best": "last", "best_tokens": 64}, False),
        ],
    )
    def test_are_a_policy_with_guards(self, name: str, policy: str, guards: JSON, state_ranking: bool) -> None:
        assert Order.parse(name) == Order(name, policy, guards, state_ranking)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("oracle", "unknown policy 'oracle'"),
            ("events", "unknown policy 'events'"),
            ("free+keep_first", "unknown guard 'keep_first'"),
            ("free+keep_first=-1", "unknown guard 'keep_first=-1'"),
            ("free+keep_first=²", "unknown guard"),
            ("free+keep_groups=1", "unknown guard 'keep_groups=1'"),
            ("free+keep_first=1+keep_first=2", "keep_first twice"),
            ("free+keep_first=1+keep_last=1", "exclude each other"),
            ("free+best=last+keep_first=1", "exclude each other"),
            ("free+best=middle", "unknown guard 'best=middle'"),
            ("sorted+keep_first=2", "not to sorted"),
            ("place=0", "give the place of the best document, such as place=1"),
            ("place=last", "give the place of the best document"),
            ("retrieval+fused=0.05", "say which tokens"),
            ("retrieval+fused=2:query", "from 0 to 1"),
            ("retrieval+fused=0.05:quary", "did you mean 'query'"),
            ("retrieval+fused=", "could not convert"),
            ("none+fused=0", "goes with a prefix cache"),
            ("retrieval+fused=0+fused=1:query", "once"),
        ],
    )
    def test_that_do_not_exist_are_refused(self, name: str, message: str) -> None:
        with pytest.raises(QualityError, match=message):
            Order.parse(name)

    def test_reversed_has_the_best_document_last(self, hotpot: Path) -> None:
        question, *_ = load_questions("hotpotqa", hotpot).questions
        ordering = Order.parse("reversed").make(None, None, 0).order(list(question.documents))  # type: ignore[arg-type]
        assert ordering.documents == list(reversed(question.documents))


# --- the experiment ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hotpot(tmp_path: Path) -> Path:
    return hotpot_folder(tmp_path / "hotpotqa")


def by_order(lines: Sequence[JSON], **cell: Any) -> dict[str, JSON]:
    quality = [line for line in lines if line["type"] == "quality"]
    return {line["policy"]: line for line in quality if cell.items() <= line["cell"].items()}


def checks(lines: Sequence[JSON], name: str) -> list[JSON]:
    return [line for line in lines if line["type"] == "check" and line["name"] == name]


class TestDryRun:
    @pytest.mark.parametrize("dataset", DATASETS)
    def test_the_accepted_answer_scores_100_and_none_scores_0(self, tmp_path: Path, dataset: str) -> None:
        lines = run_quality(make_bench(dataset, corpus_folder(tmp_path / "c"), dry_run=True, top_k=3))
        for said, score in (("accepted", 100), ("empty", 0)):
            orders = by_order(lines, answers=said)
            assert tuple(orders) == DEFAULT_ORDERS
            assert {(line["em"], line["f1"]) for line in orders.values()} == {(score, score)}

    def test_says_of_itself_that_nothing_was_measured_and_which_orders_differ(self, hotpot: Path) -> None:
        lines = run_quality(make_bench("hotpotqa", hotpot, dry_run=True))
        assert {line["dry_run"] for line in lines} == {True}
        assert {line["engine"]["name"] for line in by_order(lines).values()} == {"stub"}
        assert {line["rows"]["cached_tokens"] for line in by_order(lines).values()} == {None}
        assert not checks(lines, "quality-comparison")
        for verdict in checks(lines, "quality-verdict"):
            assert verdict["measured"] is False
            assert verdict["message"].startswith("quality was NOT measured: this was a dry run")
            assert (verdict["reordered"]["retrieval"], verdict["reordered"]["sorted"]) == (0, 1)
            assert verdict["reordered"]["free"] > 0

    def test_an_answer_without_a_word_is_counted_instead_of_failing(self, tmp_path: Path) -> None:
        data = hotpot_folder(tmp_path / "c", range(2), {0: "A"})
        lines = run_quality(make_bench("hotpotqa", data, dry_run=True))
        assert {line["wordless_answers"] for line in by_order(lines).values()} == {1}
        assert by_order(lines, answers="empty")["retrieval"]["em"] == 50

    def test_an_answer_that_the_extraction_would_spoil_ends_it(self, tmp_path: Path) -> None:
        data = hotpot_folder(tmp_path / "c", range(1), {0: "Answer: 42"})
        said = r"the accepted answer to question '5a7a0' \(1 in all\) does not score 100"
        with pytest.raises(QualityError, match=said):
            run_quality(make_bench("hotpotqa", data, dry_run=True))

    def test_an_order_that_loses_a_document_ends_it(self, hotpot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from ragorder import PromptBuilder

        build = PromptBuilder.build

        def forgetful(self: Any, query: str, ordering: Any) -> Any:
            kept = ordering.documents[0].id in ("Radio City", "Echosmith 3")
            return build(self, query, ordering.documents[0 if kept else 1 :])

        monkeypatch.setattr(PromptBuilder, "build", forgetful)
        with pytest.raises(QualityError, match="order 'sorted' loses or changes documents of question '5a7a0'"):
            run_quality(make_bench("hotpotqa", hotpot, orders=("retrieval", "sorted"), dry_run=True))

    def test_counts_in_the_tokens_of_a_model_if_there_is_one(self, hotpot: Path, model_folder: Path) -> None:
        options = {"dry_run": True, "capacity_tokens": Capacity.parse("50%")}
        exact, estimated = (
            by_order(run_quality(make_bench("hotpotqa", hotpot, **options, **model)))["free"]["engine"]
            for model in ({"model": model_folder}, {})
        )
        assert exact["capacity_tokens"] != estimated["capacity_tokens"]


class TestLines:
    def test_hold_a_row_for_each_question_with_its_answer_and_no_document(self, hotpot: Path) -> None:
        lines = list(serve_quality(make_bench("hotpotqa", hotpot, dry_run=True)))
        for line in lines:
            assert line["rows"]["id"] == [f"5a7a{number}" for number in range(6)]
            assert {len(column) for column in line["rows"].values() if column is not None} == {6}
            assert line["rows"]["answer"] == ["Arthur's Magazine" * (line["cell"]["answers"] == "accepted")] * 6
        assert "1844" not in json.dumps(lines) and "magazine was started" not in json.dumps(lines)
        orders = by_order(lines)
        assert orders["retrieval"]["rows"]["gold_places"] == [[1, 2]] * 6
        assert orders["sorted"]["rows"]["gold_places"] == [[0, 2]] * 6
        assert orders["free+keep_last=2"]["rows"]["gold_places"][0][-1] == 2
        assert orders["sorted"]["rows"]["moved_share"] == [1.0, 0.5] * 3

    def test_what_is_done_whole_is_not_even_loaded(self, tmp_path: Path) -> None:
        bench = make_bench("hotpotqa", tmp_path, dry_run=True)
        assert list(serve_quality(bench, done=lambda cell, policy: True)) == []


# --- a server ---------------------------------------------------------------------------------------------------------


class Service(LocalServer):
    """An OpenAI-compatible server on a port of its own. It answers with the title of the document that stands first,
    refuses the fields `refuses`, and every `fails`th question."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.base_url += "/v1"
        self.refuses: set[str] = set()
        self.fails = 0
        self.cached_tokens: int | None = 7
        self.content: Any = None
        self.bodies: list[JSON] = []
        self.keys: list[str | None] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    def say(self, body: JSON, key: str | None) -> tuple[int, Any]:
        if self.refuses & body.keys():
            return 400, {"error": "unknown field"}
        with self.lock:
            self.bodies.append(body)
            self.keys.append(key)
            if self.fails and len(self.bodies) % self.fails == 0:
                return 500, {}
        user = body["messages"][-1]["content"]
        first = user.partition("]")[0].removeprefix("[")
        usage: JSON = {"prompt_tokens": 50, "completion_tokens": 3}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        content = f"Answer: {first}." if self.content is None else self.content
        return 200, {"choices": [{"message": {"content": content}}], "usage": usage}


class _Handler(Handler):
    server: Service

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        models = {"data": [{"id": "Served-7B-Instruct"}, {"id": "other"}]}
        self.answer(200 if known else 404, json.dumps(models) if known else "")

    def do_POST(self) -> None:
        body, service = self.read_json(), self.server
        with service.lock:
            service.in_flight += 1
            service.most_in_flight = max(service.most_in_flight, service.in_flight)
        status, said = service.say(body, self.headers["Authorization"])
        with service.lock:
            service.in_flight -= 1
        self.answer(status, json.dumps(said))


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as service:
        yield service


@pytest.fixture
def ask(hotpot: Path, service: Service) -> Ask:
    def run(*orders: str, **options: Any) -> list[JSON]:
        server = {"engine": "openai", "base_url": service.base_url, "orders": orders or DEFAULT_ORDERS}
        return run_quality(make_bench("hotpotqa", hotpot, **server | options))

    return run


class TestServer:
    def test_every_question_is_asked_once_in_every_order_which_decides_what_it_sees(
        self, ask: Ask, service: Service
    ) -> None:
        lines = ask()
        assert len(service.bodies) == 6 * len(DEFAULT_ORDERS)
        orders = by_order(lines)
        assert tuple(orders) == DEFAULT_ORDERS
        assert {line["dry_run"] for line in lines} == {False}
        assert (orders["retrieval"]["em"], orders["sorted"]["em"]) == (0, 100)
        assert orders["sorted"]["rows"]["em"] == [1] * 6
        told = {"name": "openai", "model": "Served-7B-Instruct", "block_size": 16, "capacity_tokens": 262_144}
        assert orders["free"]["engine"] == told

    def test_requests_are_greedy_and_no_longer_than_asked(self, ask: Ask, service: Service) -> None:
        ask("retrieval", output_tokens=5, served_model="other", api_key="sk-1")
        body = service.bodies[0]
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("other", 0, 5)
        assert body["messages"][0] == {"role": "system", "content": SYSTEM}
        assert body["messages"][1]["content"].startswith("[Radio City]\nRadio City is a radio station.")
        assert body["messages"][1]["content"].endswith("Question: Which magazine was started first, number 0?")
        assert service.keys == ["Bearer sk-1"] * 6

    def test_the_ranking_is_stated_where_the_order_says_so(self, ask: Ask, service: Service) -> None:
        ask("sorted+state_ranking")
        note = "Documents from most to least relevant: Radio City, First for Women 0, Arthur's Magazine, Echosmith 0"
        assert note in service.bodies[0]["messages"][1]["content"]

    def test_each_order_has_a_cache_of_its_own_and_policy_none_one_for_each_question(
        self, ask: Ask, service: Service
    ) -> None:
        lines = ask("retrieval", "free", "none")
        salts = [body["cache_salt"] for body in service.bodies]
        assert [len(set(salts[first : first + 6])) for first in (0, 6, 12)] == [1, 1, 6]
        assert salts[0] != salts[6]
        assert by_order(lines)["free"]["rows"]["cached_tokens"] == [7] * 6
        service.cached_tokens = None
        assert by_order(ask("free"))["free"]["rows"]["cached_tokens"] is None

    def test_a_server_without_salts_is_asked_without_and_its_cached_tokens_say_nothing(
        self, ask: Ask, service: Service
    ) -> None:
        service.refuses = {"cache_salt"}
        line = by_order(ask("retrieval", capacity_tokens=Capacity.parse("unlimited")))["retrieval"]
        assert (line["failures"], line["rows"]["cached_tokens"], line["engine"]["capacity_tokens"]) == (0, None, None)
        assert "cache_salt" not in service.bodies[0]

    def test_a_server_with_another_name_for_the_limit_is_understood(self, ask: Ask, service: Service) -> None:
        service.refuses = {"cache_salt", "max_tokens"}
        assert by_order(ask("retrieval", output_tokens=4, concurrency=3))["retrieval"]["failures"] == 0
        assert {body["max_completion_tokens"] for body in service.bodies} == {4}

    def test_questions_in_flight_change_no_order(self, ask: Ask, service: Service) -> None:
        def places() -> list[list[int]]:
            rows: list[list[int]] = by_order(ask("free", concurrency=3))["free"]["rows"]["gold_places"]
            return rows

        assert places() == places()
        assert service.most_in_flight <= 3

    def test_a_failed_question_is_counted_and_in_no_row(self, ask: Ask, service: Service) -> None:
        service.fails = 4
        lines = ask("retrieval", "sorted")
        orders = by_order(lines)
        assert [orders[name]["failures"] for name in ("retrieval", "sorted")] == [1, 2]
        assert orders["retrieval"]["rows"]["id"] == ["5a7a0", "5a7a1", "5a7a2", "5a7a4", "5a7a5"]
        assert checks(lines, "quality-comparison")[0]["questions"] == 3

    def test_an_empty_answer_is_a_wrong_one(self, ask: Ask, service: Service) -> None:
        service.content = ""
        found = by_order(ask("retrieval"))["retrieval"]
        assert (found["failures"], found["em"]) == (0, 0)

    @pytest.mark.parametrize(
        ("server", "options", "said"),
        [
            ({"content": ["x"]}, {}, "not one of 6 questions was answered: the answer has no text"),
            ({"content": {}}, {}, "not one of 6 questions was answered: the answer has no text"),
            ({"refuses": {"messages"}}, {}, "not one of 6 questions was answered: HTTP 400"),
            ({}, {"base_url": "http://127.0.0.1:9"}, "cannot be reached"),
            ({}, {"served_model": "mine"}, "no model 'mine'"),
        ],
    )
    def test_without_a_server_or_an_answer_it_ends_with_the_reason(
        self, ask: Ask, service: Service, server: JSON, options: JSON, said: str
    ) -> None:
        vars(service).update(server)
        with pytest.raises(EngineError, match=said):
            ask("retrieval", **options)


# --- what it says together --------------------------------------------------------------------------------------------


def line(policy: str, em: Sequence[int], f1: Sequence[float] | None = None, **fields: Any) -> JSON:
    count = len(em)
    places = fields.pop("gold_places", [[0]] * count)
    moved = fields.pop("displacement", [0.0 if policy == "retrieval" else 1.0] * count)
    ids = fields.pop("id", [str(number) for number in range(count)])
    rows = {"id": ids, "em": [*em], "f1": [*(em if f1 is None else f1)], "displacement": moved, "gold_places": places}
    model = {"name": "big-7B", "parameters": 7_000_000_000, "random_weights": False}
    key = {"type": "quality", "session": "s", "suite": "quality", "cell": {"dataset": "hotpotqa"}, "seed": 0}
    return key | {"policy": policy, "model": model, "dry_run": False, "rows": rows} | fields


class TestStatistics:
    @pytest.mark.parametrize(
        ("lost", "won", "p"), [(0, 0, 1.0), (1, 0, 1.0), (0, 5, 0.0625), (0, 6, 0.03125), (2, 8, 0.109375), (3, 3, 1.0)]
    )
    def test_mcnemar_is_exact_and_about_the_questions_that_differ(self, lost: int, won: int, p: float) -> None:
        baseline = [1] * lost + [0] * won + [1] * 20 + [0] * 20
        other = [0] * lost + [1] * won + [1] * 20 + [0] * 20
        assert mcnemar_exact(baseline, other) == (lost, won, pytest.approx(p))

    def test_the_interval_is_that_of_the_mean_of_paired_differences(self) -> None:
        baseline = [number / 100 for number in range(100)]
        assert bootstrap_difference(baseline, [value + 0.1 for value in baseline]) == pytest.approx((0.1, 0.1, 0.1))
        differences = [(-1) ** number * 0.2 + 0.05 for number in range(400)]
        mean, low, high = bootstrap_difference([0.0] * 400, differences)
        assert mean == pytest.approx(0.05)
        # The mean's standard error is 0.2 / 20.
        assert (high - low) / 2 == pytest.approx(1.96 * 0.01, rel=0.1)
        assert bootstrap_difference([0.0] * 400, differences) == (mean, low, high)
        assert bootstrap_difference([0.0] * 400, differences, seed=1) != (mean, low, high)
        wider = bootstrap_difference([0.0] * 400, differences, confidence=0.99)
        assert wider[1] < low < high < wider[2]

    def test_what_cannot_be_paired_is_refused(self) -> None:
        with pytest.raises(ValueError, match="shorter"):
            bootstrap_difference([1.0, 2.0], [1.0])
        with pytest.raises(ValueError, match="shorter"):
            mcnemar_exact([1, 0], [1])
        with pytest.raises(ValueError, match="no questions"):
            bootstrap_difference([], [])


class TestComparison:
    def test_better_worse_and_no_difference(self) -> None:
        lines = [
            line("retrieval", [0] * 10 + [1] * 10 + [0] * 20),
            line("best", [1] * 10 + [1] * 10 + [0] * 20),
            line("sorted", [0] * 10 + [0] * 10 + [0] * 20),
            line("random", [1] * 2 + [0] * 8 + [0] * 2 + [1] * 8 + [0] * 20),
        ]
        verdicts = {each["policy"]: (each["em_verdict"], each["f1_verdict"]) for each in compare_orders(lines)}
        assert verdicts == {
            "best": ("better", "better"),
            "sorted": ("worse", "worse"),
            "random": ("no difference", "no difference"),
        }

    def test_the_figures_are_percent_of_the_questions_that_both_answered(self) -> None:
        lines = [
            line("retrieval", [1, 0, 0, 1], [1, 0.5, 0, 1], id=["a", "b", "c", "d"]),
            line("free", [1, 1, 1], [1, 1, 1], id=["d", "b", "x"], displacement=[0, 2.0, 1.0]),
        ]
        (compared,) = compare_orders(lines)
        assert (compared["questions"], compared["reordered"]) == (2, 0.6667)
        assert (compared["em_baseline"], compared["em"], compared["em_lost"], compared["em_won"]) == (50, 100, 0, 1)
        assert (compared["f1_baseline"], compared["f1"], compared["f1_difference"]) == (75, 100, 25)
        assert compared["f1_low"] <= 25 <= compared["f1_high"]

    def test_without_the_baseline_or_a_shared_question_there_is_nothing_to_say(self) -> None:
        assert compare_orders([line("free", [1])]) == []
        assert compare_orders([line("retrieval", [1], id=["a"]), line("free", [1], id=["b"])]) == []

    def test_a_question_asked_again_counts_once(self) -> None:
        lines = [
            line("retrieval", [0, 0, 1], id=["a", "a", "b"]),
            line("free", [1, 1, 1], id=["a", "a", "b"], gold_places=[[1], [1], [1]]),
        ]
        (compared,) = compare_orders(lines)
        assert (compared["questions"], compared["em_won"], compared["em_baseline"]) == (2, 1, 50)
        assert gold_places(lines[1])["places"] == [{"place": 1, "gold": 2, "em": 100, "f1": 100}]

    def test_answers_that_contain_an_accepted_one_are_compared_as_well(self, ask: Ask, service: Service) -> None:
        service.content = "It was Arthur's Magazine, I think."
        lines = ask("retrieval", "sorted")
        assert {(each["em"], each["contains"]) for each in by_order(lines).values()} == {(0, 100)}
        (compared,) = checks(lines, "quality-comparison")
        assert (compared["contains"], compared["contains_won"]) == (100, 0)
        assert compared["contains_verdict"] == "no difference"

    def test_places_of_gold_documents(self) -> None:
        found = gold_places(line("free", [1, 0, 1], [1, 0.5, 1], gold_places=[[0, 2], [2], []]))
        figures = [(0, 1, 100, 100), (2, 2, 50, 75)]
        assert found["places"] == [dict(zip(("place", "gold", "em", "f1"), each, strict=True)) for each in figures]
        assert found["without_gold"] == 1

    def test_a_summary_is_made_for_each_suite_cell_and_seed_of_the_last_line_of_an_order(self) -> None:
        lines = [line("retrieval", [0]), line("free", [0]), line("free", [1]), line("retrieval", [1], seed=1)]
        found = summarise([*lines, {"type": "run"}])
        kinds = ["comparison", "positions", "positions", "verdict", "positions", "verdict"]
        assert [each["name"] for each in found] == [f"quality-{kind}" for kind in kinds]
        assert found[0]["em"] == 100


class TestPlaces:
    def test_are_the_first_to_the_last_and_five_at_most(self) -> None:
        assert place_orders(3) == ("place=1", "place=2", "place=3")
        assert place_orders(10) == ("place=1", "place=3", "place=5", "place=8", "place=10")

    def test_only_the_best_gold_document_moves(self, ask: Ask) -> None:
        orders = by_order(ask("place=1", "place=4"))
        assert orders["place=1"]["rows"]["gold_places"] == [[0, 2], [0, 2]] * 3
        assert orders["place=4"]["rows"]["gold_places"] == [[1, 3], [1, 3]] * 3

    def test_questions_without_a_gold_document_are_left_out_and_counted(self, tmp_path: Path, service: Service) -> None:
        folder = corpus_folder(tmp_path / "c")
        written(folder / "run_mine.jsonl", *({"id": f"q{n}", "chunks": ["d7", "d0"]} for n in range(4)))
        bench = make_bench("corpus", folder, engine="openai", base_url=service.base_url, orders=("place=2",), top_k=2)
        (asked,) = serve_quality(bench)
        assert (asked["rows"]["id"], asked["passed_over"]) == (["q0"], {"questions without a gold document": 3})

    @pytest.mark.parametrize(("first", "last", "best"), [(0, 9, "last"), (9, 0, "first"), (5, 6, "any"), (0, 7, "any")])
    def test_the_end_with_more_right_answers_is_recommended_if_they_differ(
        self, first: int, last: int, best: str
    ) -> None:
        """7 to 0 has a p of .016, which is no difference after four comparisons."""
        right = {1: [1] * first + [0] * last, 5: [0] * first + [1] * last}
        lines = [line(f"place={place}", right.get(place, [0] * (first + last))) for place in range(1, 6)]
        for each in lines:
            each["rows"]["contains"] = each["rows"]["em"]
        (found,) = checks(summarise(lines), "quality-places")
        assert (found["best"], found["comparisons"]) == (best, 4)
        assert f'Settings(best="{best}")' in found["message"]
        assert found["message"].startswith("no difference found") == (best == "any")
        against = {each["baseline"] for each in checks(summarise(lines), "quality-comparison")}
        assert against == {"place=1"}

    def test_the_command_asks_the_sample_that_comes_with_it(self, tmp_path: Path, service: Service) -> None:
        done = invoke(
            "--places", "--engine", "openai", "--base-url", service.base_url, "--limit", 3, "--output", tmp_path
        )
        assert done.exit_code == 0, done.output
        assert len(service.bodies) == 3 * 5
        said = " ".join(done.output.split())
        assert re.search(r"no difference found: [\d.]+ % of 3 answers are right with the best document first", said)
        assert 'leave Settings(best="any"), the default' in said


class TestReport:
    def lines(self) -> list[JSON]:
        lines = [line(policy, [0, 1, 1], seed=0) for policy in ("retrieval", "random", "earned")]
        for place, each in enumerate(lines):
            tokens = {"prompt_tokens": [100] * 3, "cached_tokens": [20 * place] * 3}
            each["rows"] |= {"contains": each["rows"]["em"], "gold_places": [[0], [1], [2]], **tokens}
        return lines

    def test_shows_right_answers_against_cached_tokens_and_by_place(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        lines = self.lines()
        written(tmp_path / "results.jsonl", *lines, *summarise(lines))
        (section,) = make_report(read_results(tmp_path), {}).sections
        front, curve = section.pictures
        assert "retrieval order: 66.7 % right, 0.0 % cached" in front.alt
        assert "ragorder (earned): 66.7 % right, 40.0 % cached" in front.alt
        assert curve.alt == "place 1: 0.0 %, place 2: 100.0 %, place 3: 100.0 %"
        table, places = section.tables
        assert [entry.text for entry in table.rows[0]] == ["retrieval order", "66.7", "66.7", "66.7", "0.0", "3", "0.0"]
        assert table.rows[0][1].note == "[20.8, 93.9]; baseline"
        assert [row[1].text for row in places.rows] == ["1"] * 3


class TestJudgingWhatIsKept:
    def file(self, folder: Path, *lines: Any) -> Path:
        return written(folder / "results.jsonl", *lines)

    def test_is_about_the_cells_to_which_something_was_added(self, tmp_path: Path) -> None:
        old = [line("retrieval", [1]), line("free", [1])]
        new = line("sorted", [0])
        done = [line("retrieval", [1], seed=1), line("free", [1], seed=1)]
        path = self.file(tmp_path, *old, *summarise(old), *done, *summarise(done), new)
        lines, found = judge_previous(path, "quality", "now")
        assert lines == [*old, new]
        assert [each["policy"] for each in checks(found, "quality-comparison")] == ["free", "sorted"]
        assert {(each["seed"], each["session"]) for each in found} == {(0, "now")}
        assert judge_previous(self.file(tmp_path, *lines, *found), "quality", "later") == ([], [])

    def test_a_verdict_that_an_interrupt_cut_off_is_made_again(self, tmp_path: Path) -> None:
        lines = [line("retrieval", [1]), line("free", [1])]
        *compared, _ = summarise(lines)
        path = self.file(tmp_path, *lines, *compared)
        with path.open("a") as torn:
            torn.write('{"type":"check","name":"quality-verd')
        assert judge_previous(path, "quality", "now")[0] == lines

    def test_leaves_other_suites_alone(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, line("retrieval", [1], suite="table-2"), {"type": "run", "suite": "quality"})
        assert judge_previous(path, "quality", "now") == ([], [])
        assert len(judge_previous(path, "table-2", "now")[0]) == 1


CAPABLE, NOISE, SMALL = (7_000_000_000, False), (5_000, True), (1_540_000_000, False)
UNKNOWN = (None, False)


class TestVerdict:
    @pytest.mark.parametrize(
        ("model", "right", "measured", "said"),
        [
            (CAPABLE, (1, 0), True, "quality was measured"),
            (NOISE, (1, 1), False, "quality was NOT measured: the model has random weights: its answers are noise"),
            (SMALL, (0, 0), False, "1.5 billion parameters (fewer than 3)"),
            (SMALL, (0, 1), True, "quality was measured"),
            (UNKNOWN, (0, 0), False, "nothing says how large the model is"),
            (CAPABLE, (0, 0), True, "no answer is right in any order: only F1 can tell them apart"),
        ],
    )
    def test_depends_on_the_model_and_on_right_answers(
        self, model: tuple[int | None, bool], right: tuple[int, int], measured: bool, said: str
    ) -> None:
        facts = {"name": "m", "parameters": model[0], "random_weights": model[1]}
        lines = [line(name, [em], model=facts) for name, em in zip(("retrieval", "free"), right, strict=True)]
        verdict = judge(lines)
        assert verdict["measured"] is measured
        assert said in verdict["message"]
        assert verdict["reordered"] == {"retrieval": 0, "free": 1}

    def test_counts_sentences_that_contain_the_answer(self) -> None:
        asked = line("free", [0], model={"name": "m", "parameters": 135_000_000, "random_weights": False})
        asked["rows"]["contains"] = [1]
        assert judge([asked])["measured"] is True

    def test_orders_that_moved_nothing_are_no_comparison(self) -> None:
        verdict = judge([line("retrieval", [1]), line("free", [1], displacement=[0.0])])
        assert verdict["measured"] is True
        assert "no order moved a document" in verdict["message"]


class TestModels:
    def test_made_here_is_random_and_counted(self, model_folder: Path) -> None:
        facts = model_facts("name", model_folder)
        assert (facts.name, facts.random_weights, facts.from_name) == ("name", True, False)
        assert 50_000 < facts.parameters < 500_000

    @pytest.mark.parametrize(
        ("name", "parameters"),
        [
            ("Qwen/Qwen2.5-1.5B-Instruct", 1_500_000_000),
            ("meta-llama/Llama-3.1-8B", 8_000_000_000),
            ("org-7b/gpt-4o", None),
            ("Mixtral-8x7B", None),
            ("llama3:70b", 70_000_000_000),
        ],
    )
    def test_else_the_name_tells_if_it_does(self, name: str, parameters: int | None) -> None:
        assert model_facts(name).parameters == parameters
        assert model_facts("alias", name).parameters == parameters

    def test_unreadable_weights_are_no_evidence(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0oops")
        assert model_facts("m", tmp_path).parameters is None


# --- documents reused -------------------------------------------------------------------------------------------------


class TestFused:
    def test_orders_are_named_by_share_and_selection(self) -> None:
        names = fused_orders(("retrieval", "free+keep_first=2"), [0, 0.05, 0.05], ["query", "deviation"])
        assert names[:3] == ("retrieval+fused=0", "retrieval+fused=0.05:query", "retrieval+fused=0.05:deviation")
        assert len(names) == 6
        order = Order.parse(names[-1])
        assert (order.policy, order.guards) == ("free", {"keep_first": 2})
        assert order.fused == FusedReuse(0.05, "deviation")

    def test_normalised_scores_are_equation_11(self) -> None:
        f1 = {"retrieval": 80.0, "retrieval+fused=0": 20.0, "retrieval+fused=0.05:query": 65.0, "free+fused=0": 5.0}
        assert normalised_scores(f1) == {"retrieval+fused=0": 0, "retrieval+fused=0.05:query": 75}
        assert normalised_scores(f1 | {"retrieval": 20.5}) == {}

    @pytest.mark.merge
    def test_every_way_is_asked_end_to_end(self, tmp_path: Path, model_folder: Path) -> None:
        """By a random model, whose answers are noise."""
        pytest.importorskip("torch")
        hotpot = hotpot_folder(tmp_path / "hotpotqa", range(3))
        options = ["--engine", "torch", "--model", model_folder, "--output-tokens", 2, "--fusion", "0,.2,1"]
        done = invoke("hotpotqa", "--data", hotpot, "-o", tmp_path, "--select", "query,deviation", *options)
        assert done.exit_code == 0, done.output
        lines = result_lines(tmp_path)
        asked = by_order(lines)
        assert tuple(asked) == ("retrieval", *fused_orders(["retrieval"], [0, 0.2, 1], ["query", "deviation"]))
        exact = asked.pop("retrieval")
        assert exact["rows"]["fused_tokens"] is None
        for name, found in asked.items():
            recompute, rows = Order.parse(name).fused.recompute, found["rows"]  # type: ignore[union-attr]
            assert found["failures"] == 0
            assert min(*rows["fused_tokens"], *rows["cached_tokens"]) > 0
            assert rows["recomputed_tokens"] == [round(recompute * fused) for fused in rows["fused_tokens"]]
        (verdict,) = checks(lines, "quality-verdict")
        assert not verdict["measured"]


# --- engines in this process -----------------------------------------------------------------------------------------


class TestAnswersOfAnEngineInThisProcess:
    """By a random model, whose answers are noise."""

    @pytest.fixture
    def bench(self, tmp_path: Path, model_folder: Path) -> QualityBench:
        pytest.importorskip("torch")
        options = {"orders": ("retrieval", "reversed", "none"), "answers": tmp_path / "answers.jsonl", "top_k": 2}
        options |= {"engine": "torch", "model": model_folder, "output_tokens": 4}
        return make_bench("corpus", corpus_folder(tmp_path / "c"), **options)

    def test_each_prompt_is_answered_once_however_many_orders_lead_to_it(
        self, bench: QualityBench, tmp_path: Path
    ) -> None:
        lines = by_order(list(serve_quality(bench)))
        kept = [json.loads(each) for each in (tmp_path / "answers.jsonl").read_text("utf-8").splitlines()]
        assert len(kept) == len({each["prompt"] for each in kept}) == 4 * 2, "none has the prompts of retrieval"
        assert lines["none"]["rows"]["answer"] == lines["retrieval"]["rows"]["answer"]
        assert sum(lines["none"]["rows"]["cached_tokens"]) == 0 < sum(lines["retrieval"]["rows"]["cached_tokens"])
        assert min(lines["retrieval"]["rows"]["prompt_tokens"]) > 50
        assert lines["retrieval"]["model"]["name"] == "smallest", "of a folder the name, without its place"

    def test_an_interrupted_run_goes_on(self, bench: QualityBench, tmp_path: Path) -> None:
        whole = list(serve_quality(bench))
        file = tmp_path / "answers.jsonl"
        kept = file.read_text("utf-8").splitlines(keepends=True)
        file.write_text("".join(kept[:3]) + kept[3][:20], "utf-8")
        assert list(serve_quality(bench)) == whole
        assert sorted(set(file.read_text("utf-8").splitlines())) == sorted({*map(str.strip, kept), kept[3][:20]})

    def test_another_length_of_answers_is_another_answer(self, bench: QualityBench, tmp_path: Path) -> None:
        list(serve_quality(bench))
        longer = bench.engine.model_copy(update={"output_tokens": 6})
        list(serve_quality(replace(bench, engine=longer)))
        assert len((tmp_path / "answers.jsonl").read_text("utf-8").splitlines()) == 2 * 4 * 2


# --- the real engine --------------------------------------------------------------------------------------------------


@pytest.mark.vllm
class TestVLLM:
    def test_every_order_is_asked_end_to_end(self, tmp_path: Path, vllm_model: Path, vllm_engine: Any) -> None:
        from ragorder.eval.engines.models import load_tokenizer

        hotpot = hotpot_folder(tmp_path / "hotpotqa", times=4)
        orders = ("none", *DEFAULT_ORDERS)
        bench = make_bench("hotpotqa", hotpot, model=vllm_model, output_tokens=8, orders=orders)
        data = load_questions("hotpotqa", hotpot)
        builders, facts = Builders(load_tokenizer(vllm_model)), model_facts("random", vllm_model)
        engine = OnceAnswers(vllm_engine, 8, capacity_tokens=vllm_engine.capacity_tokens, model="random")

        def ask() -> list[JSON]:
            parsed = [Order.parse(name) for name in orders]
            return list(ask_questions(bench, data, parsed, engine, builders, facts, silent, bench.cells[0]))

        ask()
        engine.answer_missing(silent)
        lines = ask()
        assert tuple(by_order(lines)) == orders
        for asked in lines:
            assert (asked["failures"], len(asked["rows"]["em"]), asked["engine"]["name"]) == (0, 6, "vllm")
        cached = {name: sum(asked["rows"]["cached_tokens"]) for name, asked in by_order(lines).items()}
        assert cached["free"] > cached["retrieval"] > cached["none"] == 0
        assert by_order(lines)["none"]["rows"]["answer"] == by_order(lines)["retrieval"]["rows"]["answer"]
        (verdict,) = checks(summarise(lines), "quality-verdict")
        assert verdict["message"] == "quality was NOT measured: the model has random weights: its answers are noise"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"capacity_tokens": Capacity.parse("64")}, r"the cache \(--capacity-tokens\) holds 64: lower --top-k"),
            ({"output_tokens": 5000}, "answer included, and the model takes 4,096"),
        ],
    )
    def test_prompts_that_cannot_fit_are_refused_before_the_model_is_loaded(
        self, hotpot: Path, vllm_model: Path, options: JSON, message: str
    ) -> None:
        with pytest.raises(QualityError, match=message):
            run_quality(make_bench("hotpotqa", hotpot, model=vllm_model, **options))

    @pytest.mark.slow
    def test_a_real_server_keeps_the_orders_apart(self, hotpot: Path, vllm_model: Path, vllm_server: Any) -> None:
        orders = ("none", "retrieval", "free")
        options = {"base_url": vllm_server.base_url, "model": vllm_model, "output_tokens": 4}
        lines = run_quality(make_bench("hotpotqa", hotpot, engine="openai", orders=orders, **options))
        cached = {name: asked["rows"]["cached_tokens"] for name, asked in by_order(lines).items()}
        assert cached["none"] == [0] * 6
        assert cached["retrieval"][0] == cached["free"][0] == 0
        assert sum(cached["free"]) > 0
        assert by_order(lines)["free"]["engine"]["capacity_tokens"] == 128 * 32
        (verdict,) = checks(lines, "quality-verdict")
        assert verdict["reason"] == "the model has random weights: its answers are noise"

    @pytest.mark.slow
    def test_the_command_starts_an_engine_of_its_own(self, hotpot: Path, vllm_model: Path, tmp_path: Path) -> None:
        arguments = ["--model", vllm_model, "--limit", 2, "--output-tokens", 4, "--policy", "free"]
        done = invoke("hotpotqa", "--data", hotpot, "-o", tmp_path / "out", *arguments)
        assert done.exit_code == 0, done.output
        assert "quality was NOT measured: the model has random weights" in " ".join(done.output.split())
        (asked,) = result_lines(tmp_path / "out", "quality")
        assert len(asked["rows"]["cached_tokens"]) == 2


# --- the command ------------------------------------------------------------------------------------------------------


invoke = partial(run_command, command, env={"COLUMNS": "200"})


class TestCommand:
    def test_a_dry_run_writes_a_session_the_orders_and_a_verdict(self, hotpot: Path, tmp_path: Path) -> None:
        done = invoke("hotpotqa", "--data", hotpot, "--dry-run", "-o", tmp_path / "out")
        assert done.exit_code == 0, done.output
        session, *lines = result_lines(tmp_path / "out")
        assert (session["type"], session["schema"], session["arguments"]["dry_run"]) == ("session", 1, True)
        assert session["environment"]["python"]
        assert [each["type"] for each in lines] == ["quality"] * 16 + ["check"] * 2
        assert {each["session"] for each in lines} == {session["session"]}
        assert done.output.count("quality was NOT measured: this was a dry run, in which a stub answered") == 2

    def test_what_is_there_is_not_asked_again_and_compared_with_what_is_new(
        self, hotpot: Path, tmp_path: Path, service: Service
    ) -> None:
        arguments = ["hotpotqa", "--data", hotpot, "--engine", "openai", "--base-url", service.base_url, "-o", tmp_path]
        assert invoke(*arguments, "--policy", "retrieval").exit_code == 0
        done = invoke(*arguments, "--policy", "retrieval", "--policy", "sorted")
        assert done.exit_code == 0, done.output
        assert len(service.bodies) == 12
        assert [each["policy"] for each in result_lines(tmp_path, "quality")] == ["retrieval", "sorted"]
        (compared,) = checks(result_lines(tmp_path), "quality-comparison")
        assert (compared["policy"], compared["em_won"], compared["em_verdict"]) == ("sorted", 6, "better")
        assert "quality was measured" in done.output
        again = invoke(*arguments, "--policy", "sorted")
        assert "already has results for all of these orders: nothing was asked" in again.output
        assert len(service.bodies) == 12

    def test_every_option_reaches_the_experiment(self, tmp_path: Path, service: Service) -> None:
        pytest.importorskip("bm25s")
        data = hotpot_folder(tmp_path / "corpus", range(4))
        done = invoke(
            "2wikimultihopqa",
            *("--data", data, "--limit", 3, "--order", "random", "--seed", 5),
            *("--top-k", 4, "--document-words", 4, "--retriever", "bm25", "--policy", "free+keep_first=1"),
            *("--engine", "openai", "--base-url", service.base_url, "--served-model", "other", "--api-key", "sk-9"),
            *("--concurrency", 2, "--capacity-tokens", "9000", "--block-size", 64, "--output-tokens", 6),
            *("-o", tmp_path / "out"),
        )
        assert done.exit_code == 0, done.output
        session, asked, *_ = result_lines(tmp_path / "out")
        assert "sk-9" not in json.dumps(session)
        assert (asked["suite"], asked["seed"], asked["policy"]) == ("quality", 5, "free+keep_first=1")
        cell = {"dataset": "2wikimultihopqa", "data": str(data), "limit": 3, "question_order": "random", "top_k": 4}
        cell |= {"document_words": 4, "retriever": "bm25", "engine": "openai", "model": "other", "concurrency": 2}
        cell |= {"base_url": service.base_url, "capacity_tokens": 9000, "block_size": 64, "output_tokens": 6}
        assert asked["cell"] == cell
        assert (asked["engine"]["block_size"], asked["engine"]["capacity_tokens"]) == (64, 9000)
        assert (service.keys[0], service.bodies[0]["max_tokens"]) == ("Bearer sk-9", 6)

    def test_ones_own_questions_as_the_documentation_has_them(
        self, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page = (Path(__file__).parents[2] / "docs" / "quality.md").read_text("utf-8")
        monkeypatch.chdir(tmp_path)
        Path("my-corpus").mkdir()
        blocks = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
        for name, block in zip(("documents", "questions", "run_own"), blocks, strict=True):
            Path("my-corpus", f"{name}.jsonl").write_text(block, "utf-8")
        asked = []
        for words in re.findall(r"^ragorder eval quality .*", page, re.MULTILINE):
            del service.bodies[:]
            done = invoke(*words.replace("http://127.0.0.1:8000/v1", service.base_url).split()[3:])
            assert done.exit_code == 0, done.output
            asked.append(len(service.bodies))
        assert asked == [120 * 5, 2 * len(DEFAULT_ORDERS), 2 * 2]
        sent = json.dumps(service.bodies)
        assert "two years" in sent and "They must be unused." in sent

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["squad"], "'squad' is not one of"),
            (["hotpotqa", "--data", "nowhere"], "does not exist"),
            (["corpus", "--data", __file__], "--data is a folder with documents.jsonl"),
            (["corpus", "--data", "BROKEN", "--dry-run"], 'questions.jsonl:2: "question" is missing'),
            (["corpus", "--top-k", "9", "--dry-run"], "ranks 4 documents a question: lower --top-k (9)"),
            (["--policy", "free", "--policy", "free"], "the same order twice"),
            (["--base-url", "http://x"], "require --engine openai"),
            (["--served-model", "x"], "require --engine openai"),
            (["--fusion", "0,2"], "give shares from 0 to 1"),
            (["--fusion", "some"], "give shares from 0 to 1"),
            (["--select", "query"], "--select requires --fusion"),
            (["hotpotqa", "--fusion", "0.1"], "give --engine torch"),
            (["--places", "--policy", "free"], "--places uses its own orders"),
            (["hotpotqa", "--embedding-model", "x"], "--embedding-model requires --retriever dense"),
            (["hotpotqa", "--policy", "wild"], "unknown policy 'wild'"),
            (["hotpotqa", "--capacity-tokens", "lots"], "is no capacity"),
            (["hotpotqa", "--engine", "openai"], "needs --base-url"),
            (["hotpotqa", "--engine", "openai", "--base-url", "ftp://x"], "is not the URL of a server"),
            (["hotpotqa", "--concurrency", "2"], "requires --engine openai"),
            (["hotpotqa", "--retriever", "dense", "--embedding-model", "/nowhere"], "nowhere"),
        ],
    )
    def test_bad_input_is_one_line_without_a_traceback(
        self, hotpot: Path, tmp_path: Path, arguments: list[str], message: str
    ) -> None:
        broken = corpus_folder(tmp_path / "broken")
        written(broken / "questions.jsonl", {"id": "q0", "question": "?"}, {"id": "x"})
        data = [] if "--data" in arguments else ["--data", hotpot]
        asked = [broken if each == "BROKEN" else each for each in arguments]
        done = invoke(*asked, *data, "-o", tmp_path / "out")
        assert done.exit_code in (1, 2)
        assert message in " ".join(done.output.split())


SUITE = """
title = "Answers"
source = "tests"
says = "Something."
kind = "quality"
policies = ["retrieval", "sorted", "free+keep_first=1"]
warmup = 0
requests = 4
cell = { top_k = 2, document_words = 3, output_tokens = 6 }
sweep = { dataset = ["hotpotqa"] }
report = { chart = "quality" }
"""


class TestInASuite:
    @pytest.fixture
    def run(self, hotpot: Path, tmp_path: Path, service: Service) -> Ask:
        """The lines of `ragorder eval run` against the server, those of its session's beginning left out."""
        (tmp_path / "mine.toml").write_text(SUITE)

        def run(*options: str) -> list[JSON]:
            arguments = ["run", tmp_path / "mine.toml", "-o", tmp_path / "out", "--questions", hotpot.parent]
            arguments += ["--engine", "openai", "--base-url", service.base_url, *options]
            done = CliRunner().invoke(evaluate, [str(argument) for argument in arguments])
            assert done.exit_code == 0, done.output
            return [each for each in result_lines(tmp_path / "out") if each["type"] != "session"]

        return run

    def test_what_the_cell_says_reaches_the_server(self, run: Ask, service: Service) -> None:
        lines = run()
        assert by_order(lines).keys() == {"retrieval", "sorted", "free+keep_first=1"}
        cell = {"dataset": "hotpotqa", "top_k": 2, "document_words": 3, "output_tokens": 6}
        assert all(each["cell"] == cell for each in lines)
        assert [body["max_tokens"] for body in service.bodies] == [6] * 12
        prompt = json.dumps(service.bodies[0]["messages"])
        assert "Radio City is" in prompt and "First for Women" in prompt
        assert "Radio City is a" not in prompt and "Echosmith" not in prompt
        # It ends with the same checks as the command.
        found = [each for each in lines if each["type"] == "check"]
        assert [{**each, "session": ""} for each in found] == [{**each, "session": ""} for each in summarise(lines)]
        (verdict,) = checks(lines, "quality-verdict")
        assert verdict["measured"] is True

    def test_going_on_compares_with_what_was_there_and_repeats_nothing(self, run: Ask, service: Service) -> None:
        assert not checks(run("--policy", "retrieval"), "quality-comparison")
        lines = run()
        assert len(service.bodies) == 12
        assert [each["policy"] for each in checks(lines, "quality-comparison")] == ["sorted", "free+keep_first=1"]
        assert run() == lines
