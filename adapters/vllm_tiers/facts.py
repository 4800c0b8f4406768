"""What a request says of itself in `kv_transfer_params`: where its documents end, whose it is, what a token costs.

{"ragorder": {"documents": [end offset in tokens of each document, in prompt order], "tenant": "<opaque digest>",
"cost": seconds per new token}}; each may be missing or null. Nobody has to send them, and nobody is refused for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

__all__ = ["RequestFacts", "facts_of", "read_facts", "readable"]

_KEY = "ragorder"
_MOST_DOCUMENTS = 4096
_LONGEST_TENANT = 256
_MOST_TOKENS = 1 << 53
_HIGHEST_COST_S = 10.0
"""No engine takes as long for a token; and what a request says it cost keeps its chunks from others."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """`documents` are the prompt positions, in tokens, where documents end, in prompt order; `tenant` is a digest;
    `cost` the seconds that a new token takes, where the client knows better than the profile."""

    documents: tuple[int, ...] = ()
    tenant: str | None = None
    cost: float | None = None


class _Request(Protocol):
    """vLLM's `ReqContext`, as far as it is needed here."""

    kv_transfer_params: dict[str, Any] | None

    def get_state(self, cls: type[_T]) -> _T | None: ...
    def set_state(self, val: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _Read:
    facts: RequestFacts | None
    readable: bool


def read_facts(kv_transfer_params: object) -> RequestFacts | None:
    """The facts in a request's `kv_transfer_params`; None if there are none. Raises ValueError if they are no facts."""
    if not isinstance(kv_transfer_params, Mapping) or kv_transfer_params.get(_KEY) is None:
        return None
    facts = kv_transfer_params[_KEY]
    if not isinstance(facts, Mapping):
        raise ValueError("facts are a map with documents, tenant and cost")
    documents, tenant, cost = facts.get("documents"), facts.get("tenant"), facts.get("cost")
    if documents is not None:
        if not isinstance(documents, list | tuple) or len(documents) > _MOST_DOCUMENTS:
            raise ValueError(f"documents are a list of up to {_MOST_DOCUMENTS} end offsets")
        if not all(type(end) is int and 0 < end <= _MOST_TOKENS for end in documents):
            raise ValueError("documents are end offsets in tokens, whole numbers above 0")
        if any(after < before for before, after in pairwise(documents)):
            raise ValueError("the end offsets of documents ascend")
    if tenant is not None and (type(tenant) is not str or len(tenant) > _LONGEST_TENANT):
        raise ValueError(f"a tenant is a digest of up to {_LONGEST_TENANT} characters")
    if cost is not None:
        if type(cost) not in (int, float) or not 0 <= cost <= _HIGHEST_COST_S:
            raise ValueError(f"a cost is the seconds per new token, from 0 to {_HIGHEST_COST_S:g}")
        cost = float(cost)
    return RequestFacts(tuple(documents or ()), tenant, cost)


def facts_of(request: _Request) -> RequestFacts | None:
    """The facts of a request in vLLM's scheduler, read once; None if it has none that can be understood."""
    return _read(request).facts


def readable(request: _Request) -> bool:
    """Whether the request's facts were understood, or there were none."""
    return _read(request).readable


def _read(request: _Request) -> _Read:
    read = request.get_state(_Read)
    if read is None:
        try:
            read = _Read(read_facts(request.kv_transfer_params), True)
        except ValueError:
            read = _Read(None, False)
        request.set_state(read)
    return read
