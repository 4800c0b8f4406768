"""The experiment of the suites of kind "tiering"."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.benchmarks.ragcache.tiering import ARMS, PromptStream, kv_bytes_per_token, make_sizes, make_stream
from ragorder.benchmarks.ragcache.tiering.cells import TieringCell
from ragorder.benchmarks.ragcache.tiering.record import TieringRecord
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.data.machine import load_average
from ragorder.eval.data.trace import trace_of_corpus
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

if TYPE_CHECKING:
    from ragorder.eval.engines.server import VLLMServer
    from ragorder.eval.running.options import Options

__all__ = ["Tiering"]

_NO_SERVER = "tiers are measured on two servers, which are started: use --engine openai"
_OWN_SERVERS = "tiers are measured on two servers with pools of a size that is asked for: leave out --base-url"


class Tiering(Experiment):
    kind = "tiering"
    record = TieringRecord
    cell = TieringCell
    one_job = True
    policies: ClassVar[Any] = ARMS

    _drawn: _PromptStreams | None = None
    _running: tuple[object, Mapping[str, VLLMServer], dict[str, Any]] | None = None

    def asked(self, suite: Suite) -> Sequence[str]:
        """Both arms or none: tiers are compared with the prefix cache alone."""
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
        from ragorder.benchmarks.ragcache.tiering.measuring import measure

        cell: TieringCell = job.cell
        if self._drawn is None:
            self._drawn = _PromptStreams(self.options)
        model = self._drawn.model
        assert job.corpus is not None
        streams = self._drawn.take(cell, job.corpus, job.requests)
        servers, facts = self._servers(job, streams, model)
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
                    "load_average": load_average(),
                    "facts": facts,
                    "sources": turn.hits.as_json(),
                    "rows": {name: getattr(turn, name) for name in ("ttft_ms", "cached_tokens", "prompt_tokens")},
                }

    def _servers(
        self, job: Job, streams: Mapping[int, PromptStream], model: Path
    ) -> tuple[Mapping[str, VLLMServer], dict[str, Any]]:
        from ragorder.benchmarks.ragcache.tiering.measuring import pair_of_servers

        cell: TieringCell = job.cell
        same = (job.suite.name, repr(cell))
        if self._running is None or self._running[0] != same:
            self.resources.close()
            self._running = None
            sizes = make_sizes(
                cell.tier, list(streams.values()), block_size=cell.block_size, bytes_per_token=_bytes_per_token(model)
            )
            longest = max(stream.longest_tokens for stream in streams.values())
            settings = {"policy": cell.replacement, "device_order": cell.device_order}
            pair = pair_of_servers(sizes, model, block_size=cell.block_size, longest_tokens=longest, settings=settings)
            servers, profile = self.resources.enter_context(pair)
            self._running = same, servers, {**asdict(sizes), "profile": profile.as_json()}
        return self._running[1:]


class _PromptStreams:
    def __init__(self, options: Options) -> None:
        from ragorder.eval.engines.models import built_prompts, random_model

        self.model = options.model or random_model()
        self._options = options
        self._prompts = built_prompts(self.model)
        self._drawn: dict[object, dict[int, PromptStream]] = {}

    def take(self, cell: TieringCell, corpus: Corpus, count: int) -> dict[int, PromptStream]:
        key = (cell.stream, count)
        if key not in self._drawn:
            self._drawn[key] = {
                seed: make_stream(
                    trace_of_corpus(corpus, top_k=cell.top_k, order="random", seed=seed, limit=count),
                    self._prompts,
                    cell.block_size,
                )
                for seed in self._options.seeds
            }
        return self._drawn[key]


def _bytes_per_token(model: Path) -> int:
    from transformers import AutoConfig

    from ragorder.eval.engines.vllm import has_fast_bfloat16

    config = AutoConfig.from_pretrained(model).get_text_config()
    return kv_bytes_per_token(config, 2 if has_fast_bfloat16() else 4)
