"""The protocol of an experiment, and the registry: one folder of `ragorder.eval.experiments` for each.

A folder's module `experiment` has a subclass of `Experiment`; its suites are `*.toml`, and `make_part` in its module
`report` makes its part of the report. Nothing else names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from ragorder.eval.data.corpora import Corpus
from ragorder.eval.data.corpora.loader import CorpusLoader
from ragorder.eval.running.cells import SuiteCell, SuiteError
from ragorder.eval.running.progress import Progress
from ragorder.eval.running.record import Record
from ragorder.extras import install_hint

if TYPE_CHECKING:
    from ragorder.eval.running.options import Options
    from ragorder.eval.running.reading import Results
    from ragorder.eval.running.store import Store
    from ragorder.eval.running.suite import Suite

__all__ = ["Experiment", "Job", "Line", "Missing", "experiment_of", "experiments", "suite_files"]

Line = Mapping[str, Any]
T = TypeVar("T")
_FOLDER = "ragorder.eval.experiments"


@dataclass(frozen=True, slots=True)
class Job:
    """A cell of a suite with one seed, under the policies that are still to be measured."""

    suite: Suite
    cell: Any
    seed: int
    policies: tuple[str, ...]
    requests: int
    corpus: Corpus | None = None

    def without(self, policies: Collection[str]) -> Self:
        return replace(self, policies=tuple(policy for policy in self.policies if policy not in policies))


@dataclass(frozen=True, slots=True)
class Missing:
    """A policy that cannot be measured in a cell (empty: in the whole suite)."""

    suite: str
    cell: dict[str, Any]
    policy: str
    reason: str


class Experiment(ABC):
    """One kind of measurement, for one invocation: a context manager around its jobs."""

    kind: ClassVar[str]
    """What a suite's file says as `kind`."""
    record: ClassVar[type[Record]]
    cell: ClassVar[type[SuiteCell]]
    policies: ClassVar[Collection[str] | None] = None
    """Those that a suite may name; None: see `check`."""
    unit: ClassVar[str] = "requests"
    """What the progress bar counts."""
    counted: ClassVar[Literal["runs", "quality"]] = "runs"
    packages: ClassVar[Mapping[str, str]] = {}
    """What a measurement imports, and the extras that have it."""
    one_job: ClassVar[bool] = False
    """Whether all policies of a cell are measured in one job, which takes turns."""
    planned: ClassVar[bool] = False
    """Whether `--dry-run` shows the plan of each suite."""
    supports_dry_run: ClassVar[bool] = False
    """Whether `--dry-run` goes all the way, without a model."""
    missing_by_cell: ClassVar[bool] = False
    """Whether the report names cells, and not policies, of what is missing."""
    checks: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Checks that the experiment's own tables show, with the fields that they need."""

    def __init__(self, options: Options, store: Store, session: str, progress: Progress) -> None:
        self.options, self.store, self.session, self.progress = options, store, session, progress
        self.corpora = CorpusLoader(options.corpora)
        self.resources = ExitStack()
        self._kept: tuple[object, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.resources.close()

    def kept(self, key: object, start: Callable[[], T]) -> T:
        """What `start` made for this key, such as a server; another key closes `resources`, and makes it again."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            self.resources.close()
            self._kept = key, start()
        found: T = self._kept[1]
        return found

    @classmethod
    def check(cls, suite: Suite, where: str) -> None:
        """Raises SuiteError."""
        list(cls.cells(suite, where))

    @classmethod
    def cells(cls, suite: Suite, where: str) -> Iterator[Any]:
        """Raises SuiteError."""
        for point in suite.points:
            yield cls.cell.read(point, f"{where}: cell {_short(point)}")

    def plan(self, suite: Suite) -> Iterator[Job | Missing]:
        """The jobs that the store lacks, and what cannot be measured. Raises CorpusError."""
        asked = self.asked(suite)
        for cell in suite.cells:
            reasons = {policy: self.obstacle(suite, cell, policy) for policy in asked}
            said = (self.missing(suite, cell, policy, why) for policy, why in reasons.items() if why)
            yield from (each for each in said if each is not None)
            together = list(self.together(suite, [policy for policy in asked if not reasons[policy]]))
            if not together:
                continue
            requests, corpus = self.requests(suite, cell), self.corpus(cell)
            if corpus is not None:
                requests = min(requests, len(corpus.questions))
            for seed in self.seeds(cell):
                key = {"suite": suite.name, "cell": cell.fields, "seed": seed}
                for policies in together:
                    todo = tuple(policy for policy in policies if not self.done(**key, policy=policy))
                    if todo:
                        yield Job(suite, cell, seed, todo, requests, corpus)

    def asked(self, suite: Suite) -> Sequence[str]:
        """The suite's policies, as far as the options name them."""
        chosen = self.options.policies
        return [policy for policy in suite.policies if chosen is None or policy in chosen]

    def obstacle(self, suite: Suite, cell: Any, policy: str) -> str | None:
        """The reason why a policy cannot be measured in a cell, such as a missing package or corpus."""
        for package, extra in self.packages.items():
            if find_spec(package) is None:
                return f"the measurement needs {package}: {install_hint(extra)}"
        found = self._corpus(cell)
        return found if isinstance(found, str) else None

    def missing(self, suite: Suite, cell: Any, policy: str, reason: str) -> Missing | None:
        """The record of an obstacle; None records nothing."""
        return Missing(suite.name, cell.fields, policy, reason)

    def together(self, suite: Suite, policies: Sequence[str]) -> Iterable[tuple[str, ...]]:
        if self.one_job:
            return [tuple(policies)] if policies else []
        return [(policy,) for policy in policies]

    def requests(self, suite: Suite, cell: Any) -> int:
        asked: int = getattr(cell, "requests", suite.requests)
        return min(asked, self.options.limit or asked)

    def corpus(self, cell: Any) -> Corpus | None:
        found = self._corpus(cell)
        assert not isinstance(found, str), "a missing corpus was an obstacle"
        return found

    def _corpus(self, cell: Any) -> Corpus | str | None:
        name = getattr(cell, "corpus", None)
        return None if name is None else self.corpora.take(name)

    def seeds(self, cell: Any) -> Sequence[int]:
        """An exact measurement that ignores the seed runs once."""
        return self.options.seeds if cell.varies_with_seed else self.options.seeds[:1]

    def done(self, **key: Any) -> bool:
        return self.store.has(self.record.model_fields["type"].default, **key)

    def measured_before(self, job: Job) -> Line | None:
        """A line of the job's cell and seed, of a policy that an interrupted invocation has measured: what all policies
        share, such as the rate of arrivals, is in its facts, and must not be measured again."""
        key = {"suite": job.suite.name, "cell": job.cell.fields, "seed": job.seed}
        lines = (
            self.store.find(self.record.model_fields["type"].default, **key, policy=each) for each in job.suite.policies
        )
        return next((line for line in lines if line is not None), None)

    def in_order(self, jobs: Sequence[Job]) -> list[Job]:
        return list(jobs)

    def measurement(self, job: Job) -> str | None:
        """A name that jobs of different suites share if they measure the same."""
        return None

    def steps(self, job: Job) -> int:
        """Steps of the progress bar; 0: the measurement announces its own."""
        return job.requests * len(job.policies)

    @abstractmethod
    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        """Fields of the record (`policy`, `rows`, …) for each policy, or whole lines with a `type`.

        Each line is on the disk before the next is drawn. EngineError, ImportError and OSError end the invocation.
        """

    @classmethod
    def own_suites(cls) -> Mapping[str, Suite]:
        """Suites without a file."""
        return {}

    @classmethod
    def not_measured(cls, results: Results) -> str | None:
        """A reservation for the report."""
        return None


def _folders() -> list[Path]:
    found = (path for home in import_module(_FOLDER).__path__ for path in Path(home).iterdir())
    return sorted((path for path in found if (path / "experiment.py").is_file()), key=lambda path: path.name)


@cache
def experiments() -> dict[str, type[Experiment]]:
    found: dict[str, type[Experiment]] = {}
    for folder in _folders():
        module = import_module(f"{_FOLDER}.{folder.name}.experiment")
        for value in vars(module).values():
            own = isinstance(value, type) and issubclass(value, Experiment) and value.__module__ == module.__name__
            if own:
                found[value.kind] = value
    return found


def experiment_of(kind: str) -> type[Experiment]:
    """Raises SuiteError for an unknown kind."""
    try:
        return experiments()[kind]
    except KeyError:
        raise SuiteError(f"unknown kind {kind!r}: choose from {', '.join(experiments())}") from None


def suite_files() -> list[Path]:
    return sorted((path for folder in _folders() for path in folder.glob("*.toml")), key=lambda path: path.name)


def _short(point: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name} = {value}" for name, value in point.items()) + "}"
