"""Suites about quality: the harness asks `ragorder.eval.experiments.quality`, and keeps what it says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ragorder.eval.experiments.quality.cells import QualityCell
from ragorder.eval.running.options import Options
from ragorder.eval.running.progress import Progress
from ragorder.eval.running.store import RESULTS, Store
from ragorder.eval.running.suite import Suite

__all__ = ["run_quality_suite"]

_NO_MODEL = "quality was not measured, there is no model that can answer: give --engine vllm --model, or --base-url"
_NO_DATA = "quality was not measured, the questions are not here: give --questions, a folder with {name}.json or .jsonl"


def run_quality_suite(
    suite: Suite, options: Options, store: Store, session: str, progress: Progress
) -> Iterator[Mapping[str, Any]]:
    """Lines of type "quality", of type "check" on what those of a cell say together, and of type "unavailable" where
    nothing could be measured. Each is to be in the store before the next one is asked for.

    Questions in the order of the data are asked with the first seed only: answers are greedy, with another seed they
    are the same. Raises EngineError for an engine that does not answer, ImportError naming what to install.
    """
    from ragorder.eval.experiments.quality.kept import judge_kept

    policies = tuple(each for each in suite.policies if options.policies is None or each in options.policies)
    for point in suite.points:
        cell = QualityCell.read(point, f"{suite.name}.toml")
        yield from _ask(suite, cell, policies, options, store, session, progress)
        yield from judge_kept(store.folder / RESULTS, suite.name, session, progress)[1]


def _ask(
    suite: Suite,
    cell: QualityCell,
    policies: Sequence[str],
    options: Options,
    store: Store,
    session: str,
    progress: Progress,
) -> Iterator[Mapping[str, Any]]:
    from ragorder.eval.data.corpora import CorpusError
    from ragorder.eval.experiments.quality.base import QualityError
    from ragorder.eval.experiments.quality.bench import serve_quality
    from ragorder.eval.experiments.quality.specs import QualityBench

    reason, data = _reason(cell.dataset, options)
    missing = policies if reason is not None else ()
    seeds = options.seeds if cell.varies_with_seed else options.seeds[:1]
    for seed in seeds if reason is None else ():
        bench = QualityBench(
            **cell.fields,
            data=data,
            limit=min(suite.requests, options.limit or suite.requests),
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
            session=session,
        )

        def done(named: Mapping[str, Any], policy: str, seed: int = seed) -> bool:
            key = {"suite": suite.name, "cell": named, "seed": seed, "policy": policy}
            return store.has("quality", **key, dry_run=options.dry_run)

        try:
            yield from serve_quality(bench, progress, done)
        except (QualityError, CorpusError) as error:
            reason = str(error)
        except ImportError as error:
            # Without the engine or the statistics nothing can be measured; without the Hub only this data set cannot.
            if error.name != "datasets":
                raise
            reason = str(error)
        if reason is not None:
            missing = [policy for policy in policies if not all(done(each, policy) for each in bench.cells())]
            break
    for policy in missing:
        yield {
            "type": "unavailable",
            "session": session,
            "suite": suite.name,
            "cell": cell.fields,
            "policy": policy,
            "reason": reason,
        }


def _reason(dataset: str, options: Options) -> tuple[str | None, Path | None]:
    """Why nothing can be asked, or the file with the questions; None where they come from the Hub."""
    if not options.dry_run and not options.base_url and (options.engine == "sim" or options.model is None):
        return _NO_MODEL, None
    if options.questions is None:
        return None, None
    found = sorted(options.questions.glob(f"{dataset}.json*"))
    return (None, found[0]) if found else (_NO_DATA.format(name=dataset), None)
