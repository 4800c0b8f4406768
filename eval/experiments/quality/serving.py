"""The engine that a quality benchmark asks for, ready to answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.models import load_tokenizer, longest_prompt, random_model
from ragorder.eval.engines.torch import TorchEngine, need_torch
from ragorder.eval.engines.vllm import VLLMEngine
from ragorder.eval.experiments.quality.answering import Answerer, ServerAnswers, local_answers
from ragorder.eval.experiments.quality.asking import Builders, corpus_tokens
from ragorder.eval.experiments.quality.base import QualityError
from ragorder.eval.experiments.quality.models import RANDOM_WEIGHTS, ModelFacts, model_facts
from ragorder.eval.experiments.quality.sources import QuestionSet
from ragorder.eval.experiments.quality.specs import QualityBench
from ragorder.eval.running.progress import Progress

__all__ = ["answering"]

_CAPACITY = Capacity(tokens=100_000)
_ENGINES = {"vllm": (VLLMEngine, 32), "torch": (TorchEngine, 16)}
"""In this process, with the tokens of a block unless given."""


@contextmanager
def answering(
    bench: QualityBench, data: QuestionSet, progress: Progress
) -> Iterator[tuple[Answerer, Builders, ModelFacts]]:
    """The engine, prompts in the tokens of its model, and what is known of that.

    Raises QualityError for prompts that do not fit, EngineError for a server that is not there, OSError for a model
    that cannot be loaded, ImportError naming the extra to install.
    """
    with _server(bench, data) if bench.engine == "openai" else _local(bench, data, progress) as ready:
        yield ready


@contextmanager
def _server(bench: QualityBench, data: QuestionSet) -> Iterator[tuple[Answerer, Builders, ModelFacts]]:
    from ragorder.eval.engines.openai import find_model

    assert bench.base_url is not None
    served = find_model(bench.base_url, bench.served_model, api_key=bench.api_key)
    builders = Builders(load_tokenizer(bench.model) if bench.model is not None else None)
    capacity = bench.capacity
    with ServerAnswers(
        bench.base_url,
        served.id,
        output_tokens=bench.output_tokens,
        block_size=bench.block_size,
        capacity_tokens=capacity.resolve(corpus_tokens(data, builders)) if capacity else None,
        unlimited=capacity == Capacity(),
        api_key=bench.api_key,
    ) as answers:
        yield answers, builders, model_facts(served.id, bench.model or served.root)


@contextmanager
def _local(
    bench: QualityBench, data: QuestionSet, progress: Progress
) -> Iterator[tuple[Answerer, Builders, ModelFacts]]:
    if bench.engine == "torch":
        need_torch()
    start, block_size = _ENGINES[bench.engine]
    model = bench.model or random_model()
    builders = Builders(load_tokenizer(model))
    builder, lengths = builders(state_ranking=True), []
    advance = progress(f"{bench.dataset}: counting tokens", len(data.questions))
    for question in data.questions:
        lengths.append(len(builder.build(question.text, list(question.documents)).token_ids or ()))
        advance()
    longest = max(lengths) + bench.output_tokens
    size, room = bench.block_size or block_size, longest_prompt(model)
    capacity_tokens = (bench.capacity or _CAPACITY).resolve(corpus_tokens(data, builders))
    for takes, whose in ((room, "the model takes"), (capacity_tokens, "the cache (--capacity-tokens) holds")):
        if takes is not None and takes < longest:
            raise QualityError(
                f"the longest prompt has {longest:,} tokens, answer included, and {whose} {takes:,}: "
                "lower --top-k or --document-words"
            )
    engine = start(
        model,
        block_size=size,
        capacity_tokens=capacity_tokens,
        max_model_len=min(room, longest + size),
        output_tokens=bench.output_tokens,
        unlimited_tokens=sum(lengths) + len(lengths) * (bench.output_tokens + size),
    )
    try:
        with local_answers(engine, bench.output_tokens) as answers:
            yield answers, builders, model_facts(str(bench.model or RANDOM_WEIGHTS), model)
    finally:
        engine.close()
