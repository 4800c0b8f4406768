"""Documents of earlier turns: named instead of repeated, their order kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from string import Formatter

from ragorder.adapters.proxy.bodies.body import Passage
from ragorder.adapters.proxy.bodies.conversation import ChatBody
from ragorder.adapters.proxy.bodies.parsed import digest_of
from ragorder.adapters.proxy.bodies.template import DocumentTemplate, TemplateError
from ragorder.common.lru_cache import LRUCache

REFERENCE = "[{id}] is above."
_TURNS = ("function", "tool", "user")


class RepeatedDocuments:
    """`reference` names a document of a user or tool message if the last earlier document with its id has the same
    text. This depends on the messages alone, so an earlier turn is always sent alike.

    Raises TemplateError for a reference or template without {id}, or a reference that looks like a document."""

    def __init__(self, template: DocumentTemplate, reference: str = REFERENCE) -> None:
        if not template.shows_id:
            raise TemplateError("a reference names a document by its id: the template needs {id}")
        try:
            fields = {field for _, field, form, conversion in Formatter().parse(reference) if field is not None}
            reference.format(id="")
        except (ValueError, LookupError, AttributeError):
            fields = set()
        if fields != {"id"}:
            raise TemplateError("the reference needs {id}, and takes no other field")
        if template.has_one(reference.format(id="1")):
            raise TemplateError("the reference looks like a document: change its text")
        self._template = template
        self._reference = reference

    def name(self, body: ChatBody) -> list[int] | None:
        """Return the ranks named in the last passage with documents, or None if none is named anywhere."""
        standing: dict[str, bytes] = {}
        changes: list[tuple[Passage, str]] = []
        ranks: list[int] = []
        for passage in body.passages():
            if passage.role == "assistant":
                continue
            spans = list(self._template.spans(passage.text))
            if not spans:
                continue
            texts = [passage.text[start:end] for start, end in spans]
            known = [(self._template.split(text).id, digest_of(text)) for text in texts]
            ranks = []
            if passage.role in _TURNS:
                ranks = [rank for rank, (id, digest) in enumerate(known) if standing.get(id) == digest]
            if ranks:
                changes.append((passage, self._named(passage.text, [spans[rank] for rank in ranks])))
            standing.update(known)
        body.put_all(changes)
        return ranks if changes else None

    def _named(self, text: str, spans: Iterable[tuple[int, int]]) -> str:
        pieces, end = [], 0
        for start, stop in spans:
            id = self._template.split(text[start:stop]).id
            pieces += [text[end:start], self._reference.format(id=id)]
            end = stop
        return "".join([*pieces, text[end:]])


_KEPT_TURNS = 16384
_MOST_BYTES = 8 << 20
_ENTRY_BYTES = 200


class SentTurns:
    """Sent orders of messages' documents, which a client's history does not show: at most 16,384 in 8 MiB, by digests
    of scope and message. Thread-safe."""

    def __init__(self) -> None:
        self._orders: LRUCache[Sequence[int]] = LRUCache(_KEPT_TURNS, _MOST_BYTES)

    def remember(self, own: bytes, sent: bytes, permutation: Sequence[int]) -> None:
        """Note that message `own` was sent as `sent`: a client's history may have either."""
        self._put(own, permutation)
        if sent != own:
            self._put(sent, range(len(permutation)))

    def sent(self, own: bytes, count: int) -> Sequence[int] | None:
        known = self._orders.get(own)
        return known if known is not None and len(known) == count else None

    def _put(self, key: bytes, permutation: Sequence[int]) -> None:
        order = array("H", permutation)
        self._orders.put(key, order, _ENTRY_BYTES + order.itemsize * len(order))


class TurnKeys:
    """Digests of a message for any order of its documents, from their `keys` and the texts `around`."""

    def __init__(self, scope: bytes, around: Sequence[str], keys: Sequence[str]) -> None:
        self._around = digest_of(scope, *around)
        self._keys = keys

    def of(self, permutation: Iterable[int]) -> bytes:
        return digest_of(self._around, *(self._keys[rank] for rank in permutation))
