"""Structs that threads read at once: msgspec resolves their fields at the first use, and not thread-safely."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("starlette")

import msgspec
import msgspec._utils

import ragorder.adapters.embedded
import ragorder.adapters.proxy
import ragorder.adapters.shared_orders

RESOLVE = msgspec._utils.get_class_annotations.__code__


def resolves(kind: type[Any]) -> bool:
    """Whether msgspec looks at the struct's fields only now."""
    seen: list[bool] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        seen.append(event == "call" and frame.f_code is RESOLVE)

    sys.setprofile(note)
    try:
        msgspec.json.Decoder(kind)
    finally:
        sys.setprofile(None)
    return any(seen)


def structs() -> Iterator[type[Any]]:
    for package in (ragorder.adapters.embedded, ragorder.adapters.proxy, ragorder.adapters.shared_orders):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    found = [msgspec.Struct]
    for kind in found:
        found += kind.__subclasses__()
    yield from (kind for kind in found if kind.__module__.startswith("ragorder."))


def test_all_of_ours_have_their_fields_resolved_when_they_are_imported() -> None:
    class Late(msgspec.Struct):
        text: str

    assert resolves(Late)
    ours = list(structs())
    assert {"Tagged", "_Message", "_Shown", "ChatCompletionRequest", "SharedOrder"} <= {each.__name__ for each in ours}
    assert [each.__name__ for each in ours if resolves(each)] == []
