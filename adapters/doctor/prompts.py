"""First difference of two prompts, and its remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragorder.adapters.doctor.beginnings import common_length
from ragorder.adapters.doctor.case import Finding, RenderError, Verdict, tokenized
from ragorder.adapters.doctor.request_log import INSTRUCTIONS, messages_of, shown
from ragorder.adapters.http_client import Server
from ragorder.common.jsonl import printable

PromptSample = str | Sequence[Mapping[str, Any]]
"""Text or chat messages."""

_FIRST_WHAT_STAYS = (
    "put shared text first, byte for byte the same in all requests: instructions, documents, then the question"
)
_INTO_THE_QUESTION = "move it into the question, after the documents"
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
# Kind, pattern, remedy. The first pattern that covers the difference counts.
_KINDS = [
    (kind, re.compile(pattern, re.IGNORECASE | re.MULTILINE), remedy)
    for kind, pattern, remedy in [
        ("a UUID", r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", _INTO_THE_QUESTION),
        ("a date", r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?:[T ]\d{1,2}:\d{2}[\d:.+Z]*)?", _INTO_THE_QUESTION),
        ("a date", r"\b\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d{2})\b", _INTO_THE_QUESTION),
        ("a date", rf"\b{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}\b", _INTO_THE_QUESTION),
        ("a date", rf"\b\d{{1,2}}(?:st|nd|rd|th|\.)? {_MONTH},? \d{{4}}\b", _INTO_THE_QUESTION),
        ("a day of the week", r"\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b", _INTO_THE_QUESTION),
        ("a clock time", r"\b\d{1,2}:\d{2}(?::\d{2})?(?:\.\d+)?\b", _INTO_THE_QUESTION),
        (
            "a retrieval score",
            r"\b(?:score|relevance|similarity|distance)\b\W{0,4}-?\d*\.?\d+",
            "leave scores out of the document headers",
        ),
        (
            "a number in a document's header (a rank or position, unless it is the document's id)",
            r"^[ \t]*(?:[\[(<#*]*[ \t]*(?:document|doc|passage|source|context|chunk|result|rank|reference)\b"
            r"[ \t]*(?:no\.?|number|index)?[ \t]*[#:=\"'\[(]*[ \t]*\d{1,3}\b|[\[(#]\d{1,3}\b|\d{1,3}[.):])",
            'head each document with its id: PromptBuilder(document_template="[{id}]\\n{text}\\n\\n")',
        ),
        ("a time stamp", r"\b1[5-9]\d{8}(?:\d{3})?\b", _INTO_THE_QUESTION),
        ("an id", r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", _INTO_THE_QUESTION),
        (
            "a user, session or request",
            r"\b(?:user|customer|client|tenant|account|session|request|trace|conversation)(?:[ _-]?(?:id|name))?"
            r"[\"']?[ \t]*[:=][ \t]*(?:[\w.@+'\"-]+[ \t]*){1,3},?$",
            _INTO_THE_QUESTION,
        ),
    ]
]
_REACH = 200
_USUAL_BLOCK = 16
_CHARACTERS_A_TOKEN = 4
_BEFORE, _AFTER = 14, 26


@dataclass(frozen=True, slots=True)
class _Difference:
    """`kind` and `remedy` are "" if unknown."""

    characters: int
    in_system: bool
    before_documents: bool | None
    kind: str
    remedy: str
    excerpts: tuple[str, str]


def check_samples(
    server: Server,
    model: str | None,
    samples: tuple[PromptSample, PromptSample],
    block_size: int | None,
    document_marker: str | None,
) -> list[Finding]:
    parting = _part(*samples, document_marker)
    if parting is None:
        advice = "give prompts of two different requests"
        return [Finding("shared prefix", "unknown", "the two prompts are the same", advice)]
    shared, unit = _shared_tokens(server, model, samples), "tokens"
    if shared is None:
        shared, unit = parting.characters // _CHARACTERS_A_TOKEN, "tokens (estimated: the server did not tokenise them)"
    block = block_size or _USUAL_BLOCK
    assumed = "" if block_size else " (assumed)"
    found = f"the prompts share {shared:,} {unit}, {shared // block:,} whole blocks of {block}{assumed}"
    findings = [_judge_prefix(parting, found, shared < block), _judge_parting(parting, shared < block)]
    if document_marker is not None and parting.before_documents is None:
        advice = "give --document-marker as the text right before the first document of both prompts"
        findings.append(Finding("document marker", "unknown", "it is not in both prompts", advice))
    return findings


def _judge_prefix(parting: _Difference, found: str, too_short: bool) -> Finding:
    check, found = "shared prefix", found + ", and differ inside the system prompt" * parting.in_system
    if parting.before_documents:
        return Finding(
            check, "bad", f"{found}: they differ before the documents, which are never reused", _FIRST_WHAT_STAYS
        )
    if parting.before_documents is False:
        return Finding(check, "good", f"{found}: they do not differ before the documents")
    if not (too_short or parting.in_system):
        return Finding(check, "good", found)
    found += ": neither reuses the other" * too_short
    # Two good prompts with different documents may share no more than a short instruction.
    advice = f"unless the documents begin there (--document-marker says where), {_FIRST_WHAT_STAYS}"
    return Finding(check, "bad" if parting.kind else "warning", found, advice)


def _judge_parting(parting: _Difference, too_short: bool) -> Finding:
    check, (one, other) = "volatile text", parting.excerpts
    found = f'the prompts first differ at "{one}" and "{other}"'
    if not parting.kind:
        return Finding(check, "good", f"{found}, without a date, id or rank")
    # Document texts may contain anything; their headers should not contain this.
    if parting.before_documents is False and parting.remedy == _INTO_THE_QUESTION:
        return Finding(check, "good", f"{found}: {parting.kind}, in a document or after the documents")
    verdict: Verdict = "warning"
    if parting.before_documents or (parting.before_documents is None and (too_short or parting.in_system)):
        verdict = "bad"
    condition = "" if parting.before_documents else "unless it is part of a document's text, "
    return Finding(check, verdict, f"{found}: {parting.kind}", condition + parting.remedy)


def _shared_tokens(server: Server, model: str | None, samples: Sequence[PromptSample]) -> int | None:
    prompts = [{"prompt": each} if isinstance(each, str) else {"messages": list(each)} for each in samples]
    try:
        return common_length(*(tokenized(server, model, **prompt) for prompt in prompts))
    except RenderError:
        return None


def _part(first: PromptSample, second: PromptSample, marker: str | None) -> _Difference | None:
    (text, system), (other, other_system) = _as_text(first), _as_text(second)
    if text == other:
        return None
    at = common_length(text, other)
    kind, remedy = recognise(text, at)
    if not kind:
        kind, remedy = recognise(other, at)
    places = [text.find(marker), other.find(marker)] if marker else [-1]
    before = at < min(places) if min(places) >= 0 else None
    excerpts = (_excerpt(text, at), _excerpt(other, at))
    return _Difference(at, at < max(system, other_system), before, kind, remedy, excerpts)


def recognise(text: str, at: int) -> tuple[str, str]:
    # From the start of the line if it is close: headers are recognised by it.
    start = max(0, at - _REACH, text.rfind("\n", max(0, at - _REACH), at) + 1)
    window = text[start : at + _REACH]
    for kind, pattern, remedy in _KINDS:
        if any(match.start() <= at - start < match.end() for match in pattern.finditer(window)):
            return kind, remedy
    return "", ""


def _excerpt(text: str, at: int) -> str:
    return printable(text[max(0, at - _BEFORE) : at])[-_BEFORE:] + printable(text[at : at + _AFTER])[:_AFTER]


def _as_text(sample: PromptSample) -> tuple[str, int]:
    """Return the prompt, and where its system message ends."""
    if isinstance(sample, str):
        return sample, 0
    messages = list(messages_of(list(sample)))
    system = [shown(each) for each in messages[:1] if each.role in INSTRUCTIONS]
    return "".join(map(shown, messages)), sum(map(len, system)) - len(system)
