"""Quality guards: which orders they allow, and how an order is completed within them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.rings import examples
from support.waiting import counted_lines

from ragorder.guards import Guards

Groups = list[str | None]

GUARDS = st.builds(
    lambda ends, max_displacement, keep_groups, lost: Guards(*ends, max_displacement, keep_groups, lost),
    st.tuples(st.integers(0, 7), st.just(0)) | st.tuples(st.just(0), st.integers(0, 7)),
    st.none() | st.integers(0, 6),
    st.booleans(),
    st.none() | st.floats(0, 1),
)
GROUPS = st.lists(st.sampled_from([None, "x", "y"]), max_size=6)


def allowed(guards: Guards, groups: Groups, order: Sequence[int]) -> bool:
    """What the guards promise, said once more."""
    count = len(order)
    first, last = min(guards.keep_first, count), min(guards.keep_last, count)
    if list(order[:first]) != list(range(first)):
        return False
    if list(reversed(order))[:last] != list(range(last)):
        return False
    free = list(order[first : count - last])
    in_rank_order = sorted(free)
    limit = guards.max_displacement
    if limit is not None and any(abs(free.index(rank) - in_rank_order.index(rank)) > limit for rank in free):
        return False
    if guards.max_gain_lost is not None:
        least = (1 - guards.max_gain_lost) * discounted_gain(in_rank_order, first)
        if discounted_gain(free, first) < least - 1e-9:
            return False
    if guards.keep_groups:
        for group in {*groups} - {None}:
            members = [rank for rank in free if groups[rank] == group]
            if members != sorted(members):
                return False
    return True


def discounted_gain(ranks: Sequence[int], first_place: int) -> float:
    return sum(1 / (rank + 1) / math.log2(place + 2) for place, rank in enumerate(ranks, first_place))


def allowed_orders(guards: Guards, groups: Groups) -> list[tuple[int, ...]]:
    return [order for order in permutations(range(len(groups))) if allowed(guards, groups, order)]


@settings(deadline=None)
@given(GUARDS, GROUPS)
@example(Guards(keep_last=2, max_gain_lost=0.0625), [None] * 4)
def test_permits_exactly_the_beginnings_of_allowed_orders(guards: Guards, groups: Groups) -> None:
    request = guards.for_request(len(groups), groups)
    beginnings = {order[:length] for order in allowed_orders(guards, groups) for length in range(len(order) + 1)}
    for length in range(len(groups) + 1):
        for ranks in permutations(range(len(groups)), length):
            assert request.permits(ranks) == (ranks in beginnings), ranks


@settings(max_examples=examples(300), deadline=None)
@given(GUARDS, GROUPS, st.data())
def test_completes_to_the_allowed_order_that_follows_the_preferred_one_most_closely(
    guards: Guards, groups: Groups, data: st.DataObject
) -> None:
    """At each place stands the most preferred document that may stand there."""
    orders = allowed_orders(guards, groups)
    begun = data.draw(st.sampled_from(orders))[: data.draw(st.integers(0, len(groups)))]
    rest = data.draw(st.permutations([rank for rank in range(len(groups)) if rank not in begun]))
    preferred = [*begun, *rest]
    completed = guards.for_request(len(groups), groups).complete(begun, preferred)
    closest = min((order for order in orders if order[: len(begun)] == begun), key=lambda o: [*map(preferred.index, o)])
    assert tuple(completed) == closest


@given(
    GUARDS,
    st.lists(st.sampled_from([None, *"vwxyz"]), max_size=40).flatmap(
        lambda groups: st.tuples(st.just(groups), st.permutations(range(len(groups))))
    ),
)
def test_the_completed_order_satisfies_every_guard(
    guards: Guards, groups_and_preferred: tuple[Groups, list[int]]
) -> None:
    groups, preferred = groups_and_preferred
    request = guards.for_request(len(groups), groups)
    completed = request.complete((), preferred)
    assert sorted(completed) == list(range(len(groups)))
    assert allowed(guards, groups, completed)
    assert all(request.permits(completed[:length]) for length in range(len(completed) + 1))


def test_the_default_guards_nothing_and_any_one_setting_is_a_guard() -> None:
    assert not Guards()
    given = {"keep_first": 1, "keep_last": 1, "max_displacement": 0, "keep_groups": True, "max_gain_lost": 0.0}
    assert all(Guards(**{name: value}) for name, value in given.items())  # type: ignore[arg-type]
    request = Guards().for_request(4, [])
    assert all(request.permits(order) for order in permutations(range(4)))
    assert request.complete((), [3, 1, 0, 2]) == [3, 1, 0, 2]


@pytest.mark.parametrize(
    ("guards", "expected"),
    [
        (Guards(keep_first=2), [0, 1, 5, 4, 3, 2]),
        (Guards(keep_last=2), [5, 4, 3, 2, 1, 0]),
        (Guards(keep_first=9), [0, 1, 2, 3, 4, 5]),
        (Guards(max_displacement=1), [1, 0, 3, 2, 5, 4]),
        (Guards(max_displacement=2), [2, 3, 0, 1, 5, 4]),
        (Guards(keep_groups=True), [2, 4, 0, 1, 3, 5]),
        (Guards(keep_first=1, max_displacement=1), [0, 2, 1, 4, 3, 5]),
        # The reverse order after the best document costs 6.2 %, the worst document before all others 21.3 %.
        (Guards(max_gain_lost=0.1), [0, 5, 4, 3, 2, 1]),
        (Guards(max_gain_lost=0.2129), [5, 0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_worst_rank_first_as_far_as_the_guards_allow(guards: Guards, expected: list[int]) -> None:
    groups: Groups = ["x", "x", "y", "x", "y", "x"]
    assert guards.for_request(6, groups).complete((), [5, 4, 3, 2, 1, 0]) == expected


@pytest.mark.parametrize("length", range(7))
@pytest.mark.parametrize(
    "guards",
    [
        Guards(keep_first=1, max_displacement=2),
        Guards(keep_last=1, max_gain_lost=0.1),
        Guards(keep_groups=True),
        Guards(keep_first=2, keep_groups=True, max_gain_lost=0.05),
    ],
    ids=str,
)
def test_what_was_asked_before_changes_no_answer(guards: Guards, length: int) -> None:
    groups: Groups = ["x", "x", "y", "x", "y", "x"]
    asked = list(permutations(range(6), length))
    random.Random(length).shuffle(asked)
    request = guards.for_request(6, groups)
    for ranks in asked:
        assert request.permits(ranks) == guards.for_request(6, groups).permits(ranks)


@pytest.mark.parametrize(
    "guards",
    [
        Guards(max_gain_lost=0.1),
        Guards(max_displacement=100),
        Guards(keep_groups=True),
        Guards(keep_first=3, max_gain_lost=0.1, max_displacement=100, keep_groups=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [None, 0], ids=["rank order", "mixed"])
def test_steps_of_a_search_down_a_path_grow_no_faster_than_its_documents(guards: Guards, seed: int | None) -> None:
    steps = []
    for count in (100, 400):
        request = guards.for_request(count, ["x", "y"] * (count // 2))
        preferred = [*range(count)] if seed is None else random.Random(seed).sample(range(count), count)
        order = request.complete((), preferred)
        with counted_lines() as lines:
            assert all(request.permits(order[:end]) for end in range(count + 1))
        steps += lines
    assert steps[1] <= 4 * 1.5 * steps[0]


def test_steps_within_a_bounded_loss_grow_no_faster_than_documents() -> None:
    """Those of the other guards are counted in orders."""
    steps = []
    for count in (1_000, 4_000):
        with counted_lines() as lines:
            request = Guards(max_gain_lost=0.1).for_request(count, [None] * count)
            assert request.permits(request.complete((), random.Random(0).sample(range(count), count)))
        steps += lines
    assert steps[1] <= 4 * 1.5 * steps[0]
