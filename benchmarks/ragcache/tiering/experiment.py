"""Time to the first token of a real engine with tiers, and without (RAGCache 7)."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from ragorder.adapters.http_client import ServerError
from ragorder.adapters.observing.tier_stats import SOURCES, Hits, fetch_hits
from ragorder.adapters.vllm.server_profile import measure_server
from ragorder.adapters.vllm_tiers import TierSettings
from ragorder.eval.data.trace import Trace, trace_of_corpus
from ragorder.eval.engines.base import EngineError, RequestError
from ragorder.eval.engines.models import built_prompts, random_model
from ragorder.eval.engines.openai import OpenAIEngine
from ragorder.eval.engines.prompts import Prompts
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.record import Record, as_column
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite
from ragorder.trie.policies import POLICIES
from ragorder.trie.profile import PrefillProfile

if TYPE_CHECKING:
    from ragorder.eval.running.record import Floats

ARMS = ("apc", "tiers")
"""vLLM's prefix cache alone, and with tiers."""


@dataclass(frozen=True, slots=True)
class PromptStream:
    """`working_set_tokens` is the reusable KV of the prompts: whole blocks, each prefix once."""

    prompts: Sequence[Sequence[int]]
    working_set_tokens: int

    @property
    def longest_tokens(self) -> int:
        return max(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class TierSizes:
    """`disk_bytes` is None without a disk."""

    blocks: int
    host_bytes: int
    disk_bytes: int | None
    working_set_tokens: int


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
    """Start servers by arm; tiers have the prefill times of the server without. Raises EngineError."""
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


_ROOM = 1.25
"""Size of a tier that holds the whole working set, as a multiple of it: answers and warm-up need room."""

_SHARES: dict[str, tuple[float, float, float | None]] = {
    "device": (_ROOM, _ROOM, None),
    "host": (0.25, _ROOM, None),
    "beyond": (0.25, 0.5, None),
    "disk": (0.25, 0.5, _ROOM),
}

ROOMS = tuple(_SHARES)
"""Places that the working set fits: the device's pool, the host, neither, the disk."""

_NO_SERVER = "tiers are measured on two servers, which are started: use --engine openai"
_OWN_SERVERS = "tiers are measured on two servers with pools of a size that is asked for: leave out --base-url"


def make_stream(trace: Trace, prompts: Prompts, block_size: int) -> PromptStream:
    """Documents stand in retrieval order."""
    ids = [prompts.token_ids(row, request, request.documents) for row, request in enumerate(trace.requests)]
    return PromptStream(ids, _working_set(ids, block_size))


def _working_set(prompts: Sequence[Sequence[int]], block_size: int) -> int:
    seen: set[int] = set()
    for prompt in prompts:
        prefix = 0
        for start in range(0, len(prompt) - block_size + 1, block_size):
            prefix = hash((prefix, tuple(prompt[start : start + block_size])))
            seen.add(prefix)
    return len(seen) * block_size


def make_sizes(room: str, streams: Sequence[PromptStream], *, block_size: int, bytes_per_token: int) -> TierSizes:
    """Return sizes for the largest working set; the pool holds the longest prompt, the disk all streams."""
    largest = max(stream.working_set_tokens for stream in streams)
    every = sum(stream.working_set_tokens for stream in streams)
    least = max(stream.longest_tokens for stream in streams) // block_size + 2
    device, host, disk = _SHARES[room]
    return TierSizes(
        max(least, round(largest * device) // block_size),
        round(largest * host) * bytes_per_token,
        None if disk is None else round(every * disk) * bytes_per_token,
        largest,
    )


def kv_bytes_per_token(config: Any, value_bytes: int) -> int:
    """For a model with uniform layers, from its transformers configuration."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * value_bytes)


class TieringCell(SuiteCell):
    """`tier` is what the working set fits: "device", its pool; "host", four times the pool, and host memory; "beyond",
    twice the host memory as well; "disk", the same with a disk. Servers take turns of `segment` requests."""

    tier: Annotated[str, one_of("tier", ROOMS)]
    corpus: str = "pydocs"
    top_k: int = Field(2, ge=1)
    block_size: int = Field(32, ge=1)
    replacement: Annotated[str, one_of("replacement policy", POLICIES)] = "pgdsf"
    device_order: bool = True
    segment: int = Field(10, ge=1)

    @property
    def stream(self) -> tuple[str, int, int]:
        """Equal for cells that serve the same requests."""
        return self.corpus, self.top_k, self.block_size


class TieringRecord(Record):
    """One arm in one cell with one seed. `sources` are prompt tokens by the source of their KV."""

    sources: dict[str, int]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if "tier" not in self.cell or not self.sources.keys() >= set(SOURCES):
            raise ValueError("the tier or sources are missing")
        return self

    @property
    def requests(self) -> int:
        return len(self.ttft_ms)

    @property
    def ttft_ms(self) -> Floats:
        return as_column(self.rows["ttft_ms"])[self.warmup :]


class Tiering(Experiment):
    kind = "tiering"
    base = TieringRecord
    cell = TieringCell
    columns = ("ttft_ms", "cached_tokens", "prompt_tokens")
    facts = ("blocks", "host_bytes", "working_set_tokens")
    runs = True
    one_job = True
    policies: ClassVar[Any] = ARMS

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._drawn: dict[object, dict[int, PromptStream]] = {}

    def asked(self, suite: Suite) -> Sequence[str]:
        """Both arms or neither: tiers are compared with the prefix cache alone."""
        return ARMS if set(ARMS[1:]) & set(super().asked(suite)) else ()

    def obstacle(self, suite: Suite, cell: TieringCell, policy: str) -> str | None:
        return self._no_engine() or super().obstacle(suite, cell, policy)

    def _no_engine(self) -> str | None:
        if self.options.engine != "openai":
            return _NO_SERVER
        return _OWN_SERVERS if self.options.base_url is not None else None

    def missing(self, suite: Suite, cell: TieringCell, policy: str, reason: str) -> Missing | None:
        named = {} if self._no_engine() else cell.fields
        return Missing(suite.name, named, policy, reason) if policy == ARMS[1] else None

    def steps(self, job: Job) -> int:
        return len(ARMS) * job.requests

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: TieringCell = job.cell
        model = self.options.model or random_model()
        streams = self._streams(job, model)
        servers, facts = self.kept((job.suite.name, repr(cell)), lambda: self._start(cell, streams, model))
        stream = streams[job.seed]
        # A shorter run has as large a share of warm-up.
        warmup = len(stream.prompts) * job.suite.warmup // job.suite.requests
        serving = measure(servers, stream, warmup=warmup, segment=cell.segment, first=job.seed, advance=advance)
        for turn in asyncio.run(serving):
            if turn.arm in job.policies:
                yield {
                    "policy": turn.arm,
                    "engine": {"name": "openai", "model": model.name, "block_size": cell.block_size},
                    "warmup": warmup,
                    "facts": facts,
                    "sources": turn.hits.as_json(),
                    "rows": {name: getattr(turn, name) for name in self.columns},
                }

    def _start(
        self, cell: TieringCell, streams: Mapping[int, PromptStream], model: Path
    ) -> tuple[Mapping[str, VLLMServer], dict[str, Any]]:
        sizes = make_sizes(
            cell.tier, list(streams.values()), block_size=cell.block_size, bytes_per_token=_bytes_per_token(model)
        )
        longest = max(stream.longest_tokens for stream in streams.values())
        settings = {"policy": cell.replacement, "device_order": cell.device_order}
        pair = pair_of_servers(sizes, model, block_size=cell.block_size, longest_tokens=longest, settings=settings)
        servers, profile = self.resources.enter_context(pair)
        return servers, {**asdict(sizes), "profile": profile.as_json()}

    def _streams(self, job: Job, model: Path) -> dict[int, PromptStream]:
        """By seed."""
        cell, corpus = job.cell, job.corpus
        assert corpus is not None, "a cell has a corpus"
        key = (cell.stream, job.requests)
        if key not in self._drawn:
            prompts = built_prompts(model)
            traces = {
                seed: trace_of_corpus(corpus, top_k=cell.top_k, order="random", seed=seed, limit=job.requests)
                for seed in self.options.seeds
            }
            self._drawn[key] = {seed: make_stream(trace, prompts, cell.block_size) for seed, trace in traces.items()}
        return self._drawn[key]


def _bytes_per_token(model: Path) -> int:
    from transformers import AutoConfig

    from ragorder.eval.engines.vllm import has_fast_bfloat16

    config = AutoConfig.from_pretrained(model).get_text_config()
    return kv_bytes_per_token(config, 2 if has_fast_bfloat16() else 4)
