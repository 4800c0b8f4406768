"""Structs that threads read at once: msgspec resolves their fields at the first use, and not thread-safely."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
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
from ragorder.adapters.structs import readable_by_threads

RESOLVE = msgspec._utils.get_class_annotations.__code__

FIRST_REQUESTS = """
import json, sys, threading
from ragorder.adapters.proxy.bodies.parsing import BodyParser
from ragorder.adapters.proxy.bodies.token_counter import TokenCounter
from ragorder.prompt import PromptBuilder

tag = {"documents": [{"id": name, "text": "A text."} for name in "ab"], "query": "?"}
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}], "ragorder": tag}).encode()
builder = PromptBuilder()
parser = BodyParser(builder, TokenCounter(builder), None, warn=print)
begin = threading.Barrier(8)
read = []
sys.setswitchinterval(1e-6)

def parse():
    begin.wait()
    read.append(parser.parse("chat", body))

threads = [threading.Thread(target=parse) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
assert [len(each.documents) for each in read] == [2] * 8
"""


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
    ours = list(structs())
    assert {"Tagged", "_Message", "_Shown", "ChatCompletionRequest", "SharedOrder"} <= {each.__name__ for each in ours}
    assert [each.__name__ for each in ours if resolves(each)] == []


def test_one_that_is_not_readable_by_threads_is_noticed() -> None:
    class Late(msgspec.Struct):
        text: str

    assert resolves(Late)

    @readable_by_threads
    class Early(msgspec.Struct):
        text: str

    assert not resolves(Early)
    assert msgspec.json.decode(b'{"text": "a"}', type=Early) == Early("a")


@pytest.mark.slow
def test_the_first_requests_of_a_process_may_come_at_once() -> None:
    """Several processes: where it ends one, it does not end each."""
    for _ in range(8):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_REQUESTS], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
