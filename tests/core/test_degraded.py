"""What an orderer has to do without is told once, and stays visible; what is wrong in every call is an error."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import ragorder
from ragorder import DegradedWarning, Document, Orderer
from ragorder.adapters.observing.observed import ObservedOrderer

DOCUMENTS = [Document(id, f"text of {id}", tokens=32) for id in "abc"]
NO_DOCUMENTS: dict[str, list[Any]] = {
    "str": ["SECRET one", "SECRET two"],
    "dict": [{"text": "SECRET"}, {"text": "SECRET"}],
    "tuple": [(document, 0.5) for document in DOCUMENTS],
    "NoneType": [None],
}
CALLS: dict[str, Callable[[Any, list[Any]], object]] = {
    "order": lambda orderer, given: orderer.order(given),
    "preview": lambda orderer, given: orderer.preview(given),
    "predict": lambda orderer, given: orderer.predict_cached_tokens(given),
    "order_batch": lambda orderer, given: orderer.order_batch([DOCUMENTS, given]),
    "topic": lambda orderer, given: orderer.topic(given),
}


def boom(document: Any) -> str:
    raise ValueError("SECRET")


class TestNoDocuments:
    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("kind", NO_DOCUMENTS)
    @pytest.mark.parametrize("wrap", [Orderer, lambda: ObservedOrderer(Orderer())], ids=["plain", "observed"])
    def test_is_a_type_error_that_names_what_to_change(self, call: str, kind: str, wrap: Callable[[], Any]) -> None:
        with pytest.raises(TypeError, match=rf"got {kind} without .*Orderer\(key=…, tokens=…\)") as caught:
            CALLS[call](wrap(), NO_DOCUMENTS[kind])
        assert "SECRET" not in str(caught.value)
        assert ("leave the scores out" in str(caught.value)) == (kind == "tuple")

    @pytest.mark.parametrize(
        ("module", "name", "adapter"),
        [
            ("langchain_core.documents.base", "Document", "ragorder.adapters.langchain"),
            ("llama_index.core.schema", "NodeWithScore", "ragorder.adapters.llama_index"),
            ("haystack.dataclasses.document", "Document", "ragorder.adapters.haystack"),
            ("shop.articles", "Article", "wrap each"),
        ],
    )
    def test_documents_of_a_framework_are_sent_to_its_adapter(self, module: str, name: str, adapter: str) -> None:
        foreign: Any = type(name, (), {"__module__": module})
        said = rf"got {module}\.{name} without 'key' and 'token_count'.*{adapter}"
        with pytest.raises(TypeError, match=said) as caught:
            Orderer().order([foreign()])
        assert "Orderer(key=…, tokens=…)" in str(caught.value)

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"key": str}, "tokens"),
            ({"tokens": lambda _: 5}, "key"),
            ({"key": str, "tokens": lambda _: 5, "keep_groups": True}, "group"),
        ],
    )
    def test_only_what_is_not_given_is_asked_for(self, options: dict[str, Any], named: str) -> None:
        with pytest.raises(TypeError, match=rf"Orderer\({named}=…\)"):
            Orderer(**options).order(["a", "b"])

    def test_one_bad_document_among_good_ones_falls_back(self) -> None:
        """It depends on the data, and the serving path does not raise for data."""
        with pytest.warns(DegradedWarning):
            ordering = Orderer().order([*DOCUMENTS, "SECRET"])
        assert ordering.fallback and ordering.documents == [*DOCUMENTS, "SECRET"]


class TestWarned:
    def test_the_first_fallback_warns_once_and_stays_visible(self) -> None:
        orderer = Orderer(key=boom)
        with pytest.warns(DegradedWarning, match="ValueError") as caught:
            for _ in range(3):
                orderer.order(DOCUMENTS)
        assert len(caught) == 1 and orderer.fallbacks == 3
        assert caught[0].filename == __file__, "the warning points at the caller"
        assert len(orderer.degraded) == 1 and orderer.degraded[0] in repr(orderer)
        assert "SECRET" not in repr(orderer) + str(caught[0].message)

    def test_it_is_shown_where_nothing_is_set_up(self, python: Any) -> None:
        script = "from ragorder import *; o = Orderer(key=lambda d: 1 / 0); o.order([Document('SECRET', 'SECRET')])"
        done = python("-c", script)
        assert done.returncode == 0, done.stderr
        assert "DegradedWarning: ordering failed with ZeroDivisionError" in done.stderr
        assert "SECRET" not in done.stderr.replace(script, "")

    def test_it_does_not_raise_where_warnings_are_errors(self) -> None:
        orderer = Orderer(key=boom)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert orderer.order(DOCUMENTS).fallback
            orderer.degrade("no server")
        assert orderer.degraded[1:] == ("no server",)

    def test_a_reason_is_reported_once(self) -> None:
        orderer = ObservedOrderer(Orderer())
        with pytest.warns(DegradedWarning) as caught:
            for reason in ("one", "two", "one"):
                orderer.degrade(reason)
        assert [str(each.message) for each in caught] == ["one", "two"]
        assert orderer.degraded == ("one", "two")


class TestRepr:
    @pytest.mark.parametrize(
        ("options", "residency"),
        [({}, "LRU mirror with feedback"), ({"feedback": False}, "LRU mirror"), ({"residency": "none"}, "none")],
    )
    def test_it_shows_capacity_block_size_and_residency(self, options: dict[str, Any], residency: str) -> None:
        shown = repr(Orderer(capacity_tokens=16_352, block_size=32, **options))
        assert shown == f"Orderer(capacity_tokens=16352, block_size=32, residency={residency})"
        unlimited = ObservedOrderer(Orderer(capacity_tokens=None, **options))
        assert "capacity_tokens=unlimited" in repr(unlimited)


def test_the_version_is_that_of_the_installed_package() -> None:
    assert re.fullmatch(r"\d+\.\d+.*", ragorder.__version__)
    with pytest.raises(AttributeError, match="nothing_such"):
        ragorder.nothing_such  # noqa: B018
