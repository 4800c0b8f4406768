"""Documents and requests of pipelines, whose searches are played."""

from __future__ import annotations

from typing import Any

from ragorder import Document
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.suites.pipelining.server import ask
from ragorder.pipelining import Provisional, Retrieval

WORDS = [f"{name} {verb}" for name in ("cats", "banks", "parsers", "rivers") for verb in ("sleep", "rise", "read")]


def documents(count: int = 24) -> list[Document]:
    return [Document(f"d{each}", f"{WORDS[each % len(WORDS)]} number {each}. " * 8) for each in range(count)]


def requests(count: int, top_k: int = 3) -> list[TraceRequest]:
    """Neighbours share documents."""
    known = documents()
    return [
        TraceRequest(f"What of number {number}?", [known[(number // 2 + each) % len(known)] for each in range(top_k)])
        for number in range(count)
    ]


async def shown(retrieval: Retrieval[Any, Document], number: int = 0) -> list[Provisional[Document]]:
    return [stage async for stage in retrieval(ask(number, "q", "salt"))]
