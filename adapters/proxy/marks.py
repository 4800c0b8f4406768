"""Marks in bodies whose client set none: where a cache can be resumed, as each provider's API spells it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from msgspec import Raw

from ragorder.adapters.cloud_orderers import CloudOrderers, ModelOrderer
from ragorder.adapters.proxy.body import BOUNDARY, Route, encode
from ragorder.clouds.parts import cache_control, cache_options, prompt_cache_breakpoint
from ragorder.orderer import OrdererLike

__all__ = ["CACHE_CONTROL", "Chunk", "Left", "MarkForm", "MarkedBy", "Marking", "chunks_of", "has_head"]

Left = Literal["client_marks", "no_marks"]
"""Why documents keep their order for a cache that resumes only at marks: the client has set its own, or there can be
none."""

# Within a text the quotes would be escaped.
_OF_CLIENT = re.compile(
    rb'"(?:cache_control|cache_control_injection_points|prompt_cache_breakpoint|prompt_cache_options|cachePoint)"'
    rb"\s*:(?!\s*null\b)"
)


@dataclass(frozen=True, slots=True)
class MarkForm:
    """A mark as an API takes it: the field `name` with `value` of a part of one of the `kinds`, in a message of one of
    the `roles`; a body with marks has the fields `besides`. At most `most` a request; from each a cache looks
    `lookback_parts` back. `own_head`: what stands in front of the documents in their message is a part of its own."""

    name: str
    value: Raw
    kinds: Set[str]
    roles: Set[str]
    most: int = 4
    lookback_parts: int = 1
    besides: Mapping[str, Raw] = field(default_factory=dict)
    own_head: bool = False


CACHE_CONTROL = MarkForm(
    "cache_control",
    encode(cache_control()["cache_control"]),
    kinds=frozenset({"document", "image", "text", "tool_result"}),
    roles=frozenset({"system", "developer", "user", "assistant"}),
    lookback_parts=20,
)
"""Of Anthropic's API, and of gateways to it."""

_BREAKPOINT = MarkForm(
    "prompt_cache_breakpoint",
    encode(prompt_cache_breakpoint()["prompt_cache_breakpoint"]),
    kinds=frozenset({"text", "input_text"}),
    roles=frozenset({"system", "developer", "user", "tool"}),
    own_head=True,
)


@dataclass(frozen=True, slots=True)
class MarkedBy:
    """The form of a body's marks (None: it gets none), and the orderer that chooses them (None: a plain rule does, on
    the orderer of all other bodies). `keyed`: requests are routed by a key in them; `left`: no order leads to a hit."""

    form: MarkForm | None = None
    orderer: OrdererLike | None = None
    keyed: bool = False
    left: Left | None = None


class Marking:
    """Says how a body is marked. Bodies of `routes` take `cache_control`; those of models that `clouds` know are
    ordered and marked by the rules of their cache. `heeds_client`: the server's cache resumes at a client's own marks,
    and nowhere else."""

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
            return MarkedBy(CACHE_CONTROL if route in self._routes else None)
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
            # The default life needs no word.
            ttl = None if rules.ttl == "5m" else rules.ttl
            return replace(CACHE_CONTROL, value=encode(cache_control(ttl)["cache_control"]), own_head=True, **bounds)
        if found.provider == "openai" and route in ("chat", "responses"):
            besides = {name: encode(value) for name, value in cache_options(rules.ttl).items()}
            return replace(_BREAKPOINT, besides=besides, **bounds)
        return None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A text of a passage that becomes a content part: the number of the part that it was in, and whether a cache may
    be resumed behind it."""

    part: int
    text: str
    marked: bool = False


def chunks_of(pieces: Sequence[str], marked: Collection[int], *, own_head: bool = False) -> list[Chunk]:
    """A content part for each document, whatever is marked: a cache finds parts again only if they are divided alike.

    `pieces` alternate: head, document, gap, document, …, tail; `BOUNDARY` separates the parts that they are in. What
    stands in front of a document is part of its chunk, but for a head that is its `own`, behind which is mark 0.
    """
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
            # The head is in parts of its own anyway.
            chunks[-2] = replace(chunks[-2], marked=True)
    return chunks


def has_head(pieces: Sequence[str]) -> bool:
    """Whether mark 0 stands in the documents' own passage."""
    *before, own = pieces[0].split(BOUNDARY)
    return bool(own.strip()) or (bool(before) and bool(before[-1].strip()))
