"""Load times of a server's tiers, for `ragorder profile --loads`."""

from __future__ import annotations

import asyncio

from ragorder.adapters.http_client import ServerError
from ragorder.adapters.vllm.server_profile import Answered, TierLoads
from ragorder.eval.engines.base import EngineError, RequestError
from ragorder.eval.engines.openai import OpenAIEngine
from ragorder.eval.running.progress import Progress, silent
from ragorder.eval.suites.profiling.measuring import ProfiledServer
from ragorder.trie.profile import PrefillProfile

__all__ = ["measure_loads"]


def measure_loads(
    server: ProfiledServer,
    profile: PrefillProfile,
    *,
    repeats: int = 5,
    seed: int = 0,
    limit_s: float = 600.0,
    progress: Progress = silent,
) -> PrefillProfile:
    """The profile of a vLLM server with ragorder's tiers, with `loads`: medians of `repeats` samples of each tier, or
    of as many as `limit_s` allows. The server and this machine should serve nothing else.

    Raises EngineError if requests fail, or for a server without tiers or without a published capacity.
    """
    capacity_tokens = server.capacity_tokens
    if capacity_tokens is None:
        raise EngineError("the server does not publish the size of its cache: load times are measured on vLLM only")
    engine = OpenAIEngine(
        server.base_url, server.model, block_size=server.block_size, capacity_tokens=None, api_key=server.api_key
    )
    with asyncio.Runner() as loop:

        def send(token_ids: list[int], salt: str) -> Answered:
            engine.salt = salt
            answer = loop.run(engine.complete(token_ids))
            assert answer.ttft_s is not None
            return Answered(answer.ttft_s, answer.cached_tokens, answer.prompt_tokens)

        loop.run(engine.__aenter__())
        try:
            loads = TierLoads(
                server.base_url,
                send,
                profile,
                block_size=server.block_size,
                capacity_tokens=capacity_tokens,
                longest_tokens=server.longest_tokens,
                api_key=server.api_key,
                seed=seed,
            )
            return loads.measure(repeats, limit_s, lambda samples: progress("loads", samples))
        except (RequestError, ServerError) as error:
            raise EngineError(f"load times: {error}") from None
        finally:
            loop.run(engine.__aexit__())
