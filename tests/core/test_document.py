"""A document is an id and a text: checked when it is made, never changed, known by its content."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import sys
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder import Document

# Any string that Python holds, lone surrogates included.
strings = st.text(st.characters(exclude_categories=()))


class TestFields:
    def test_an_id_is_enough(self) -> None:
        document = Document("a")
        assert (document.id, document.text, document.tokens, document.score) == ("a", "", None, None)
        assert dict(document.metadata) == {}

    @pytest.mark.parametrize("metadata", [{"tags": ["a"]}, {"nested": {"b": {1, 2}}}, MappingProxyType({"x": [1]})])
    def test_metadata_may_hold_what_cannot_be_hashed(self, metadata: Any) -> None:
        document = Document("a", "text", metadata=metadata)
        assert hash(document) == hash(Document("a", "text"))
        assert document == Document("a", "text"), "metadata does not tell documents apart"


class TestValidation:
    @pytest.mark.parametrize(
        ("wrong", "error", "said"),
        [
            *(
                ({"id": id}, TypeError, rf"id must be a string, got {type(id).__name__}: pass str\(id\)")
                for id in (1, None, b"a", ["a"])
            ),
            *(
                ({"text": text}, TypeError, f"text must be a string, got {type(text).__name__}: pass text=''")
                for text in (None, 3, b"x")
            ),
            *(
                ({"tokens": each}, TypeError, f"tokens must be an integer or None, got {type(each).__name__}")
                for each in (1.0, "7", True, math.nan)
            ),
            ({"tokens": -1}, ValueError, "tokens must not be negative, got -1"),
        ],
        ids=str,
    )
    def test_a_wrong_field_is_refused_with_the_remedy(
        self, wrong: dict[str, Any], error: type[Exception], said: str
    ) -> None:
        with pytest.raises(error, match=rf"Document\.{said}"):
            Document(**{"id": "a", "text": "text"} | wrong)


class TestFrozen:
    @pytest.mark.parametrize("field", ["id", "text", "tokens", "score", "metadata", "key", "token_count"])
    def test_no_field_can_be_set(self, field: str) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(Document("a", "text"), field, "other")

    def test_a_changed_copy_has_the_key_of_its_content(self) -> None:
        old = Document("a", "old text", metadata={"source": "s"})
        new = dataclasses.replace(old, text="new text, and longer")
        assert new.key == Document("a", "new text, and longer").key != old.key
        assert new.token_count == Document("a", "new text, and longer").token_count

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))])  # noqa: S301
    def test_copies_are_equal_and_have_the_same_key(self, duplicate: Any) -> None:
        document = Document("a", "text", 3, metadata={"tags": ["x"]})
        made = duplicate(document)
        assert made == document
        assert (made.key, made.token_count, made.metadata) == (document.key, 3, {"tags": ["x"]})


class TestKey:
    def test_the_same_content_has_the_same_key(self) -> None:
        assert Document("a", "text", 5, 0.1, {"x": 1}).key == Document("a", "text", 9, 0.9, {"y": 2}).key

    @given(st.lists(st.tuples(strings, strings), min_size=2, max_size=2, unique=True))
    def test_different_contents_have_different_keys(self, contents: list[tuple[str, str]]) -> None:
        (id, text), (other_id, other_text) = contents
        assert Document(id, text).key != Document(other_id, other_text).key

    def test_the_seam_between_id_and_text_counts(self) -> None:
        assert Document("ab", "c").key != Document("a", "bc").key
        assert Document("a\0b", "c").key != Document("a", "b\0c").key

    def test_the_key_is_the_same_in_another_process(self, python: Any) -> None:
        contents = [["a", "text"], ["ü", "Zürich 🙂"], ["\ud800", "lone \udfff surrogate"], ["", ""]]
        script = (
            "import json, sys\nfrom ragorder import Document\n"
            "print(json.dumps([Document(*content).key for content in json.loads(sys.stdin.read())]))"
        )
        done = python("-c", script, input=json.dumps(contents), PYTHONHASHSEED="4711")
        assert json.loads(done.stdout) == [Document(*content).key for content in contents], done.stderr


class TestTokenCount:
    @pytest.mark.parametrize(("text", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("x" * 400, 100)])
    def test_is_estimated_at_four_characters_a_token_rounded_up(self, text: str, tokens: int) -> None:
        assert Document("a", text).token_count == tokens

    @given(tokens=st.integers(0, sys.maxsize), text=strings)
    def test_is_what_was_given_where_it_was_given(self, tokens: int, text: str) -> None:
        assert Document("a", text, tokens).token_count == tokens
