"""The embedded engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any, Self

import torch

from ragorder.kernels.cache import TierTokens
from ragorder.kernels.engine.budgeted import MemoryPressure, StreamedMemory, StreamedModel, load_streamed
from ragorder.kernels.engine.fair_lock import FairLock
from ragorder.kernels.engine.moving import Moves
from ragorder.kernels.engine.request import (
    Completion,
    Fault,
    FinishReason,
    Request,
    RequestRefusedError,
    ShortOfMemoryError,
    Update,
    UpdateQueues,
)
from ragorder.kernels.engine.runner import Ended, FailedSteps, ModelRunner, SampledToken
from ragorder.kernels.engine.scheduler import ScheduledChunk, Scheduler
from ragorder.kernels.engine.scoring import Scorer
from ragorder.kernels.engine.selecting import Fuser, KeptQuestions, check_fusion
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.engine.stats import EngineCounters, EngineStats
from ragorder.kernels.engine.validation import RequestValidator
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.models.loading import load_model, load_tokenizer
from ragorder.kernels.models.model import PatchedModel, cache_maker, device_blocks
from ragorder.kernels.models.prefill_times import engine_profile
from ragorder.kernels.offload.residency import LayerTiers
from ragorder.kernels.paging import OutOfBlocksError
from ragorder.kernels.preprocessing.fit import BuildFit
from ragorder.pipelining.placement.base import Placement, Spread

# A step's wait for loads without anything to compute.
_IDLE_S = 0.001
_FORWARD_FAILED = "the model's forward failed"


class TieredEngine:
    """Serves a transformers model, with documents' KV cached on three tiers.

        with TieredEngine.load("Qwen/Qwen2.5-0.5B-Instruct") as engine:
            [completion] = engine.generate([Request(token_ids, document_ends)])

    Answers equal those of the model without a cache; with `reuse="fused"` they approximate them (FusionRAG). A step
    that fails with the device is computed again (RAGCache section 6). With `device_bytes`, `load` streams decoder
    layers that do not fit (RAGDoll 4.2, 4.3).

    Any thread may call; one runs at a time. `generate` and `stream` call `step`. Until `close` the model has the
    engine's attention. Raises UnsupportedModelError; `step` and `add` raise DeviceLostError once only another process
    can use the device.
    """

    def __init__(
        self, model: Any | StreamedModel, tokenizer: Any | None = None, settings: EngineSettings | None = None
    ) -> None:
        self.settings = settings = settings or EngineSettings()
        streamed = model if isinstance(model, StreamedModel) else None
        if settings.device_bytes is not None and streamed is None:
            raise ValueError(
                "device_bytes needs weights that stream from files: use TieredEngine.load, or leave it out"
            )
        self.tokenizer = tokenizer
        self.block_size = settings.block_size
        self._lock = FairLock()
        self._counters = EngineCounters()
        self._ids = count()
        self._sequences: dict[int, Sequence] = {}
        self._updates = UpdateQueues()
        self._closed = False
        self._streamer = None if streamed is None else streamed.streamer
        self._model = PatchedModel(model if streamed is None else streamed.model, settings, self._streamer)
        self.model_name = self._model.name
        try:
            memory = None if streamed is None else StreamedMemory(self._model, streamed, settings)
            self._set_up(settings if memory is None else memory.settings, self._model, memory)
        except BaseException:
            self._model.restore()
            raise

    def _set_up(self, settings: EngineSettings, model: PatchedModel, memory: StreamedMemory | None) -> None:
        shape = model.shape
        rotation = self._rotation(model) if settings.reuse == "fused" else None
        blocks = device_blocks(shape, model.device, settings.device_tokens, model.longest, settings.device_share)
        if memory is not None:
            memory.place_layers()
        self.profile = settings.prefill_profile(lambda: engine_profile(model, settings, blocks))
        make = cache_maker(model, settings, self.profile, self._streamer)
        self._cache = make(blocks, settings.host_bytes, ()) if memory is None else memory.make_cache(make)
        self.max_model_len = model.longest or self.device_tokens
        ends = model.end_tokens(self.tokenizer)
        self._validator = RequestValidator(
            model.vocabulary, self.max_model_len, self.device_tokens, self.tokenizer, ends, settings
        )
        fuser = None
        self._questions: KeptQuestions | None = None
        self._build: BuildFit | None = None
        if rotation is not None:
            scorer = Scorer(model.forward, self._cache.pool, rotation, settings.max_batch_tokens)
            self._questions = KeptQuestions(scorer, shape.block_size, self._counters)
            fuser = Fuser(self._cache, rotation, scorer, self._questions)
        if rotation is not None and settings.disk_path is not None:
            self._build = self._find_build(settings.disk_path)
        window = settings.schedule_window if settings.schedule == "cached-first" else 0
        self._scheduler = Scheduler(
            self._cache, settings.max_batch_tokens, settings.max_requests, window, self.profile, fuser
        )
        self._runner = ModelRunner(model.forward, self._cache.pool)
        self._memory = MemoryPressure(self._scheduler, self._cache, memory)
        self._moves = Moves(self._lock, self._memory, self._ready_for_pools, self._sequences.values)
        self._failures = FailedSteps(
            self._scheduler, self._runner, self._counters, settings.max_retries, self.forget_device
        )

    def _find_build(self, folder: Path) -> BuildFit | None:
        other_model = "identity" in (self._cache.stats().disk.refused or {})
        build = BuildFit.of(folder, model=self.model_name, other_model=other_model)
        if build is not None:
            self._counters.build_fits, self._counters.build_sides = build.counts, build.sides
        return build

    def _rotation(self, model: PatchedModel) -> Rotation:
        check_fusion(model.model)
        rotation = Rotation.of(model.model)
        if self.settings.verify:
            rotation.verify(model.model)
        return rotation

    @classmethod
    def load(cls, name: str | Path, settings: EngineSettings | None = None) -> Self:
        """Load model and tokenizer from a folder or the Hub. Also raises ModelLoadError, PlacementError."""
        settings = settings or EngineSettings()
        if settings.device_bytes is None:
            return cls(load_model(name, settings), load_tokenizer(name), settings)
        tokenizer = load_tokenizer(name)
        streamed = load_streamed(name, settings)
        try:
            return cls(streamed, tokenizer, settings)
        except BaseException:
            streamed.streamer.close()
            raise

    @property
    def device_tokens(self) -> int:
        return self._cache.pool.blocks * self.block_size

    @property
    def longest(self) -> int:
        """Maximum tokens of a prompt with its answer: layers make way if the pool is smaller now."""
        return min(self.max_model_len, self._validator.device_tokens)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences or self._updates)

    def add(self, request: Request) -> int:
        """Queue a request and return its id. Raises RequestRefusedError; RuntimeError after `close`."""
        with self._lock:
            self._check_open()
            request_id = next(self._ids)
            try:
                sequence = self._validator.admit(request_id, request)
                self._hold(sequence)
            except RequestRefusedError:
                self._counters.refused += 1
                raise
            self._sequences[request_id] = sequence
            self._scheduler.add(sequence)
            if self._build is not None and sequence.fusion is not None:
                self._build.observe(sequence.path)
            return request_id

    def abort(self, request_id: int) -> bool:
        """End a request; the next `step` has its completion. Return False if it was absent."""
        with self._lock:
            sequence = self._sequences.get(request_id)
            if sequence is None:
                return False
            self._updates.put([self._end(sequence, "abort")])
            return True

    def step(self) -> list[Update]:
        """Compute a step and return its updates; none while all requests wait for prefixes."""
        with self._lock:
            self._run_step()
            return self._updates.take()

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Serve requests together. Return completions in order; refused ones have finish reason "error"."""
        completions: dict[int, Completion] = {}
        ids: list[int] = []
        try:
            ids.extend(self._subscribe(request, completions) for request in requests)
            for request_id in ids:
                while request_id not in completions:
                    for update in self._next_updates(request_id):
                        if update.completion is not None:
                            completions[request_id] = update.completion
        finally:
            for request_id in ids:
                self._unsubscribe(request_id)
        return [completions[request_id] for request_id in ids]

    def stream(self, request: Request) -> Iterator[Update]:
        """Yield a request's updates, the last with its completion. Closing the iterator aborts it. The first update
        raises RequestRefusedError."""
        with self._lock:
            request_id = self.add(request)
            self._updates.subscribe(request_id)
        try:
            while True:
                for update in self._next_updates(request_id):
                    yield update
                    if update.completion is not None:
                        return
        finally:
            self._unsubscribe(request_id)

    def stats(self) -> EngineStats:
        with self._lock:
            scheduler = self._scheduler
            running = set(_requests(scheduler.running))
            waiting = sum(sequence not in running for sequence in scheduler.waiting)
            stream = None if self._streamer is None else self._streamer.stats
            if stream is not None:
                stream = replace(stream, kv_host_layers=len(self._cache.layers_in_host))
            return self._counters.snapshot(self._cache.stats(), len(running), waiting, scheduler.preempted, stream)

    @property
    def placement(self) -> Placement:
        """The placement now. `partitions` is 0: the engine has no index."""
        with self._lock:
            cache, step_tokens = self._cache.stats(), self._scheduler.step_tokens
            stream = None if self._streamer is None else self._streamer.stats
            weights = Spread(self._cache.shape.layers)
            if stream is not None:
                weights = Spread(stream.device_layers, stream.host_layers, stream.disk_layers)
            return Placement(
                weights,
                Spread(cache.device.capacity_bytes, cache.host.capacity_bytes, cache.disk.capacity_bytes),
                partitions=0,
                batch=min(self._scheduler.max_requests, step_tokens),
                step_tokens=step_tokens,
                slots=self._streamer.wanted_slots if self._streamer and weights.device < weights.total else 0,
                kv_host_layers=len(self._cache.layers_in_host),
            )

    def relieve(self) -> bool:
        """Give memory back as `MemoryPressure` does. Return False if nothing is left to give."""
        with self._lock:
            self._failures.check_device()
            if self._closed:
                return False
            self._forget_work()
            return self._relieve(self._scheduler.step_tokens)

    def resize(self, *, device_tokens: int | None = None, host_bytes: int | None = None) -> None:
        """Resize the KV pools from the next step on; smaller ones evict by the policy. Raises OutOfBlocksError if
        requests need more, and MemoryError; both keep the sizes."""
        with self._lock:
            self._ready_for_pools()
            self._memory.resize(device_tokens, host_bytes, self._sequences.values())
            if device_tokens is not None:
                self._validator = replace(self._validator, device_tokens=self.device_tokens)

    def place(self, placement: Placement) -> None:
        """Place layers and KV while requests run, reductions first, and return once all have moved. Layers move one by
        one between steps, and no step waits for a read (RAGDoll 5). Raises ValueError for another number of layers or a
        model that does not stream, OutOfBlocksError if requests need the KV now, RuntimeError after `close`; after
        LayerReadError what can go back has gone back. A MemoryError leaves what was reached."""
        self._moves.place(placement, lambda: self.placement)
        with self._lock:
            # A request that needs more than a smaller pool is still served: layers make way for it.
            most = max(self._validator.device_tokens, self.device_tokens)
            self._validator = replace(self._validator, device_tokens=most)

    def move_layers(self, residency: LayerTiers) -> LayerTiers:
        """Move decoder layers as `place` does. Return the reached residency. Raises LayerReadError."""
        return self._moves.move(residency)

    def forget_device(self) -> None:
        """Drop the device's KV. Requests are computed again from host and disk."""
        with self._lock:
            self._forget_work()
            self._scheduler.requeue()
            self._cache.forget_device()
            for sequence in self._scheduler.waiting:
                sequence.forget_cached()

    def clear_cache(self) -> None:
        with self._lock:
            self._forget_work()
            self._cache.clear()

    def close(self) -> None:
        """Abort all requests, release the disk's folder, and restore the model."""
        with self._lock:
            if self._closed:
                return
            for request_id in list(self._sequences):
                self.abort(request_id)
            self._closed = True
            self._forget_work()
            try:
                self._cache.close()
            finally:
                self._model.restore()
                if self._streamer is not None:
                    self._streamer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_step(self) -> None:
        self._failures.check_device()
        overdue = [sequence for sequence in self._sequences.values() if sequence.overdue]
        self._updates.put(self._end(sequence, "timeout", sequence.overdue_message) for sequence in overdue)
        self._updates.put(self._advance())

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed: make another one")
        self._failures.check_device()

    def _ready_for_pools(self) -> None:
        self._check_open()
        self._forget_work()

    def _forget_work(self) -> None:
        if self._questions is not None:
            self._questions.clear()

    def _advance(self) -> list[Update]:
        scheduler = self._scheduler
        try:
            self._memory.restore_pool(self._sequences.values())
            chunks = scheduler.plan()
        except OutOfBlocksError:
            if self._memory.make_blocks():
                return []
            [first, *_] = _requests(scheduler.running or scheduler.waiting)
            why = "the request does not fit into the pool: give the engine more device_tokens"
            return [self._end(first, "error", why, "memory")]
        except Exception as error:
            # Any of them may be the cause.
            sequences = _requests(scheduler.with_turns or scheduler.waiting)
            shrink = partial(self._relieve, 0, failed=True)
            return self._ended_all(self._failures.recover(sequences, error, "the step could not be planned", shrink))
        if not chunks:
            if scheduler.waiting:
                sleep(_IDLE_S)
            return []
        sequences = _requests(chunk.sequence for chunk in chunks)
        tokens = sum(chunk.tokens for chunk in chunks)
        try:
            logits, choices = self._runner.compute(chunks)
        except Exception as error:
            shrink = partial(self._relieve, tokens, failed=True)
            return self._ended_all(self._failures.recover(sequences, error, _FORWARD_FAILED, shrink))
        except BaseException as error:
            self._updates.put(self._ended_all(self._failures.fail(sequences, error, _FORWARD_FAILED)))
            raise
        self._counters.steps += 1
        self._counters.computed_tokens += tokens
        updates = []
        results = zip(choices, logits, strict=True)
        for chunk in chunks:
            if chunk.last:
                updates.append(self._take(chunk, *next(results)))
            else:
                scheduler.mark_computed(chunk)
        self._memory.step_succeeded(self._sequences.values())
        return updates

    def _take(self, chunk: ScheduledChunk, choice: SampledToken, logits: torch.Tensor) -> Update:
        sequence = chunk.sequence
        first = sequence.ttft_s is None
        if choice.token_id is None:
            # Its KV, even of earlier steps, may be bad: no other request may use it.
            self._scheduler.reject(sequence)
            return self._ended(
                sequence.end("error", "the model's logits contain NaN or inf (overflow, or bad weights)")
            )
        if first and sequence.request.keep_logits:
            sequence.logits = logits.float().cpu().clone()
        self._scheduler.mark_computed(chunk)
        if first and sequence.request.keep_question and self._questions is not None:
            self._questions.keep(sequence)
        try:
            update = sequence.push(choice.token_id, choice.logprobs)
        except Exception as error:
            # Some tokenizers have fewer tokens than their model.
            return self._end(sequence, "error", f"the tokenizer cannot decode the answer ({type(error).__name__})")
        self._counters.generated_tokens += 1
        if first:
            self._counters.first_token(sequence)
        elif sequence.gap_s is not None:
            self._counters.next_token(sequence.gap_s)
        if update.completion is not None:
            self._scheduler.finish(sequence)
            self._ended(update)
        return update

    def _relieve(self, tokens: int, *, failed: bool = False) -> bool:
        return self._memory.shrink(tokens, self._sequences.values(), failed=failed)

    def _hold(self, sequence: Sequence) -> None:
        needed = sequence.prompt_tokens + sequence.request.sampling.max_tokens - 1
        if needed > self.device_tokens and not self._memory.hold(needed):
            why = f"not enough KV memory now for {needed} tokens: retry later, or shorten the request"
            raise ShortOfMemoryError(why) from MemoryError(why)

    def _end(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, fault: Fault | None = None
    ) -> Update:
        # Nothing is released on a lost device.
        if self._failures.lost is None:
            self._scheduler.finish(sequence)
        return self._ended(sequence.end(reason, error, fault))

    def _ended(self, update: Update) -> Update:
        assert update.completion is not None
        del self._sequences[update.request_id]
        self._counters.end(update.completion)
        return update

    def _ended_all(self, ended: Ended) -> list[Update]:
        return [self._ended(sequence.end("error", why, fault)) for sequence, why, fault in ended]

    def _subscribe(self, request: Request, completions: dict[int, Completion]) -> int:
        with self._lock:
            try:
                request_id = self.add(request)
            except RequestRefusedError as error:
                request_id = next(self._ids)
                completions[request_id] = Completion(
                    request_id,
                    (),
                    "",
                    "error",
                    len(request.token_ids),
                    TierTokens(),
                    None,
                    0.0,
                    str(error),
                    fault="memory" if isinstance(error, ShortOfMemoryError) else None,
                )
            self._updates.subscribe(request_id)
            return request_id

    def _next_updates(self, request_id: int) -> list[Update]:
        with self._lock:
            updates = self._updates.take_for(request_id)
            if not updates:
                self._run_step()
                updates = self._updates.take_for(request_id)
            return updates

    def _unsubscribe(self, request_id: int) -> None:
        with self._lock:
            self.abort(request_id)
            self._updates.unsubscribe(request_id)


def _requests(sequences: Iterable[Sequence]) -> list[Sequence]:
    return list(dict.fromkeys(sequence.owner or sequence for sequence in sequences))
