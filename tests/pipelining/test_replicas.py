"""The choice among replicas: by what they have cached, less their load."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ragorder.pipelining.reordering import CachedLengths
from ragorder.pipelining.replicas import BestReplica, ReplicaState


def state(cached_tokens: float, in_flight: int = 0, prompt_tokens: float = 1000) -> ReplicaState:
    return ReplicaState(CachedLengths(cached_tokens, prompt_tokens - cached_tokens), in_flight)


class TestTheBest:
    def test_has_most_cached(self) -> None:
        assert BestReplica[str]().choose({"a": state(100), "b": state(800), "c": state(0)}) == "b"

    def test_is_not_worth_any_queue(self) -> None:
        assert BestReplica[str](busy=0.1).choose({"a": state(500, in_flight=4), "b": state(0)}) == "a"
        assert BestReplica[str](busy=0.1).choose({"a": state(500, in_flight=6), "b": state(0)}) == "b"

    def test_load_counts_beyond_the_least_busy_one(self) -> None:
        busy = {"a": state(500, in_flight=104), "b": state(0, in_flight=100)}
        assert BestReplica[str](busy=0.1).choose(busy) == "a"

    def test_is_the_same_for_a_prompt_of_twice_the_length(self) -> None:
        for scale in (1, 2, 100):
            replicas = {"a": state(300 * scale, 2, 1000 * scale), "b": state(0, 0, 1000 * scale)}
            assert BestReplica[str](busy=0.1).choose(replicas) == "a"

    def test_without_a_prediction_is_the_least_busy_one(self) -> None:
        assert BestReplica[str]().choose({"a": state(0, 2), "b": state(0, 1), "c": state(0, 3)}) == "b"

    @given(st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 1000), st.integers(0, 9)), min_size=1))
    def test_is_one_of_those_that_were_given(self, given_states: dict[int, tuple[int, int]]) -> None:
        replicas = {name: state(*each) for name, each in given_states.items()}
        assert BestReplica[int]().choose(replicas) in replicas


class TestWork:
    def test_of_requests_one_after_another_is_shared(self) -> None:
        """No replica is ever busy when the next request comes."""
        best, computed = BestReplica[int](), Counter[int]()
        for _ in range(400):
            computed[best.choose({number: state(0) for number in range(4)})] += 1
        assert max(computed.values()) <= 101

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
        best = BestReplica[str](half_life=4)
        for _ in range(20):
            best.choose({"a": state(0)})
        for _ in range(200):
            best.choose({"b": state(0), "c": state(0)})
        assert best.choose({"a": state(0), "b": state(0), "c": state(0)}) == "a"

    def test_of_replicas_that_have_gone_takes_no_memory(self) -> None:
        """A fleet that grows and shrinks for months."""
        best = BestReplica[int](half_life=4)
        for number in range(2000):
            best.choose({number: state(0), number + 1: state(0)})
        assert len(best._computed) <= 250

    def test_of_prompts_of_unknown_length_is_shared_too(self) -> None:
        """They count as one token each."""
        best, chosen = BestReplica[int](), Counter[int]()
        for _ in range(400):
            chosen[best.choose({number: state(0, prompt_tokens=1) for number in range(4)})] += 1
        assert max(chosen.values()) <= 101
