"""Views of the parts that are no interface, for tests alone."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Coroutine, Sequence
from operator import attrgetter
from typing import Any

import pytest

_BOUNDS = {
    "answer_check_s": "adapters.proxy.upstream._CHECK_S",
    "compared_requests": "eval.replay.overlap._COMPARED_REQUESTS",
    "comparisons": "eval.replay.overlap._COMPARISONS",
    "contents": "kernels.cache.contents._FEWEST",
    "copies": "kernels.cache.contents._MOST_COPIES",
    "documents_per_shard": "cli.planning.run._DOCUMENTS_PER_SHARD",
    "escaped_window": "tokens._WINDOW",
    "hashed_bytes": "kernels.store.hashing._PIECE_BYTES",
    "kept_prefixes": "adapters.proxy.bodies.parsing._PREFIXES",
    "kept_turns": "adapters.proxy.bodies.turns._KEPT_TURNS",
    "pending_calls": "adapters.litellm.callback._MOST_PENDING",
    "planned_bytes": "cli.planning.run._PLANNED_BYTES",
    "planned_candidates": "trie.plan._MOST_CANDIDATES",
    "planned_holders": "trie.plan._MOST_HOLDERS",
    "prompt_bytes": "prompt._KEPT_BYTES",
    "published_s": "adapters.vllm.server_profile._PUBLISHED_S",
    "replay_timeout_s": "adapters.vllm.kv_events._REPLAY_TIMEOUT_S",
    "settled_ns": "adapters.vllm_tiers.disk_identity._SETTLED_NS",
    "silence_s": "adapters.vllm.connect._PATIENCE_S",
    "steps_to_grow": "kernels.engine.scheduler._STEPS_TO_GROW",
    "streamed_steps_to_grow": "kernels.engine.budgeted._STEPS_TO_GROW",
    "synchronise_s": "adapters.vllm.connect._SYNCHRONISE_S",
    "weights": "kernels.attention.weights._WEIGHTS",
    "weights_rows": "kernels.attention.weights._ROWS",
}
"""Limits and times that are too large for a test."""
ALLOCATE, ALLOCATE_LAYER = "_make", "_zeros"
"""Methods of pools of KV that can find no memory."""
NEXT_PIECE = "_next_piece"
"""The method of a search that chooses what is scanned next."""


def _place(name: str) -> tuple[Any, str]:
    module, _, constant = f"ragorder.{_BOUNDS[name]}".rpartition(".")
    return importlib.import_module(module), constant


def bound(name: str) -> Any:
    return getattr(*_place(name))


def set_bounds(patch: pytest.MonkeyPatch, **bounds: Any) -> None:
    for name, value in bounds.items():
        patch.setattr(*_place(name), value)


# ---------------------------------------------------------------- orderers


scopes_of = attrgetter("_scopes")
lock_of = attrgetter("_lock")  # The lock that defers work
held_while_working = attrgetter("_lock._lock")
deferred_in = attrgetter("_lock._queue")  # What waits for the lock's holder
other_order_of = attrgetter("_other")  # The orderer that is told what would have been sent
ordering_of = attrgetter("_ordering")  # The ordering of a request on its way
lease_of = attrgetter("_lease")


def plan_of(callback: Any) -> Any:
    """What the only request that is pending writes to a cloud's cache."""
    (sent,) = callback._pending.values()
    return sent._ordering.cloud._plan


lock_of_outcomes = attrgetter("_settled._lock")
computed_in = attrgetter("_computed")  # What a choice of replicas has computed for each


def dry_run(orderer: Any, batch: Sequence[Sequence[Any]]) -> tuple[list[Any], Any]:
    """The requests of a batch, and a run of them on a copy of the orderer's state."""
    from ragorder.scope.batch_plan import _DryRun

    requests = [orderer._reader.read(list(documents)) for documents in batch]
    return requests, _DryRun(orderer._copy_of(None, None, requests), None)


