"""Topics: routing keys for requests that share documents."""

from __future__ import annotations

import os
import re
import secrets
from array import array
from collections.abc import Hashable, Iterable
from hashlib import blake2b
from math import frexp
from struct import Struct

__all__ = ["DIGEST_BYTES", "SECRET_VARIABLE", "DecayedSketch", "Topics", "checked_header"]

DIGEST_BYTES = 16

_ROWS = Struct("<4I")
_RESCALE = 1e200


class DecayedSketch:
    """Counts of 16-byte digests; an occurrence `half_life` steps ago counts half.

    A count-min sketch with conservative updates (Estan and Varghese 2002): four rows of `width` cells, a power of two.
    Concurrent threads may lose counts.
    """

    def __init__(self, half_life: int = 4096, width: int = 1 << 14) -> None:
        if width < 1 or width & (width - 1):
            raise ValueError(f"width must be a power of two, got {width}")
        self._growth = 2.0 ** (1 / half_life)
        self._steps = 0.0
        self._width = width
        # Instead of decaying every count, each new step weighs more than the one before. Counts and weight are one
        # tuple, so that threads always read a matching pair.
        self._weighted = array("d", bytes(8 * 4 * width)), 1.0

    @property
    def steps(self) -> float:
        return self._steps

    def step(self) -> None:
        cells, weight = self._weighted
        weight *= self._growth
        self._steps = 1.0 + self._steps / self._growth
        if weight > _RESCALE:
            cells, weight = array("d", (cell / weight for cell in cells)), 1.0
        self._weighted = cells, weight

    def add(self, digest: bytes) -> float:
        (cells, weight), width = self._weighted, self._width
        places = [row * width + (place & width - 1) for row, place in enumerate(_ROWS.unpack(digest))]
        count: float = min([cells[place] for place in places]) + weight
        for place in places:
            if cells[place] < count:
                cells[place] = count
        return count / weight


SECRET_VARIABLE = "RAGORDER_TOPIC_SECRET"  # noqa: S105

# The key prevents guessing the documents of a topic. Without a secret it exists in this process only.
_KEY = secrets.token_bytes(32)
# Popularity is compared in steps of this power of two.
_POWER = 3
# A topic with fewer requests than this is never split.
_FEW = 16.0
_TOKEN = re.compile(r"[0-9A-Za-z!#$%&'*+.^_`|~-]+")
_OWNED = frozenset({"authorization", "connection", "content-length", "content-type", "host", "transfer-encoding"})


class Topics:
    """Topics by the popularity of documents.

        topics = Topics(secret="the same in all processes")
        topics.of(["faq-7", "faq-2"], scope="acme")  # 32 hexadecimal digits

    A topic is a request's scope and most popular document; while it has more than `share` of all requests, the next
    popular one is added. Popularity is compared in steps of 8 times, so that topics seldom change, and agree between
    processes with the same `secret` (default: RAGORDER_TOPIC_SECRET) that see samples of the same traffic. Without the
    secret they reveal nothing about documents.
    """

    def __init__(self, secret: str | None = None, *, share: float = 1 / 32) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {share}")
        if secret is None:
            secret = os.environ.get(SECRET_VARIABLE)
        if secret is not None and not secret.strip():
            raise ValueError(f"the secret of topics is empty: give one, or leave it and {SECRET_VARIABLE} out")
        self.share = share
        self.shared = secret is not None
        """Whether other processes can have the same topics."""
        self._key = _KEY if secret is None else blake2b(secret.strip().encode(), digest_size=32).digest()
        self._counts = DecayedSketch()

    def of(self, keys: Iterable[Hashable], scope: Hashable = None) -> str | None:
        """Count a request's documents and return their topic, or None without documents.

        Keys and scopes are texts, bytes or numbers, or have the same `repr` in all processes.
        """
        tenant = _encoded(scope)
        documents = {self._digest(b"document", tenant, _encoded(key)) for key in keys}
        if not documents:
            return None
        counts = self._counts
        counts.step()
        first, *others = sorted((-(frexp(counts.add(each))[1] // _POWER), each) for each in documents)
        topic = self._digest(b"topic", tenant, first[1])
        # The factor tolerates rounding of decayed counts.
        most = 1.000001 * max(_FEW, self.share * counts.steps)
        for _, document in others:
            if counts.add(topic) <= most:
                break
            topic = self._digest(b"topic", topic, document)
        return topic.hex()

    def _digest(self, *parts: bytes) -> bytes:
        digest = blake2b(key=self._key, digest_size=DIGEST_BYTES)
        for part in parts:
            digest.update(b"%d:" % len(part))
            digest.update(part)
        return digest.digest()


def checked_header(name: str) -> str:
    if not _TOKEN.fullmatch(name) or name.lower() in _OWNED:
        raise ValueError(f"{name!r} cannot be the header of topics: give a name such as x-session-id")
    return name


def _encoded(value: Hashable) -> bytes:
    if value is None:
        return b"-"
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return b"b" + value
    return b"r" + repr(value).encode("utf-8", "surrogatepass")
