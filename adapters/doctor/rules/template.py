"""Chat templates with different renderings of an earlier turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ragorder.adapters.doctor.case import Case
from ragorder.adapters.doctor.chat_template import Chat, ChatTemplate, RenderError
from ragorder.adapters.doctor.finding import Finding

__all__ = ["check"]

_CHECK = "chat template"
_MOST = 4
# Tokens may merge at the boundary of two segments.
_MERGED = 2
_ADVICE = (
    "the template drops or adds text in earlier turns, such as their reasoning (<think>): keep it with the model's "
    "option for that (--default-chat-template-kwargs), give vLLM a template that only appends (--chat-template), or "
    "send token ids"
)
_DATED = "the template writes today's date: give it a fixed one (date_string in --default-chat-template-kwargs)"
_NEXT = ({"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And what follows from that?"})


class _Comparison(NamedTuple):
    """Tokens of a turn that the next one loses, and whether the next one repeats the prompt of the answer."""

    lost_tokens: int
    tokens: int
    answer_stays: bool


def check(case: Case) -> Finding:
    """Compare the tokens of turns with those of the next ones: of the log, or else made up."""
    if case.template is None:
        return Finding(_CHECK, "unknown", "not checked", "give the URL of a vLLM server, or --tokenizer")
    pairs = _pairs(case)
    if not pairs:
        return Finding(_CHECK, "good", "no chat in this log")
    compared: list[_Comparison] = []
    failures: list[str] = []
    for first, second in pairs:
        try:
            compared.append(_compare(case.template, first, second))
        except RenderError as failure:
            failures.append(str(failure))
    if not compared:
        return Finding(_CHECK, "unknown", f"not checked: {failures[0]}", "see the server's log, or give --tokenizer")
    if changed := [each for each in compared if each.lost_tokens > _MERGED]:
        worst = max(changed, key=lambda each: each.lost_tokens)
        found = f"{len(changed)} of {len(compared)} chats lose up to {worst.lost_tokens:,} of {worst.tokens:,} tokens"
        return Finding(_CHECK, "bad", f"{found} in the next turn, rendered twice", _ADVICE)
    if not all(each.answer_stays for each in compared):
        found = "earlier turns keep their tokens, but the last answer's start differs from its generation prompt"
        return Finding(_CHECK, "warning", f"{found}: each turn computes it again", _ADVICE)
    if case.template.dated:
        return Finding(_CHECK, "warning", "earlier turns keep their tokens until the date changes", _DATED)
    return Finding(_CHECK, "good", f"{len(compared)} chats keep their tokens in the next turn, rendered twice")


def _pairs(case: Case) -> list[tuple[Chat, Chat]]:
    real: list[tuple[Chat, Chat]] = [
        (turn.before.sent, turn.request.sent)
        for turn in case.turns
        if turn.changed is None and turn.before.sent and turn.request.sent
    ]
    if real:
        return _spread(real)
    chats = [each.sent for each in case.log.requests if each.sent and _asks(each.sent[-1])]
    return _spread([(chat, [*chat, *_NEXT]) for chat in chats])


def _asks(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "user"


def _spread(pairs: Sequence[tuple[Chat, Chat]]) -> list[tuple[Chat, Chat]]:
    step = max(1, len(pairs) // _MOST)
    return list(pairs[::step][:_MOST])


def _compare(template: ChatTemplate, first: Chat, second: Chat) -> _Comparison:
    whole, other = template.render(first, open_end=False), template.render(second, open_end=True)
    asked = template.render(first, open_end=True)
    same = _common(whole, other)
    return _Comparison(len(whole) - same, len(whole), answer_stays=_common(asked, other) == len(asked))


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
