"""Facts about a request, for an engine with ragorder's tiers; the tenant's salt.

    {"kv_transfer_params": {"ragorder": {"documents": [end offset in tokens, in prompt order], "expected": [number of
    later requests with all documents up to this one], "tenant": "<digest>", "cost": seconds per new token, "prefix":
    tokens before the first document, "exact": leading documents to compute exactly, "question": true}}}

Each fact may be missing or null. Only the embedded engine reads the last three. vLLM's processes load this module: it
imports only the standard library.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)

FIELD = "kv_transfer_params"
"""Field of a request's body, and of vLLM's `extra_args`."""
FACTS = "ragorder"
PREFIX = "prefix"
EXACT = "exact"
QUESTION = "question"
"""True for a warm-up of a system prompt (its only document) and a question whose KV is kept."""

# Random and never sent, so that nobody can test guessed tenant names against a digest.
_KEY = secrets.token_bytes(32)
_MAX_DOCUMENTS = 4096
_MAX_TENANT_LENGTH = 256
# Refused by vLLM 0.32 (validate_cache_salt); earlier versions refuse an empty salt only.
_MAX_SALT_LENGTH = 128
_NOT_IN_SALT = frozenset("@/\\\0")
_MAX_TOKENS = 1 << 53
# No engine takes longer for a token. Without a limit a client could keep its chunks in the cache by a false cost.
_MAX_COST_S = 10.0
# For the same reason: a chunk expected 1,000 times outlives one expected once by 14 turnovers of its tier.
_MAX_EXPECTED = 1000.0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts as read. `cost`, if given, replaces the engine profile's."""

    documents: tuple[int, ...] = ()
    tenant: str | None = None
    cost: float | None = None
    expected: tuple[float, ...] = ()

    def of_first(self, documents: int | None) -> RequestFacts:
        if documents is None or len(self.documents) <= documents:
            return self
        return replace(self, documents=self.documents[:documents], expected=self.expected[:documents])

    def forecast(self, blocks: Iterable[K], ends: Iterable[int]) -> dict[K, float]:
        """Return each block's expected uses: those of the document with its last token. `ends` are in tokens."""
        places = ((block, bisect_left(self.documents, end)) for block, end in zip(blocks, ends, strict=True))
        return {block: self.expected[place] for block, place in places if place < len(self.expected)}


def read_facts(kv_transfer_params: object) -> RequestFacts | None:
    """Return the facts, or None without any. Raises ValueError for malformed ones."""
    if not isinstance(kv_transfer_params, Mapping) or kv_transfer_params.get(FACTS) is None:
        return None
    facts = kv_transfer_params[FACTS]
    if not isinstance(facts, Mapping):
        raise ValueError("facts must be a map, such as of documents, expected, tenant and cost")
    documents, tenant, cost = facts.get("documents"), facts.get("tenant"), facts.get("cost")
    if documents is not None:
        if not isinstance(documents, list | tuple) or len(documents) > _MAX_DOCUMENTS:
            raise ValueError(f"documents are a list of up to {_MAX_DOCUMENTS} end offsets")
        if not all(type(end) is int and 0 < end <= _MAX_TOKENS for end in documents):
            raise ValueError("documents are end offsets in tokens, whole numbers above 0")
        if any(after < before for before, after in pairwise(documents)):
            raise ValueError("the end offsets of documents must ascend")
    if tenant is not None and (type(tenant) is not str or len(tenant) > _MAX_TENANT_LENGTH):
        raise ValueError(f"a tenant is a digest of up to {_MAX_TENANT_LENGTH} characters")
    if cost is not None:
        if type(cost) not in (int, float) or not 0 <= cost <= _MAX_COST_S:
            raise ValueError(f"a cost is the seconds per new token, from 0 to {_MAX_COST_S:g}")
        cost = float(cost)
    expected = facts.get("expected")
    if expected is not None:
        if not isinstance(expected, list | tuple) or len(expected) != len(documents or ()):
            raise ValueError("expected must have one number of later requests for each of the documents")
        if not all(type(uses) in (int, float) and 0 <= uses <= _MAX_EXPECTED for uses in expected):
            raise ValueError(f"expected are numbers of later requests, from 0 to {_MAX_EXPECTED:g}")
    return RequestFacts(tuple(documents or ()), tenant, cost, tuple(map(float, expected or ())))


def checked_salt(scope: str) -> str:
    """Raises ValueError for a scope that cannot be a salt."""
    if 0 < len(scope) <= _MAX_SALT_LENGTH and _NOT_IN_SALT.isdisjoint(scope):
        return scope
    raise ValueError(
        "a scope is sent as cache_salt, and vLLM refuses one that is empty, has more than 128 characters, or has "
        "@, /, \\ or NUL in it: give None for no tenant, scope=hashlib.sha256(name.encode()).hexdigest() for this name"
    )


def tenant_digest(scope: Hashable) -> str | None:
    """Return a digest that identifies a tenant in this process only."""
    if scope is None:
        return None
    name = scope if isinstance(scope, bytes) else str(scope).encode("utf-8", "surrogatepass")
    return blake2b(name, key=_KEY, digest_size=16).hexdigest()


def request_facts(
    document_ends: Sequence[int],
    scope: Hashable,
    prefix_tokens: int = 0,
    expected_uses: Sequence[float] = (),
    exact_documents: int = 0,
    keep_question: bool = False,
) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if document_ends:
        facts["documents"] = list(document_ends)
        if len(expected_uses) == len(document_ends):
            facts["expected"] = [min(round(uses, 3), _MAX_EXPECTED) for uses in expected_uses]
        if prefix_tokens:
            facts[PREFIX] = prefix_tokens
        if exact_documents:
            facts[EXACT] = exact_documents
        if keep_question:
            facts[QUESTION] = True
    if (tenant := tenant_digest(scope)) is not None:
        facts["tenant"] = tenant
    return facts


def with_facts(
    arguments: Mapping[str, Any],
    document_ends: Sequence[int],
    scope: Hashable,
    expected_uses: Sequence[float] = (),
    **others: Any,
) -> dict[str, Any]:
    """Return the openai client's `extra_body` or vLLM's `extra_args` with facts added; its own stay."""
    sent = dict(arguments)
    params = sent.get(FIELD)
    params = {} if params is None else params
    own = params.get(FACTS, {}) if isinstance(params, Mapping) else None
    if isinstance(params, Mapping) and isinstance(own, Mapping):
        facts = _merged(own, request_facts(document_ends, scope, expected_uses=expected_uses, **others))
        if facts:
            sent[FIELD] = {**params, FACTS: facts}
    return sent


def add_facts(fields: dict[str, Any], *known: Any) -> None:
    """Add facts to a body of `msgspec.Raw` fields, in place. The client's values stay byte for byte: the server
    refuses malformed ones."""
    import msgspec

    raw_fields = dict[str, msgspec.Raw]
    try:
        params = msgspec.json.decode(fields.get(FIELD, b"null"), type=raw_fields | None) or {}
        own = msgspec.json.decode(params[FACTS], type=raw_fields) if FACTS in params else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if facts := _merged(own, request_facts(*known)):
        fields[FIELD] = msgspec.Raw(msgspec.json.encode(params | {FACTS: facts}))


def _merged(own: Mapping[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    if "documents" in own:
        # The client names other documents, and these two facts count ours.
        facts.pop("expected", None)
        facts.pop(EXACT, None)
    return facts | dict(own)
