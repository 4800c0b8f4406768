"""The parts of a GPU day: which suite, in which form, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ragorder.benchmarks.kernels.gpu_day.models import shape_folder
from ragorder.eval.running.options import Options
from ragorder.eval.running.suite import Suite, load_suites

__all__ = ["MINUTES", "PARTS", "Part"]

MINUTES = 45.0
"""Of all parts together."""

_SMALL_SHAPE = "tiny"


@dataclass(frozen=True, slots=True)
class Part:
    """A suite with other parameters, as of `--set`. With a `shape` it is served by the embedded engine, with a model of
    this shape; other suites name theirs in the parameters. `small`: the form that is checked on a CPU, of `small_suite`
    if that is another one."""

    shows: str
    suite: str
    minutes: float
    set: tuple[str, ...]
    small: tuple[str, ...]
    small_suite: str | None = None
    policies: tuple[str, ...] | None = None
    limit: int | None = None
    small_limit: int | None = None
    shape: str | None = None

    def of_suite(self, *, small: bool) -> Suite:
        """Raises SuiteError."""
        name = self.small_suite if small and self.small_suite else self.suite
        suite = _suites()[name].with_parameters(self.small if small else self.set)
        return suite if self.policies is None else suite.model_copy(update={"policies": self.policies})

    def options(self, options: Options, *, small: bool) -> Options:
        """Of an invocation of this suite alone, with one seed."""
        limits = [limit for limit in (options.limit, self.small_limit if small else self.limit) if limit is not None]
        changed: dict[str, Any] = {
            "engine": "sim",
            "model": None,
            "seeds": options.seeds[:1],
            "policies": None,
            "parameters": (),
            "reduced": False,
            "limit": min(limits, default=None),
        }
        if self.shape is not None:
            changed |= {"engine": "torch", "model": shape_folder(_SMALL_SHAPE if small else self.shape)}
        return options.model_copy(update=changed)


_suites = cache(load_suites)

_QWEN = "qwen2.5-7b"
_MISTRAL = "shape=mistral-7b"
_TINY = (f"shape={_SMALL_SHAPE}", "repeats=2", "documents=2", "document_tokens=20")
_SERVED = ("workload=paper-shuf", "capacity_tokens=8000")

PARTS: Mapping[str, Part] = {
    "profile": Part(
        "Prefill by cached documents, and beside transformers",
        "embedded-prefill",
        3,
        ("measure=cached,overhead", _MISTRAL, "repeats=10"),
        ("measure=cached", *_TINY),
    ),
    "kernel": Part(
        "The attention kernel's grid, head dim 128",
        "attention-kernel",
        6,
        ("head_dim=128",),
        ("batch=1", "head_dim=64", "context=70", "query=5"),
        small_suite="attention-check",
    ),
    "table-1": Part(
        "Strategies compared",
        "table-1",
        5,
        (),
        _SERVED,
        policies=("none", "retrieval", "sorted", "greedy", "earned"),
        limit=120,
        small_limit=3,
        shape=_QWEN,
    ),
    "tiers": Part(
        "Prefill by the tier that holds the documents",
        "embedded-prefill",
        2,
        ("measure=tiers", _MISTRAL, "repeats=10"),
        ("measure=tiers", *_TINY),
    ),
    "figure-18": Part(
        "One, three and five documents a request, with host memory behind the device",
        "embedded-serving",
        6,
        (
            *("workload=mmlu-like", "top_k=1,3,5", _MISTRAL, "requests=60", "warmup=20"),
            *("device=4GiB", "host=32GiB", "replacement=pgdsf"),
        ),
        (
            "workload=zipf10-1.6",
            "top_k=2",
            f"shape={_SMALL_SHAPE}",
            "requests=12",
            "warmup=2",
            "device=60%",
            "host=60%",
        ),
    ),
    "figure-15": Part(
        "Time to the first token of requests that arrive at random",
        "open-loop",
        4,
        ("workload=paper-shuf", "arrivals=none,poisson:2,poisson:4,poisson:8", "output_tokens=1"),
        (*_SERVED, "arrivals=none,poisson:50", "output_tokens=1"),
        limit=120,
        small_limit=3,
        shape=_QWEN,
    ),
    "figure-17": Part(
        "Time between tokens of requests that arrive at random",
        "open-loop",
        3,
        ("workload=paper-shuf", "arrivals=poisson:2,poisson:4", "output_tokens=32"),
        (*_SERVED, "arrivals=poisson:50", "output_tokens=3"),
        limit=100,
        small_limit=3,
        shape=_QWEN,
    ),
    "table-4": Part(
        "Throughput, one at a time and together",
        "table-4",
        4,
        (),
        (*_SERVED, "concurrency=2", "output_tokens=2"),
        policies=("retrieval", "earned"),
        limit=64,
        small_limit=4,
        shape=_QWEN,
    ),
    "table-8": Part(
        "Concurrent load",
        "table-8",
        3,
        ("workload=paper-shuf",),
        (*_SERVED, "concurrency=2"),
        policies=("retrieval", "earned"),
        limit=100,
        small_limit=4,
        shape=_QWEN,
    ),
    "table-10": Part(
        "Geospatial workload",
        "table-10",
        2,
        ("capacity_tokens=100000",),
        ("capacity_tokens=8000",),
        policies=("retrieval", "greedy", "earned"),
        limit=120,
        small_limit=3,
        shape=_QWEN,
    ),
    "kernel-sparse": Part(
        "Rows at any positions",
        "attention-sparse",
        3,
        (),
        ("batch=1", "head_dim=64", "context=70", "query=33", "scattered=yes"),
        small_suite="attention-check",
    ),
    "kernel-64": Part(
        "The attention kernel's grid, head dim 64",
        "attention-kernel",
        4,
        ("head_dim=64",),
        ("batch=2", "head_dim=80", "context=0", "query=33"),
        small_suite="attention-check",
    ),
}
"""In the order in which they are measured; together they take `MINUTES`."""
