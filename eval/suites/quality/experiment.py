"""The experiment of the suites of kind "quality"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ragorder.eval.data.corpora import CorpusError
from ragorder.eval.running.cells import SuiteCell, SuiteError
from ragorder.eval.running.record import RESULTS, Record
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

if TYPE_CHECKING:
    from ragorder.eval.suites.quality.specs import QualityBench

_NO_MODEL = "quality was not measured, there is no model that can answer: give --engine vllm --model, or --base-url"
_NO_DATA = "quality was not measured, the questions are not here: give --questions, a folder with the folder {name}"


class QualityCell(SuiteCell):
    """The fields of `QuestionsSpec` and `AnswererSpec` that a suite may set."""

    dataset: Literal["hotpotqa", "musique", "2wikimultihopqa"]
    question_order: Literal["data", "random"] = "data"
    top_k: int | None = Field(None, ge=1)
    document_words: int | None = Field(None, ge=1)
    retriever: Literal["bm25", "dense"] | None = None
    output_tokens: int = Field(32, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return self.question_order == "random"


class QualityRecord(Record):
    """Scores of one order, question by question."""

    called: ClassVar[str] = "a quality run"
    identified_by: ClassVar[tuple[str, ...]] = ("suite", "cell", "seed", "policy", "dry_run")
    is_run: ClassVar[bool] = False

    type: Literal["quality"] = "quality"
    rows: dict[str, Any] = Field(default_factory=dict)
    model: Any = None
    dry_run: bool = False

    @model_validator(mode="before")
    @classmethod
    def _known_columns(cls, line: Any) -> Any:
        if isinstance(line, dict):
            rows = dict(line.get("rows") or {})
            return {**line, "rows": {name: values for name, values in rows.items() if isinstance(values, list)}}
        return line

    @property
    def model_name(self) -> str:
        return str((self.model or {}).get("name") or "")


class Quality(Experiment):
    kind = "quality"
    record = QualityRecord
    cell = QualityCell
    counted = "quality"
    supports_dry_run = True
    missing_by_cell = True
    checks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "quality-verdict": ("measured", "reason", "note", "reordered", "message"),
        "quality-positions": ("policy", "places"),
        "quality-places": ("first", "last", "questions", "comparisons", "p", "best", "message"),
        "quality-comparison": (
            "policy",
            "baseline",
            *("em", "em_baseline", "em_lost", "em_won", "em_p", "em_verdict"),
            *("f1_difference", "f1_low", "f1_high", "f1_verdict"),
            *("contains", "contains_baseline", "contains_lost", "contains_won", "contains_p", "contains_verdict"),
        ),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Cells with questions that cannot be asked, whatever the seed.
        self._failed: set[tuple[str, QualityCell]] = set()

    @classmethod
    def check(cls, suite: Suite, where: str) -> None:
        from ragorder.eval.suites.quality.orders import Order, QualityError

        for order in suite.policies:
            try:
                Order.parse(order)
            except QualityError as error:
                raise SuiteError(f"{where}: policies: {error}") from None
        super().check(suite, where)

    def obstacle(self, suite: Suite, cell: QualityCell, policy: str) -> str | None:
        options = self.options
        if not options.dry_run and not options.base_url and (options.engine == "sim" or options.model is None):
            return _NO_MODEL
        if options.questions is not None and self._data(cell) is None:
            return _NO_DATA.format(name=cell.dataset)
        return None

    def together(self, suite: Suite, policies: Sequence[str]) -> Iterable[tuple[str, ...]]:
        return [tuple(policies)]

    def done(self, **key: Any) -> bool:
        """False: `serve_quality` skips what the store has, and earlier answers may still have to be compared."""
        return False

    def steps(self, job: Job) -> int:
        return 0

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        from ragorder.eval.suites.quality.asking import done_in, serve_quality
        from ragorder.eval.suites.quality.compare import judge_previous
        from ragorder.eval.suites.quality.orders import QualityError

        name = job.suite.name
        if (name, job.cell) in self._failed:
            return
        bench = self._bench(job)
        done = done_in(self.store, bench)
        reason = None
        try:
            yield from serve_quality(bench, self.progress, done)
        except (QualityError, CorpusError) as error:
            reason = str(error)
        except ImportError as error:
            # Only a missing `datasets` is about this data set alone.
            if error.name != "datasets":
                raise
            reason = str(error)
        if reason is not None:
            self._failed.add((name, job.cell))
            missing = (each for each in job.policies if not all(done(cell, each) for cell in bench.cells))
            yield from (Missing(name, job.cell.fields, policy, reason) for policy in missing)
        yield from judge_previous(self.store.folder / RESULTS, name, self.session, self.progress)[1]

    def _bench(self, job: Job) -> QualityBench:
        from ragorder.eval.suites.quality.specs import ANSWERS, AnswererSpec, QualityBench, QuestionsSpec

        options, fields = self.options, job.cell.fields
        asked = {name: value for name, value in fields.items() if name in QuestionsSpec.model_fields}
        served = {name: value for name, value in fields.items() if name in AnswererSpec.model_fields}
        engine = {name: getattr(options, name) for name in ("model", "base_url", "served_model", "api_key")}
        engine["engine"] = "vllm" if options.engine == "sim" else options.engine
        return QualityBench(
            QuestionsSpec(**asked, data=self._data(job.cell), limit=job.requests, seed=job.seed),
            AnswererSpec.model_validate(served | engine),
            orders=job.policies,
            dry_run=options.dry_run,
            suite=job.suite.name,
            suite_cell=fields,
            session=self.session,
            answers=self.store.folder / ANSWERS,
        )

    def _data(self, cell: QualityCell) -> Path | None:
        folder = self.options.questions and self.options.questions / cell.dataset
        return folder if folder is not None and folder.is_dir() else None

    @classmethod
    def own_suites(cls) -> Mapping[str, Suite]:
        asked = Suite.unlisted(
            "quality",
            "Answer quality, measured by itself",
            source="ragorder eval quality",
            says="Whether the order of the documents changes the answers, question by question.",
            kind="quality",
        )
        return {asked.name: asked}

    @classmethod
    def not_measured(cls, records: Sequence[Record], checks: Sequence[Mapping[str, Any]]) -> str | None:
        why = _why_not_measured(records, checks)
        return f"Whether another order changes answers (EM, F1): {why}." if why else None


def _why_not_measured(records: Sequence[Record], checks: Sequence[Mapping[str, Any]]) -> str | None:
    verdicts = [check for check in checks if check["name"] == "quality-verdict"]
    if any(verdict["measured"] for verdict in verdicts):
        return None
    asked = [each for each in records if isinstance(each, QualityRecord)]
    if not asked:
        return None
    if all(line.dry_run for line in asked):
        return "only a dry run, whose answers are made up"
    reasons = dict.fromkeys(str(verdict["reason"]) for verdict in verdicts if not verdict["dry_run"])
    return "; ".join(reasons) or "the answers have not been compared yet"
