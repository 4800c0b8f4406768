"""Logs of requests as `ragorder doctor --requests` reads them, served by a prefix cache that resumes in steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ragorder.adapters.doctor import Finding, examine_requests
from ragorder.adapters.doctor.rules import RULES

Lines = list[dict[str, Any]]
Examine = Callable[..., dict[str, Finding]]
"""`examined` in a test's own folder."""

MODEL = "qwen"
NAMES = [f"doc-{number}" for number in range(40)]
SYSTEM = "You answer questions from documents, in one sentence, and say so where they do not have the answer."
_CHARACTERS_A_TOKEN = 4


def document(name: str, sentences: int = 6) -> str:
    """Lines that no other document has."""
    words = [blake2b(f"{name} {place}".encode(), digest_size=4).hexdigest() for place in range(12 * sentences)]
    lines = (" ".join(words[start : start + 12]) for start in range(0, len(words), 12))
    return f"[{name}]\n" + "\n".join(lines) + "\n\n"


def chat(documents: Sequence[str], question: str, *, system: str = SYSTEM, model: str = MODEL) -> dict[str, Any]:
    """One turn, with the documents before the question."""
    content = "".join(map(document, documents)) + f"Question: {question}"
    return {
        "model": model,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": content}],
    }


def texts_of(body: dict[str, Any]) -> str:
    return "".join(f"<{each['role']}>\n{each['content']}\n" for each in body["messages"])


def served(bodies: Iterable[dict[str, Any]], step: int = 16) -> list[dict[str, Any]]:
    """Each body with what a prefix cache of steps of this many tokens would have reported."""
    held: set[str] = set()
    lines = []
    for body in bodies:
        text = texts_of(body)
        heads = [text[:end] for end in range(0, len(text) + 1, _CHARACTERS_A_TOKEN * step)]
        cached = max(place for place, head in enumerate(heads) if not head or head in held)
        held.update(heads)
        usage = {
            "prompt_tokens": len(text) // _CHARACTERS_A_TOKEN,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": cached * step},
        }
        lines.append({**body, "usage": usage})
    return lines


def of_cloud(body: dict[str, Any], *, read: int, written: int) -> dict[str, Any]:
    """The body with the usage in Anthropic's words, whose parts add up."""
    tokens = len(texts_of(body)) // _CHARACTERS_A_TOKEN
    usage = {
        "input_tokens": max(0, tokens - read - written),
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": written,
        "output_tokens": 5,
    }
    return {"request": body, "response": {"usage": usage}}


def counted(body: dict[str, Any], prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    details = {"cached_tokens": cached_tokens}
    return {"request": body, "response": {"usage": {"prompt_tokens": prompt_tokens, "prompt_tokens_details": details}}}


def asked(number: int, **fields: Any) -> dict[str, Any]:
    """A question after the same long system message."""
    system = SYSTEM + document("manual")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"q {number}"}]
    return {"model": "m", "messages": messages, **fields}


def shares(found: str) -> tuple[float, float]:
    """The cached share of the prompt tokens, and what it would be."""
    now, then = re.findall(r"([\d.]+) % (?:of the prompt tokens were cached|would be)", found)
    return float(now), float(then)


def write_log(path: Path, lines: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def healthy(requests: int = 30) -> Lines:
    """Requests that begin alike: the same documents in the same places, then the question."""
    return served(chat([*NAMES[:4], NAMES[4 + number % 3]], f"what about {number}?") for number in range(requests))


def turns(conversation: int, *, replays: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Lines:
    """Three turns; `replays` makes of a turn's messages what the next one sends of them."""
    bodies = []
    history: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for turn in range(3):
        name = NAMES[(5 * conversation + turn) % 40]
        question = f"what does conversation {conversation} say in turn {turn}?"
        history = [*history, {"role": "user", "content": f"{document(name)}Question: {question}"}]
        bodies.append({"model": "qwen", "messages": history})
        history = [*replays(history), {"role": "assistant", "content": f"It says {conversation} and {turn}."}]
    return bodies


def conversations(replays: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Lines:
    return served(body for number in range(8) for body in turns(number, replays=replays))


def examined(folder: Path, lines: Lines, **options: Any) -> dict[str, Finding]:
    """Findings of a log by their checks: complete ones, that quote nothing."""
    found = examine_requests(write_log(folder / "requests.jsonl", lines), **options)
    assert len({each.check for each in found}) == len(found) == len(RULES) + 1
    for each in found:
        assert each.found
        assert each.verdict == "good" or each.advice
        assert_quotes_nothing(f"{each.found} {each.advice}")
    return {each.check: each for each in found}


def assert_quotes_nothing(text: str) -> None:
    words = {word for name in NAMES[:8] for word in document(name).split()[1:]}
    assert words.isdisjoint(text.split())
    for secret in ("alice", "Answer", "questions from documents", "doc-1"):
        assert secret not in text
