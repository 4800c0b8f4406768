"""Labels that do not move with the order, and what an answer cites by them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder import Document, Orderer, PromptBuilder
from ragorder.citations import cited, number_label

SHOWN = "[{label}] {text}\n"
DOCUMENTS = [Document(name, f"{name} is a document about {name}. " * 20) for name in "abcdef"]


class TestNumberLabels:
    def test_are_of_the_text_alone_and_the_same_in_every_process(self, python: Any) -> None:
        assert number_label(Document("1", "text")) == number_label(Document("2", "text")) == number_label("text")
        assert number_label("text") != number_label("other text")
        script = "from ragorder.citations import number_label; print(number_label('Orders are shipped.'))"
        assert python("-c", script).stdout.strip() == number_label("Orders are shipped.")

    @given(st.text(), st.integers(1, 15))
    def test_have_that_many_digits(self, text: str, digits: int) -> None:
        label = number_label(text, digits=digits)
        assert re.fullmatch(rf"[1-9]\d{{{digits - 1}}}", label)

    @pytest.mark.parametrize("digits", [0, 16, -1])
    def test_other_lengths_are_refused(self, digits: int) -> None:
        with pytest.raises(ValueError, match="1 to 15 digits"):
            number_label("text", digits=digits)

    def test_are_spread_over_all_numbers(self) -> None:
        labels = {number_label(f"text {number}", digits=6) for number in range(1000)}
        assert len(labels) > 990
        assert {label[0] for label in labels} == set("123456789")


class TestCited:
    def name(self, document: Document) -> str:
        return document.id

    @pytest.mark.parametrize(
        ("answer", "names"),
        [
            ("It is so [b], and so [a].", "ba"),
            ("[a] [a] [a, b]", "ab"),
            ("[b; c]", "bc"),
            ("[ d ]", "d"),
            ("No source.", ""),
            ("[x] [] [a\n] a b [[c]]", "c"),
        ],
    )
    def test_in_order_of_the_first_citation(self, answer: str, names: str) -> None:
        assert cited(answer, DOCUMENTS, self.name) == [DOCUMENTS["abcdef".index(name)] for name in names]

    def test_the_same_label_is_all_of_them(self) -> None:
        twins = [Document("1", "text"), Document("2", "text")]
        assert cited(f"[{number_label('text')}]", twins, number_label) == twins

    def test_a_label_with_a_comma_is_one(self) -> None:
        document = Document("1", "text", metadata={"source": "Smith, J."})
        assert cited("[Smith, J.]", [document], lambda each: str(each.metadata["source"])) == [document]

    @given(st.text())
    def test_any_answer_can_be_read(self, answer: str) -> None:
        assert set(cited(answer, DOCUMENTS, self.name)) <= set(DOCUMENTS)


class TestInPrompts:
    def test_what_is_cited_is_what_the_model_saw(self) -> None:
        orderer, builder = Orderer(block_size=16, strict=True), PromptBuilder("s", document_template=SHOWN)
        for names in ("abc", "cab", "dcba"):
            ordering = orderer.order([DOCUMENTS["abcdef".index(name)] for name in names])
            prompt = builder.build("Which?", ordering)
            for document in ordering.documents:
                label = builder.label_of(document)
                (shown,) = [line for line in prompt.text.splitlines() if line.startswith(f"[{label}] ")]
                assert shown.startswith(f"[{label}] {document.text[:20]}")
                assert cited(f"See [{label}].", ordering.documents, builder.label_of) == [document]
        assert [document.id for document in ordering.documents] != list("dcba")

    def test_a_label_can_be_given(self) -> None:
        builder = PromptBuilder(
            "", document_template="{label}: {text}\n", label=lambda document: document.metadata["source"]
        )
        document = Document("1", "text", metadata={"source": "manual.pdf"})
        assert builder.build("?", [document]).text.startswith("\n\nmanual.pdf: text\n")

    def test_a_label_that_is_not_shown_is_not_asked_for(self) -> None:
        builder = PromptBuilder("", label=lambda document: str(1 / 0))
        assert "[1]\ntext" in builder.build("?", [Document("1", "text")]).text

    def test_lengths_count_it_and_keep_labels_by_metadata_apart(self) -> None:
        builder = PromptBuilder("", document_template=SHOWN, label=lambda document: document.metadata["n"])
        short, long = (builder.document_tokens(Document("1", "text", metadata={"n": "y" * n})) for n in (4, 400))
        assert long - short == 99

    def test_in_a_conversation_it_stays_and_is_found_again(self) -> None:
        builder = PromptBuilder("s", document_template=SHOWN)
        orderer = Orderer(block_size=16, strict=True)
        first = builder.turn("Which?", DOCUMENTS[:3], orderer=orderer)
        history = [*first.messages, {"role": "assistant", "content": "a"}]
        second = builder.turn("Why?", DOCUMENTS[1:4], history=history, orderer=orderer)
        shown = [str(message["content"]) for message in second.messages]
        assert second.messages[: len(history)] == history
        for document in DOCUMENTS[:4]:
            text = f"[{number_label(document)}] {document.text}\n"
            assert [text in content for content in shown].count(True) == 1
