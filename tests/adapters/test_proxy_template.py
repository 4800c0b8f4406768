"""Templates: which documents they find in a text, and what of it moves."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bodies import Bodies

pytest.importorskip("starlette")

from ragorder.adapters.proxy import DocumentTemplate, TemplateError
from ragorder.adapters.proxy.bodies.body import BOUNDARY

TEMPLATE = '<document id="{id}">\n{text}\n</document>'

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>[]{}#"), max_size=20)
FORMS = [
    TEMPLATE,
    "<d>{text}</d>",
    "[doc {id}] {title}: {text} [end]",
    "<d>{text}\nSource: {title}</d>",
    "{{{id}: {text}}}",
    "  <d>{text}</d>\n\n",
    "### {id}\n{text}\n#-- end",
]
PIECES = ["<d>", "</d>", "<d", "/d>", ":", "x", " ", "\n", "<d>:y</d>", BOUNDARY, f"<d>:{BOUNDARY}</d>"]
HOSTILE = ["<d>", "</d>", "<d></d>", "<d></d></d>", "<d><d></d>", "</d><d>", "<d>:</d>", "<d>:", "<d>:</d> "]
HOSTILE += ["<", "</d", "ID: ", "ID: 1\n", "\n\nID: 1", "\n\nID: 1\n", "\n\n"]


class TestTemplates:
    @pytest.mark.parametrize(
        ("template", "said"),
        [
            ("", "{text}"),
            ("no field", "{text}"),
            ("<d>{id}</d>", "{text}"),
            ("<d>{text}{text}</d>", "nothing separates"),
            ("<d>{text} {text}</d>", "separated by a line break"),
            ("{text}\n---\n{text}", "nothing marks the first"),
            ("Context:\n{text}\n\n{text}", "separated by a line break"),
            ("<d>{text}|{text}|{text}</d>", "{text} once"),
            ("<d>{id}: {text} and {text}</d>", "{text} once"),
            ("<d>{n} {id}: {text}</d>", "{id} or {n}"),
            ("<d>{text} {n} {title}</d>", "but not both"),
            ("<d>{n}{*}:{text}</d>", "between two fields"),
            ("---\n{text}\n---\n{text}\n---", "not recognised"),
            ("<d>{text} {query}</d>", "no other field"),
            ("<d>{}</d>", "no other field"),
            ("<d>{text!r}</d>", "no other field"),
            ("<d>{text:>10}</d>", "no other field"),
            ("<d>{text", "brace"),
            ("<d>}{text}</d>", "brace"),
            ("{text}", "before"),
            ("<d>{text}", "after"),
            ("<d>{text}\n\n", "after"),
            ("\n{text}</d>", "before"),
            ("[{id}]\n{text}\n\n", "after"),
            ("<d>{id}{text}</d>", "between two fields"),
            ("---{text}---", "must not contain each other"),
            ("### {id}\n{text}\n### end", "must not contain each other"),
            ("ab{text}a", "must not contain each other"),
            ("<d>{id}<d>{text}</d>", "not recognised"),
            ("<d>{id}</d>{text}</d>", "not recognised"),
        ],
    )
    def test_a_template_that_finds_nothing_is_refused(self, template: str, said: str) -> None:
        with pytest.raises(TemplateError, match=re.escape(said)):
            DocumentTemplate(template)

    def test_the_longest_run_counts_and_the_first_of_equals(self) -> None:
        def found(text: str) -> list[str]:
            run = DocumentTemplate("<{text}>").find(text)
            return list(run.documents) if run else []

        assert found("<a> <b> x <c> <d> <e> x <f>") == ["<c>", "<d>", "<e>"]
        assert found("<a> <b> x <c> <d>") == ["<a>", "<b>"]
        assert found("<a> x <b> x <c>") == []
        assert found("<a>") == found("") == []

    @pytest.mark.parametrize(
        ("text", "documents"),
        [
            # A document's text, or what is around, has marks in it: where a document ends is not clear.
            ("<<a> <b> <c>", ["<b>", "<c>"]),
            ("like < so: <a> <b> <c>", ["<b>", "<c>"]),
            ("<a> <b> <c>> x", ["<a>", "<b>"]),
            ("<a> <b>> <c> <d>", ["<c>", "<d>"]),
            ("<a> <b < b> <c> <d>", ["<c>", "<d>"]),
            ("<a> <b> <c> and < then", ["<a>", "<b>", "<c>"]),
            ("and > then <a> <b>", ["<a>", "<b>"]),
            ("<a> <b", None),
            ("<a>> <b>>", None),
        ],
    )
    def test_what_is_not_clear_stays_where_it_is(self, text: str, documents: list[str] | None) -> None:
        run = DocumentTemplate("<{text}>").find(text)
        assert (run and list(run.documents)) == documents

    def test_a_header_is_part_of_a_document(self) -> None:
        template = DocumentTemplate('<d id="{id}">{text}</d>')
        assert template.find('<d id="1">one</d><d id=2>two</d>') is None
        run = template.find('<d id="1">one</d><d id="1">two</d>')
        assert run is not None
        assert "".join(run.pieces_with(run.documents[::-1])) == '<d id="1">two</d><d id="1">one</d>'

    @pytest.mark.parametrize("form", FORMS)
    @given(st.lists(WORDS, min_size=2, max_size=6), WORDS, WORDS, st.text("\n\t ", max_size=3), st.randoms())
    def test_documents_move_whole_and_nothing_else_does(
        self, form: str, texts: list[str], before: str, after: str, gap: str, rng: random.Random
    ) -> None:
        documents = [form.strip().format(id=n, title=f"T{n}", text=text) for n, text in enumerate(texts)]
        run = DocumentTemplate(form).find(before + gap.join(documents) + after)
        assert run is not None
        assert (run.head, list(run.documents), run.tail) == (before, documents, after)
        permutation = rng.sample(range(len(texts)), len(texts))
        moved = "".join(run.pieces_with([run.documents[rank] for rank in permutation]))
        assert moved == before + gap.join(documents[place] for place in permutation) + after

    @given(st.lists(st.sampled_from(PIECES), max_size=40))
    def test_any_text_or_parts_are_cut_up_without_loss(self, pieces: list[str]) -> None:
        text = "".join(pieces)
        run = DocumentTemplate("<d>{id}:{text}</d>").find(text)
        if run is not None:
            assert "".join(run.pieces) == text
            turned = "".join(run.pieces_with(run.documents[::-1]))
            assert sorted(turned) == sorted(text)
            assert len(run.documents) >= 2
            assert all(BOUNDARY not in each for each in run.documents)
            assert all(
                re.fullmatch("<d>(?:(?!<d>|</d>).)*?:(?:(?!<d>|</d>).)*</d>", each, re.S) for each in run.documents
            )
            assert all(gap.replace(BOUNDARY, "").strip() == "" for gap in run.pieces[2:-1:2])

    @pytest.mark.parametrize("piece", HOSTILE)
    def test_hostile_texts_take_no_longer_than_others(self, piece: str) -> None:
        # In quadratic time these would take days.
        DocumentTemplate("<d>{id}:{text}</d>").find(piece * 200_000)
        DocumentTemplate("ID: {n}\n{title}:\n{text}", between="\n\n").find(piece * 100_000)

    def test_a_document_that_quotes_an_opening_mark_is_not_torn(self) -> None:
        template = DocumentTemplate('<source id="{id}">{text}</source>')
        documents = [f'<source id="{id}">Text {id}.</source>' for id in "12"]
        quoting = '<source id="0">Write\n<source id="7"> in each tag.</source>'
        for listed in ([quoting, *documents], [*documents, quoting]):
            run = template.find("Context:\n" + "\n".join(listed))
            assert run is not None
            assert list(run.documents) == documents


class TestNumbersByPlace:
    def test_a_number_that_differs_within_a_document_is_none(self) -> None:
        template = DocumentTemplate("[CONTEXT {n}]:\n{text}\n[END CONTEXT {n}]")
        assert template.split("[CONTEXT 1]:\nx\n[END CONTEXT 2]").id == ""

    @pytest.mark.parametrize("mark", ["[CONTEXT x]:", "[CONTEXT ]:", "[CONTEXT 12345]:", "[CONTEXT 1]"])
    def test_other_marks_are_text(self, mark: str) -> None:
        template = DocumentTemplate("[CONTEXT {n}]:\n{text}\n[END CONTEXT {n}]")
        listed = "".join(f"[CONTEXT {n}]:\n{mark}\n[END CONTEXT {n}]\n\n" for n in (0, 1))
        run = template.find(listed)
        assert run is not None
        assert len(run.documents) == 2


class TestSeparators:
    @pytest.mark.parametrize(
        "text",
        [
            "a\n---\nb",  # no head
            "Context:\na\n---\nb\nContext:\nc\n---\nd\nQuery:",  # two heads
            "Context:\na\n---\nb\nQuery: what is\nQuery:?",  # two tails
            "Context:\na\nQuery:",  # one document
            "Context:\na\n---\nb\ud800\n---\nc\nQuery:",  # documents in several content parts
        ],
    )
    def test_a_list_whose_bounds_are_not_clear_stays_as_it_is(self, text: str) -> None:
        assert DocumentTemplate("{text}", head="Context:\n", between="\n---\n", tail="\nQuery:").find(text) is None

    @pytest.mark.parametrize("text", ["Facts:\na\n\n\nb\n\nEnd", "Facts:\na\n\n\n\nb\n\nEnd"])
    def test_texts_that_touch_a_separator_with_a_part_of_it_are_not_divided(self, text: str) -> None:
        assert DocumentTemplate("Facts:\n{text}\n\n{text}\n\nEnd").find(text) is None

    def test_a_document_with_another_of_the_tails_ends_nothing(self) -> None:
        template = DocumentTemplate("[{n}] {text}", head="Facts:\n", between="\n", tail=["\n  The end.", "\nThe end."])
        assert template.find("Facts:\n[1] a\nThe end.\n[2] b\n  The end.") is None

    def test_without_a_tail_the_last_number_counts_too(self) -> None:
        template = DocumentTemplate("[{n}] {text}", head="Facts:\n", between="\n")
        assert template.find("Facts:\n[1] a\n[2] b\n[3] c") is not None
        # The second document has a mark in its text.
        assert template.find("Facts:\n[1] a\n[2] b\n[3] quoted\n[3] c") is None

    def test_without_a_tail_the_last_document_stays_where_it_is(self) -> None:
        template = DocumentTemplate("ID: {n}\n{text}", between="\n\n", tail=["\nEnd.", "\nDone."])
        listed = "\n\n".join(f"ID: {n}\n{text}" for n, text in enumerate("abc"))
        for tail, found in (("\nEnd.", 3), ("\nDone.", 3), (" and a question", 2)):
            run = template.find("Use:\n" + listed + tail)
            assert run is not None
            assert len(run.documents) == found


def test_numbers_that_documents_share_leave_a_request_as_it_is() -> None:
    passed: list[str] = []
    bodies = Bodies('<source id="{n}">{text}</source>', on_passed=passed.append)
    for names, numbers in (("abcd", "1213"), ("dcba", "1232"), ("abc", "234")):
        texts = [f'<source id="{n}">{name * 200}</source>' for n, name in zip(numbers, names, strict=True)]
        body = {"messages": [{"role": "user", "content": "\n".join(texts)}]}
        assert json.loads(bodies.ordered(json.dumps(body).encode())) == body
    assert passed == ["not_numbered"] * 3
