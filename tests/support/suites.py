"""Suites from the text of a file."""

from __future__ import annotations

import pytest

from ragorder.eval.running.cells import SuiteError
from ragorder.eval.running.suite import Suite, read_suite

__all__ = ["assert_refused", "suite_of"]


def suite_of(text: str) -> Suite:
    return read_suite("mine", text, "mine.toml")


def assert_refused(text: str, old: str, new: str, said: str) -> None:
    """With this mistake, naming the file and the field."""
    assert old in text
    with pytest.raises(SuiteError) as refused:
        suite_of(text.replace(old, new, 1))
    assert str(refused.value).startswith("mine.toml: ") and said in str(refused.value)
