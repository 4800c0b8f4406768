"""Running servers: one for all policies in turn, or one for each policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING

from ragorder.adapters.vllm.kv_events import KVEventSubscriber
from ragorder.eval.data.trace import Trace
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.models import built_prompts, longest_prompt, random_model
from ragorder.eval.engines.openai import OpenAIEngine, ServedModel, find_model
from ragorder.eval.engines.prompts import BuiltPrompts
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.running.load import Advance, Load, serve_live, serve_live_in_turn
from ragorder.eval.running.runner import MakeRun, Run
from ragorder.eval.running.specs import BenchError, EventsAddress
from ragorder.trie.residency.blocks import EngineBlocks

if TYPE_CHECKING:
    from ragorder.eval.running.specs import Bench, EngineSpec

_SYNCHRONISE_S = 10.0
_OWN_CAPACITY_TOKENS = 65_536
_OWN_BLOCK_SIZE = 32
_LONGEST_TOKENS = 8_192


class Servers:
    """The servers of a benchmark on engine "openai", and prompts in their model's tokens. Raises EngineError or
    ImportError."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self._bench = bench
        self._urls, events = bench.base_urls, bench.events
        if not self._urls:
            server = stack.enter_context(start_server(bench))
            self._urls = [server.base_url]
            events = EventsAddress(server.events_endpoint, server.replay_endpoint, server.events_topic)
        self._models = [find_model(url, bench.served_model, api_key=bench.api_key) for url in self._urls]
        self._caches = [self._block_size_and_capacity(url) for url in self._urls]
        self._prompts = self._load_prompts(self._models[0])
        self._blocks: EngineBlocks | None = None
        if "events" in bench.policies and events is not None:
            self._blocks = EngineBlocks(self._caches[0][0])
            heard = stack.enter_context(KVEventSubscriber(self._blocks, *events[:2], topic=events.topic))
            if events.replay_endpoint is not None and not heard.wait_until_synchronised(_SYNCHRONISE_S):
                raise EngineError("the server's replay endpoint does not answer: see `ragorder doctor`")

    def serve(self, trace: Trace, seed: int, make: MakeRun, load: Load, advance: Advance) -> list[Run]:
        """All policies on a trace: on one server one after another, each with a fresh salt, rotated by seed; on several
        servers at the same time."""
        self._check_lengths(trace, load)
        return asyncio.run(self._serve(trace, seed, make, load, advance))

    async def _serve(self, trace: Trace, seed: int, make: MakeRun, load: Load, advance: Advance) -> list[Run]:
        policies, first = self._bench.policies, trace.requests[0]
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(engine) for engine in self._engines(trace)]
            for engine in engines:
                await engine.check(self._prompts.token_ids(0, first, first.documents))
            if len(engines) == len(policies):
                runs = [make(policy, engine, self._prompts) for policy, engine in zip(policies, engines, strict=True)]
                await _serve_side_by_side(list(zip(runs, engines, strict=True)), load, advance)
                return runs
            (engine,) = engines
            served = {}
            for turn in range(len(policies)):
                place = (turn + seed) % len(policies)
                engine.reset()
                run = served[place] = make(policies[place], engine, self._prompts)
                await serve_live(run, engine, load, advance)
            return [served[place] for place in range(len(policies))]

    def _engines(self, trace: Trace) -> list[OpenAIEngine]:
        bench = self._bench
        engines = []
        for url, model, (block_size, capacity_tokens) in zip(self._urls, self._models, self._caches, strict=True):
            if bench.capacity is not None:
                capacity_tokens = bench.capacity.resolve(trace.corpus_tokens)
            engine = OpenAIEngine(
                url,
                model.id,
                block_size=block_size,
                capacity_tokens=capacity_tokens,
                output_tokens=bench.answer_tokens or 1,
                api_key=bench.api_key,
                blocks=self._blocks,
            )
            engines.append(engine)
        return engines

    def _block_size_and_capacity(self, url: str) -> tuple[int, int | None]:
        bench = self._bench
        if bench.block_size is not None and bench.capacity is not None:
            return bench.block_size, None
        from ragorder.adapters.http_client import ServerError
        from ragorder.adapters.vllm.cache_config import read_cache_config

        try:
            config = read_cache_config(url, api_key=bench.api_key)
        except ServerError as error:
            raise EngineError(f"{error}; for a benchmark: --capacity-tokens and --block-size") from None
        return bench.block_size or config.block_size, config.capacity_tokens

    def _load_prompts(self, model: ServedModel) -> BuiltPrompts:
        name = str(self._bench.model or model.root)
        try:
            return built_prompts(name)
        except (OSError, ValueError) as error:
            raise EngineError(
                f"no tokenizer can be loaded from {name!r}: give --model, the folder or the name on the Hub of the "
                f"model that is served ({type(error).__name__})"
            ) from None

    def _check_lengths(self, trace: Trace, load: Load) -> None:
        prompts, room = self._prompts, min((each.max_model_len or 1 << 60) for each in self._models)
        for row, request in enumerate(trace.requests):
            tokens = prompts.prefix_tokens + prompts.suffix_tokens(request) + (load.length(row) or 1)
            tokens += sum(map(prompts.document_tokens, request.documents))
            if tokens > room:
                raise EngineError(
                    f"a request of {trace.name} has {tokens:,} tokens, answer included, and the server takes {room:,}: "
                    "lower --top-k or --output-tokens, or raise the server's --max-model-len"
                )


def start_server(spec: EngineSpec) -> VLLMServer:
    """A vLLM server for one benchmark. Raises BenchError for a share of a corpus as capacity."""
    tokens = _OWN_CAPACITY_TOKENS if spec.capacity is None else spec.capacity.tokens
    if tokens is None:
        raise BenchError("a server of its own is started before the corpus is known: give --capacity-tokens in tokens")
    size = spec.block_size or _OWN_BLOCK_SIZE
    model = spec.model or random_model()
    longest = min(tokens, _LONGEST_TOKENS, longest_prompt(model))
    return VLLMServer(model, blocks=tokens // size, block_size=size, max_model_len=longest)


async def _serve_side_by_side(runs: Sequence[tuple[Run, OpenAIEngine]], load: Load, advance: Advance) -> None:
    if load.concurrency in (None, 1) and not load.arrivals:
        await serve_live_in_turn(runs, load, advance)
        return
    async with asyncio.TaskGroup() as group:
        for run, engine in runs:
            group.create_task(serve_live(run, engine, load, advance))
