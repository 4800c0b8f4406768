"""Batches of any size: a workload by name, or topics."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from ragorder.eval.data.workloads import document_tokens, make_workload

__all__ = ["draw", "write_requests"]

_TOPIC_DOCUMENTS = 12
_TOPIC_REQUESTS = 40
_OF_THE_TOPIC = 6
_OF_ALL = 2
_POPULAR = 2_000


def draw(workload: str, requests: int, seed: int) -> Iterable[list[int]]:
    """Documents of each request, by number. `topics`: as many topics as there are 40 requests, the first ones more
    frequent (a Pareto distribution); six of a topic's twelve documents, and two of 2,000 that all topics share.
    Raises WorkloadError."""
    if workload == "topics":
        return _topics(requests, random.Random(seed))
    return make_workload(workload, seed, requests=requests).rankings[:requests]


def _topics(requests: int, rng: random.Random) -> Iterator[list[int]]:
    topics = max(1, requests // _TOPIC_REQUESTS)
    for _ in range(requests):
        topic = int((rng.paretovariate(0.5) - 1) * topics / 100) % topics
        own = rng.sample(range(_TOPIC_DOCUMENTS), _OF_THE_TOPIC)
        documents = [_POPULAR + topic * _TOPIC_DOCUMENTS + each for each in own]
        while len(documents) < _OF_THE_TOPIC + _OF_ALL:
            shared = int(10 * (rng.paretovariate(0.7) - 1)) % _POPULAR
            if shared not in documents:
                documents.append(shared)
        rng.shuffle(documents)
        yield documents


def write_requests(path: Path, rankings: Iterable[list[int]]) -> None:
    """As JSON lines for `ragorder plan`."""
    with path.open("w", encoding="utf-8") as file:
        for number, ranking in enumerate(rankings):
            documents = [{"id": f"d{each}", "tokens": document_tokens(each)} for each in ranking]
            file.write(json.dumps({"id": f"q{number}", "documents": documents}) + "\n")