def batch_orders() -> tuple[Any, Any, Any]:
    """The orders that are tried for a batch: in windows, the nearest first, one by one."""
    from ragorder.scope.batch_plan import _in_windows, _nearest_first, _one_by_one

    return _in_windows, _nearest_first, _one_by_one


def start_in(orderer: Any, start: Callable[[Any], Any]) -> Any:
    """Start a request by the scope that it belongs to."""
    return orderer._lock.run(orderer._work_in, None, None, start)


def escaping() -> tuple[Any, int, Any]:
    """The common special tokens, how often they are looked for, and what stands in place of one."""
    from ragorder import tokens

    return tokens._COMMON_SPECIAL_TOKENS, tokens._PASSES, tokens._break


def escape(pattern: Any, longest: int, text: str) -> str | None:
    from ragorder import tokens

    return tokens._replace(pattern, longest, text, tokens._break)


# ---------------------------------------------------------------- residency


held_in = attrgetter("_held")  # What an engine's table, or a tier that is mirrored, has by its own account
contents_in = attrgetter("_contents")  # The contents that are known, held or not
watchers_of = attrgetter("_watchers")
writers_lock_of = attrgetter("_lock")


def key_in(residency: Any, node: Any) -> Any:
    """The node's key in the mirror of tiers."""
    return residency._key(node)


room_of = attrgetter("_held_tokens")
blocks_in = attrgetter("_block_of")  # The simulated engine's blocks by their hashes


def replace_take(patch: pytest.MonkeyPatch, events: Any, take: Callable[[Any], Any]) -> Any:
    """Let another function take the messages of events; return the one before."""
    before = events._take
    patch.setattr(events, "_take", take)
    return before


# ---------------------------------------------------------------- clients and servers


nodes_in = attrgetter("_nodes")  # The nodes of a graph that is being built
load_of = attrgetter("_pipeline.load")  # What a pipelined client knows of the engine's load
engine_of = attrgetter("_pipeline._engine")
turns_in = attrgetter("_sent")
unsent_in = attrgetter("_waiting")


def is_closed(log: Any) -> bool:
    return bool(log._stopped)


def never_fill(patch: pytest.MonkeyPatch) -> None:
    """Let a server's tiers need for ever to be filled."""
    from ragorder.adapters.vllm.server_profile import TierLoads

    patch.setattr(TierLoads, "_filling_s", lambda *_: math.inf)


measured_client_of = attrgetter("_client")


def replay_in_worker(patch: pytest.MonkeyPatch, shared: tuple[Any, ...], job: Any) -> bool:
    """Replay a job as a worker that has this of its parent; return False if it was stopped."""
    from ragorder.eval.replay import sweep

    patch.setattr(sweep, "_shared", shared, raising=False)
    try:
        sweep._work(0, job)
    except sweep._StoppedError:
        return False
    return True


def serve_live(connect: Callable[[], Any], prompts: Any, max_in_flight: int, *served: Any) -> Coroutine[Any, Any, Any]:
    """What `LiveQueues.serve` runs, without a server to ask for its model."""
    from ragorder.benchmarks.ragcache.reordering import LiveQueues

    queues: Any = object.__new__(LiveQueues)
    queues._connect, queues._prompts, queues._max_in_flight = connect, prompts, max_in_flight
    run: Coroutine[Any, Any, Any] = queues._serve(*served)
    return run


def vllm_of(engine: Any) -> tuple[Any, int]:
    """vLLM's own engine, and the tokens of its longest request."""
    return engine._open(), engine._longest


# ---------------------------------------------------------------- vLLM's tiers


def blocks_of(order: Any) -> tuple[Any, Any]:
    """Blocks with a content, by the order's account, and those that go first."""
    return order._keys, order._spare


def connector_without_engine(tier_settings: Any, profile: Any, **parts: Any) -> Any:
    from ragorder.adapters.vllm_tiers.ordered_connector import DeviceOrderConnector

    connector: Any = DeviceOrderConnector.__new__(DeviceOrderConnector)
    connector._bounding_group_ids, connector._cached_tokens = (), {}
    connector._tier_settings, connector._profile = tier_settings, profile
    for name, part in parts.items():
        setattr(connector, name, part)
    return connector


