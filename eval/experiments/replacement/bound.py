"""Upper bound on the hits of any replacement policy."""

from __future__ import annotations

from ragorder.eval.experiments.replacement.streams import DocumentStream

__all__ = ["most_hits"]


def most_hits(stream: DocumentStream, tokens: int, warmup: int = 0) -> float:
    """The most documents that can be hit behind the warm-up with room for `tokens`, even if the future is known.

    To be hit, a node must have stayed since its last use: its tokens, for as many requests as lie between. All stays
    together have tokens x requests of room, and the cheapest ones are taken until that is used up (PFOO-U: Berger,
    Beckmann, Harchol-Balter, Practical Bounds on Optimal Caching with Variable Object Sizes, 2018). That room may be
    short at one moment, and that a hit needs those in front of it, is left out: it is a bound, and may not be reached.
    """
    last: dict[tuple[int, ...], int] = {}
    stays = []
    for now, request in enumerate(stream.requests):
        for end in range(1, len(request) + 1):
            path = request[:end]
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
