"""A GPU day: suites one after another, each for some minutes.

`python -m ragorder.benchmarks.gpu.day -o DIR`, again and again, until all parts have ended.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import click

from ragorder.benchmarks.kernels.embedded.models import SHAPES
from ragorder.common.files import cache_folder

__all__ = ["MINUTES", "PARTS", "Part", "main"]

MINUTES = 45
"""Of all parts together."""
_STATE = "gpu-day.json"
_SMALL = "tiny"
_VOCABULARY = 8_192
_CLOSING_S = 60


class Part(NamedTuple):
    """`suite` with its `--set`s for `minutes`; with a `shape` the embedded engine serves it, with a model of this
    shape. `small` has the `--set`s of the form that a CPU measures in seconds, of `small_suite` if that is another one.
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

    def arguments(self, *, small: bool) -> list[str]:
        """Return those of `ragorder eval run`."""
        limit = self.small_limit if small else self.limit
        words = [(small and self.small_suite) or self.suite, "--seeds", "0"]
        words += [word for each in (self.small if small else self.sets) for word in ("--set", each)]
        words += [word for each in self.policies for word in ("--policy", each)]
        words += ["--limit", str(limit)] if limit else []
        if self.shape:
            words += ["--engine", "torch", "--model", str(_model_folder(_SMALL if small else self.shape))]
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

PARTS = {
    "profile": Part(
        "embedded-prefill",
        3,
        ("measure=cached,overhead", _MISTRAL, "repeats=10"),
        ("measure=cached", *_TINY),
    ),
    "kernel": Part("attention-kernel", 6, ("head_dim=128",), (*_ROWS, "query=5"), "attention-check"),
    "table-1": Part("table-1", 5, (), _SERVED, policies=_TABLE_1, limit=120, small_limit=3, shape=_QWEN),
    "tiers": Part("embedded-prefill", 2, ("measure=tiers", _MISTRAL, "repeats=10"), ("measure=tiers", *_TINY)),
    "figure-18": Part("embedded-serving", 6, (*_OF_18, "replacement=pgdsf"), _SMALL_18),
    "figure-15": Part(
        "open-loop",
        4,
        _OPEN,
        (*_SERVED, "arrivals=none,poisson:50", "output_tokens=1"),
        limit=120,
        small_limit=3,
        shape=_QWEN,
    ),
    "figure-17": Part(
        "open-loop",
        3,
        ("workload=paper-shuf", "arrivals=poisson:2,poisson:4", "output_tokens=32"),
        (*_SERVED, "arrivals=poisson:50", "output_tokens=3"),
        limit=100,
        small_limit=3,
        shape=_QWEN,
    ),
    "table-4": Part(
        "table-4",
        4,
        (),
        (*_SERVED, "concurrency=2", "output_tokens=2"),
        policies=_TWO,
        limit=64,
        small_limit=4,
        shape=_QWEN,
    ),
    "table-8": Part(
        "table-8",
        3,
        ("workload=paper-shuf",),
        (*_SERVED, "concurrency=2"),
        policies=_TWO,
        limit=100,
        small_limit=4,
        shape=_QWEN,
    ),
    "table-10": Part(
        "table-10",
        2,
        ("capacity_tokens=100000",),
        ("capacity_tokens=8000",),
        policies=("retrieval", "greedy", "earned"),
        limit=120,
        small_limit=3,
        shape=_QWEN,
    ),
    "kernel-sparse": Part("attention-sparse", 3, (), (*_ROWS, "query=33", "scattered=yes"), "attention-check"),
    "kernel-64": Part(
        "attention-kernel", 4, ("head_dim=64",), ("batch=2", "head_dim=80", "context=0", "query=33"), "attention-check"
    ),
}
"""In the order in which they are measured: what needs little time and shows much comes first."""


@click.command()
@click.option(
    "-o", "--output", "folder", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR"
)
@click.option("--call-minutes", type=click.FloatRange(min=0), default=9.5, show_default=True, help="Of this call.")
@click.option("--small", is_flag=True, help="Check the day on a CPU, in some minutes; it says nothing about a GPU.")
def main(folder: Path, call_minutes: float, small: bool) -> None:
    """Run the parts of a GPU day that have time left, each into a folder of DIR, and say how each ended."""
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / _STATE
    spent_s: dict[str, Any] = json.loads(state.read_text("utf-8")) if state.is_file() else {}
    call_ends = time.monotonic() + 60 * call_minutes
    for name, part in PARTS.items():
        began = time.monotonic()
        part_s = math.inf if small and name not in spent_s else 60 * part.minutes - spent_s.get(name, 0.0)
        left_s = min(part_s, call_ends - began)
        if left_s <= 0:
            continue
        ended = _run([*part.arguments(small=small), "-o", str(folder / name)], left_s)
        # A part that is through has no time left; one that was stopped goes on where it was.
        spent_s[name] = 60 * part.minutes if ended else spent_s.get(name, 0.0) + time.monotonic() - began
        state.write_text(json.dumps(spent_s), "utf-8")
        click.echo(f"{name}: {ended or 'stopped, out of time'}")


def _run(arguments: list[str], seconds: float) -> str:
    """Return how the command ended, or an empty text if it was stopped."""
    with subprocess.Popen([sys.executable, "-m", "ragorder", "eval", "run", *arguments]) as process:  # noqa: S603
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
