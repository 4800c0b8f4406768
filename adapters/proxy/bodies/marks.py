"""Cache breakpoints in each provider's form."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Raw

from ragorder.adapters.proxy.bodies.body import BOUNDARY, Fields, Route, decode, encode
from ragorder.protocols import OrdererLike

if TYPE_CHECKING:
    from ragorder.adapters.cloud_orderers import CloudOrderers, ModelOrderer

Left = Literal["client_marks", "no_marks"]
"""Why documents keep their order for a cache that resumes only at breakpoints: the client has set some, or none
fits."""

# Inside a JSON text the quotes would be escaped.
_OF_CLIENT = re.compile(
    rb'"(?:cache_control|cache_control_injection_points|prompt_cache_breakpoint|prompt_cache_options|cachePoint)"'
    rb"\s*:(?!\s*null\b)"
)


@dataclass(frozen=True, slots=True)
class MarkForm:
    """Form of breakpoints in an API: a field `name` with `value` in a part of these `kinds`, in a message of these
    `roles`; at most `most` in a body, which then has the fields `besides`. The cache looks back over `lookback_parts`
    parts. `own_head`: the text before the documents in their message is its own part."""

    name: str
    value: Raw
    kinds: Set[str]
    roles: Set[str]
    most: int = 4
    lookback_parts: int = 1
    besides: Mapping[str, Raw] = field(default_factory=dict)
    own_head: bool = False


@cache
def _cache_control(ttl: str | None = None) -> MarkForm:
    """Return the form of Anthropic's API and its gateways."""
    from ragorder.clouds.parts import cache_control

    return MarkForm(
        "cache_control",
        encode(cache_control(ttl)["cache_control"]),
        kinds=frozenset({"document", "image", "search_result", "text", "tool_result"}),
        roles=frozenset({"system", "developer", "user", "assistant"}),
        lookback_parts=20,
    )


@cache
def _breakpoint(ttl: str | None) -> MarkForm:
    """Return the form of OpenAI's API."""
    from ragorder.clouds.parts import cache_options, prompt_cache_breakpoint

    return MarkForm(
        "prompt_cache_breakpoint",
        encode(prompt_cache_breakpoint()["prompt_cache_breakpoint"]),
        kinds=frozenset({"text", "input_text"}),
        roles=frozenset({"system", "developer", "user", "tool"}),
        besides={name: encode(value) for name, value in cache_options(ttl).items()},
        own_head=True,
    )


@dataclass(frozen=True, slots=True)
class MarkedBy:
    """How a body gets breakpoints: their form (if any), and the orderer that chooses them (None: a plain rule).
    `keyed`: the server routes by a cache key; `left`: why no order leads to a hit."""

    form: MarkForm | None = None
    orderer: OrdererLike | None = None
    keyed: bool = False
    left: Left | None = None


class Marking:
    """Bodies of `routes` take cache_control; those for models of `clouds` follow their cache's rules. `heeds_client`:
    the cache resumes only at a client's own breakpoints."""

    def __init__(
        self, routes: Collection[Route] = (), clouds: CloudOrderers | None = None, *, heeds_client: bool = True
    ) -> None:
        self._routes = routes
        self._clouds = clouds
        self._heeds_client = heeds_client

    def of(self, route: Route, model: str | None, content: bytes) -> MarkedBy:
        found = self._clouds.of(model) if self._clouds is not None and model is not None else None
        has_own = _OF_CLIENT.search(content) is not None
        if found is None:
            if has_own and self._heeds_client:
                return MarkedBy(left="client_marks")
            return MarkedBy(_cache_control() if route in self._routes else None)
        # Legacy completions take no key.
        keyed = found.provider == "openai" and route in ("chat", "responses")
        if found.rules.resume != "marks":
            return MarkedBy(None, found.orderer, keyed)
        if has_own:
            return MarkedBy(left="client_marks")
        form = self._form(route, found)
        return MarkedBy(form, found.orderer, keyed, None if form is not None else "no_marks")

    def _form(self, route: Route, found: ModelOrderer) -> MarkForm | None:
        rules = found.rules
        bounds: dict[str, Any] = {"most": rules.marks, "lookback_parts": rules.lookback_parts}
        if found.provider == "anthropic" and route in self._routes:
            # The default TTL is not sent.
            return replace(_cache_control(None if rules.ttl == "5m" else rules.ttl), own_head=True, **bounds)
        if found.provider == "openai" and route in ("chat", "responses"):
            return replace(_breakpoint(rules.ttl), **bounds)
        return None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text of a new content part, the number of its old one, and whether a breakpoint follows."""

    part: int
    text: str
    marked: bool = False


def chunks_of(pieces: Sequence[str], marked: Collection[int], *, own_head: bool = False) -> list[Chunk]:
    """Return a content part for each document of the `pieces` (head, document, gap, …, tail), wherever breakpoints are:
    a cache finds only parts divided alike. The text before a document joins its part; with `own_head` the head is one,
    which breakpoint 0 follows."""
    chunks: list[Chunk] = []
    part = 0
    segments = [front + document for front, document in zip(pieces[:-1:2], pieces[1::2], strict=True)]
    splits = own_head and bool(segments) and bool(pieces[0].rpartition(BOUNDARY)[2].strip())
    if splits:
        segments[:1] = [pieces[0], pieces[1]]
    for number, segment in enumerate([*segments, pieces[-1]], 0 if splits else 1):
        for place, text in enumerate(segment.split(BOUNDARY)):
            part += place > 0
            last = chunks[-1] if chunks else None
            if last is not None and last.part == part and not text.strip():
                # No server takes a part of white space alone.
                chunks[-1] = replace(last, text=last.text + text)
            else:
                chunks.append(Chunk(part, text))
        if number in marked and number < len(segments) + (not splits):
            chunks[-1] = replace(chunks[-1], marked=True)
        if number == 1 and not splits and 0 in marked and len(chunks) > 1 and chunks[-2].text.strip():
            # The head has its own parts anyway.
            chunks[-2] = replace(chunks[-2], marked=True)
    return chunks


def has_head(pieces: Sequence[str]) -> bool:
    *before, own = pieces[0].split(BOUNDARY)
    return bool(own.strip()) or (bool(before) and bool(before[-1].strip()))


_NULL = Raw(b"null")
_BOUNDARIES = frozenset({"user", "tool"})


def chunk_part(part: dict[str, Any], chunk: Chunk, form: MarkForm | None) -> dict[str, Any]:
    mark = {form.name: form.value} if chunk.marked and form is not None else {}
    return part | {"text": chunk.text} | mark


def mark_last(message: Raw, form: MarkForm, text_kind: str, parts_before: int | None = None) -> Raw | None:
    """Return the message with a breakpoint after its last part, or the first `parts_before`; None if no server takes it
    there. A text becomes a part of `text_kind`."""
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
    """Return the messages that breakpoints follow: the last one, where the next turn resumes, and if the cache does not
    look back so far, that where this turn resumes. None before the first answer."""
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
