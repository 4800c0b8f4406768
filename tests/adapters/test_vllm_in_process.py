"""Pipelines and workflows on a vLLM in their own process: the answers are those without speculation, and an abort frees
the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

IN_PROCESS = """
import asyncio, sys, time
from ragorder import Document, Orderer, PromptBuilder
from ragorder.adapters.openai.pipelined import PromptRequest, ordered_pipeline
from ragorder.adapters.vllm.async_engine import AsyncVLLM
from ragorder.adapters.workflows import ordered_workflows
from ragorder.eval.engines.vllm import has_fast_bfloat16
from ragorder.eval.engines.models import load_tokenizer
from ragorder.pipelining import Provisional
from ragorder.pipelining.workflow import irg

DOCUMENTS = [Document(f"d{n}", f"Secret {n} is kept in drawer {n}. " * 2) for n in range(4)]
last = None

class Stats:
    def __init__(self, *_): pass
    def record(self, scheduler_stats, *_, **__):
        global last
        if scheduler_stats is not None:
            last = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
    def log_engine_initialized(self): pass
    def log(self): pass
    def record_sleep_state(self, *_): pass

async def main(model):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    arguments = AsyncEngineArgs(
        model, dtype="bfloat16" if has_fast_bfloat16() else "float32", enforce_eager=True, block_size=32,
        num_gpu_blocks_override=129, kv_cache_memory_bytes=1 << 26, max_model_len=2048, max_num_batched_tokens=2048,
    )
    llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[Stats])
    engine = AsyncVLLM(llm)
    builder = PromptBuilder("You are careful. Use the documents. " * 12, tokenizer=load_tokenizer(model))

    async def answers(speculate):
        await llm.reset_prefix_cache()
        orderer = Orderer(tokens=builder.document_tokens, block_size=32, capacity_tokens=4096, feedback=False,
                          prefix_tokens=builder.prefix_tokens, strict=True)
        given = []
        for stages in ([[0, 1], [1, 2], [1, 2]], [[2, 3], [2, 3], [1, 2]], [[0], [0], [0]]):
            async def search(question):
                for stage in stages:
                    await asyncio.sleep(0.05)
                    yield Provisional([DOCUMENTS[n] for n in stage], stage is stages[-1])
            pipeline = ordered_pipeline(engine, orderer=orderer, builder=builder, retrieval=search, max_prefill_bs=4,
                                        speculate=speculate, requests=engine.requests)
            given.append(await pipeline.answer(Question("What is kept?", "red", 8, options={"ignore_eos": True})))
            await pipeline.close()
        return given

    plain, speculated = await answers(False), await answers(True)
    assert [stream.text for stream in plain] == [stream.text for stream in speculated]
    assert [stream.trace.right for stream in speculated] == [True, False, True]
    assert speculated[0].trace.warmed_up and not speculated[1].trace.warmed_up
    for one, other in zip(plain, speculated):
        assert one.usage.completion_tokens == other.usage.completion_tokens == 8
        assert one.usage.prompt_tokens == other.usage.prompt_tokens
        assert other.usage.cached_tokens >= one.usage.cached_tokens - 32
    assert plain[1].usage.cached_tokens >= builder.prefix_tokens // 32 * 32 >= 64

    # A workflow finds the documents of the one before.
    orderer = Orderer(tokens=builder.document_tokens, block_size=32, capacity_tokens=4096, strict=True,
                      prefix_tokens=builder.prefix_tokens)
    async with ordered_workflows(
        engine, lambda vector, k: range(k), lambda query: [0.0], DOCUMENTS.__getitem__, orderer=orderer,
        builder=builder, prompts="token_ids", requests=engine.requests, warm_up=False,
    ) as server:
        graph = irg(topk=4, rounds=1, max_tokens=8).compile()
        results = [await server.run(graph, "What is kept?", scope="blue") for _ in range(2)]
    first, second = [each for result in results for each in result.trace.pieces if each.worker == "engine"]
    documents = builder.prefix_tokens + sum(map(builder.document_tokens, DOCUMENTS))
    assert first.cached_tokens == 0 and second.cached_tokens >= documents // 32 * 32, (first, second)

    # Each would run for many seconds, and show among those that run while the short one does.
    ids = builder.build("What?", DOCUMENTS).token_ids
    long = PromptRequest(None, ids, None, {"max_tokens": 1500, "ignore_eos": True, "temperature": 0.0})
    for pieces in (0, 1, 5):
        async def consume():
            stream = engine.stream(long)
            for _ in range(pieces):
                await anext(stream)
            if pieces:
                await stream.aclose()
            else:
                await anext(stream)
        task = asyncio.create_task(consume())
        if not pieces:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert engine.requests() == 0, (pieces, engine.requests())
    short = PromptRequest(None, ids, None, {"max_tokens": 4, "temperature": 0.0})
    assert [chunk async for chunk in engine.stream(short)][-1].usage.finish_reason
    deadline = time.monotonic() + 60
    while last not in ((0, 0), (1, 0)) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert last in ((0, 0), (1, 0)), last
    before = last
    await asyncio.sleep(0.3)
    assert last == before, "something still runs"
    try:
        await anext(engine.stream(PromptRequest([], None, None, {})))
    except ValueError as error:
        print(error)
    llm.shutdown()

if __name__ == "__main__":
    from ragorder.adapters.openai.pipelined import Question
    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_in_this_process(vllm_model: Path, python: Any, tmp_path: Path) -> None:
    """Its own, not that of the tests."""
    script = tmp_path / "in_process.py"
    script.write_text(IN_PROCESS, "utf-8")
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    done = python(script, vllm_model, timeout=240, **quiet)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "prompts='token_ids'" in done.stdout
