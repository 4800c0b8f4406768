"""Upper bound on the hits of any replacement policy."""

from __future__ import annotations

from ragorder.benchmarks.ragcache.replacement.streams import DocumentStream

__all__ = ["most_hits"]


def most_hits(stream: DocumentStream, tokens: int, warmup: int = 0, *, in_any_order: bool = False) -> float:
    """The most documents after the warm-up that any policy can hit with room for `tokens`, even if it knows the future;
    with `in_any_order` whatever the order of documents, as if one could be hit behind any others.

    PFOO-U (Berger, Beckmann, Harchol-Balter, Practical Bounds on Optimal Caching with Variable Object Sizes, 2018):
    each hit takes its tokens times the requests since the last use of the room, cheapest first. The bound may not be
    reached.
    """
    last: dict[tuple[int, ...], int] = {}
    stays = []
    for now, request in enumerate(stream.requests):
        for end in range(1, len(request) + 1):
            path = request[end - 1 : end] if in_any_order else request[:end]
            if now >= warmup and path in last:
                stays.append(stream.tokens[path[-1]] * (now - max(last[path], warmup)))
            last[path] = now
    room = tokens * (len(stream.requests) - warmup)
    hits = 0
    for stay in sorted(stays):
        if stay > room:
            return hits + room / stay
        room -= stay
        hits += 1
    return float(hits)
