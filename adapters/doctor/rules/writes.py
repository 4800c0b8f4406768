"""Tokens written into a cloud's cache and never read."""

from __future__ import annotations

from ragorder.adapters.doctor.case import Case
from ragorder.adapters.doctor.cloud import rules_of
from ragorder.adapters.doctor.finding import Finding

__all__ = ["check"]

_CHECK = "writes and reads"
_WRITE, _READ = 1.25, 0.1
_ADVICE = (
    "set a cache breakpoint only after text that is sent again within its TTL, never after the question; "
    "requests sent at the same time all write: let the first one begin to answer before the others"
)


def check(case: Case) -> Finding:
    written = read = 0
    on_top = saved = 0.0
    for request in case.log.requests:
        if request.written_tokens is None or request.cached_tokens is None:
            continue
        rules = rules_of(request.model)
        write_price, read_price = (rules.write, rules.read) if rules else (_WRITE, _READ)
        written += request.written_tokens
        read += request.cached_tokens
        on_top += (write_price - 1) * request.written_tokens
        saved += (1 - read_price) * request.cached_tokens
    if not written:
        return Finding(_CHECK, "good", "no answer reports tokens written into a cache at a price")
    found = f"{written:,} tokens written, {read:,} read"
    if saved >= on_top:
        return Finding(_CHECK, "good", f"{found}: {saved - on_top:,.0f} input tokens saved, at the plain price")
    found += f": {on_top - saved:,.0f} input tokens, at the plain price, dearer than without a cache"
    return Finding(_CHECK, "bad", found, _ADVICE)
