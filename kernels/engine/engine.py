"""The embedded engine: a causal language model with its documents' KV over device, host and disk."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from collections.abc import Sequence as Many
from itertools import count
from pathlib import Path
from threading import RLock
from time import sleep
from typing import Any, Self

import torch

from ragorder.kernels.cache import DiskSettings, KnowledgeCache, TierTokens
from ragorder.kernels.engine.admission import Admission
from ragorder.kernels.engine.adopted import AdoptedModel
from ragorder.kernels.engine.attention import PagedLayers
from ragorder.kernels.engine.identity import identity
from ragorder.kernels.engine.loading import load_model, load_tokenizer
from ragorder.kernels.engine.memory import device_blocks
from ragorder.kernels.engine.outbox import Outbox
from ragorder.kernels.engine.request import Completion, Request, RequestRefusedError, Update
from ragorder.kernels.engine.runner import Runner
from ragorder.kernels.engine.sampling import Choice
from ragorder.kernels.engine.scheduler import Chunk, Scheduler
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.engine.stats import Counters, EngineStats
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.paging import OutOfBlocksError
from ragorder.kernels.profile import LINEAR, PrefillProfile

__all__ = ["TieredEngine"]

_logger = logging.getLogger("ragorder.kernels.engine")

# How long a step waits for loads where there is nothing else to do.
_IDLE_S = 0.001


class TieredEngine:
    """Serves a transformers model from a paged pool of KV, of which documents stay cached over three tiers.

    The model is used as it is: while the engine lives, its attention is set to ours (`set_attn_implementation`) and it
    is in evaluation mode; `close` puts both back. Every answer is what the model gives without a cache.

    `add` takes requests at any time, and `step` computes one packed forward for all that run. `generate` and `stream`
    step by themselves; what meanwhile comes for others waits for theirs. All methods may be called from any thread,
    one at a time is served.

    Raises UnsupportedModelError for a model that cannot be served exactly, ValueError for a device, a length or a pool
    that cannot be.
    """

    def __init__(self, model: Any, tokenizer: Any | None = None, settings: EngineSettings | None = None) -> None:
        self.settings = settings = settings or EngineSettings()
        self.tokenizer = tokenizer
        self.block_size = settings.block_size
        self._lock = RLock()
        self._counters = Counters()
        self._ids = count()
        self._sequences: dict[int, Sequence] = {}
        self._outbox = Outbox()
        self._closed = False
        self._model = AdoptedModel(model, settings)
        self.model_name = self._model.name
        try:
            self._set_up(settings, self._model)
        except BaseException:
            self._model.give_back()
            raise

    def _set_up(self, settings: EngineSettings, model: AdoptedModel) -> None:
        shape = model.shape
        blocks = device_blocks(shape, model.device, settings.device_tokens, model.longest, settings.device_share)
        self.device_tokens = blocks * shape.block_size
        self.max_model_len = model.longest or self.device_tokens
        self._admission = Admission(
            model.vocabulary,
            self.max_model_len,
            self.device_tokens,
            shape.block_size,
            settings.chunk_tokens,
            self.tokenizer,
            model.end_tokens(self.tokenizer),
        )
        self._cache = KnowledgeCache(
            shape,
            device_blocks=blocks,
            host_blocks=settings.host_bytes // shape.block_bytes,
            disk=None if settings.disk_path is None else DiskSettings(settings.disk_path, settings.disk_bytes),
            policy=settings.policy,
            history=settings.history,
            profile=LINEAR if settings.profile is None else PrefillProfile.from_file(settings.profile),
            device=model.device,
            # Reads all weights: only for KV that outlives the process.
            identity="" if settings.disk_path is None else identity(model.model, shape),
            replicate_nodes=settings.replicate_nodes,
        )
        self._scheduler = Scheduler(self._cache, shape.block_size, settings.max_batch_tokens, settings.max_requests)
        self._runner = Runner(model.forward, PagedLayers(self._cache.pool), model.device)

    @classmethod
    def load(cls, name: str | Path, settings: EngineSettings | None = None) -> Self:
        """An engine on a model and its tokenizer in a folder, or of that name on the Hub.

        Raises ModelLoadError naming what is missing, and what `TieredEngine` does.
        """
        settings = settings or EngineSettings()
        model = load_model(name, settings)
        return cls(model, load_tokenizer(name), settings)

    @property
    def has_unfinished(self) -> bool:
        """Whether a `step` has something to do or to tell."""
        return bool(self._sequences or self._outbox)

    def add(self, request: Request) -> int:
        """Queue a request; its id comes with its updates. Raises RequestRefusedError, which says what to change, for
        one that can never be served, and RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed: make another one")
            request_id = next(self._ids)
            try:
                sequence = self._admission.admit(request_id, request)
            except RequestRefusedError:
                self._counters.refused += 1
                raise
            self._sequences[request_id] = sequence
            self._scheduler.add(sequence)
            return request_id

    def abort(self, request_id: int) -> bool:
        """End a request now, wherever it is; what it had computed of its documents stays cached. Its completion comes
        with the next `step`. Whether there was such a request."""
        with self._lock:
            sequence = self._sequences.get(request_id)
            if sequence is None:
                return False
            self._scheduler.finish(sequence)
            self._outbox.tell([self._ended(sequence.end("abort"))])
            return True

    def step(self) -> list[Update]:
        """Compute the next step, and say what it brought; nothing while all requests wait for their prefixes."""
        with self._lock:
            self._outbox.tell(self._advance())
            return self._outbox.take()

    def generate(self, requests: Many[Request]) -> list[Completion]:
        """Serve these, side by side, and return their completions in the same order. A request that is refused has one
        with the finish reason "error"."""
        completions: dict[int, Completion] = {}
        places = [self._add_followed(request, completions) for request in requests]
        try:
            for request_id in places:
                while request_id not in completions:
                    for update in self._next_updates(request_id):
                        if update.completion is not None:
                            completions[request_id] = update.completion
        finally:
            for request_id in places:
                self._unfollow(request_id)
        return [completions[request_id] for request_id in places]

    def stream(self, request: Request) -> Iterator[Update]:
        """Serve a request and yield its updates as they come, the last one with its completion. Leaving earlier aborts
        it. Raises RequestRefusedError with the first."""
        with self._lock:
            request_id = self.add(request)
            self._outbox.follow(request_id)
        try:
            while True:
                for update in self._next_updates(request_id):
                    yield update
                    if update.completion is not None:
                        return
        finally:
            self._unfollow(request_id)

    def stats(self) -> EngineStats:
        """A snapshot."""
        with self._lock:
            scheduler = self._scheduler
            return self._counters.snapshot(
                self._cache.stats(), len(scheduler.running), len(scheduler.waiting), scheduler.preempted
            )

    def clear_cache(self) -> None:
        """Forget all documents, in all tiers, but for what requests under way use."""
        with self._lock:
            self._cache.clear()

    def close(self) -> None:
        """Abort what is under way, and let go of the pool, the disk's folder and the model."""
        with self._lock:
            if self._closed:
                return
            for request_id in list(self._sequences):
                self.abort(request_id)
            self._closed = True
            self._cache.close()
            self._model.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _advance(self) -> list[Update]:
        scheduler = self._scheduler
        try:
            chunks = scheduler.plan()
        except OutOfBlocksError:
            first = (scheduler.running or scheduler.waiting)[0]
            scheduler.finish(first)
            return [self._ended(first.end("error", "the pool has no room for it: give the engine more device_tokens"))]
        except Exception as error:
            # Whose fault it is, is not known.
            return self._fail([*scheduler.running, *scheduler.waiting], error, "the step could not be planned")
        if not chunks:
            if scheduler.waiting:
                sleep(_IDLE_S)
            return []
        try:
            logits, choices = self._runner.compute(chunks)
        except BaseException as error:
            failed = self._fail([chunk.sequence for chunk in chunks], error, "the model's forward failed")
            if isinstance(error, Exception):
                return failed
            self._outbox.tell(failed)
            raise
        self._counters.steps += 1
        self._counters.computed_tokens += sum(chunk.tokens for chunk in chunks)
        updates = []
        results = zip(choices, logits, strict=True)
        for chunk in chunks:
            if chunk.last:
                updates.append(self._take(chunk, *next(results)))
            else:
                scheduler.computed(chunk)
        return updates

    def _take(self, chunk: Chunk, choice: Choice, logits: torch.Tensor) -> Update:
        sequence = chunk.sequence
        first = sequence.ttft_s is None
        if choice.token_id is None:
            # Its KV may be as bad: nobody else shall find it.
            self._scheduler.drop(sequence)
            return self._ended(sequence.end("error", "the model's logits are not numbers (overflow, or bad weights)"))
        if first and sequence.request.keep_logits:
            sequence.logits = logits.float().cpu().clone()
        self._scheduler.computed(chunk)
        try:
            update = sequence.take(choice.token_id, choice.logprobs)
        except Exception as error:
            # Tokenizers of some models know fewer tokens than the model.
            self._scheduler.finish(sequence)
            why = f"the tokenizer cannot decode the answer ({type(error).__name__})"
            return self._ended(sequence.end("error", why))
        self._counters.generated_tokens += 1
        if first:
            self._counters.first_token(sequence.prompt_tokens, sequence.cached or TierTokens(), sequence.ttft_s or 0.0)
        if update.completion is not None:
            self._scheduler.finish(sequence)
            self._ended(update)
        return update

    def _fail(self, sequences: Many[Sequence], error: BaseException, what: str) -> list[Update]:
        # The message of an error may quote a prompt; the place where it was raised does not.
        place = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{what} ({type(error).__name__} in {Path(place.filename).name}, line {place.lineno})"
        if isinstance(error, torch.OutOfMemoryError):
            why += ": give a smaller max_batch_tokens"
        _logger.error("a step of %d requests: %s", len(sequences), why)
        self._counters.failed_steps += 1
        self._scheduler.fail(sequences)
        return [self._ended(sequence.end("error", why)) for sequence in sequences]

    def _ended(self, update: Update) -> Update:
        assert update.completion is not None
        del self._sequences[update.request_id]
        self._counters.end(update.completion)
        return update

    def _add_followed(self, request: Request, completions: dict[int, Completion]) -> int:
        with self._lock:
            try:
                request_id = self.add(request)
            except RequestRefusedError as error:
                request_id = next(self._ids)
                completions[request_id] = Completion(
                    request_id, (), "", "error", len(request.token_ids), TierTokens(), None, 0.0, str(error)
                )
            self._outbox.follow(request_id)
            return request_id

    def _next_updates(self, request_id: int) -> list[Update]:
        """What has come for a request, after a step if nothing has."""
        with self._lock:
            updates = self._outbox.of(request_id)
            if not updates:
                self._outbox.tell(self._advance())
                updates = self._outbox.of(request_id)
            return updates

    def _unfollow(self, request_id: int) -> None:
        with self._lock:
            self.abort(request_id)
            self._outbox.unfollow(request_id)
