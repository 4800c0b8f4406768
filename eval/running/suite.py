"""Suites, the experiments that measure them, and the registry of both.

A suite is a `*.toml` below `ragorder.eval.suites`, in a checkout below `ragorder.benchmarks`, or in a folder of
`experiments_in`. An experiment is a subclass of `Experiment` in the folder of its suites: in the module `experiment`,
or in any module if there is none. Its part of the report are the `tables` that it declares, or what `make_part` makes,
in the same module or in `report` beside `experiment`.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from ragorder.common.extras import install_hint
from ragorder.common.jsonl import decode_toml
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.data.corpora.loader import CorpusLoader
from ragorder.eval.data.names import unknown
from ragorder.eval.running.cells import STRICT, Display, PaperLine, Reduced, SuiteCell, SuiteError, complaint
from ragorder.eval.running.load import Progress, silent
from ragorder.eval.running.options import Options
from ragorder.eval.running.record import Record, declared_record
from ragorder.eval.running.store import Store

PAPERS = ("RAGCache++", "RAGCache", "FusionRAG", "HedraRAG", "RAGDoll")
GROUPS = (*map(str.lower, PAPERS), "ours", "all")
_FROM_PAPER = re.compile(r"(ragcache-)?(table|figure)-\d+|pressure")
Line = Mapping[str, Any]
T = TypeVar("T")
_HOMES = ("ragorder.eval.suites", "ragorder.benchmarks")
"""The second is not in the wheel."""
_OTHERS = ("ragorder.eval.replay.tables", "ragorder.eval.suites.pipelining.record")
"""Modules with kinds of records that no suite measures."""


class Suite(BaseModel):
    """Cells are the product of `sweep`, each with `cell`, and those of each of `extra`. The first `warmup` requests of
    a run are in no figure. `source` begins with the paper whose figure it measures; `takes_corpora`: corpora of
    --corpora are swept too; `reduced`: its short form."""

    model_config = STRICT

    name: str
    title: str
    source: str
    says: str
    kind: str = "serve"
    takes_corpora: bool = False
    policies: tuple[str, ...] = ()
    baseline: str = "retrieval"
    warmup: int = Field(5, ge=0)
    requests: int = Field(600, ge=1)
    cell: Mapping[str, Any] = {}
    sweep: Mapping[str, tuple[Any, ...]] = {}
    extra: tuple[Mapping[str, tuple[Any, ...]], ...] = ()
    reduced: Reduced | None = None
    report: Display
    paper: tuple[PaperLine, ...] = ()

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        experiment_of(kind)
        return kind

    @field_validator("policies")
    @classmethod
    def _known(cls, policies: tuple[str, ...], info: Any) -> tuple[str, ...]:
        if len(set(policies)) < len(policies):
            raise ValueError("the same policy twice")
        known = experiment_of(info.data["kind"]).policies if "kind" in info.data else None
        for policy in policies:
            if known is not None and policy not in known:
                raise ValueError(f"unknown policy {policy!r}: choose from {', '.join(known)}")
        return policies

    @field_validator("sweep", "extra")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        for swept in value if isinstance(value, tuple) else (value,):
            for name, values in swept.items():
                if not values:
                    raise ValueError(f"{name} has no value: give one at least")
        return value

    @model_validator(mode="after")
    def _whole(self) -> Suite:
        if not self.policies:
            raise ValueError("policies: name one at least")
        if self.baseline not in self.policies:
            raise ValueError(f"baseline: {self.baseline!r} is not among the policies")
        twice = [name for swept in (self.sweep, *self.extra) for name in swept if name in self.cell]
        if self.sweep and twice and any(name in self.sweep for name in twice):
            raise ValueError(f"{twice[0]}: either in [cell] or in [sweep]")
        return self

    @classmethod
    def unlisted(cls, name: str, title: str = "", **fields: Any) -> Self:
        defaults: dict[str, Any] = {"source": "", "says": "", "report": Display(chart="")}
        return cls.model_construct(name=name, title=title or name, **defaults | fields)

    def about(self, *words: str) -> bool:
        return any(word in (self.name, self.report.chart, *self.report.metrics) for word in words)

    @property
    def paper_rows(self) -> list[PaperLine]:
        """The paper's numbers, parameters of the cell told from figures."""
        parameters = {name for point in self.points for name in point}
        return [row.split(parameters) for row in self.paper]

    @property
    def group(self) -> str:
        """The paper that `source` begins with, in small letters, or "ours"."""
        return next((each.lower() for each in PAPERS if re.match(rf"{re.escape(each)}(?![\w+])", self.source)), "ours")

    @property
    def from_paper(self) -> bool:
        return _FROM_PAPER.fullmatch(self.name) is not None

    @property
    def points(self) -> list[dict[str, Any]]:
        """The parameters of each cell, as in the file."""
        found: list[dict[str, Any]] = []
        for swept in (self.sweep, *self.extra):
            for values in product(*swept.values()):
                point = {**self.cell, **dict(zip(swept, values, strict=True))}
                if point not in found:
                    found.append(point)
        return found

    @property
    def cells(self) -> list[Any]:
        """Raises SuiteError."""
        return list(experiment_of(self.kind).cells(self, f"{self.name}.toml"))

    def with_corpora(self, names: Iterable[str]) -> Suite:
        swept = self.sweep.get("corpus", ())
        added = tuple(name for name in names if name not in swept)
        if not self.takes_corpora or not added:
            return self
        return self.model_copy(update={"sweep": {**self.sweep, "corpus": (*swept, *added)}})

    def with_parameters(self, given: Iterable[str]) -> Suite:
        """With these values ("top_k=1,5") in its cells; several are swept, none ("top_k=") is the default. Raises
        SuiteError."""
        texts: dict[str, list[str]] = {}
        for each in given:
            name, equals, values = each.partition("=")
            if not equals:
                raise SuiteError(f"{each!r}: write NAME=VALUE")
            texts.setdefault(name, []).extend(filter(None, values.split(",")))
        if not texts:
            return self
        found = {name: experiment_of(self.kind).cell.parse(name, each) for name, each in texts.items()}
        swept = {name: values for name, values in found.items() if len(values) > 1}
        fixed = {name: values[0] for name, values in found.items() if len(values) == 1}

        def rest(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name not in found}

        ours = self.model_dump(exclude_none=True)
        ours |= {"cell": rest(self.cell) | fixed, "sweep": rest(self.sweep) | swept}
        if self.reduced is not None:
            ours["reduced"] |= {"cell": rest(self.reduced.cell), "sweep": rest(self.reduced.sweep)}
        for form in (ours, ours.get("reduced", {})):
            if "extra" in form:
                form["extra"] = [kept | swept for each in form["extra"] if (kept := rest(each))]
        changed = Suite.model_validate(ours)
        experiment_of(self.kind).check(changed, self.name)
        return changed

    @property
    def short_form(self) -> Suite | None:
        """Raises ValidationError."""
        if self.reduced is None:
            return None
        ours, theirs = self.model_dump(), self.reduced.model_dump(exclude_none=True)
        cell, sweep = theirs.pop("cell"), theirs.pop("sweep")
        ours["cell"] = {name: value for name, value in self.cell.items() if name not in sweep} | cell
        ours["sweep"] = {name: values for name, values in self.sweep.items() if name not in cell} | sweep
        return Suite.model_validate({**ours, **theirs, "reduced": None})

    @property
    def times_builds(self) -> bool:
        return "build_us" in self.report.metrics

    @property
    def keeps_timelines(self) -> bool:
        return "timeline" in (self.report.chart, *self.report.metrics)


