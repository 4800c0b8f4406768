"""`ragorder serve --engine torch`: a model in this process, in the place of a server behind the proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from pydantic import ValidationError

from ragorder.cli.options import Size

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.types import ASGIApp

    from ragorder.adapters.embedded import EngineWorker
    from ragorder.kernels.engine import TieredEngine
    from ragorder.settings import Settings

__all__ = ["ENGINE_OPTIONS", "Behind", "check_engine", "embedded", "engine_options"]

F = TypeVar("F", bound=Callable[..., Any])

_MAX_WAITING = 1000
_RANDOM = "random"
# Nothing is looked up under this name, and nothing listens.
_NOWHERE = "http://embedded"

_OPTIONS = (
    click.option(
        "--model",
        metavar="FOLDER|NAME|random",
        help="With --engine torch: the causal language model, by folder or name on the Hub, safetensors and tokenizer; "
        "random: one with random weights, made on the spot, to try the server without a download.",
    ),
    click.option(
        "--device-tokens",
        type=click.IntRange(min=1),
        metavar="N",
        help="With --engine torch: tokens of KV on the device. [default: what fits]",
    ),
    click.option(
        "--host-bytes",
        type=Size(),
        metavar="SIZE",
        help="With --engine torch: host memory for KV that left the device: 8GiB, 500MB or bytes; 0: none. "
        "[default: 1GiB]",
    ),
    click.option(
        "--disk",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="With --engine torch: where KV that left host memory is kept. One server at a time uses it. "
        "[default: no disk]",
    ),
    click.option(
        "--disk-bytes", type=Size(), metavar="SIZE", help="With --disk: what it may take there. [default: 16GiB]"
    ),
    click.option(
        "--policy",
        metavar="NAME",
        help="With --engine torch: what goes first when a tier is full: pgdsf, gdsf, lru or lfu. [default: pgdsf]",
    ),
    click.option(
        "--profile",
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        metavar="FILE",
        help="With --engine torch: what prefill takes, as `ragorder profile` has measured it, for the policy.",
    ),
    click.option(
        "--max-model-len",
        type=click.IntRange(min=2),
        metavar="N",
        help="With --engine torch: tokens that prompt and answer may have. [default: what the model takes]",
    ),
    click.option(
        "--max-requests",
        type=click.IntRange(min=1),
        metavar="N",
        help="With --engine torch: requests that are computed side by side. [default: 64]",
    ),
    click.option(
        "--dtype",
        metavar="NAME",
        help="With --engine torch: float32, bfloat16 or float16. [default: as the weights are stored]",
    ),
    click.option(
        "--device", metavar="NAME", help="With --engine torch: cpu, cuda or cuda:N. [default: a GPU if there is one]"
    ),
)
ENGINE_OPTIONS = (
    "model",
    "device_tokens",
    "host_bytes",
    "disk",
    "disk_bytes",
    "policy",
    "profile",
    "max_model_len",
    "max_requests",
    "dtype",
    "device",
)
_UPSTREAM_OPTIONS: tuple[str, ...] = ("upstream", "upstream_api_key", "tokenizer", "tiers", "connect_timeout")
_FIELDS = {"disk": "disk_path"}


def engine_options(command: F) -> F:
    """The options of a command that can run an engine."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_engine(context: click.Context) -> str:
    """What the command is to run: "upstream" or "torch". Raises click.UsageError for options that are at odds."""
    params = context.params
    given = {name for name in params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    engine: str | None = params["engine"]
    if engine is None and params["upstream"] is not None:
        engine = "upstream"
    if engine is None:
        raise click.UsageError("give --upstream URL, or --engine torch with --model FOLDER|NAME|random")
    needed, other, foreign = "model", "upstream", _UPSTREAM_OPTIONS
    if engine == "upstream":
        needed, other, foreign = "upstream", "torch", ENGINE_OPTIONS
    if misplaced := [name for name in foreign if name in given]:
        raise click.UsageError(f"{_option(misplaced[0])} goes with --engine {other}, not with {engine}")
    if params[needed] is None:
        raise click.UsageError(f"--engine {engine} needs {_option(needed)}")
    if params["disk_bytes"] is not None and params["disk"] is None:
        raise click.UsageError("--disk-bytes goes with --disk")
    return engine


@dataclass(frozen=True, slots=True)
class Behind:
    """What is behind the proxy: what is known of it, `options` of `make_app` that lead to it, where its sizes are from,
    and how the proxy's application is to be wrapped."""

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
) -> Iterator[Behind]:
    """The engine that the options describe, until the end of the block; `registry` gets its metrics.

    Raises click.ClickException where it cannot be had.
    """
    try:
        from ragorder.adapters.embedded import AppTransport, EngineMetrics, EngineWorker, hosted, make_engine_app
    except ImportError as error:
        raise click.ClickException(_missing(error)) from None
    engine = _load(options, settings)
    waiting = _MAX_WAITING if max_waiting is None else max_waiting
    worker = EngineWorker(engine, max_unfinished=engine.settings.max_requests + waiting)
    try:
        metrics = EngineMetrics(worker)
        registry.register(metrics)
        # What goes on is written anew, and may be longer than what came.
        app = make_engine_app(worker, metrics=metrics, body_limit=2 * body_limit)
        yield Behind(
            _with_sizes(settings, worker),
            deepcopy(engine.tokenizer),
            {"upstream": _NOWHERE, "send_facts": True, "make_transport": lambda: AppTransport(app)},
            "device and host memory",
            lambda proxy: hosted(proxy, worker),
        )
    finally:
        worker.close()


