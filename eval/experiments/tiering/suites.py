"""Suites about tiers on a real engine: the harness has them measured on two servers, and keeps what comes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragorder.eval.data.corpora import Corpus
from ragorder.eval.data.corpora.loader import CorpusLoader
from ragorder.eval.data.trace import trace_of_corpus
from ragorder.eval.experiments.tiering import ARMS, Stream, kv_bytes_per_token, make_sizes, make_stream
from ragorder.eval.experiments.tiering.cells import TieringCell
from ragorder.eval.running.options import Options
from ragorder.eval.running.progress import Progress
from ragorder.eval.running.store import Store
from ragorder.eval.running.suite import Suite

__all__ = ["run_tiering_suites"]

_NO_SERVER = "tiers are measured on two servers, which are started: use --engine openai"
_OWN_SERVERS = "tiers are measured on two servers with pools of a size that is asked for: leave out --base-url"


def run_tiering_suites(
    suites: Sequence[Suite], options: Options, store: Store, session: str, progress: Progress
) -> Iterator[Mapping[str, Any]]:
    """Lines of type "tiering", one for each arm, and of type "unavailable" where nothing could be measured. Each is to
    be in the store before the next one is asked for.

    Raises EngineError for a server that does not come up or fails a request, CorpusError for a corpus that cannot be
    read, ImportError naming what to install.
    """
    shelf, todo = CorpusLoader(options.corpora), []
    for suite in suites:
        if options.policies is not None and not set(ARMS[1:]) & set(options.policies):
            continue
        for cell in (TieringCell.read(point, f"{suite.name}.toml") for point in suite.points):
            why = _no_engine(options)
            corpus = why or shelf.take(cell.corpus)
            if isinstance(corpus, str):
                yield _unavailable(session, suite, {} if why else cell.fields, corpus)
                continue
            seeds = [seed for seed in options.seeds if not _done(store, suite, cell, seed)]
            if seeds:
                todo.append((suite, cell, corpus, seeds))
    if not todo or options.dry_run:
        return
    served = sum(len(ARMS) * len(seeds) * _count(suite, corpus, options) for suite, _, corpus, seeds in todo)
    advance = progress("requests", served)
    streams = _Streams(options)
    for suite, cell, corpus, seeds in todo:
        yield from _measure(suite, cell, streams.take(suite, cell, corpus), seeds, streams.model, session, advance)


def _measure(
    suite: Suite,
    cell: TieringCell,
    streams: Mapping[int, Stream],
    seeds: Sequence[int],
    model: Path,
    session: str,
    advance: Any,
) -> Iterator[dict[str, Any]]:
    """Both servers stay as they are for all seeds of a cell."""
    from ragorder.eval.experiments.tiering.measuring import measure, pair_of_servers

    sizes = make_sizes(
        cell.tier, list(streams.values()), block_size=cell.block_size, bytes_per_token=_bytes_per_token(model)
    )
    longest = max(stream.longest_tokens for stream in streams.values())
    settings = {"policy": cell.replacement, "device_order": cell.device_order}
    with pair_of_servers(
        sizes, model, block_size=cell.block_size, longest_tokens=longest, settings=settings
    ) as servers:
        for seed in seeds:
            stream = streams[seed]
            # A shorter run has as large a share of warm-up.
            warmup = len(stream.prompts) * suite.warmup // suite.requests
            serving = measure(servers, stream, warmup=warmup, segment=cell.segment, first=seed, advance=advance)
            for turn in asyncio.run(serving):
                yield {
                    "type": "tiering",
                    "session": session,
                    "suite": suite.name,
                    "cell": cell.fields,
                    "seed": seed,
                    "policy": turn.arm,
                    "engine": {"name": "openai", "model": model.name, "block_size": cell.block_size},
                    "warmup": warmup,
                    "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
                    "facts": asdict(sizes),
                    "sources": turn.hits.as_json(),
                    "rows": {name: getattr(turn, name) for name in ("ttft_ms", "cached_tokens", "prompt_tokens")},
                }


class _Streams:
    """The requests of all seeds, in the tokens of the model."""

    def __init__(self, options: Options) -> None:
        from ragorder.eval.engines.models import built_prompts, random_model

        self.model = options.model or random_model()
        self._options = options
        self._prompts = built_prompts(self.model)
        self._drawn: dict[object, dict[int, Stream]] = {}

    def take(self, suite: Suite, cell: TieringCell, corpus: Corpus) -> dict[int, Stream]:
        count = _count(suite, corpus, self._options)
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


def _count(suite: Suite, corpus: Corpus, options: Options) -> int:
    return min(suite.requests, options.limit or suite.requests, len(corpus.questions))


def _bytes_per_token(model: Path) -> int:
    from transformers import AutoConfig

    from ragorder.eval.engines.vllm import has_fast_bfloat16

    config = AutoConfig.from_pretrained(model).get_text_config()
    return kv_bytes_per_token(config, 2 if has_fast_bfloat16() else 4)


def _done(store: Store, suite: Suite, cell: TieringCell, seed: int) -> bool:
    key = {"suite": suite.name, "cell": cell.fields, "seed": seed}
    return all(store.has("tiering", **key, policy=arm) for arm in ARMS)


def _no_engine(options: Options) -> str | None:
    if options.engine != "openai":
        return _NO_SERVER
    return _OWN_SERVERS if options.base_url is not None else None


def _unavailable(session: str, suite: Suite, cell: dict[str, Any], reason: str) -> dict[str, Any]:
    return {
        "type": "unavailable",
        "session": session,
        "suite": suite.name,
        "cell": cell,
        "policy": ARMS[1],
        "reason": reason,
    }
