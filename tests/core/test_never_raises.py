"""An orderer never raises: an error leaves retrieval order, and is counted, or is raised if it is strict."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.inside import scopes_of
from support.orders import (
    check_idle,
    check_permutation,
    check_sound,
    documents,
    ids,
    serve,
)

from ragorder import Document, Lengths, Orderer


class BoomError(Exception):
    pass


def raising(value: Any) -> Any:
    raise BoomError(f"SECRET in the text of {value!r}")


BROKEN: dict[str, dict[str, Any]] = {
    "key raises": {"key": raising},
    "tokens raises": {"tokens": raising},
    "key is unhashable": {"key": lambda document: [document.id]},
    "tokens are a string": {"tokens": lambda document: "200"},
    "tokens are None": {"tokens": lambda document: None},
    "tokens are negative": {"tokens": lambda document: -5},
    "tokens are very negative": {"tokens": lambda document: -(10**9)},
    "tokens are not a number": {"tokens": lambda document: float("nan")},
    "group raises": {"group": raising, "keep_groups": True},
    "group is unhashable": {"group": lambda document: [], "keep_groups": True},
}


class TestNeverRaises:
    @pytest.mark.parametrize("broken", BROKEN)
    def test_an_error_leaves_retrieval_order_and_is_counted_or_is_raised_if_strict(self, broken: str) -> None:
        with pytest.raises((BoomError, TypeError, ValueError)):
            Orderer(strict=True, **BROKEN[broken]).order(documents("cab"))
        orderer = Orderer(**BROKEN[broken])
        for number in range(1, 4):
            retrieved = documents("cab")
            ordering = orderer.order(retrieved)
            check_permutation(ordering, retrieved)
            assert ids(ordering) == "cab"
            assert ordering.fallback
            assert (ordering.cached_tokens, ordering.prefix_documents) == (0, 0)
            assert orderer.fallbacks == number
            ordering.confirm(3)
            ordering.discard()
            assert orderer.fallbacks == number

    @pytest.mark.parametrize("broken", BROKEN)
    def test_a_batch_falls_back_to_retrieval_order(self, broken: str) -> None:
        orderer = Orderer(**BROKEN[broken])
        retrieved = [documents("cab"), [], documents("ba")]
        batch = orderer.order_batch(retrieved)
        assert sorted(batch.indices) == [0, 1, 2]
        for ordering in batch:
            check_permutation(ordering, retrieved[ordering.index])
            if retrieved[ordering.index]:
                assert list(ordering.permutation) == sorted(ordering.permutation)
                assert ordering.fallback
        assert orderer.fallbacks >= 1

    @pytest.mark.parametrize("broken", BROKEN)
    def test_one_bad_document_does_not_spoil_the_requests_after_it(self, broken: str) -> None:
        """The callable is wrong for the document `z` only."""
        options = dict(BROKEN[broken])
        for name, right in {"key": "key", "tokens": "token_count", "group": "id"}.items():
            if name in options:
                wrong = options[name]
                options[name] = lambda document, wrong=wrong, right=right: (
                    wrong(document) if document.id == "z" else getattr(document, right)
                )
        orderer = Orderer(capacity_tokens=2_000, **options)
        serve(orderer, "abc", "azb", "zab", "abc")
        check_idle(orderer)
        assert serve(orderer, "cba" if "keep_groups" not in options else "abc") == "abc"
        assert orderer.order(documents("abc")).cached_tokens == 96
        assert orderer.fallbacks == 2

    def test_previews_and_questions_about_the_prefix(self) -> None:
        orderer = Orderer(key=lambda document: [], prefix_tokens=40)
        assert orderer.preview(["a", "b"]) == ["a", "b"] and orderer.fallbacks == 1
        assert orderer.holds_prefix(scope=[]) and orderer.fallbacks == 2  # type: ignore[arg-type]

    @pytest.mark.parametrize("waiting", [[["not a document"]], [3], [None]], ids=str)
    def test_waiting_requests_that_are_no_requests(self, waiting: Any) -> None:
        orderer = Orderer()
        ordering = orderer.order(documents("ba"), waiting=waiting)
        assert (ids(ordering), ordering.fallback, orderer.fallbacks) == ("ba", True, 1)

    @pytest.mark.parametrize("suffix_tokens", ["x", float("nan"), [], -100_000], ids=str)
    def test_nonsense_for_the_length_of_the_suffix(self, suffix_tokens: Any) -> None:
        orderer = Orderer(capacity_tokens=1_000)
        retrieved = documents("ba")
        check_permutation(orderer.order(retrieved, lengths=Lengths(suffix=suffix_tokens)), retrieved)
        serve(orderer, "ab", "abc", "xyz")
        check_sound(orderer)

    def test_logged_once_and_without_a_word_of_the_documents(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        orderer = Orderer(key=raising)
        for _ in range(5):
            orderer.order([Document("id", "SECRET text")])
            list(orderer.order_batch([[Document("id", "SECRET text")]]))
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert caplog.records[0].name.startswith("ragorder")
        assert "BoomError" in caplog.text
        assert "SECRET" not in caplog.text

    def test_an_error_inside_starts_the_scope_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        orderer = Orderer()
        serve(orderer, "abc")
        monkeypatch.setattr(type(scopes_of(orderer)[None].residency), "lease", raising)
        assert orderer.order(documents("cba")).fallback
        monkeypatch.undo()
        assert orderer.order(documents("cba")).cached_tokens == 0
        check_sound(orderer)