requests_in = attrgetter("_cached_tokens")


def spec_without_worker(spec: Any) -> Any:
    made = object.__new__(spec)
    made._worker = None
    return made


policy_of = attrgetter("_policy")


def set_policy(primary: Any, policy: Any) -> None:
    primary._policy = policy


def node_in(policy: Any, key: Any) -> Any:
    return policy._tier.get(key)


awaited_by = attrgetter("_awaited")  # Chunks that waiting requests need
threads_of = attrgetter("_threads")
store_of = attrgetter("_store")


def chunk_file(disk: Any, key: Any) -> str:
    """The name of a chunk's file in the store's folder."""
    name: str = disk._store._index.chunks[key].name.path
    return name


def is_closing(threads: Any) -> bool:
    return bool(threads._closing)


# ---------------------------------------------------------------- the torch engine


cache_of = attrgetter("_cache")
runner_of = attrgetter("_runner")
scheduler_of = attrgetter("_scheduler")


def preempt(scheduler: Any, sequence: Any) -> None:
    scheduler._preempt(sequence)


sequences_of = attrgetter("_sequences")  # The sequences of all requests that have not ended, by id
counters_of = attrgetter("_counters")
memory_of = attrgetter("_memory")  # What gives memory back under pressure


def model_of(engine: Any) -> tuple[Any, Any]:
    """The model of an engine or a builder, and the shape of its KV."""
    return engine._model.model, engine._model.shape


def models_held() -> Any:
    from ragorder.kernels.models import model

    return model._held


preprocessor_of = attrgetter("_preprocessor")


def path_of(engine: Any, request: Any) -> Any:
    """The segments of a request's documents."""
    return engine._validator.admit(0, request).path


def questions_of(engine: Any, **bounds: Any) -> Any:
    """The questions that are kept, from now on within these bounds."""
    for name, value in bounds.items():
        setattr(engine._questions, f"_{name}", value)
    return engine._questions


profile_in = attrgetter("_uses._profile")  # The profile by which a cache prices what it evicts
scorer_of = attrgetter("_scheduler._fuser._scorer")


def replace_forward(patch: pytest.MonkeyPatch, scorer: Any, replace: Callable[[Any], Any]) -> None:
    patch.setattr(scorer, "_forward", replace(scorer._forward))


def aligned(mask: Any) -> Any:
    """A mask as a GPU's kernel gets it."""
    from ragorder.kernels.attention import torch_backend

    return torch_backend._aligned(mask)


def lock_profile(cache: Any, key: str) -> Any:
    """Hold what a process holds that measures a profile."""
    return cache._lock(key, 1.0)


streamer_of = attrgetter("_streamer")


def await_reads(streamer: Any) -> None:
    """Wait until no layer is queued or being read."""
    ring = streamer._ring
    with ring._changed:
        assert ring._changed.wait_for(lambda: not ring._jobs, 60)


# ---------------------------------------------------------------- the engine's cache


tiers_of = attrgetter("_tiers")
device_of = attrgetter("_tiers.device")
host_of = attrgetter("_tiers.host")
disk_of = attrgetter("_tiers.disk")
leases_of = attrgetter("_leases")
copies_of = attrgetter("_tiers.copies")
running_copies = attrgetter("_tiers.copies._running")


# ---------------------------------------------------------------- searches


def cluster_index() -> Any:
    """The class that scans an IVF index's clusters."""
    from ragorder.pipelining.staged._ivf import ClusterIndex

    return ClusterIndex


file_of = attrgetter("_file")  # The index file of a search by partition
scanner_of = attrgetter("_scanner")


def reads_ahead(passing: Any) -> bool:
    """Whether the next partition of a pass has been asked for, and no stage waits for it."""
    return passing._walk._reading is not None


reader_of = attrgetter("_reader")  # The thread that reads partitions
