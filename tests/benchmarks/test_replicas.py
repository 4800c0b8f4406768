"""Simulated fleets: the ring, the policies, what is measured, and processes that share their orders."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from ragorder.benchmarks.common.served import cached_share
from ragorder.benchmarks.fleet.replicas import ROUTERS, Replicas, ReplicasCell, Ring, SimulatedReplica, load, serve
from ragorder.benchmarks.fleet.sharing import SharingCell
from ragorder.benchmarks.fleet.sharing import serve as serve_sharing
from ragorder.eval.data.trace import TraceRequest, trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.running.record import Record

TOPICS = [f"topic {number}" for number in range(4000)]


def cell(**fields: Any) -> ReplicasCell:
    return ReplicasCell.read({"workload": "mix8", "replicas": 4, **fields}, "here")


@pytest.fixture(scope="module")
def requests() -> list[TraceRequest]:
    return list(trace_of_workload(make_workload("mix8", 0, requests=600), 600).requests)


@pytest.fixture(scope="module")
def many_topics() -> list[TraceRequest]:
    return list(trace_of_workload(make_workload("mix64", 0, requests=900), 900).requests)


def served(requests: list[TraceRequest], of: ReplicasCell, policy: str) -> Record:
    return Replicas.record(suite="mine", policy=policy, **serve(requests, of, policy, 0, 100))


class TestRing:
    def test_gives_each_replica_its_share_and_each_topic_every_replica_once(self) -> None:
        ring = Ring(range(16))
        found = Counter(next(ring.owners(topic)) for topic in TOPICS)
        assert max(found.values()) <= 1.3 * 4000 / 16
        assert len({next(ring.owners(topic)) for topic in TOPICS[:1000]}) == 16
        assert sorted(ring.owners("topic")) == list(range(16))

    def test_an_added_replica_takes_topics_from_the_others_and_moves_no_other(self) -> None:
        before, after = Ring(range(16)), Ring(range(17))
        owners = [(next(before.owners(topic)), next(after.owners(topic))) for topic in TOPICS]
        moved = [new for old, new in owners if old != new]
        assert set(moved) == {16}
        assert len(moved) <= 1.3 * len(TOPICS) / 17

    def test_topics_of_a_removed_replica_go_to_their_next_owners(self) -> None:
        before, after = Ring(range(16)), Ring(range(1, 16))
        for topic in TOPICS[:500]:
            old = list(before.owners(topic))
            assert next(after.owners(topic)) == next(owner for owner in old if owner != 0)


class TestAReplica:
    def test_predicts_what_its_engine_reports(self, requests: list[TraceRequest]) -> None:
        replica = SimulatedReplica(16_384, NumberedPrompts())
        for number, request in enumerate(requests[:200]):
            lengths = replica.predict(request.documents)
            started = replica.start(request, number)
            assert started.exact
            assert started.ordering.cached_tokens == started.cached_tokens == lengths.cached_tokens
            assert sum(lengths) == started.prompt_tokens
            replica.end(started)
        assert replica.in_flight == 0


class TestServing:
    @pytest.mark.parametrize("policy", ROUTERS)
    def test_serves_every_request_once_the_same_each_time_as_predicted(
        self, requests: list[TraceRequest], policy: str
    ) -> None:
        found = serve(requests, cell(), policy, 0, warmup=100)
        assert found == serve(requests, cell(), policy, 0, warmup=100)
        rows = found["rows"]
        assert sum(rows["requests"]) == 500
        assert len(rows["requests"]) == 4
        assert all(cached < prompt for cached, prompt in zip(rows["cached_tokens"], rows["prompt_tokens"], strict=True))
        # Beside the engine.
        assert found["facts"]["exact"] >= 0.99

    def test_topics_and_the_best_replica_find_more_than_chance(self, requests: list[TraceRequest]) -> None:
        found = {policy: cached_share(served(requests, cell(), policy)) for policy in ROUTERS}
        chance = max(found[policy] for policy in ("random", "in turn", "least busy"))
        assert found["topic"] > chance + 0.05
        assert found["topic, bound 2"] > chance + 0.05
        assert found["best"] > chance + 0.05

    def test_bounded_load_bounds_the_requests_in_flight(self, requests: list[TraceRequest]) -> None:
        loose = serve(requests, cell(), "topic", 0, 100)["facts"]["in_flight"]
        bounded = serve(requests, cell(), "topic, bound 1.25", 0, 100)["facts"]["in_flight"]
        # Rounded up to whole requests: 6 of 17 on four replicas.
        assert bounded <= 1.5 < loose

    def test_a_table_of_sessions_balances_what_a_ring_of_hashes_does_not(self, many_topics: list[TraceRequest]) -> None:
        """And finds as much, as a topic stays where it has begun."""
        policies = ("topic, bound 2", "topic, table, bound 2")
        ring, table = (served(many_topics, cell(replicas=8), policy) for policy in policies)
        assert load(table) < load(ring)
        assert cached_share(table) > cached_share(ring) - 0.02

    def test_a_table_loses_the_topics_of_a_replica_that_goes_and_no_other(
        self, many_topics: list[TraceRequest]
    ) -> None:
        added, removed = serve(many_topics, cell(replicas=8, changes=True), "topic, table", 0, 100)["facts"]["moved"]
        assert added == 0
        assert 0 < removed <= 1.6 / 9

    def test_replicas_that_come_and_go_move_few_topics(self, many_topics: list[TraceRequest]) -> None:
        found = serve(many_topics, cell(replicas=8, changes=True), "topic", 0, 100)
        added, removed = found["facts"]["moved"]
        assert 0 < added <= 1.6 / 9
        assert 0 < removed <= 1.6 / 9
        assert found["rows"]["always"] == [0, 1, 1, 1, 1, 1, 1, 1, 0]
        assert all(found["rows"]["requests"][1:])


def test_a_cell_has_one_trace() -> None:
    for fields in ({}, {"workload": "mix8", "corpus": "pydocs"}):
        with pytest.raises(ValidationError, match="either workload or corpus"):
            ReplicasCell(replicas=4, **fields)


class TestMixedStreams:
    def test_eight_are_those_of_the_published_figures(self) -> None:
        drawn = json.dumps(make_workload("mix8", 0).rankings).encode()
        assert hashlib.sha256(drawn).hexdigest()[:16] == "be5c37c32847346c"


def sharing(**fields: Any) -> SharingCell:
    return SharingCell.read({"workload": "mix8", **fields}, "here")


def cached(rows: dict[str, list[int]]) -> float:
    return sum(rows["cached_tokens"]) / sum(rows["prompt_tokens"])


class TestSharedOrders:
    def test_one_process_has_nothing_to_share(self, requests: list[TraceRequest]) -> None:
        one = sharing(processes=1)
        assert serve_sharing(requests, one, 0, 100, shared=True) == serve_sharing(requests, one, 0, 100, shared=False)

    def test_shared_orders_are_nearly_those_of_one_process(self, requests: list[TraceRequest]) -> None:
        one = cached(serve_sharing(requests, sharing(processes=1), 0, 100, shared=False))
        for processes in (4, 16):
            many = sharing(processes=processes)
            own, shared = (cached(serve_sharing(requests, many, 0, 100, shared=shared)) for shared in (False, True))
            assert shared >= 0.9 * one > own

    def test_late_ones_are_worth_less(self, requests: list[TraceRequest]) -> None:
        found = [cached(serve_sharing(requests, sharing(late=late), 0, 100, shared=True)) for late in (0, 64)]
        assert found[0] > found[1]

    def test_is_the_same_each_time(self, requests: list[TraceRequest]) -> None:
        rows = [serve_sharing(requests[:200], sharing(), 1, 10, shared=True) for _ in range(2)]
        assert rows[0] == rows[1]
        assert {len(column) for column in rows[0].values()} == {190}