@dataclass(frozen=True, slots=True)
class Job:
    """A cell of a suite with one seed, under the policies still to be measured."""

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


class Kind:
    """A kind of record, told apart by `type` in results.jsonl, and what a report says about it."""

    kind: ClassVar[str]
    """What a suite's file says as `kind`."""
    record: ClassVar[type[Record]]
    missing_by_cell: ClassVar[bool] = False
    """Whether the report names cells, and not policies, of what is missing."""
    checks: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Checks that its own tables show, with the fields that they need."""

    @classmethod
    def own_suites(cls) -> Mapping[str, Suite]:
        """Suites without a file."""
        return {}

    @classmethod
    def not_measured(cls, records: Sequence[Record], checks: Sequence[Mapping[str, Any]]) -> str | None:
        """A reservation for the report, by all results and the checks of `checks`."""
        return None


class Experiment(Kind, ABC):
    """One kind of measurement, for one invocation: a context manager around its jobs."""

    cell: ClassVar[type[SuiteCell]]
    columns: ClassVar[tuple[str, ...]] = ()
    facts: ClassVar[tuple[str, ...]] = ()
    """What every record has, of one length and besides."""
    base: ClassVar[type[Record]] = Record
    """`RunRecord`, if requests are served."""
    record: ClassVar[type[Record]]
    """By default made of `base`, `kind`, `columns`, `facts` and `runs`."""
    runs: ClassVar[bool] = False
    """Whether the report counts the records among the runs, which those of served requests are."""
    tables: ClassVar[Sequence[Any]] = ()
    """Each a `TableForm` of the report, or some that take turns, in an experiment without `make_part`."""
    words: ClassVar[Sequence[str]] = ()
    """What the report says before them."""
    suites: ClassVar[Mapping[str, str]] = {}
    """Suites by name, as TOML, beside those in files."""
    policies: ClassVar[Collection[str] | None] = None
    """Those that a suite may name; None: see `check`."""
    unit: ClassVar[str] = "requests"
    """What the progress bar counts."""
    sized_by: ClassVar[str] = "requests"
    """The parameter of a cell that says how many are measured, unless the suite or --limit does."""
    counts: ClassVar[Literal["requests", "policies"]] = "requests"
    """What a measurement announces to the progress bar, unless `steps` says otherwise."""
    counted: ClassVar[Literal["runs", "quality"]] = "runs"
    packages: ClassVar[Mapping[str, str]] = {}
    """What a measurement imports, and the extras that have it."""
    simulated: ClassVar[bool] = False
    """Whether it simulates what --engine would choose."""
    one_job: ClassVar[bool] = False
    """Whether all policies of a cell are measured in one job, which takes turns."""
    supports_dry_run: ClassVar[bool] = False
    """Whether `--dry-run` goes all the way, without a model."""

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls) and "record" not in vars(cls):
            cls.record = declared_record(cls.base, cls.kind, cls.columns, cls.facts, runs=cls.runs)

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

    @classmethod
    def obstacles(cls, suite: Suite) -> list[str | None]:
        """Return for each policy in each cell its `obstacle` on this machine without options."""
        experiment = cls(Options(), Store(Path()), "", silent)
        cells = ((cell, policy) for cell in suite.cells for policy in experiment.asked(suite))
        applying = (each for each in cells if experiment.applies(suite, *each))
        return [experiment.obstacle(suite, *each) for each in applying]

    def plan(self, suite: Suite) -> Iterator[Job | Missing]:
        """The jobs that the store lacks, and what cannot be measured. Raises CorpusError."""
        for cell in suite.cells:
            asked = [policy for policy in self.asked(suite) if self.applies(suite, cell, policy)]
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
        """Return the suite's policies that the options choose, by default all."""
        chosen = self.options.policies
        return [policy for policy in suite.policies if chosen is None or policy in chosen]

    def applies(self, suite: Suite, cell: Any, policy: str) -> bool:
        """Whether a policy means something in a cell; nothing is said if not."""
        return True

    def obstacle(self, suite: Suite, cell: Any, policy: str) -> str | None:
        """Why a policy cannot be measured in a cell, such as a missing package or corpus."""
        if self.simulated and self.options.engine != "sim":
            return "the engine is simulated: run it without --engine"
        for package, extra in self.packages.items():
            if find_spec(package) is None:
                return f"the measurement needs {package}: {install_hint(extra)}"
        name = getattr(cell, "corpus", None)
        return None if name is None else self.corpora.lacks(name)

    def missing(self, suite: Suite, cell: Any, policy: str, reason: str) -> Missing | None:
        """The record of an obstacle; None records nothing."""
        return Missing(suite.name, cell.fields, policy, reason)

    def together(self, suite: Suite, policies: Sequence[str]) -> Iterable[tuple[str, ...]]:
        if self.one_job:
            return [tuple(policies)] if policies else []
        return [(policy,) for policy in policies]

    def requests(self, suite: Suite, cell: Any) -> int:
        asked: int = getattr(cell, self.sized_by, suite.requests)
        return min(asked, self.options.limit or asked)

    def corpus(self, cell: Any) -> Corpus | None:
        name = getattr(cell, "corpus", None)
        return None if name is None else self.corpora.load(name)

    def seeds(self, cell: Any) -> Sequence[int]:
        """An exact measurement that ignores the seed runs once."""
        return self.options.seeds if cell.varies_with_seed else self.options.seeds[:1]

    def done(self, **key: Any) -> bool:
        return self.store.has(self.record.model_fields["type"].default, **key)

    def measured_before(self, job: Job) -> Line | None:
        """A line of the job's cell and seed from an interrupted invocation: what all policies share, such as the rate
        of arrivals, is in its facts, and must not be measured again."""
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
        return len(job.policies) * (job.requests if self.counts == "requests" else 1)

    @abstractmethod
    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        """Fields of the record (`policy`, `rows`, …) for each policy, or whole lines with a `type`. Each line is on the
        disk before the next is drawn; the machine's load before it was measured is added. EngineError, ImportError and
        OSError end the invocation."""


