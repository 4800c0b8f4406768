"""Learning in a running proxy, from forwarded prompts."""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from threading import Lock, Thread
from typing import Self

from ragorder.adapters.learning.suggestion import Suggestion, suggest
from ragorder.adapters.observing.prometheus import Metrics
from ragorder.adapters.observing.stats import LEARNED
from ragorder.adapters.proxy.bodies.template import DocumentTemplate
from ragorder.protocols import OrdererLike

_logger = logging.getLogger("ragorder")

_FEWEST, _MOST = 100, 300
"""Requests to learn a form from."""
_SHORTEST, _LONGEST = 200, 1 << 16
"""Characters of a kept text."""
_MOST_CHARACTERS = 1 << 22
_TENANTS = 8
_CAPACITY_TOKENS = 131_072
_COST_S = 0.001
_MISSES = 3
_AGREES = 0.9
_LEAST_SAVING = 0.02
_FOUND = (
    "a form of documents was found in {fits:,} of {seen:,} prompts, and ordering them would save {saving:.0f} % of "
    "their prefill: see `ragorder template --from URL -o app.toml`"
)


class ShadowLearner:
    """Learns a template from requests whose documents no template finds; orders nothing. Thread-safe.

    Keeps a window of at most 300 requests a tenant, 4 million characters in all, until a thread learns a form from it,
    in at most 1 ms of processor time a request on average. The form is confirmed if a later window (another tenant's,
    if there are any) gives the same, and if it saves 2 % of the prefill. It is dropped if three in a row do not.

    For a confirmed form `on_learned` gets the fields of its `Saving` and the number of requests; `warn` gets a sentence
    once.
    """

    def __init__(
        self,
        capacity_tokens: int | None,
        on_learned: Callable[[int, int, int, int], None],
        warn: Callable[[str], None],
        processor_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._capacity_tokens = capacity_tokens or _CAPACITY_TOKENS
        self._on_learned = on_learned
        self._warn: Callable[[str], None] | None = warn
        self._processor_s = processor_s
        self._key = secrets.token_bytes(16)
        self._lock = Lock()
        self._windows: OrderedDict[bytes, deque[Sequence[str]]] = OrderedDict()
        self._characters = 0
        self._seen = 0
        self._spent_s = 0.0
        self._is_learning = False
        self._earlier: OrderedDict[bytes, DocumentTemplate] = OrderedDict()
        self._misses = 0
        self._file: str | None = None

    @classmethod
    def of(cls, metrics: Metrics, orderer: OrdererLike) -> Self:
        return cls(orderer.settings.held_tokens, partial(metrics.recognised, LEARNED), orderer.degrade)

    def file(self) -> str | None:
        """Return the confirmed template, for `ragorder serve --template FILE`."""
        return self._file

    def add(self, tenant: str | None, texts: Sequence[str]) -> None:
        kept = [each for each in texts if _SHORTEST < len(each) <= _LONGEST]
        name = self._name(tenant)
        with self._lock:
            self._seen += 1
            if not kept:
                return
            window = self._windows.setdefault(name, deque())
            self._windows.move_to_end(name)
            window.append(kept)
            self._characters += _length(kept)
            self._trim(window)
            if self._is_learning or len(window) < _FEWEST or self._spent_s > self._seen * _COST_S:
                return
            self._is_learning = True
            requests = list(self._windows.pop(name))
            self._characters -= sum(map(_length, requests))
        Thread(target=self._learn, args=(name, requests), name="ragorder-learner", daemon=True).start()

    def _name(self, tenant: str | None) -> bytes:
        if not tenant:
            return b""
        return blake2b(tenant.encode("utf-8", "surrogatepass"), key=self._key, digest_size=16).digest()

    def _trim(self, window: deque[Sequence[str]]) -> None:
        while len(window) > _MOST or (self._characters > _MOST_CHARACTERS and len(window) > 1):
            self._characters -= _length(window.popleft())
        while len(self._windows) > _TENANTS or (self._characters > _MOST_CHARACTERS and len(self._windows) > 1):
            _, oldest = self._windows.popitem(last=False)
            self._characters -= sum(map(_length, oldest))

    def _learn(self, name: bytes, requests: list[Sequence[str]]) -> None:
        started_s = self._processor_s()
        try:
            self._judge(name, requests)
        except Exception as error:
            # Its message may quote a prompt.
            _logger.error("learning a template failed: %s", type(error).__name__)
        finally:
            with self._lock:
                self._spent_s += self._processor_s() - started_s
                self._is_learning = False

    def _judge(self, name: bytes, requests: Sequence[Sequence[str]]) -> None:
        found = suggest(requests, self._capacity_tokens)
        template = None if isinstance(found, str) or found.refused else found.template()
        if template is None or isinstance(found, str):
            self._miss()
            return
        others = [each for tenant, each in self._earlier.items() if tenant != name or not name]
        is_known = any(_agree(template, other, requests) for other in others)
        self._earlier[name] = template
        self._earlier.move_to_end(name)
        if len(self._earlier) > _TENANTS:
            self._earlier.popitem(last=False)
        saving = found.saving
        if not is_known or saving is None or saving.share < _LEAST_SAVING:
            self._miss()
            return
        self._file, self._misses = _file(found, saving.share), 0
        self._on_learned(saving.tokens, saving.ordered_tokens, saving.retrieval_tokens, found.fits)
        if self._warn is not None:
            self._warn(_FOUND.format(fits=found.fits, seen=found.seen, saving=100 * saving.share))
            self._warn = None

    def _miss(self) -> None:
        self._misses += 1
        if self._misses >= _MISSES:
            self._file = None


def _length(texts: Sequence[str]) -> int:
    return sum(map(len, texts))


def _agree(one: DocumentTemplate, other: DocumentTemplate, requests: Sequence[Sequence[str]]) -> bool:
    runs = [(one.find(text), other.find(text)) for texts in requests for text in texts]
    found = [
        a is not None and b is not None and a.pieces == b.pieces for a, b in runs if a is not None or b is not None
    ]
    return bool(found) and sum(found) >= _AGREES * len(found)


def _file(found: Suggestion, share: float) -> str:
    return (
        f"# Learned from {found.seen:,} requests, {found.fits:,} of them with documents. Would save "
        f"{100 * share:.1f} % of their prefill.\n"
        "# Lists whose order means something look the same: compare it with a prompt before you use it.\n"
        f"{found.toml()}"
    )
