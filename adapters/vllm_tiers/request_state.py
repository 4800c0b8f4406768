"""State of a request in vLLM's scheduler: its facts, and its path in chunks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ragorder.adapters.request_facts import RequestFacts, read_facts
from ragorder.trie.policies import Key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

__all__ = ["ReadFacts", "RequestPath", "facts_of", "path_of", "state_of"]

T = TypeVar("T")


class RequestPath:
    """The chunks of a request's prompt, root first; those of several groups of layers are adjacent."""

    __slots__ = (
        "_device",
        "_loaded",
        "_positions",
        "admitted",
        "awaited",
        "cost",
        "counted",
        "ends",
        "expected",
        "keys",
        "last",
        "places",
    )

    def __init__(self, positions: dict[OffloadKey, int]) -> None:
        # vLLM's own, which grows while the request is answered.
        self._positions = positions
        self.keys: list[OffloadKey] = []
        self.ends: list[int] = []
        self.places: dict[OffloadKey, int] = {}
        self._device: int | None = None
        self._loaded = 0
        self.counted = False
        # The number of chunks that count as used, and that may be stored; None: all.
        self.last: int | None = None
        self.admitted: int | None = None
        self.cost: float | None = None
        # Chunks that the host keeps while the request waits.
        self.awaited: tuple[Key, ...] = ()
        # Forecast uses of chunks, if any.
        self.expected: dict[OffloadKey, float] = {}
        self._read()

    def __contains__(self, key: object) -> bool:
        return key in self._positions

    def parent_of(self, key: OffloadKey) -> OffloadKey | None:
        """None for the first chunk, and for other requests' chunks."""
        place = self._place(key)
        return self.keys[place - 1] if place else None

    def looked_up(self, key: OffloadKey) -> None:
        """The device has everything before the first chunk looked up."""
        if self._device is None:
            self._device = self._place(key)

    def loaded(self, keys: Iterable[OffloadKey]) -> None:
        """From the tiers behind the device."""
        places = [place for key in keys if (place := self._place(key)) is not None]
        self._loaded = max([self._loaded, *(place + 1 for place in places)])

    @property
    def cached(self) -> int:
        """In chunks; all if vLLM looked up none."""
        return len(self.keys) if self._device is None else max(self._device, self._loaded)

    def counts(self, key: OffloadKey) -> bool:
        """The request was counted already, and with this chunk."""
        place = self._place(key)
        return self.counted and place is not None and (self.last is None or place < self.last)

    def admits(self, key: OffloadKey) -> bool:
        """Whether the tiers may keep this chunk."""
        place = self._place(key)
        return self.admitted is None or place is None or place < self.admitted

    def before(self, end: int) -> int:
        """Chunks that end within `end` tokens."""
        return bisect_right(self.ends, end)

    def _place(self, key: OffloadKey) -> int | None:
        place = self.places.get(key)
        if place is None and key in self._positions:
            self._read()
            place = self.places.get(key)
        return place

    def _read(self) -> None:
        in_order = sorted(self._positions.items(), key=lambda chunk: chunk[1])
        self.keys = [key for key, _ in in_order]
        self.ends = [end for _, end in in_order]
        self.places = {key: place for place, key in enumerate(self.keys)}


@dataclass(frozen=True, slots=True)
class ReadFacts:
    """The facts of a request, if any; not `readable` if they are malformed."""

    facts: RequestFacts | None
    readable: bool = True


def path_of(request: ReqContext) -> RequestPath:
    # vLLM's public get_offload_key_position needs a key, and a manager never gets the keys of a request's chunks that
    # were on the device. They count as used all the same.
    return state_of(request, RequestPath, lambda: RequestPath(request._offload_key_positions))


def facts_of(request: ReqContext) -> ReadFacts:
    return state_of(request, ReadFacts, lambda: _read_facts(request.kv_transfer_params))


def state_of(request: ReqContext, kind: type[T], make: Callable[[], T]) -> T:
    """The state of this type that vLLM keeps with the request, made on first use."""
    state: T | None = request.get_state(kind)
    if state is None:
        state = make()
        request.set_state(state)
    return state


def _read_facts(kv_transfer_params: object) -> ReadFacts:
    try:
        return ReadFacts(read_facts(kv_transfer_params))
    except ValueError:
        return ReadFacts(None, readable=False)
