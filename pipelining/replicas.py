"""Choice among replicas of an engine with separate prefix caches."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

from ragorder.pipelining.reordering import CachedLengths

# Cost of a request in flight more than the least busy replica has, as a share of the prompt.
_BUSY = 0.08
# Further requests per replica after which one has half its weight.
_HALF_LIFE = 64
# Differences in work below this many prompts have little weight.
_FEW = 8
# Replicas with fewer tokens are dropped, since a changing fleet always has new names.
_NOTHING = 0.001

K = TypeVar("K", bound=Hashable)


class ReplicaState(NamedTuple):
    """A request's predicted lengths, and the replica's requests in flight."""

    lengths: CachedLengths
    in_flight: int


class BestReplica(Generic[K]):
    """Chooses the replica with the largest cached share of the prompt less its load.

    The load is 0.08 for each request in flight more than the least busy replica has, plus the share by which recently
    computed tokens exceed the mean (half-life: 64 requests per replica). Not thread-safe.
    """

    def __init__(self) -> None:
        self._computed: dict[K, float] = {}

    def choose(self, replicas: Mapping[K, ReplicaState]) -> K:
        decay = 0.5 ** (1 / (_HALF_LIFE * len(replicas)))
        decayed = {known: decay * tokens for known, tokens in self._computed.items()}
        computed = self._computed = {known: tokens for known, tokens in decayed.items() if tokens >= _NOTHING}
        done = {replica: computed.get(replica, 0.0) for replica in replicas}
        mean = sum(done.values()) / len(done)
        least = min(state.in_flight for state in replicas.values())

        def cost(replica: K) -> tuple[float, int, float]:
            (cached_tokens, computed_tokens, _), in_flight = replicas[replica]
            prompt = max(1.0, cached_tokens + computed_tokens)
            work = max(0.0, done[replica] - mean) / (mean + _FEW * prompt)
            return _BUSY * (in_flight - least) + work - cached_tokens / prompt, in_flight, done[replica]

        chosen = min(replicas, key=cost)
        computed[chosen] = done[chosen] + replicas[chosen].lengths.computed_tokens
        return chosen
