"""Marks behind parts of messages: of what stands in front of the documents, and of the turns of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Raw

from ragorder.adapters.proxy.body import Fields, decode, encode
from ragorder.adapters.proxy.marks import Chunk, MarkForm

__all__ = ["chunk_part", "mark_last", "takes_mark", "turn_ends"]

_NULL = Raw(b"null")
_BOUNDARIES = frozenset({"user", "tool"})


def chunk_part(part: dict[str, Any], chunk: Chunk, form: MarkForm | None) -> dict[str, Any]:
    mark = {form.name: form.value} if chunk.marked and form is not None else {}
    return part | {"text": chunk.text} | mark


def mark_last(message: Raw, form: MarkForm, text_kind: str, parts_before: int | None = None) -> Raw | None:
    """The message with a mark behind its last part, or the last of its first `parts_before`; None if no server takes
    one there. A text becomes a part of `text_kind`."""
    fields = decode(message, Fields) or {}
    if decode(fields.get("role", _NULL), str) not in form.roles:
        return None
    content = fields.get("content", _NULL)
    text = decode(content, str)
    parts = decode(content, list[Raw]) or [] if text is None else [encode({"type": text_kind, "text": text})]
    number = (len(parts) if parts_before is None else parts_before) - 1
    last = decode(parts[number], Fields) if 0 <= number < len(parts) else None
    if last is None or decode(last.get("type", _NULL), str) not in form.kinds:
        return None
    if "text" in last and not (decode(last["text"], str) or "").strip():
        return None
    parts[number] = encode(last | {form.name: form.value})
    return encode(fields | {"content": encode(parts)})


def takes_mark(message: Raw, form: MarkForm, text_kind: str, parts_before: int | None = None) -> bool:
    return mark_last(message, form, text_kind, parts_before) is not None


def turn_ends(
    messages: Sequence[Raw], form: MarkForm, text_kind: str, is_answer: Callable[[Raw], bool]
) -> tuple[int, ...]:
    """Messages of a conversation behind which a mark stands: the last one, where the next turn resumes, and the one
    where this turn does, if it is not found from there. None before the first answer."""
    last = len(messages) - 1
    answers = [place for place, message in enumerate(messages) if is_answer(message)]
    if not answers or not _is_boundary(messages[last]) or not takes_mark(messages[last], form, text_kind):
        return ()
    before = next((place for place in range(answers[-1] - 1, -1, -1) if _is_boundary(messages[place])), None)
    if before is None or not takes_mark(messages[before], form, text_kind):
        return (last,)
    parts = sum(map(_parts_of, messages[before + 1 :]))
    return (last,) if parts < form.lookback_parts else (before, last)


def _is_boundary(message: Raw) -> bool:
    fields = decode(message, Fields) or {}
    return decode(fields.get("role", _NULL), str) in _BOUNDARIES


def _parts_of(message: Raw) -> int:
    fields = decode(message, Fields) or {}
    content = fields.get("content", _NULL)
    return 1 if decode(content, str) is not None else len(decode(content, list[Raw]) or [_NULL])
