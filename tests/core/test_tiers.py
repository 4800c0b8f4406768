"""Engines with tiers: what is predicted of them, and orders that save seconds instead of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import batch_price
from support.price import orderer_of, serve, sizes_of
from support.rings import grid

from ragorder import DegradedWarning, Document, Orderer
from ragorder.benchmarks.ragcache.replacement.streams import DocumentStream, stream_of_trace
from ragorder.benchmarks.ragcache.replacement.tiers import A10G, SYSTEM_TOKENS, TwoTiers
from ragorder.eval.data.trace import trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.trie.profile import PrefillProfile

LOADS = {"host": 1.5e-4, "disk": 1e-3}
"""Seconds a token; computing one takes 2.2e-4 s and more."""


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefill times with slow loads, as a file of `ragorder profile`."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    replace(A10G, loads=LOADS).to_file(path)
    return path


@pytest.fixture(scope="module", params=grid(["mix8", "zipf10"], 1))
def stream(request: pytest.FixtureRequest) -> DocumentStream:
    return stream_of_trace(trace_of_workload(make_workload(request.param, 0), 400))


class TestPredictions:
    @pytest.mark.parametrize("policy", ["lru", "pgdsf", "forecast"])
    def test_the_simulated_engine_loads_what_is_predicted(
        self, stream: DocumentStream, profile: Path, policy: str
    ) -> None:
        """What the tiers hold and where: the mirror evicts as they do."""
        device, host = sizes_of(stream)
        tiers = TwoTiers(device, host, policy, 65_536, PrefillProfile.from_file(profile))
        found: list[tuple[int, int, int]] = []
        sizes = {"capacity_tokens": SYSTEM_TOKENS + device, "host_tokens": host}
        orderer = orderer_of(stream, **sizes, tier_policy=policy, tier_copies="evicted", profile=profile)

        def note(ordering: Any, served: Any) -> None:
            found.append((ordering.host_tokens, served.host_tokens, served.cached_tokens))

        serve(stream, orderer, tiers, note)
        cached = sum(tokens for _, _, tokens in found)
        assert sum(loaded for _, loaded, _ in found) > 0.05 * cached, "otherwise nothing is tested"
        assert sum(abs(predicted - loaded) for predicted, loaded, _ in found) <= 0.01 * cached

    def test_loads_are_part_of_the_cached_tokens(self) -> None:
        orderer = Orderer(capacity_tokens=48, host_tokens=480, disk_tokens=4800, block_size=16, suffix_tokens=0)
        first, second = Document("a", text="a", tokens=32), Document("b", text="b", tokens=32)
        for documents in ([first], [second]):
            orderer.order(documents).confirm()
        ordering = orderer.order([first])
        assert (ordering.cached_tokens, ordering.host_tokens, ordering.disk_tokens) == (32, 32, 0)
        ordering.confirm()
        again = orderer.order([first])
        assert (again.cached_tokens, again.host_tokens, again.disk_tokens) == (32, 0, 0), "it is on the device now"

    def test_what_only_the_disk_has_is_cached(self) -> None:
        orderer = Orderer(capacity_tokens=32, host_tokens=32, disk_tokens=4800, block_size=16, suffix_tokens=0)
        documents = [Document(name, text=name, tokens=32) for name in "abcde"]
        for document in documents:
            orderer.order([document]).confirm()
        ordering = orderer.order(documents[:1])
        assert (ordering.cached_tokens, ordering.host_tokens, ordering.disk_tokens) == (32, 0, 32)

    def test_a_preview_and_a_batch_plan_move_nothing(self) -> None:
        orderer = Orderer(capacity_tokens=48, host_tokens=320, block_size=16, suffix_tokens=0)
        documents = [Document(name, text=name, tokens=32) for name in "ab"]
        for document in documents:
            orderer.order([document]).confirm()
        orderer.preview(documents[:1])
        orderer.order_batch([documents[:1]])
        assert orderer.order(documents[1:]).host_tokens == 0
        assert orderer.order(documents[:1]).host_tokens == 32


class TestOneTier:
    @pytest.mark.parametrize("loads", [{}, LOADS])
    def test_orders_are_those_without_a_profile(
        self, stream: DocumentStream, tmp_path: Path, loads: dict[str, float]
    ) -> None:
        replace(A10G, loads=loads).to_file(tmp_path / "profile.json")
        priced = orderer_of(stream, capacity_tokens=30_000, profile=tmp_path / "profile.json")
        self.check_same(stream, orderer_of(stream, capacity_tokens=30_000), priced)

    def test_a_device_that_holds_everything_decides_as_one_tier(self, stream: DocumentStream, profile: Path) -> None:
        """Nothing is loaded, and so no price differs: the same documents, token for token."""
        capacity = stream.working_set_tokens + SYSTEM_TOKENS
        plain = orderer_of(stream, capacity_tokens=capacity)
        priced = orderer_of(stream, capacity_tokens=capacity, host_tokens=capacity, profile=profile)
        self.check_same(stream, plain, priced)

    @staticmethod
    def check_same(stream: DocumentStream, plain: Orderer, priced: Orderer) -> None:
        for documents in stream.requests:
            one, other = plain.order(documents), priced.order(documents)
            assert (one.documents, one.cached_tokens) == (other.documents, other.cached_tokens)
            assert other.host_tokens == 0
            one.confirm()
            other.confirm()


class TestOrders:
    def test_a_short_path_on_the_device_beats_a_longer_one_on_disk(self, profile: Path) -> None:
        """It takes 1 ms to load a token from the disk, and less to compute it."""
        sizes = {"capacity_tokens": 300, "host_tokens": 0, "disk_tokens": 3000, "block_size": 1, "suffix_tokens": 0}
        lengths = {"a": 100, "b": 80, "c": 90, "d": 200}
        a, b, c, d = (Document(name, text=name, tokens=count) for name, count in lengths.items())
        for prices, expected in ((None, "abc"), (profile, "c")):
            orderer = Orderer(**sizes, profile=prices)
            for documents in ([a, b], [c], [d]):
                orderer.order(documents).confirm()
            ordering = orderer.order([b, c, a])
            assert "".join(document.id for document in ordering.documents).startswith(expected)
            assert (ordering.disk_tokens == 0) == (prices is not None)

    @given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=12), st.integers(0, 1))
    def test_documents_are_a_permutation_within_the_guards(
        self, profile: Path, requests: list[list[int]], kept: int
    ) -> None:
        orderer = Orderer(
            key=lambda document: document,
            tokens=lambda document: 7 * document,
            capacity_tokens=64,
            host_tokens=128,
            disk_tokens=192,
            block_size=4,
            suffix_tokens=3,
            keep_first=kept,
            profile=profile,
            strict=True,
        )
        for number, documents in enumerate(requests):
            ordering = orderer.order(documents, scope=str(number % 2))
            assert sorted(ordering.documents) == sorted(documents)
            assert ordering.documents[:kept] == documents[:kept]
            assert ordering.host_tokens + ordering.disk_tokens <= ordering.cached_tokens
            if number % 3:
                ordering.confirm()
            else:
                ordering.discard()


class TestBatches:
    def test_the_plans_of_the_measurement_are_those_of_a_batch(
        self, stream: DocumentStream, profile: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """docs/batches.md: the one with most cached tokens has the order in which the batch is served."""
        monkeypatch.setattr(batch_price, "WARM", 60)
        monkeypatch.setattr(batch_price, "BATCH", 24)
        found = {plan.name: batch_price.measure(stream, plan, profile) for plan in batch_price.plans(8)}
        assert found.keys() == {"planned", "nearest first", "one by one"}
        assert all(each.seconds > 0 for each in found.values())
        best = max(found.values(), key=lambda each: each.cached_tokens)
        assert best.cached_tokens > found["one by one"].cached_tokens


class TestProfiles:
    def test_a_profile_without_loads_is_said_to_be_of_no_use(self, tmp_path: Path) -> None:
        A10G.to_file(tmp_path / "profile.json")
        with pytest.warns(DegradedWarning, match="ragorder profile"):
            orderer = Orderer(host_tokens=1000, profile=tmp_path / "profile.json")
        assert len(orderer.degraded) == 1

    def test_a_profile_that_cannot_be_read_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no-such"):
            Orderer(host_tokens=1000, profile=tmp_path / "no-such.json")
