"""Questions of answer quality: where they come from, the official scores of their answers, and their orders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.quality import JSON, corpus_folder, hotpot_folder, load_questions, paragraphs, written

pytest.importorskip("scipy")

from ragorder.eval.data.corpora import CorpusError
from ragorder.eval.data.corpora.folder import load_folder
from ragorder.eval.data.trace import trace_of_corpus
from ragorder.eval.suites.quality.metrics import SCORERS, extract_answer
from ragorder.eval.suites.quality.orders import GradedQuestion, Order, QualityError


def titles(question: GradedQuestion) -> list[str]:
    return [document.id for document in question.documents]


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

    def test_reversed_has_the_best_document_last(self, tmp_path: Path) -> None:
        question, *_ = load_questions("hotpotqa", hotpot_folder(tmp_path / "hotpotqa")).questions
        ordering = Order.parse("reversed").make(None, None, 0).order(list(question.documents))  # type: ignore[arg-type]
        assert ordering.documents == list(reversed(question.documents))
