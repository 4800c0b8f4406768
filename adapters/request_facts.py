"""What a request tells a vLLM with ragorder's tiers (adapters/vllm_tiers) of itself: where its documents end, and whose
it is. The text of neither."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

__all__ = ["FACTS", "FIELD", "PREFIX", "request_facts", "tenant_digest", "with_facts"]

FIELD = "kv_transfer_params"
"""The field of a request's body, and the key in the extra_args of vLLM's SamplingParams."""
FACTS = "ragorder"
"""The key of the facts in there."""
PREFIX = "prefix"
"""The key, in the facts, of how many tokens are in front of the first document: for the embedded engine."""

# Whoever sees a digest can try no names on it: the key is nowhere else, and gone with this process.
_KEY = secrets.token_bytes(32)


def tenant_digest(scope: Hashable) -> str | None:
    """What stands for a tenant: the same in all requests of this process, and without a meaning outside. None for no
    tenant."""
    if scope is None:
        return None
    name = scope if isinstance(scope, bytes) else str(scope).encode("utf-8", "surrogatepass")
    return blake2b(name, key=_KEY, digest_size=16).hexdigest()


def request_facts(document_ends: Sequence[int], scope: Hashable, prefix_tokens: int = 0) -> dict[str, Any]:
    """The facts of a request whose documents end at these tokens of its prompt, in its order, and begin behind its
    first `prefix_tokens`. What is not known is left out."""
    facts: dict[str, Any] = {}
    if document_ends:
        facts["documents"] = list(document_ends)
        if prefix_tokens:
            facts[PREFIX] = prefix_tokens
    if (tenant := tenant_digest(scope)) is not None:
        facts["tenant"] = tenant
    return facts


def with_facts(arguments: Mapping[str, Any], document_ends: Sequence[int], scope: Hashable) -> dict[str, Any]:
    """Arguments of a request (`extra_body` of the openai client, `extra_args` of vLLM), with the facts. What the caller
    has put there himself stays as it is; facts of his own go before ours."""
    sent = dict(arguments)
    params = sent.get(FIELD)
    params = {} if params is None else params
    own = params.get(FACTS, {}) if isinstance(params, Mapping) else None
    if isinstance(params, Mapping) and isinstance(own, Mapping):
        facts = request_facts(document_ends, scope) | dict(own)
        if facts:
            sent[FIELD] = {**params, FACTS: facts}
    return sent