def _folders() -> list[tuple[str, Path]]:
    """Return package and path of each folder with suites."""
    found: list[tuple[str, Path]] = []
    for home in filter(find_spec, _HOMES):
        for root in map(Path, import_module(home).__path__):
            folders = sorted({file.parent for file in root.rglob("*.toml")} | {root} - {_home(home)})
            found += [(".".join([home, *folder.relative_to(root).parts]), folder) for folder in folders]
    return found


def _home(package: str) -> Path:
    return Path(import_module(package).__path__[0])


@contextmanager
def experiments_in(folder: Path) -> Iterator[None]:
    """Add the suites of a folder, and the experiments in the modules beside them."""
    path = import_module(_HOMES[0]).__path__
    place = str(folder.resolve())
    path.append(place)
    invalidate_caches()
    _forget()
    try:
        yield
    finally:
        path.remove(place)
        _forget()
        for name in [name for name in sys.modules if name.startswith(f"{_HOMES[0]}.")]:
            if any(each.startswith(place) for each in _places(sys.modules[name])):
                del sys.modules[name]


def _forget() -> None:
    for known in (kinds, experiments):
        known.cache_clear()


def _places(module: ModuleType) -> Iterator[str]:
    yield from getattr(module, "__path__", ())
    yield from filter(None, [module.__file__])


