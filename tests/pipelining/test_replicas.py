"""The choice among replicas: by what they have cached, less their load."""

from __future__ import annotations

from collections import Counter

import pytest
from support.inside import computed_in

from ragorder.pipelining.reordering import CachedLengths
from ragorder.pipelining.replicas import BestReplica, ReplicaState


def state(cached_tokens: float, in_flight: int = 0, prompt_tokens: float = 1000) -> ReplicaState:
    return ReplicaState(CachedLengths(cached_tokens, prompt_tokens - cached_tokens), in_flight)


class TestTheBest:
    @pytest.mark.parametrize(
        ("replicas", "best"),
        [
            ({"a": state(100), "b": state(800), "c": state(0)}, "b"),
            # It is not worth any queue, which counts beyond the least busy one.
            ({"a": state(500, in_flight=4), "b": state(0)}, "a"),
            ({"a": state(500, in_flight=6), "b": state(0)}, "a"),
            ({"a": state(500, in_flight=7), "b": state(0)}, "b"),
            ({"a": state(500, in_flight=104), "b": state(0, in_flight=100)}, "a"),
            ({"a": state(0, 2), "b": state(0, 1), "c": state(0, 3)}, "b"),
        ],
    )
    def test_has_most_cached(self, replicas: dict[str, ReplicaState], best: str) -> None:
        assert BestReplica[str]().choose(replicas) == best

    def test_is_the_same_for_a_prompt_of_twice_the_length(self) -> None:
        for scale in (1, 2, 100):
            replicas = {"a": state(300 * scale, 2, 1000 * scale), "b": state(0, 0, 1000 * scale)}
            assert BestReplica[str]().choose(replicas) == "a"


class TestWork:
    @pytest.mark.parametrize("prompt_tokens", [1000, 1])
    def test_of_requests_one_after_another_is_shared(self, prompt_tokens: int) -> None:
        """No replica is ever busy when the next request comes. Prompts of unknown length count as one token each."""
        best, chosen = BestReplica[int](), Counter[int]()
        for _ in range(400):
            chosen[best.choose({number: state(0, prompt_tokens=prompt_tokens) for number in range(4)})] += 1
        assert max(chosen.values()) <= 101

    def test_a_common_prefix_does_not_keep_all_on_one(self) -> None:
        """The first replica has the system prompt, a quarter of each request: the others get it, too."""
        best, held, computed = BestReplica[int](), {0}, Counter[int]()
        for _ in range(400):
            chosen = best.choose({number: state(250 if number in held else 0) for number in range(4)})
            held.add(chosen)
            computed[chosen] += 1
        assert held == {0, 1, 2, 3}
        assert max(computed.values()) <= 150

    def test_long_ago_is_forgotten(self) -> None:
        best = BestReplica[str]()
        for _ in range(20):
            best.choose({"a": state(0)})
        for _ in range(3200):
            best.choose({"b": state(0), "c": state(0)})
        assert best.choose({"a": state(0), "b": state(0), "c": state(0)}) == "a"

    def test_of_replicas_that_have_gone_takes_no_memory(self) -> None:
        """A fleet that grows and shrinks for months."""
        best = BestReplica[int]()
        for number in range(8000):
            best.choose({number: state(0), number + 1: state(0)})
        assert len(computed_in(best)) <= 4000
