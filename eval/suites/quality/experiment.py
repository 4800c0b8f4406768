"""The experiment of the suites of kind "quality"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.eval.data.corpora import CorpusError
from ragorder.eval.running.cells import SuiteError
from ragorder.eval.running.record import RESULTS, Record
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite
from ragorder.eval.suites.quality.base import QualityError
from ragorder.eval.suites.quality.cells import QualityCell
from ragorder.eval.suites.quality.record import QualityRecord

if TYPE_CHECKING:
    from ragorder.eval.suites.quality.specs import QualityBench

__all__ = ["Quality"]

_NO_MODEL = "quality was not measured, there is no model that can answer: give --engine vllm --model, or --base-url"
_NO_DATA = "quality was not measured, the questions are not here: give --questions, a folder with {name}.json or .jsonl"


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
        from ragorder.eval.suites.quality.orders import Order

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
        from ragorder.eval.suites.quality.bench import done_in, serve_quality
        from ragorder.eval.suites.quality.compare import judge_previous

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
        folder = self.options.questions
        found = sorted(folder.glob(f"{cell.dataset}.json*")) if folder is not None else []
        return found[0] if found else None

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
        from ragorder.eval.suites.quality.report import quality_not_measured

        why = quality_not_measured(records, checks)
        return f"Whether another order changes answers (EM, F1): {why}." if why else None
