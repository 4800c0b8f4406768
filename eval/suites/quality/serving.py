"""Engines of the benchmark of answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.models import load_tokenizer, longest_prompt, random_model
from ragorder.eval.engines.torch import TorchEngine, need_torch
from ragorder.eval.engines.vllm import VLLMEngine
from ragorder.eval.running.progress import Progress
from ragorder.eval.suites.quality.answering import BATCH, Answerer, OnceAnswers, ServerAnswers, fused_answers
from ragorder.eval.suites.quality.base import QualityError
from ragorder.eval.suites.quality.datasets import QuestionSet
from ragorder.eval.suites.quality.models import RANDOM_WEIGHTS, ModelFacts, model_facts
from ragorder.eval.suites.quality.questions import Builders, corpus_tokens
from ragorder.eval.suites.quality.specs import AnswererSpec, QualityBench

__all__ = ["serve_answers"]

_CAPACITY = Capacity(tokens=100_000)
# Of prompts that are answered together.
_POOL_TOKENS = 32_768
# Engines in this process, with their default block sizes.
_ENGINES = {"vllm": (VLLMEngine, 32), "torch": (TorchEngine, 16)}


@contextmanager
def serve_answers(
    bench: QualityBench, data: QuestionSet, progress: Progress
) -> Iterator[tuple[Answerer, Builders, ModelFacts]]:
    """Raises QualityError for prompts that do not fit, EngineError for a server that does not answer, OSError for a
    model that cannot be loaded, ImportError."""
    spec = bench.engine
    with _server(spec, data) if spec.engine == "openai" else _local(bench, data, progress) as ready:
        yield ready


@contextmanager
def _server(spec: AnswererSpec, data: QuestionSet) -> Iterator[tuple[Answerer, Builders, ModelFacts]]:
    from ragorder.eval.engines.openai import find_model

    assert spec.base_url is not None
    served = find_model(spec.base_url, spec.served_model, api_key=spec.api_key)
    builders = Builders(load_tokenizer(spec.model) if spec.model is not None else None)
    capacity = spec.capacity_tokens
    with ServerAnswers(
        spec.base_url,
        served.id,
        output_tokens=spec.output_tokens,
        block_size=spec.block_size,
        capacity_tokens=capacity.resolve(corpus_tokens(data, builders)) if capacity else None,
        unlimited=capacity == Capacity(),
        api_key=spec.api_key,
    ) as answers:
        yield answers, builders, model_facts(served.id, spec.model or served.root)


@contextmanager
def _local(
    bench: QualityBench, data: QuestionSet, progress: Progress
) -> Iterator[tuple[Answerer, Builders, ModelFacts]]:
    spec, fuses = bench.engine, bench.fuses
    if spec.engine == "torch":
        need_torch()
    start, block_size = _ENGINES[spec.engine]
    model = spec.model or random_model()
    builders = Builders(load_tokenizer(model))
    builder, lengths = builders(state_ranking=True), []
    advance = progress(f"{data.dataset.name}: counting tokens", len(data.questions))
    for question in data.questions:
        lengths.append(len(builder.build(question.text, list(question.documents)).token_ids or ()))
        advance()
    longest = max(lengths) + spec.output_tokens
    size, room = spec.block_size or block_size, longest_prompt(model)
    capacity_tokens = (spec.capacity_tokens or _CAPACITY).resolve(corpus_tokens(data, builders))
    for takes, whose in ((room, "the model takes"), (capacity_tokens, "the cache (--capacity-tokens) holds")):
        if takes is not None and takes < longest:
            raise QualityError(
                f"the longest prompt has {longest:,} tokens, answer included, and {whose} {takes:,}: "
                "lower --top-k or --document-words"
            )
    if fuses and capacity_tokens is not None and capacity_tokens < 2 * longest:
        raise QualityError(
            f"the longest prompt has {longest:,} tokens, and the cache holds {capacity_tokens:,}: give "
            f"--capacity-tokens {2 * longest} for what fused requests copy"
        )
    options: dict[str, Any] = {
        "block_size": size,
        "max_model_len": min(room, longest + size),
        "output_tokens": spec.output_tokens,
    }
    named = str(spec.model or RANDOM_WEIGHTS)
    facts = model_facts(Path(named).name if Path(named).is_dir() else named, model)
    if fuses:
        unlimited = 2 * (sum(lengths) + len(lengths) * (spec.output_tokens + size))
        options |= {"capacity_tokens": capacity_tokens, "unlimited_tokens": unlimited, "reuse": "fused"}
    else:
        held = max(2, min(BATCH, _POOL_TOKENS // (longest + size)))
        options |= {"capacity_tokens": held * (longest + size)} | ({"at_once": BATCH} if spec.engine == "vllm" else {})
    engine = start(model, **options)
    try:
        if not fuses:
            thinks = "<think>" in builders(state_ranking=False).build("", []).text
            once = OnceAnswers(
                engine,
                spec.output_tokens,
                capacity_tokens=capacity_tokens,
                model=named,
                whole=thinks,
                file=bench.answers,
            )
            yield once, builders, facts
        else:
            with fused_answers(engine, spec.output_tokens) as answers:
                yield answers, builders, facts
    finally:
        engine.close()
