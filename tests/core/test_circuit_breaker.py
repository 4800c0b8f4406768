"""Pauses after failures in a row: when they begin, how long they are, and what ends them."""

from __future__ import annotations

import pytest

from ragorder.common.circuit_breaker import CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(5, 1.0, 60.0, clock)


def test_a_pause_begins_with_the_last_failure_in_a_row(breaker: CircuitBreaker) -> None:
    assert [breaker.failed() for _ in range(4)] == [0] * 4
    assert not breaker.succeeded()
    assert [breaker.failed() for _ in range(5)] == [0, 0, 0, 0, 1]
    assert [breaker.failed() for _ in range(40)] == [0] * 40, "those of attempts begun before make it no longer"
    assert breaker.left_s == 1
    assert breaker.succeeded() and breaker.left_s == 0
    assert not breaker.succeeded()
    assert [breaker.failed() for _ in range(5)] == [0, 0, 0, 0, 1]


def test_each_probe_that_fails_doubles_the_pause(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(5):
        breaker.failed()
    lengths = []
    for _ in range(8):
        clock.now += breaker.left_s
        breaker.begin()
        assert breaker.left_s > 0, "one probe at a time"
        lengths.append(breaker.failed())
        assert breaker.left_s == lengths[-1]
    assert lengths == [2, 4, 8, 16, 32, 60, 60, 60]


def test_a_probe_without_an_outcome_is_followed_by_another(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(5):
        breaker.failed()
    clock.now += 1
    breaker.begin()
    clock.now += 1
    assert breaker.left_s == 0


def test_a_pause_that_was_asked_for_does_not_end_early(breaker: CircuitBreaker) -> None:
    breaker.pause(30)
    breaker.pause(3)
    breaker.succeeded()
    assert breaker.left_s == 30