@cache
def kinds() -> dict[str, type[Kind]]:
    """Return all kinds of records by name."""
    names = [*_OTHERS]
    for package, folder in _folders():
        alone = folder / "experiment.py"
        files = [alone] if alone.is_file() else sorted(folder.glob("[!_]*.py"))
        names += [f"{package}.{file.stem}" for file in files]
    found: dict[str, type[Kind]] = {}
    for module in map(import_module, names):
        for value in vars(module).values():
            known = isinstance(value, type) and issubclass(value, Kind) and value.__module__ == module.__name__
            # One without a kind is the base of others.
            if known and hasattr(value, "kind"):
                found[value.kind] = value
    return dict(sorted(found.items()))


@cache
def experiments() -> dict[str, type[Experiment]]:
    """Return the experiments by their kind."""
    return {kind: each for kind, each in kinds().items() if issubclass(each, Experiment)}


def experiment_of(kind: str) -> type[Experiment]:
    """Raises SuiteError for an unknown kind."""
    try:
        return experiments()[kind]
    except KeyError:
        raise SuiteError(f"unknown kind {kind!r}: choose from {', '.join(experiments())}") from None


def _short(point: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name} = {value}" for name, value in point.items()) + "}"


def load_suites() -> dict[str, Suite]:
    """Raises SuiteError."""
    files = sorted((path for _, folder in _folders() for path in folder.glob("*.toml")), key=lambda path: path.name)
    suites = [read_suite(file.stem, file.read_text("utf-8"), file.name) for file in files]
    for each in experiments().values():
        suites += [read_suite(name, text, f"{each.__module__}: {name}") for name, text in each.suites.items()]
    return {suite.name: suite for suite in sorted(suites, key=_place)}


def load_suite(path: Path) -> Suite:
    """Raises SuiteError."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: cannot be read ({error})") from None
    return read_suite(path.stem, text, str(path))


def read_suite(name: str, text: str, where: str) -> Suite:
    """Raises SuiteError naming file and field."""
    try:
        fields = decode_toml(text.encode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise SuiteError(f"{where}: {error}") from None
    try:
        suite = Suite.model_validate({**fields, "name": name})
    except ValidationError as error:
        raise SuiteError(f"{where}: {complaint(error)}") from None
    experiment = experiment_of(suite.kind)
    experiment.check(suite, where)
    try:
        short_form = suite.short_form
    except ValidationError as error:
        raise SuiteError(f"{where}: [reduced] {complaint(error)}") from None
    if short_form is not None:
        experiment.check(short_form, f"{where}: [reduced]")
    return suite


def choose_suites(names: Sequence[str]) -> list[Suite]:
    """By name, group (`GROUPS`) or path of a TOML file, each once. Raises SuiteError."""
    known = load_suites()
    chosen: dict[str, Suite] = {}
    for name in names:
        for suite in _named(name, known):
            if chosen.setdefault(suite.name, suite) != suite:
                raise SuiteError(f"two suites called {suite.name}: rename {name}")
    return list(chosen.values())


def _named(name: str, known: Mapping[str, Suite]) -> Iterable[Suite]:
    if name in GROUPS:
        return [suite for suite in known.values() if name in ("all", suite.group)]
    if name in known:
        return [known[name]]
    if name.endswith(".toml"):
        return [load_suite(Path(name))]
    raise SuiteError(f"{unknown('suite', name, [*known, *GROUPS])}, or give a TOML file")


def _place(suite: Suite) -> tuple[bool, bool, int, str]:
    kind, _, number = suite.name.partition("-")
    numbered = suite.from_paper and number.isdigit()
    return not suite.from_paper, not numbered, int(number) if numbered else 0, kind
