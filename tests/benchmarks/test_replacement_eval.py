"""Replacement policies compared: simulated tiers held against slow, plain ones, and every row of the suites."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.results import result_lines
from support.rings import examples
from support.suites import assert_refused, run_suites

pytest.importorskip("numpy")

from ragorder.benchmarks.ragcache.replacement.experiment import TierSize
from ragorder.benchmarks.ragcache.replacement.streams import SKEWED, DocumentStream, skewed_stream, stream_of_trace
from ragorder.benchmarks.ragcache.replacement.tiers import (
    A10G,
    QUESTION_TOKENS,
    REPLACEMENT_POLICIES,
    SYSTEM_TOKENS,
    EventsOrderer,
    SimulatedPrefill,
    TwoTiers,
    mirroring_orderer,
    most_hits,
    simulate,
)
from ragorder.eval.data.trace import trace_of_workload
from ragorder.eval.data.workloads import WorkloadError, make_workload
from ragorder.eval.running.suite import load_suites
from ragorder.trie.policies import History, Tier, TierNode, make_policy

Path_ = tuple[int, ...]
CACHES = [policy for policy in REPLACEMENT_POLICIES if policy not in ("none", "device")]


class PlainTiers:
    """RAGCache's two tiers as the paper tells them, by paths. Each is a `Tier`, which its own tests hold against
    Algorithm 1."""

    def __init__(self, device: int, host: int, policy: str, history: bool) -> None:
        self.sizes: dict[Path_, int] = {}
        self.device_room, self.host_room = device, host
        self.device, self.host = (Tier(make_policy(policy), History(1_000) if history else None) for _ in range(2))

    def serve(self, documents: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
        paths = [tuple(documents[:end]) for end in range(1, len(documents) + 1)]
        self.sizes.update((path, tokens[path[-1]]) for path in paths)
        hits = 0
        while hits < len(paths) and (paths[hits] in self.device or paths[hits] in self.host):
            hits += 1
        from_host = sum(path not in self.device for path in paths[:hits])
        fitting = [path for place, path in enumerate(paths) if self.total(paths[: place + 1]) <= self.device_room]
        missing = [path for path in fitting if path not in self.device]
        known = {path: self.device.get(path) for path in self.sizes}
        gone = self.device.evict(self.device.used + self.total(missing) - self.device_room, set(paths))
        assert gone is not None
        for path in gone:
            if path not in self.host:
                self.keep(path, known[path], set(paths))
        for path in missing:
            self.device.insert(path, self.sizes[path], path[:-1] or None, known=self.host.get(path))
        cached, new = SYSTEM_TOKENS + self.total(paths[:hits]), QUESTION_TOKENS + self.total(paths[hits:])
        for tier in (self.device, self.host):
            tier.use(paths, cost=A10G.cost(cached, new), computed=paths[hits:])
        return hits, from_host

    def keep(self, path: Path_, known: TierNode | None, protected: set[Path_]) -> None:
        if self.host.evict(self.host.used + self.sizes[path] - self.host_room, protected) is not None:
            self.host.insert(path, self.sizes[path], path[:-1] or None, known=known)
            return
        for longer in [each for each in self.sizes if each in self.host and each[: len(path)] == path]:
            self.host.remove(longer)

    def total(self, paths: Sequence[Path_]) -> int:
        return sum(self.sizes[path] for path in paths)


TOKENS = [1, 2, 3, 4, 5, 6, 9, 17]
requests_of_few = st.lists(
    st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=4, unique=True), min_size=1, max_size=40
)


def paths_of(tiers: TwoTiers, requests: Sequence[Sequence[int]]) -> dict[Path_, int]:
    """All nodes that there are, by the documents from the root on."""
    found: dict[Path_, int] = {}
    for request in requests:
        for end, node in enumerate(tiers.path(request, TOKENS), 1):
            found[tuple(request[:end])] = node
    return found


class TestTwoTiers:
    @settings(max_examples=examples(150))
    @given(requests_of_few, st.integers(0, 30), st.integers(0, 50), st.sampled_from(CACHES))
    def test_hold_what_slow_and_plain_ones_hold(
        self, requests: list[list[int]], device: int, host: int, policy: str
    ) -> None:
        name, history, _ = policy.partition("+history")
        fast = TwoTiers(device, host, name, 1_000 if history else 0)
        slow = PlainTiers(device, host, name, bool(history))
        for number, request in enumerate(requests):
            served = fast.serve(request, TOKENS)
            assert (served.hits, served.host_hits) == slow.serve(request, TOKENS)
            nodes = paths_of(fast, requests[: number + 1])
            for tier, plain, room in ((fast.device, slow.device, device), (fast.host, slow.host, host)):
                assert [path for path, node in nodes.items() if node in tier] == [
                    path for path in nodes if path in plain
                ]
                assert tier.used == plain.used <= room
            for path, node in nodes.items():
                above = nodes.get(path[:-1])
                if node in fast.device and above is not None:
                    assert above in fast.device
                if node in fast.host and above is not None:
                    assert above in fast.device or above in fast.host

    def test_take_what_the_profile_says(self) -> None:
        tiers = TwoTiers(100, 100)
        tiers.serve([1, 2], TOKENS)
        served = tiers.serve([1, 3], TOKENS)
        assert (served.cached_tokens, served.new_tokens) == (SYSTEM_TOKENS + 2, QUESTION_TOKENS + 4)
        assert served.seconds == A10G(SYSTEM_TOKENS + 2, QUESTION_TOKENS + 4)

    def test_copy_out_only_once(self) -> None:
        tiers = TwoTiers(9, 50, "lru")
        for document in (6, 5, 6, 5, 6):  # each fills the device
            tiers.serve([document], TOKENS)
        assert (tiers.traffic.swapped_out, tiers.traffic.swapped_in) == (9 + 6, 9 + 6 + 9)
        assert tiers.traffic.lost == 0


@pytest.fixture(scope="module")
def skewed() -> DocumentStream:
    return skewed_stream("mmlu-like", 0, top_k=2, requests=1_500)


def served_in(
    stream: DocumentStream, policy: str, device: str, host: str, skip: int, **options: Any
) -> list[SimulatedPrefill]:
    sizes = [TierSize.parse(each).tokens(stream.working_set_tokens) for each in (device, host)]
    return simulate(stream, policy, *sizes, **options).served[skip:]


def hit_rate(stream: DocumentStream, policy: str, device: str, host: str, skip: int = 200, **options: Any) -> float:
    served = served_in(stream, policy, device, host, skip, **options)
    return sum(each.hits for each in served) / sum(map(len, stream.requests[skip:]))


def prefill_s(stream: DocumentStream, policy: str, device: str, host: str, skip: int = 200) -> float:
    return sum(each.seconds for each in served_in(stream, policy, device, host, skip))


class TestSimulating:
    @pytest.mark.parametrize("policy", CACHES)
    def test_with_room_for_all_hits_all_that_came_before(self, skewed: DocumentStream, policy: str) -> None:
        served = simulate(skewed, policy, skewed.working_set_tokens, 0).served
        assert [each.hits for each in served] == skewed.seen_before()

    def test_without_a_cache_computes_all(self, skewed: DocumentStream) -> None:
        served = simulate(skewed, "none", 1_000_000, 1_000_000).served
        assert all(each.hits == each.cached_tokens == 0 for each in served)
        longest = max(each.new_tokens for each in served)
        assert longest == SYSTEM_TOKENS + QUESTION_TOKENS + max(
            sum(skewed.tokens[document] for document in request) for request in skewed.requests
        )

    def test_on_the_device_alone_leaves_the_host_out(self, skewed: DocumentStream) -> None:
        found = simulate(skewed, "device", 30_000, 300_000)
        assert all(each.host_hits == 0 for each in found.served)
        assert found.traffic.swapped_out == 0
        alone = simulate(skewed, "lru", 30_000, 0)
        assert [each.hits for each in found.served] == [each.hits for each in alone.served]

    def test_is_the_same_every_time_whatever_strings_hash_to(self, python: Any) -> None:
        script = (
            "from ragorder.benchmarks.ragcache.replacement.streams import *\n"
            "from ragorder.benchmarks.ragcache.replacement.tiers import *\n"
            "stream = skewed_stream('nq-like', 3, top_k=3, requests=300)\n"
            "for policy in REPLACEMENT_POLICIES:\n"
            "    served = simulate(stream, policy, 30_000, 60_000).served\n"
            "    print(policy, sum(each.hits for each in served), sum(each.seconds for each in served))\n"
        )
        one, other = (python("-c", script, PYTHONHASHSEED=seed) for seed in ("7", "8"))
        assert one.returncode == 0, one.stderr
        assert one.stdout == other.stdout and len(one.stdout.splitlines()) == len(REPLACEMENT_POLICIES)

    @pytest.mark.parametrize("host", ["8GiB", "32GiB"])
    def test_frequency_and_cost_are_worth_what_is_required_of_them(self, skewed: DocumentStream, host: str) -> None:
        """On a stream whose popularity stays as it is: where it does not, or everything fits, LRU is as good."""
        hits = {policy: hit_rate(skewed, policy, "4GiB", host) for policy in ("pgdsf+history", "lru")}
        assert hits["pgdsf+history"] >= 1.05 * hits["lru"]
        ours, theirs = (prefill_s(skewed, policy, "4GiB", host) for policy in ("pgdsf+history", "gdsf+history"))
        assert ours <= 1.01 * theirs

    @pytest.mark.parametrize("policy", ["lru", "pgdsf+history", "forecast+history"])
    def test_an_orderer_that_follows_events_predicts_each_hit(self, policy: str) -> None:
        """Whatever the policy: the tiers say what they hold."""
        stream = stream_of_trace(trace_of_workload(make_workload("geo", 0), 250))
        tiers, events = TwoTiers(4_000, 12_000, policy.removesuffix("+history")), EventsOrderer(stream)
        for request in stream.requests:
            ordering = events.orderer.order(request)
            served = tiers.serve(ordering.documents, stream.tokens, ordering.expected_uses)
            # Where a block holds the end of one document and the beginning of the next, it goes with the next.
            assert served.hits - 1 <= ordering.prefix_documents <= served.hits
            events.publish(tiers, tiers.path(ordering.documents, stream.tokens), ordering.documents)
            ordering.confirm(served.cached_tokens)
        assert tiers.traffic.lost > 0

    @pytest.mark.parametrize("policy", ["lru", "lfu+history", "gdsf+history", "pgdsf+history", "forecast+history"])
    def test_an_orderer_that_mirrors_the_tiers_predicts_each_hit(self, policy: str) -> None:
        """Whatever the policy: the mirror evicts as the tiers do."""
        stream = stream_of_trace(trace_of_workload(make_workload("geo", 0), 250))
        name = policy.removesuffix("+history")
        tiers = TwoTiers(4_000, 12_000, name, 1_000)
        orderer = mirroring_orderer(stream, tiers, name, A10G)
        wrong = 0
        for request in stream.requests:
            ordering = orderer.order(request)
            served = tiers.serve(ordering.documents, stream.tokens, ordering.expected_uses)
            wrong += ordering.prefix_documents != served.hits or ordering.host_tokens != served.host_tokens
            ordering.confirm(served.cached_tokens)
        assert tiers.traffic.lost > 0
        assert wrong <= 2

    def test_waiting_requests_are_not_worse_off_for_being_known(self) -> None:
        stream = stream_of_trace(trace_of_workload(make_workload("mix8", 0), 400))
        options: dict[str, Any] = {"ordered": True, "follow": "events"}
        unknown, known = (
            hit_rate(stream, "forecast+history", "2%", "8%", 100, waiting=waiting, **options) for waiting in (0, 32)
        )
        assert known > 1.05 * unknown

    def test_awaited_nodes_stay_in_the_host_as_many_as_take_half_of_it(self) -> None:
        tiers = TwoTiers(9, 26, "lru")
        for document in (6, 5, 4):
            tiers.serve([document], TOKENS)
        awaited = tiers.held([6], in_order=True)
        tiers.expect([awaited])
        for document in (7, 3, 5, 4, 3, 2):
            tiers.serve([document], TOKENS)
        assert awaited[0] in tiers
        tiers.expect([])
        for document in (5, 4, 3, 2, 1, 0, 5):
            tiers.serve([document], TOKENS)
        assert awaited[0] not in tiers


class TestTheBound:
    def test_counts_the_cheapest_stays_first_after_the_warm_up(self) -> None:
        # Stays: of the first document 10 tokens for one request, and for two; of the second 40 tokens for three.
        stream = DocumentStream("mine", [(0,), (0,), (1,), (0,), (2,), (1,)], [10, 40, 5])
        assert most_hits(stream, 10**9) == 3
        assert most_hits(stream, 0) == 0
        # Room for 30 tokens x requests in all, and 60 more: half of what the last one needs.
        assert most_hits(stream, 5) == 2
        assert most_hits(stream, 15) == pytest.approx(2.5)
        stream = DocumentStream("mine", [(0,), (0,), (0,), (1,)], [10, 10])
        assert most_hits(stream, 10, warmup=2) == 1
        assert most_hits(stream, 10, warmup=3) == 0

    @pytest.mark.parametrize("policy", CACHES)
    @pytest.mark.parametrize(("device", "host"), [("1%", "2%"), ("2%", "10%"), ("10%", "50%")])
    def test_is_above_what_every_policy_hits(self, skewed: DocumentStream, policy: str, device: str, host: str) -> None:
        sizes = [TierSize.parse(each).tokens(skewed.working_set_tokens) for each in (device, host)]
        hits = sum(each.hits for each in simulate(skewed, policy, *sizes).served[200:])
        assert hits <= most_hits(skewed, sum(sizes), warmup=200) <= sum(skewed.seen_before()[200:])


class TestASkewedStream:
    @pytest.mark.parametrize("name", SKEWED)
    def test_has_its_share_of_requests_for_few_documents(self, name: str) -> None:
        stream = skewed_stream(name, 1, top_k=1, requests=60_000)
        counted = Counter(first for (first,) in stream.requests)
        popular = sum(count for _, count in counted.most_common(300))
        assert popular / 60_000 == pytest.approx(SKEWED[name], abs=0.02)

    def test_has_documents_of_the_papers_length(self, skewed: DocumentStream) -> None:
        assert sum(skewed.tokens) / len(skewed.tokens) == pytest.approx(3_718, rel=0.05)
        assert min(skewed.tokens) >= 1 and max(skewed.tokens) <= 16_384

    def test_draws_what_its_seed_says(self) -> None:
        one, again, other = (skewed_stream("mmlu-like", seed, top_k=5, requests=100) for seed in (1, 1, 2))
        assert one == again != other
        assert all(len(set(request)) == 5 for request in one.requests)

    def test_has_the_same_first_documents_for_the_same_neighbours(self, skewed: DocumentStream) -> None:
        seconds: dict[int, set[int]] = {}
        for first, second in skewed.requests:
            seconds.setdefault(first, set()).add(second)
        assert max(map(len, seconds.values())) <= 20

    def test_cannot_have_more_documents_than_neighbours(self) -> None:
        with pytest.raises(WorkloadError, match="lower top-k"):
            skewed_stream("mmlu-like", 0, top_k=21, requests=1)

    def test_documents_of_a_trace_are_identified_by_content(self) -> None:
        trace = trace_of_workload(make_workload("paper-shuf", 0), 50)
        stream = stream_of_trace(trace)
        assert [len(request) for request in stream.requests] == [5] * 50
        lengths = [[stream.tokens[document] for document in request] for request in stream.requests]
        assert lengths == [[document.token_count for document in request.documents] for request in trace.requests]

    def test_knows_its_working_set(self) -> None:
        stream = DocumentStream("few", [(0, 1), (0, 2), (1, 0), (0, 1)], [10, 20, 30])
        assert stream.working_set_tokens == 10 + 20 + 30 + 20 + 10
        assert stream.longest_tokens == 40
        assert stream.seen_before() == [0, 1, 0, 2]


class TestASize:
    @pytest.mark.parametrize(("said", "tokens"), [("8GiB", 65_536), ("0.5GiB", 4_096), ("5%", 500), ("0.1%", 10)])
    def test_is_gib_or_a_share(self, said: str, tokens: int) -> None:
        assert TierSize.parse(said).tokens(10_000) == tokens


SUITE = """
title = "A suite"
source = "tests"
says = "Something."
kind = "replacement"
policies = ["lru", "pgdsf+history", "gdsf+history"]
baseline = "lru"
warmup = 20
requests = 120
[cell]
device = "1%"
top_k = 2
[sweep]
host = ["5%", "20%"]
workload = ["paper-shuf"]
[[extra]]
host = ["1GiB"]
device = ["1GiB"]
workload = ["mmlu-like"]
[report]
chart = "replacement"
x = "host"
metrics = ["hits"]
"""


class TestSuites:
    def test_of_table_2_bring_both_data_sets_at_the_sizes_that_are_simulated(self) -> None:
        found = load_suites()["ragcache-figure-20"]
        rows = [row for row in found.paper if row.cell]
        points = [{name: point.get(name) for name in ("workload", "host")} for point in found.points]
        assert len(rows) == 10 and all(dict(row.cell) in points for row in rows)
        ratios = {row.label: (row.figures["from"], row.figures["to"]) for row in found.paper if not row.cell}
        assert ratios["hit rate of PGDSF by that of LRU"] == (1.06, 1.62)

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ('device = "1%"', 'device = "1 per cent"', "device: '1 per cent' is no size of a tier"),
            ('device = "1%"', "nodes = 5", 'nodes go with measure = "scheduling"'),
            ('device = "1%"', 'measure = "scheduling"', "needs nodes, and no stream"),
            ('device = "1%"', "", "device and host: give the sizes of both"),
            ('device = "1%"', 'device = "1%"\norder = "data"', "order is that of a corpus' questions"),
            ('device = "1%"', 'device = "1%"\ncorpus = "pydocs"', "either a workload or a corpus"),
        ],
    )
    def test_with_a_mistake_are_refused_with_file_and_field(self, old: str, new: str, said: str) -> None:
        assert_refused(SUITE, old, new, said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replacement")
    (folder / "mine.toml").write_text(SUITE, "utf-8")
    run_suites(folder, folder / "mine.toml", "--seeds", "0,1")
    return folder


class TestTheHarness:
    def test_keeps_every_request_and_gives_the_device_room_for_the_longest(self, folder: Path) -> None:
        found = result_lines(folder, "replacement")
        assert len(found) == 3 * 3 * 2
        for line in found:
            rows = line["rows"]
            assert {len(column) for column in rows.values()} == {120}
            assert all(0 <= host <= hits <= 2 for host, hits in zip(rows["host_hits"], rows["hits"], strict=True))
            assert set(rows["retrieved"]) == {2}
            assert min(rows["prefill_ms"]) > 25
            assert line["warmup"] == 20
        sizes = {line["cell"]["host"]: line["facts"]["host_tokens"] for line in found if line["seed"] == 0}
        assert sizes["1GiB"] == 8_192 and sizes["20%"] == pytest.approx(4 * sizes["5%"], abs=4)
        for line in found:
            if line["cell"]["workload"] == "paper-shuf":
                facts = line["facts"]
                assert facts["working_set_tokens"] // 100 < 400 < facts["device_tokens"] <= 2 * 220
