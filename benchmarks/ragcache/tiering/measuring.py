"""The same requests on two servers, with and without tiers, in turn: they share the machine's cores."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragorder.adapters.http_client import ServerError
from ragorder.adapters.observing.tier_stats import Hits, fetch_hits
from ragorder.adapters.vllm.server_profile import measure_server
from ragorder.adapters.vllm_tiers import TierSettings
from ragorder.benchmarks.ragcache.tiering.cells import ARMS, PromptStream, TierSizes
from ragorder.eval.engines.base import EngineError, RequestError
from ragorder.eval.engines.openai import OpenAIEngine
from ragorder.eval.engines.server import VLLMServer
from ragorder.trie.profile import PrefillProfile

__all__ = ["ArmRun", "measure", "pair_of_servers"]

_PAUSE_S = 0.3
"""Between two turns: the other server's threads poll for work for a while."""

_WARM_UP_TOKENS = (64, 256, 512, 1024, 2048)


@dataclass(slots=True)
class ArmRun:
    """One arm with one seed, warm-up included. `hits` are the sources of the KV after the warm-up."""

    arm: str
    ttft_ms: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    hits: Hits = field(default_factory=Hits)


@contextmanager
def pair_of_servers(
    tiers: TierSizes, model: Path, *, block_size: int, longest_tokens: int, settings: Mapping[str, object]
) -> Iterator[tuple[dict[str, VLLMServer], PrefillProfile]]:
    """Servers by arm; `settings` are further fields of `TierSettings`. The tiers have prefill times that were measured
    on the server without. Raises EngineError if they cannot be."""
    blocks = longest_tokens // block_size + 2
    longest = min(blocks, tiers.blocks) * block_size
    sizes: dict[str, Any] = {"blocks": tiers.blocks, "block_size": block_size, "max_model_len": longest}
    with ExitStack() as stack:
        disk = None
        if tiers.disk_bytes is not None:
            disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragorder-tiering-"))) / "disk"
        alone = stack.enter_context(VLLMServer(model, **sizes))
        try:
            profile = measure_server(alone.base_url)
        except ServerError as error:
            raise EngineError(f"the prefill times are not measured ({error})") from None
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragorder-profile-"))) / "profile.json"
        profile.to_file(file)
        asked = {"host_bytes": tiers.host_bytes, "disk_path": disk, "disk_bytes": tiers.disk_bytes, "profile": file}
        config = TierSettings.model_validate({**asked, **settings}).kv_transfer_config()
        tiered = stack.enter_context(VLLMServer(model, **sizes, kv_transfer_config=config))
        yield dict(zip(ARMS, (alone, tiered), strict=True)), profile


async def measure(
    servers: Mapping[str, VLLMServer],
    stream: PromptStream,
    *,
    warmup: int,
    segment: int,
    first: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> list[ArmRun]:
    """Both arms, one request at a time, in turns of `segment` requests; if `first` is odd, tiers begin. Device and host
    are empty at the start; a cache salt hides earlier streams on the disk. Raises EngineError for a server that stops
    answering."""
    turns = [ArmRun(arm) for arm in ARMS]
    async with AsyncExitStack() as stack:
        engines = []
        for turn in turns:
            server = servers[turn.arm]
            engine = OpenAIEngine(
                server.base_url,
                server.model_name,
                block_size=server.block_size,
                capacity_tokens=server.capacity_tokens,
            )
            engines.append(await stack.enter_async_context(engine))
            await _prepare(engine, server, stream, host=turn.arm == "tiers")
        before = {}
        for number, rows in enumerate(_segments(len(stream.prompts), warmup, segment)):
            order = list(zip(turns, engines, strict=True))
            for turn, engine in order[:: 1 if (number + first) % 2 == 0 else -1]:
                await asyncio.sleep(_PAUSE_S)
                if rows.start == warmup:
                    before[turn.arm] = await _hits(servers[turn.arm])
                for row in rows:
                    await _serve(turn, engine, stream.prompts[row])
                    advance()
        for turn in turns:
            turn.hits = await _hits(servers[turn.arm]) - before.get(turn.arm, Hits())
    return turns


def _segments(requests: int, warmup: int, segment: int) -> Iterator[range]:
    """A turn ends with the warm-up, so that the requests after it are counted separately."""
    for start, end in ((0, warmup), (warmup, requests)):
        for first in range(start, end, segment):
            yield range(first, min(first + segment, end))


async def _prepare(engine: OpenAIEngine, server: VLLMServer, stream: PromptStream, *, host: bool) -> None:
    rng = random.Random(0)
    try:
        for tokens in _WARM_UP_TOKENS:
            room = min(tokens, stream.longest_tokens)
            await engine.complete(rng.choices(stream.prompts[0], k=room))
    except RequestError as error:
        raise EngineError(f"a server does not serve a prompt of token ids ({error})") from None
    await asyncio.to_thread(server.reset, host=host)
    engine.reset()


async def _serve(turn: ArmRun, engine: OpenAIEngine, prompt: Sequence[int]) -> None:
    try:
        completion = await engine.complete(prompt)
    except RequestError as error:
        raise EngineError(f"the server {turn.arm!r} failed a request ({error}): nothing can be compared") from None
    assert completion.ttft_s is not None
    turn.ttft_ms.append(round(1e3 * completion.ttft_s, 3))
    turn.cached_tokens.append(completion.cached_tokens)
    turn.prompt_tokens.append(completion.prompt_tokens)


async def _hits(server: VLLMServer) -> Hits:
    # A server counts a request a moment after its last token has left.
    await asyncio.sleep(_PAUSE_S)
    return await asyncio.to_thread(fetch_hits, server.base_url)
