"""Views of the parts that are no interface, for tests alone."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Coroutine, Sequence
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


def scopes_of(orderer: Any) -> Any:
    return orderer._scopes


def lock_of(orderer: Any) -> Any:
    """The lock that defers work."""
    return orderer._lock


def held_while_working(orderer: Any) -> Any:
    return orderer._lock._lock


def deferred_in(orderer: Any) -> Any:
    """What waits for the lock's holder."""
    return orderer._lock._queue


def other_order_of(observed: Any) -> Any:
    """The orderer that is told what would have been sent."""
    return observed._other


def ordering_of(request: Any) -> Any:
    """The ordering of a request on its way."""
    return request._ordering


def lease_of(ordering: Any) -> Any:
    return ordering._lease


def plan_of(callback: Any) -> Any:
    """What the only request that is pending writes to a cloud's cache."""
    (sent,) = callback._pending.values()
    return sent._ordering.cloud._plan


def lock_of_outcomes(metrics: Any) -> Any:
    return metrics._settled._lock


def computed_in(choice: Any) -> Any:
    """What a choice of replicas has computed for each."""
    return choice._computed


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


def held_in(table: Any) -> Any:
    """What an engine's table, or a tier that is mirrored, has by its own account."""
    return table._held


def contents_in(table: Any) -> Any:
    """The contents that are known, held or not."""
    return table._contents


def watchers_of(table: Any) -> Any:
    return table._watchers


def writers_lock_of(table: Any) -> Any:
    return table._lock


def key_in(residency: Any, node: Any) -> Any:
    """The node's key in the mirror of tiers."""
    return residency._key(node)


def room_of(pool: Any) -> Any:
    return pool._held_tokens


def blocks_in(engine: Any) -> Any:
    """The simulated engine's blocks by their hashes."""
    return engine._block_of


def replace_take(patch: pytest.MonkeyPatch, events: Any, take: Callable[[Any], Any]) -> Any:
    """Let another function take the messages of events; return the one before."""
    before = events._take
    patch.setattr(events, "_take", take)
    return before


# ---------------------------------------------------------------- clients and servers


def nodes_in(graph: Any) -> Any:
    """The nodes of a graph that is being built."""
    return graph._nodes


def load_of(client: Any) -> Any:
    """What a pipelined client knows of the engine's load."""
    return client._pipeline.load


def engine_of(client: Any) -> Any:
    return client._pipeline._engine


def turns_in(conversation: Any) -> Any:
    return conversation._sent


def unsent_in(log: Any) -> Any:
    return log._waiting


def is_closed(log: Any) -> bool:
    return bool(log._stopped)


def never_fill(patch: pytest.MonkeyPatch) -> None:
    """Let a server's tiers need for ever to be filled."""
    from ragorder.adapters.vllm.server_profile import TierLoads

    patch.setattr(TierLoads, "_filling_s", lambda *_: math.inf)


def measured_client_of(server: Any) -> Any:
    return server._client


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


def requests_in(connector: Any) -> Any:
    return connector._cached_tokens


def spec_without_worker(spec: Any) -> Any:
    made = object.__new__(spec)
    made._worker = None
    return made


def policy_of(primary: Any) -> Any:
    return primary._policy


def set_policy(primary: Any, policy: Any) -> None:
    primary._policy = policy


def node_in(policy: Any, key: Any) -> Any:
    return policy._tier.get(key)


def awaited_by(policy: Any) -> Any:
    """Chunks that waiting requests need."""
    return policy._awaited


def threads_of(disk: Any) -> Any:
    return disk._threads


def store_of(disk: Any) -> Any:
    return disk._store


def chunk_file(disk: Any, key: Any) -> str:
    """The name of a chunk's file in the store's folder."""
    name: str = disk._store._index.chunks[key].name.path
    return name


def is_closing(threads: Any) -> bool:
    return bool(threads._closing)


# ---------------------------------------------------------------- the torch engine


def cache_of(engine: Any) -> Any:
    return engine._cache


def runner_of(engine: Any) -> Any:
    return engine._runner


def scheduler_of(engine: Any) -> Any:
    return engine._scheduler


def preempt(scheduler: Any, sequence: Any) -> None:
    scheduler._preempt(sequence)


def sequences_of(engine: Any) -> Any:
    """The sequences of all requests that have not ended, by id."""
    return engine._sequences


def counters_of(engine: Any) -> Any:
    return engine._counters


def memory_of(engine: Any) -> Any:
    """What gives memory back under pressure."""
    return engine._memory


def model_of(engine: Any) -> tuple[Any, Any]:
    """The model of an engine or a builder, and the shape of its KV."""
    return engine._model.model, engine._model.shape


def models_held() -> Any:
    from ragorder.kernels.models import model

    return model._held


def preprocessor_of(builder: Any) -> Any:
    return builder._preprocessor


def path_of(engine: Any, request: Any) -> Any:
    """The segments of a request's documents."""
    return engine._validator.admit(0, request).path


def questions_of(engine: Any, **bounds: Any) -> Any:
    """The questions that are kept, from now on within these bounds."""
    for name, value in bounds.items():
        setattr(engine._questions, f"_{name}", value)
    return engine._questions


def profile_in(cache: Any) -> Any:
    """The profile by which a cache prices what it evicts."""
    return cache._uses._profile


def scorer_of(engine: Any) -> Any:
    return engine._scheduler._fuser._scorer


def replace_forward(patch: pytest.MonkeyPatch, scorer: Any, replace: Callable[[Any], Any]) -> None:
    patch.setattr(scorer, "_forward", replace(scorer._forward))


def aligned(mask: Any) -> Any:
    """A mask as a GPU's kernel gets it."""
    from ragorder.kernels.attention import torch_backend

    return torch_backend._aligned(mask)


def lock_profile(cache: Any, key: str) -> Any:
    """Hold what a process holds that measures a profile."""
    return cache._lock(key, 1.0)


def streamer_of(engine: Any) -> Any:
    return engine._streamer


def await_reads(streamer: Any) -> None:
    """Wait until no layer is queued or being read."""
    ring = streamer._ring
    with ring._changed:
        assert ring._changed.wait_for(lambda: not ring._jobs, 60)


# ---------------------------------------------------------------- the engine's cache


def tiers_of(cache: Any) -> Any:
    return cache._tiers


def device_of(cache: Any) -> Any:
    return cache._tiers.device


def host_of(cache: Any) -> Any:
    return cache._tiers.host


def disk_of(cache: Any) -> Any:
    return cache._tiers.disk


def leases_of(cache: Any) -> Any:
    return cache._leases


def copies_of(cache: Any) -> Any:
    return cache._tiers.copies


def running_copies(cache: Any) -> Any:
    return cache._tiers.copies._running


# ---------------------------------------------------------------- searches


def cluster_index() -> Any:
    """The class that scans an IVF index's clusters."""
    from ragorder.pipelining.staged._ivf import ClusterIndex

    return ClusterIndex


def file_of(search: Any) -> Any:
    """The index file of a search by partition."""
    return search._file


def scanner_of(search: Any) -> Any:
    return search._scanner


def reads_ahead(passing: Any) -> bool:
    """Whether the next partition of a pass has been asked for, and no stage waits for it."""
    return passing._walk._reading is not None


def reader_of(search: Any) -> Any:
    """The thread that reads partitions."""
    return search._reader
