"""Retrieval as it is played."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence

from ragorder.document import Document
from ragorder.eval.suites.pipelining.server import Asked
from ragorder.pipelining import Provisional, Retrieval


def played(
    rankings: Sequence[Sequence[Document]], delay_s: float, *, stages: int = 1, seed: int = 0
) -> Retrieval[Asked, Document]:
    """A trace's documents after `delay_s` seconds, in equal stages. They are final after a stage drawn uniformly for
    each question."""
    pool = list({document.key: document for documents in rankings for document in documents}.values())

    async def search(question: Asked) -> AsyncGenerator[Provisional[Document], None]:
        now = asyncio.get_running_loop().time
        start_s, final = now(), list(rankings[question.number])
        for number, documents in enumerate(_provisional(final, pool, stages, seed, question.number), 1):
            await asyncio.sleep(max(0.0, start_s + delay_s * number / stages - now()))
            yield Provisional(documents, final=number == stages)

    return search


def _provisional(
    final: list[Document], pool: Sequence[Document], stages: int, seed: int, number: int
) -> list[list[Document]]:
    draw = random.Random(f"{seed} {number}")
    known = {document.key for document in final}
    others = [each for each in draw.sample(pool, min(len(pool), len(final) + stages)) if each.key not in known]
    settled = draw.randint(1, stages)
    found = []
    for stage in range(1, stages + 1):
        missing = min(len(final), len(others), max(0, settled - stage))
        found.append(final[: len(final) - missing] + others[:missing])
    return found