def _load(options: Mapping[str, Any], settings: Settings) -> TieredEngine:
    from ragorder.kernels.engine import EngineSettings, TieredEngine
    from ragorder.kernels.engine.loading import may_be_on_hub

    given = {_FIELDS.get(name, name): value for name, value in options.items() if value is not None}
    model = given.pop("model")
    if model != _RANDOM and not Path(model).is_dir() and may_be_on_hub(model):
        click.echo(f"There is no folder {model}: it is looked for on the Hugging Face Hub.", err=True)
    if "block_size" in settings.model_fields_set:
        given["block_size"] = settings.block_size
    try:
        if model == _RANDOM:
            model, dtype = _random_model()
            given.setdefault("dtype", dtype)
        return TieredEngine.load(model, EngineSettings(**given))
    except ValidationError as error:
        raise click.UsageError(_complaint(error)) from None
    except ImportError as error:
        raise click.ClickException(_missing(error)) from None
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise click.ClickException(f"--model {model}: {error}") from None


def _random_model() -> tuple[str, str]:
    """Its folder in the cache of this user, and the dtype that this machine computes fast."""
    # By name: the product does without the evaluation, whose model this is, but for a trial.
    models, engines = import_module("ragorder.eval.engines.models"), import_module("ragorder.eval.engines.vllm")
    return str(models.random_model()), "bfloat16" if engines.has_fast_bfloat16() else "float32"


def _with_sizes(settings: Settings, worker: EngineWorker) -> Settings:
    """The settings, with what the engine keeps in the place of what nobody has said.

    What counts as cached is what device and host memory hold together: both are quick to reach. What is on the disk
    alone is not predicted, and is found all the same.
    """
    engine, cache = worker.engine, worker.stats().cache
    known: dict[str, Any] = {"block_size": engine.block_size}
    if "capacity_tokens" not in settings.model_fields_set:
        token_bytes = cache.device.capacity_bytes // engine.device_tokens
        known["capacity_tokens"] = engine.device_tokens + cache.host.capacity_bytes // token_bytes
    return settings.model_copy(update=known)


def _complaint(error: ValidationError) -> str:
    """What is wrong, in the names of the options."""
    problem = error.errors(include_url=False, include_context=False)[0]
    message = problem["msg"].removeprefix("Value error, ")
    options = {field: name for name, field in _FIELDS.items()}
    names = [str(part) for part in problem["loc"][:1]]
    return ": ".join([*(_option(options.get(name, name)) for name in names), message])


def _missing(error: ImportError) -> str:
    return f"the embedded engine needs {error.name or 'torch'}: pip install 'ragorder[torch,proxy]'"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
