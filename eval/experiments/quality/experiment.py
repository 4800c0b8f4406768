"""Questions with known answers: the suites of kind "quality"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.eval.data.corpora import CorpusError
from ragorder.eval.experiments.quality.cells import QualityCell, check_orders
from ragorder.eval.experiments.quality.record import QualityRecord
from ragorder.eval.running.experiment import Experiment, Job, Line, Missing
from ragorder.eval.running.record import RESULTS

if TYPE_CHECKING:
    from ragorder.eval.report.part import Part
    from ragorder.eval.report.reading import Results
    from ragorder.eval.report.suites import SuiteInfo
    from ragorder.eval.running.suite import Suite

__all__ = ["Quality"]

_NO_MODEL = "quality was not measured, there is no model that can answer: give --engine vllm --model, or --base-url"
_NO_DATA = "quality was not measured, the questions are not here: give --questions, a folder with {name}.json or .jsonl"


class Quality(Experiment):
    kind = "quality"
    record = QualityRecord
    cell = QualityCell
    counted = "quality"
    rehearses = True
    missing_by_cell = True
    checks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "quality-verdict": ("measured", "reason", "note", "reordered", "message"),
        "quality-positions": ("policy", "places"),
        "quality-comparison": (
            "policy",
            "baseline",
            *("em", "em_baseline", "em_lost", "em_won", "em_p", "em_verdict"),
            *("f1_difference", "f1_low", "f1_high", "f1_verdict"),
        ),
    }

    @classmethod
    def check(cls, suite: Suite, where: str) -> None:
        check_orders(suite.policies, where)
        super().check(suite, where)

    def together(self, suite: Suite, policies: Sequence[str]) -> Iterable[tuple[str, ...]]:
        return [tuple(policies)]

    def seeds(self, cell: QualityCell) -> Sequence[int]:
        """One job for all seeds: a cell whose data set is missing is missing once."""
        return self.options.seeds[:1]

    def done(self, **key: Any) -> bool:
        """Never: the benchmark itself passes over what is there, and earlier answers may still have to be compared."""
        return False

    def steps(self, job: Job) -> int:
        return 0

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        """Questions in the order of the data are asked with the first seed only: answers are greedy, with another seed
        they are the same."""
        from ragorder.eval.experiments.quality.kept import judge_kept

        yield from self._ask(job)
        yield from judge_kept(self.store.folder / RESULTS, job.suite.name, self.session, self.progress)[1]

    def _ask(self, job: Job) -> Iterator[Line | Missing]:
        from ragorder.eval.experiments.quality.base import QualityError
        from ragorder.eval.experiments.quality.bench import serve_quality
        from ragorder.eval.experiments.quality.specs import QualityBench

        options, store, suite, policies = self.options, self.store, job.suite, job.policies
        cell: QualityCell = job.cell
        reason, data = self._reason(cell.dataset)
        missing: Sequence[str] = policies if reason is not None else ()
        seeds = options.seeds if cell.varies_with_seed else options.seeds[:1]
        for seed in seeds if reason is None else ():
            bench = QualityBench(
                **cell.fields,
                data=data,
                limit=job.requests,
                seed=seed,
                orders=tuple(policies),
                engine=options.engine if options.engine in ("openai", "torch") else "vllm",
                model=options.model,
                base_url=options.base_url,
                served_model=options.served_model,
                api_key=options.api_key,
                dry_run=options.dry_run,
                suite=suite.name,
                suite_cell=cell.fields,
                session=self.session,
            )

            def done(named: Mapping[str, Any], policy: str, seed: int = seed) -> bool:
                key = {"suite": suite.name, "cell": named, "seed": seed, "policy": policy}
                return store.has("quality", **key, dry_run=options.dry_run)

            try:
                yield from serve_quality(bench, self.progress, done)
            except (QualityError, CorpusError) as error:
                reason = str(error)
            except ImportError as error:
                # Without the engine or the statistics nothing can be measured; without the Hub all but this data set.
                if error.name != "datasets":
                    raise
                reason = str(error)
            if reason is not None:
                missing = [policy for policy in policies if not all(done(each, policy) for each in bench.cells())]
                break
        yield from (Missing(suite.name, cell.fields, policy, str(reason)) for policy in missing)

    def _reason(self, dataset: str) -> tuple[str | None, Path | None]:
        """The reason why nothing can be asked, or the file with the questions; None where they come from the Hub."""
        options = self.options
        if not options.dry_run and not options.base_url and (options.engine == "sim" or options.model is None):
            return _NO_MODEL, None
        if options.questions is None:
            return None, None
        found = sorted(options.questions.glob(f"{dataset}.json*"))
        return (None, found[0]) if found else (_NO_DATA.format(name=dataset), None)

    @classmethod
    def report(cls, suite: SuiteInfo, results: Results) -> Part:
        from ragorder.eval.experiments.quality.report import quality_part

        return quality_part(suite, results)

    @classmethod
    def own_suites(cls) -> Mapping[str, SuiteInfo]:
        from ragorder.eval.report.suites import SuiteInfo

        asked = SuiteInfo(
            "quality",
            "Answer quality, asked about by itself",
            source="ragorder eval quality",
            says="Whether the order of the documents changes the answers, question by question.",
            kind="quality",
        )
        return {asked.name: asked}

    @classmethod
    def not_measured(cls, results: Results) -> str | None:
        from ragorder.eval.experiments.quality.report import quality_not_measured

        why = quality_not_measured(results)
        return f"Whether another order changes answers (EM, F1): {why}." if why else None
