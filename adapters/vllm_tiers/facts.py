"""Facts of a request in vLLM's scheduler, read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ragorder.adapters.request_facts import RequestFacts, read_facts

__all__ = ["facts_of", "readable"]

_T = TypeVar("_T")


class _ReqContext(Protocol):
    kv_transfer_params: dict[str, Any] | None

    def get_state(self, cls: type[_T]) -> _T | None: ...
    def set_state(self, val: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _ReadFacts:
    facts: RequestFacts | None
    readable: bool


def facts_of(request: _ReqContext) -> RequestFacts | None:
    """None for a request without facts, or with malformed ones."""
    return _read(request).facts


def readable(request: _ReqContext) -> bool:
    return _read(request).readable


def _read(request: _ReqContext) -> _ReadFacts:
    read = request.get_state(_ReadFacts)
    if read is None:
        try:
            read = _ReadFacts(read_facts(request.kv_transfer_params), True)
        except ValueError:
            read = _ReadFacts(None, False)
        request.set_state(read)
    return read
