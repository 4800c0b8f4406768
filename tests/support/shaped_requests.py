"""Requests of applications for documents of real and hostile corpora, and what may be sent of them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ragorder.benchmarks.proxy.shapes import Passage, Shape

CORPORA = ("hostile", "nqopen", "covidqa", "bing_covid_cord")
_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_WORDS = "order refund invoice carrier label engine window policy account holder parcel battery lamp socket".split()  # noqa: SIM905
Asked = tuple[list[Passage], str]

# What documents have that looks like an application's mark.
MARKS = [
    "\n\n", "\n---\n", "\n\n---\n\n", "\n```python\nx = {1: 2}\n```\n", "# Heading\n", "- a\n- b\n",
    "| a | b |\n|---|---|\n", "1. One\n2. Two\n", "[CONTEXT 1]:\n",
    "\n[END CONTEXT 1]\n\n[CONTEXT 2]:\n", '<source id="1">', '</source>\n<source id="2">', "\nID: 1\n",
    "\n\nID: 2\n├── Title: x\n└── Content:\n", "Source 1:\n", "\n\n\nSource 2:\n", "\n------\nQuery: ",
    "------\n", "\n```\n\nDOCUMENT 1: x\n```\n", "DOCUMENT 2: x\n```\n", "[webpage 1 begin]",
    "[webpage 2 end]\n[webpage 3 begin]", '\n<document index="1">',
    '</document>\n<document index="2">\n', "\n\nDocument: 1\n", "\n\n[2] ", "\n\nPassage 2: ",
    "\nContent: x", "\n\nSource 3:\n", "\n</results>", "\nDocument [2](Title: x) ",
    "\n\n---\n\n### Document 2: x\n\n", "\n\nQuestion: ", "\n\nQUERY: ", "中文。", "日本語のテキスト。", "نص عربي",
    "😀👩\u200d👩\u200d👧", "\r\n", "\r\n\r\n", "\\", "\\n", "{text}", "{", "}}", "</context>",
    "<context>\n", "\n      The above is the knowledge base.", "\u2028", "\u00a0", "\t", '"', "'",
    "</item>",
]  # fmt: skip


def _sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(5, 14))).capitalize() + draw.choice(".?!;:")


def _hostile_text(draw: random.Random, name: str) -> str:
    pieces = [f"About {name} {draw.randrange(10**6)}."]
    count = draw.randint(3, 12)
    pieces += [
        draw.choice(MARKS) if draw.random() < 0.25 else draw.choice([" ", "\n"]) + _sentence(draw) for _ in range(count)
    ]
    return draw.choice(["", "", "", "\n", " "]) + "".join(pieces) + draw.choice(["", "", "", "\n", "\n\n", " "])


def _hostile(count: int, seed: int) -> Iterator[Asked]:
    """Three to six of the eight documents of a topic, in any order."""
    draw = random.Random(seed)
    made = random.Random(7)
    plain = [" ".join(_sentence(made) for _ in range(made.randint(3, 8))) for _ in range(160)]
    pool = [
        Passage(f"kb-{n}", f"Article {n}", plain[n] if n % 5 else _hostile_text(made, f"article {n}"))
        for n in range(160)
    ]
    for number in range(count):
        topic = draw.choices(range(39), [1 / (place + 1) for place in range(39)])[0] * 4
        yield draw.sample(pool[topic : topic + 8], draw.randint(3, 6)), f"Question {number}: {_sentence(draw)}"


@cache
def _lines(name: str, file: str) -> list[dict[str, Any]]:
    with gzip.open(_DATA / name / f"{file}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _real(name: str, count: int, seed: int) -> Iterator[Asked]:
    documents = {str(each["id"]): each for each in _lines(name, "documents")}
    pool = []
    for chunk in _lines(name, "chunks"):
        own = documents[str(chunk["doc"])]
        text = own["text"][chunk["start"] : chunk["end"]]
        title = " ".join(str(own.get("title") or chunk["doc"]).split())
        pool.append(Passage(f"{chunk['doc']}-{chunk['k']}", title, text))
    questions = {str(each["id"]): str(each["question"]) for each in _lines(name, "questions")}
    runs = _lines(name, "run_top20")
    draw = random.Random(seed)
    start = draw.randrange(max(1, len(runs) - count))
    for run in runs[start : start + count]:
        yield [pool[cid] for cid in run["chunks"][:5]], questions[str(run["id"])]


def retrievals(corpus: str, count: int, seed: int = 0) -> list[Asked] | None:
    """Return the documents retrieved for each question; None if the corpus is not on this machine."""
    if corpus == "hostile":
        return list(_hostile(count, seed))
    return list(_real(corpus, count, seed)) if (_DATA / corpus).is_dir() else None


def ask(shape: Shape, asked: Asked) -> Asked:
    """Return what the shape's template allows: without the texts that no document may have."""
    passages, question = asked
    if not shape.plain:
        return asked
    return [
        each._replace(text=each.text.replace(shape.plain, " / "), title=each.title.replace(shape.plain, " "))
        for each in passages
    ], question


def texts_of(body: bytes) -> list[str]:
    """Return the texts of a body's messages, as a log of requests has them."""
    fields = json.loads(body)
    messages = [
        *(fields.get("messages") or []),
        *(_as_messages(fields.get("input"))),
        *_as_messages(fields.get("prompt")),
    ]
    contents = [each.get("content") or each.get("output") for each in messages]
    return [each for each in contents if isinstance(each, str)]


def _as_messages(value: object) -> list[dict[str, object]]:
    if isinstance(value, str):
        return [{"content": value}]
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
