"""A server's prefill times by cached and by new tokens.

A request has a prefix of random tokens that was sent just before, and new tokens after it; it is repeated unless the
server reports exactly the prefix as cached. Each pair of counts has a `cache_salt` of its own, so that nothing else can
be cached. Rounds in changing order spread slow spells over all pairs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

from ragorder.adapters.http_client import Server, ServerError
from ragorder.adapters.vllm.cache_config import cache_config
from ragorder.adapters.vllm.server_profile import Answered, TierLoads
from ragorder.eval.data.machine import describe_environment
from ragorder.eval.engines.base import EngineCompletion, EngineError, RequestError
from ragorder.eval.engines.models import longest_prompt, random_model
from ragorder.eval.engines.openai import OpenAIEngine, find_model
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.running.load import Progress, silent
from ragorder.trie.profile import PrefillProfile

_CellTokens = tuple[int, int]
"""Cached and new tokens."""

_TIMEOUT_S = 10.0
_LONGEST_TOKENS = 8_192
_OWN_BLOCK_SIZE = 32
_FIRST_NEW = 16
_FIRST_CACHED = 64
_FACTOR = 4
_CHECK_TOKENS = 512
_TRIES = 3
# Ordinary tokens, or at least harmless ones, in any vocabulary.
_TOKEN_IDS = range(100, 256)


@dataclass(frozen=True, slots=True)
class ProfiledServer:
    """A running server; `engine` is its name and version, `longest_tokens` the longest prompt with its answer,
    `capacity_tokens` those that its KV cache holds, if published."""

    base_url: str
    model: str
    engine: str
    block_size: int
    longest_tokens: int
    api_key: str | None = field(default=None, repr=False)
    capacity_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """All pairs of these counts. `notes`: deviations from what was asked for."""

    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @property
    def cells(self) -> list[_CellTokens]:
        return [(cached, new) for cached in self.cached_tokens for new in self.new_tokens]


def own_server(model: Path | None = None, *, block_size: int | None = None) -> VLLMServer:
    """A vLLM server to be entered. Raises ImportError, OSError or ValueError for a folder without a model."""
    size = block_size or _OWN_BLOCK_SIZE
    folder = model or random_model()
    longest = min(_LONGEST_TOKENS, longest_prompt(folder))
    return VLLMServer(folder, blocks=4 * longest // size, block_size=size, max_model_len=longest)


def find_profiled(
    base_url: str, *, served_model: str | None = None, api_key: str | None = None, block_size: int | None = None
) -> ProfiledServer:
    """The server at an address, by its published limits (8,192 tokens without). Raises EngineError for a server without
    an answer, this model or a block size."""
    found = find_model(base_url, served_model, api_key=api_key)
    capacity_tokens: int | None = None
    with Server(base_url, timeout_s=_TIMEOUT_S, api_key=api_key) as server:
        try:
            config = cache_config(server)
            capacity_tokens, block_size = config.capacity_tokens, block_size or config.block_size
        except ServerError as error:
            if block_size is None:
                raise EngineError(f"{error}; for a profile: --block-size") from None
        engine = _engine(server)
    longest = min((tokens for tokens in (found.max_model_len, capacity_tokens) if tokens), default=_LONGEST_TOKENS)
    return ProfiledServer(base_url, found.id, engine, block_size, longest, api_key, capacity_tokens)


@contextmanager
def profiled_server(
    base_url: str | None,
    *,
    model: Path | None = None,
    served_model: str | None = None,
    api_key: str | None = None,
    block_size: int | None = None,
) -> Iterator[ProfiledServer]:
    """The server at an address, else a new one. Raises as `find_profiled` and `own_server` do."""
    if base_url is not None:
        yield find_profiled(base_url, served_model=served_model, api_key=api_key, block_size=block_size)
        return
    with own_server(model, block_size=block_size) as started:
        yield find_profiled(started.base_url, block_size=block_size)


def plan_grid(server: ProfiledServer, cached: Iterable[int] | None = None, new: Iterable[int] | None = None) -> Grid:
    """The grid of these counts, cached ones rounded down to whole blocks; by default geometric series that fit into a
    prompt. Raises EngineError for invalid or too large counts."""
    size, room = server.block_size, server.longest_tokens - 1
    if room < 3 * size:
        raise EngineError(
            f"the server takes prompts of {room:,} tokens, less than three of its blocks of {size}: raise its "
            "--max-model-len"
        )
    asked = None if cached is None else sorted(set(cached))
    fresh = None if new is None else sorted(set(new))
    if asked == [] or fresh == [] or min(asked or [0]) < 0 or min(fresh or [1]) < 1:
        raise EngineError("the grid needs token counts: give --cached some of 0 or more, --new some of 1 or more")
    if fresh is None:
        fresh = _series(_FIRST_NEW, room // 2 if asked is None else max(1, room - asked[-1]))
    if asked is None:
        asked = [0, *_series(_blocks(_FIRST_CACHED + size - 1, size), _blocks(room - fresh[-1], size))]
    whole = {tokens: _blocks(tokens, size) for tokens in asked}
    longest = max(whole.values()) + fresh[-1]
    if longest > room:
        raise EngineError(
            f"{asked[-1]:,} cached and {fresh[-1]:,} new tokens make a prompt that does not fit: the server takes "
            f"{room:,} beside the answer: lower --cached or --new, or raise the server's --max-model-len"
        )
    rounded = [f"{tokens:,} is {blocks:,}" for tokens, blocks in whole.items() if tokens != blocks]
    notes = [f"cached tokens come in whole blocks of {size}: {', '.join(rounded)}"] if rounded else []
    return Grid(tuple(dict.fromkeys(whole.values())), tuple(fresh), tuple(notes))


def measure_profile(
    server: ProfiledServer,
    grid: Grid,
    *,
    repeats: int = 5,
    seed: int = 0,
    progress: Progress = silent,
) -> PrefillProfile:
    """Medians of the time to the first token at the client. The server and this machine should serve nothing else.
    Raises EngineError if requests fail, or the reported cached tokens are missing or wrong."""
    return asyncio.run(_measure(server, grid, repeats, seed, progress))


async def _measure(server: ProfiledServer, grid: Grid, repeats: int, seed: int, progress: Progress) -> PrefillProfile:
    environment, draw, cells = describe_environment(), Random(seed), grid.cells
    # The first of its kind pays for what is set up once: with and without a prefix, in every length.
    warm_up = [cell for cell in cells if cell[0] in (grid.cached_tokens[0], grid.cached_tokens[-1])]
    advance = progress("profile", len(warm_up) + repeats * len(cells))
    times: dict[_CellTokens, list[float]] = {cell: [] for cell in cells}
    async with OpenAIEngine(
        server.base_url, server.model, block_size=server.block_size, capacity_tokens=None, api_key=server.api_key
    ) as engine:
        requests = _Requests(engine, draw)
        await engine.check(requests.token_ids(min(server.longest_tokens - 1, 3 * server.block_size + _CHECK_TOKENS)))
        for cell in warm_up:
            await requests.ttft_s(cell)
            advance()
        for _ in range(repeats):
            for cell in draw.sample(cells, len(cells)):
                times[cell].append(await requests.ttft_s(cell))
                advance()
    rows = [[median(times[cached, new]) for new in grid.new_tokens] for cached in grid.cached_tokens]
    spreads = [(max(each) - min(each)) / median(each) for each in times.values()]
    facts = {
        "engine": server.engine,
        "model": server.model,
        "date": environment["time"],
        "measured": "time to the first token at the client, in seconds: median of the repeats",
        "block_size": server.block_size,
        "longest_tokens": server.longest_tokens,
        "repeats": repeats,
        "seed": seed,
        "sent_again": requests.again,
        "medians_s": rows,
        "spread_share": {"median": median(spreads), "largest": max(spreads)},
        "environment": environment,
    }
    return PrefillProfile.measured(grid.cached_tokens, grid.new_tokens, rows, facts)


class _Requests:
    """`again` counts requests that failed or found something else cached."""

    def __init__(self, engine: OpenAIEngine, draw: Random) -> None:
        self.again = 0
        self._engine = engine
        self._draw = draw
        self._prefixes: dict[_CellTokens, tuple[str, list[int]]] = {}

    def token_ids(self, count: int) -> list[int]:
        return self._draw.choices(_TOKEN_IDS, k=count)

    async def ttft_s(self, cell: _CellTokens) -> float:
        cached, new = cell
        problem = ""
        for _ in range(_TRIES):
            try:
                answer = await self._ask(cell)
            except RequestError as error:
                problem = (
                    f"the server did not serve a prompt of {cached + new:,} tokens ({error}): see its log, or lower "
                    "--cached and --new"
                )
            else:
                if (answer.cached_tokens, answer.prompt_tokens) == (cached, cached + new) and answer.ttft_s is not None:
                    return answer.ttft_s
                problem = (
                    f"the server had {answer.cached_tokens:,} tokens cached of {cached:,} that it had just been sent, "
                    f"before {new:,} others, in the last of {_TRIES} tries: see that it serves nothing "
                    "else and is one engine (no data parallelism), and that --block-size is right, or lower --cached"
                )
            self.again += 1
            del self._prefixes[cell]
        raise EngineError(problem)

    async def _ask(self, cell: _CellTokens) -> EngineCompletion:
        cached, new = cell
        salt, prefix = self._prefixes.setdefault(cell, (secrets.token_hex(16), self.token_ids(cached)))
        self._engine.salt = salt
        if prefix:
            # Mostly it is still there, and costs next to nothing.
            await self._engine.complete(prefix)
        return await self._engine.complete([*prefix, *self.token_ids(new)])


def _engine(server: Server) -> str:
    try:
        answer = server.get_json("/version")
    except ServerError:
        answer = None
    version = answer.get("version") if isinstance(answer, dict) else None
    return f"vllm {version}" if isinstance(version, str) else "OpenAI-compatible server"


def _blocks(tokens: int, size: int) -> int:
    return tokens // size * size


def _series(first: int, last: int) -> list[int]:
    series = []
    while first <= last:
        series.append(first)
        first *= _FACTOR
    # Two that are close to each other would measure noise.
    if last > 0 and (not series or 4 * last >= 5 * series[-1]):
        series.append(last)
    return series


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
    of fewer if `limit_s` ends first. The server and this machine should serve nothing else. Raises EngineError if
    requests fail, or for a server without tiers or without a published capacity."""
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
