"""A corpus and its index, placed within the embedded engine's budgets (RAGDoll)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import nlargest
from itertools import accumulate
from pathlib import Path
from typing import Any

from ragorder import Document, PromptBuilder
from ragorder.adapters.doctor.memory import estimated_costs
from ragorder.adapters.embedded.questions import ANSWER_TOKENS
from ragorder.adapters.openai.prompts import Question
from ragorder.common.corpus import read_passages
from ragorder.kernels.engine import EngineSettings
from ragorder.kernels.engine.budgeted import model_folder
from ragorder.kernels.model_sizes import exact_length
from ragorder.kernels.models.loading import load_config
from ragorder.kernels.preprocessing.encoder import TextEncoder
from ragorder.pipelining import PartitionedSearch
from ragorder.pipelining.batching import PartitionedRetrieval
from ragorder.pipelining.batching.corpus_index import corpus_index
from ragorder.pipelining.placement.base import PARTITIONS, Placement
from ragorder.pipelining.placement.budgets import Budgets
from ragorder.pipelining.placement.fit import PlacementError
from ragorder.pipelining.placement.plan import PlannedPlacement, plan_placement
from ragorder.pipelining.placement.profile import index_sizes
from ragorder.pipelining.placement.replan import Replanner

# Tokens of a usual question.
_QUESTION_TOKENS = 64


class Library:
    """Documents of a corpus folder and their FAISS index; see `corpus_index` for `index`, `embedder` and errors.

    Also raises CorpusError. `say` gets progress lines.
    """

    def __init__(
        self,
        corpus: Path,
        index: Path | None = None,
        embedder: str | None = None,
        top_k: int = 5,
        *,
        say: Callable[[str], object],
    ) -> None:
        self._documents = [
            # A part has a number after its document's id.
            Document(each.source if each.key == each.source else each.id, each.text, metadata={"title": each.title})
            for each in read_passages(corpus)
        ]
        self.top_k = min(top_k, len(self._documents))
        self.replanner: Replanner | None = None
        say(f"Corpus: {len(self._documents):,} documents in {corpus}")
        self._encoder = TextEncoder(embedder)
        self._index = corpus_index([each.text for each in self._documents], self._encoder, index, say=say)
        self._sizes = index_sizes(self._index, PARTITIONS)
        say(f"Index: {self._index}, {self._sizes.total:,} bytes, partitions: {len(self._sizes.partitions)}")

    def place(
        self, model: str, settings: EngineSettings, builder: PromptBuilder
    ) -> tuple[EngineSettings, PlannedPlacement | None]:
        """Divide the budgets of `settings` between model and index; None without `device_bytes`.

        Other given settings are kept; if they set neither KV nor steps, there is a `replanner` then. Raises
        PlacementError, OSError, ValueError.
        """
        prompt = self.check_prompts(
            builder, settings.max_model_len or exact_length(load_config(model).get_text_config().to_dict())
        )
        if settings.device_bytes is None:
            return settings, None
        given = settings.model_fields_set
        estimated = estimated_costs(
            model_folder(model),
            self._index,
            tokens={"prompt_tokens": prompt, "answer_tokens": ANSWER_TOKENS},
            device=settings.device,
            dtype=settings.dtype,
        )
        disk_bytes = settings.disk_bytes if settings.disk_path is not None else 0
        budgets = Budgets(settings.device_bytes, settings.host_bytes, disk_bytes)
        costs = replace(estimated, step_tokens=settings.max_batch_tokens)
        held = "max_batch_tokens" in given
        placement = plan_placement(budgets, costs, backlog=settings.max_requests, held=held)
        planned = dict(placement.engine_settings)
        kept = given - {"device_bytes", "host_bytes"}
        if not kept & {"device_tokens", "max_batch_tokens"}:
            self.replanner = Replanner(placement, costs, most=settings.max_requests)
        changed = {name: value for name, value in planned.items() if name not in kept}
        return EngineSettings(**settings.model_dump(exclude_unset=True) | changed), placement

    def check_prompts(self, builder: PromptBuilder, longest: int | None) -> int:
        """Return the tokens of the longest prompt. Raises PlacementError if it and an answer exceed `longest`."""
        found = nlargest(self.top_k, self._documents, key=lambda each: len(each.text))
        tokens = list(map(builder.document_tokens, found))
        others = builder.prefix_tokens + _QUESTION_TOKENS
        prompt, room = others + sum(tokens), sys.maxsize if longest is None else longest - ANSWER_TOKENS
        if prompt > room:
            fitting = sum(others + total <= room for total in accumulate(tokens))
            change = f"--top-k {fitting}" if fitting else "shorter documents (parts in chunks.jsonl)"
            raise PlacementError(
                f"--top-k {self.top_k}: with the longest documents of the corpus a prompt has {prompt:,} tokens, and "
                f"with an answer of {ANSWER_TOKENS} more than the {longest:,} that the engine can hold: give {change}, "
                "or more memory if the model can hold more"
            )
        return prompt

    def retrieval(self, builder: PromptBuilder, resident: int | None) -> PartitionedRetrieval[Question, Document]:
        """Return the search with `resident` partitions in memory (None: all). It tokenises questions and documents
        with the prompts' `builder`, in its thread."""
        partitions = len(self._sizes.partitions)
        search = PartitionedSearch(self._index, partitions, resident=partitions if resident is None else resident)
        documents = self._documents

        def document(number: int) -> Document:
            found = documents[number]
            # The builder keeps the latest documents' tokens for the event loop.
            tokens = builder.document_tokens(found)
            if found.tokens is None:
                documents[number] = found = replace(found, tokens=tokens)
            return found

        def embed(questions: Sequence[Question]) -> Any:
            for each in questions:
                builder.keep_question(each.query)
            return self._encoder.encode([each.query for each in questions])

        return PartitionedRetrieval(search, embed, document, top_k=self.top_k)

    def placed(self, placement: Placement, resident: int | None) -> str:
        """Say where layers, KV and partitions are."""
        weights, partitions = placement.weights, len(self._sizes.partitions)
        held = partitions if resident is None else resident
        kv = f"; the KV of {placement.kv_host_layers} layers in host memory" * (placement.kv_host_layers > 0)
        return (
            f"Placement: of {weights.total} layers {weights.device} on the device, {weights.host} in host memory, "
            f"{weights.disk} on the disk{kv}; {held} of {partitions} partitions in host memory; at most "
            f"{placement.batch} questions at once, in steps of up to {placement.step_tokens:,} tokens"
        )
