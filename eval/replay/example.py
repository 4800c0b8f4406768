"""The log of `ragorder replay --example`: requests of two made-up help desks.

    python -m ragorder.eval.replay.example > eval/replay/example.jsonl

Nothing in it is of a real service. A question is about one of a desk's topics: at times the one before, otherwise by
Zipf's law. Retrieval returns five of the topic's thirty pages, by a relevance that is the page's own and the question's
in equal parts; in two of five requests the last is a page of another topic. Questions come as a Poisson process.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLE_LOG = Path(__file__).with_name("example.jsonl")

_REQUESTS = 400
_PAGES = 30
_TOP_K = 5
_FOLLOWED_UP = 0.3
_STRAY = 0.4
_EVERY_S = 9.0
# By tenant: the share of its questions, the tokens of its system prompt, and its topics, the most asked first.
_DESKS = {
    "bicycle-shop": (
        0.6,
        118,
        "returns delivery sizes warranty payment brakes tyres gears lights helmets e-bikes batteries insurance leasing "
        "workshop vouchers trailers locks",
    ),
    "library": (
        0.4,
        74,
        "opening-hours loans renewals reservations fees cards e-books rooms printing donations events children",
    ),
}


def example_lines() -> Iterator[dict[str, Any]]:
    """The lines, in order of time."""
    rng = random.Random(0)
    pages = {
        (desk, topic, page): (rng.randint(110, 340), rng.random())
        for desk, (_, _, topics) in _DESKS.items()
        for topic in topics.split()
        for page in range(1, _PAGES + 1)
    }
    asked: dict[str, str] = {}
    time_s = 0.0
    for _ in range(_REQUESTS):
        time_s += rng.expovariate(1 / _EVERY_S)
        (desk,) = rng.choices([*_DESKS], [share for share, _, _ in _DESKS.values()])
        _, prefix_tokens, named = _DESKS[desk]
        topics = named.split()
        if desk not in asked or rng.random() >= _FOLLOWED_UP:
            (asked[desk],) = rng.choices(topics, [1 / rank for rank in range(1, len(topics) + 1)])
        topic = asked[desk]
        relevance = {page: pages[desk, topic, page][1] + rng.random() for page in range(1, _PAGES + 1)}
        found = [(topic, page) for page in sorted(relevance, key=lambda page: -relevance[page])[:_TOP_K]]
        if rng.random() < _STRAY:
            found[-1] = rng.choice([each for each in topics if each != topic]), rng.randint(1, _PAGES)
        yield {
            "time": round(time_s, 2),
            "tenant": desk,
            "documents": [f"{topic}/{page}" for topic, page in found],
            "tokens": [pages[desk, topic, page][0] for topic, page in found],
            "prefix_tokens": prefix_tokens,
            "suffix_tokens": rng.randint(12, 40),
            "output_tokens": rng.randint(40, 160),
        }


if __name__ == "__main__":
    for line in example_lines():
        sys.stdout.write(json.dumps(line) + "\n")
