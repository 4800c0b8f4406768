"""Deviation of reused KV from full attention's: the suites of kind "fusion-deviation"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.benchmarks.fusion.fusion_deviation.cells import COPIES, PREPROCESSED, DeviationCell
from ragorder.benchmarks.fusion.fusion_deviation.record import DeviationRecord
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.torch import TorchModel, lacks_torch
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite

if TYPE_CHECKING:
    from ragorder.benchmarks.fusion.fusion_deviation.measuring import Measured

__all__ = ["FusionDeviation"]

_OTHER_ENGINE = "KV is compared in the embedded engine: give --engine torch, or none"
# Of a system prompt and a question.
_MORE_TOKENS = 1024


class FusionDeviation(Experiment):
    kind = "fusion-deviation"
    record = DeviationRecord
    cell = DeviationCell
    policies: ClassVar[Any] = COPIES
    unit = "prompts"
    one_job = True

    def obstacle(self, suite: Suite, cell: DeviationCell, policy: str) -> str | None:
        if self.options.engine not in ("sim", "torch"):
            return _OTHER_ENGINE
        return lacks_torch() or super().obstacle(suite, cell, policy)

    def steps(self, job: Job) -> int:
        return job.requests

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line | Missing]:
        cell: DeviationCell = job.cell
        assert job.corpus is not None
        corpus = job.corpus
        model = self.kept((self.options.model, corpus.name), lambda: self._load(corpus))
        engine = {"name": "torch", "model": str(self.options.model or "random weights")}
        try:
            measured = self._measure(job, corpus, model, advance)
        except ValueError as error:
            # A model whose keys cannot be moved, or neighbours that are not this corpus'.
            yield from (Missing(job.suite.name, cell.fields, kind, str(error)) for kind in job.policies)
            return
        for kind, sums in measured.items():
            rows = {"deviation": [round(value, 6) for value in sums.deviation]}
            yield {"policy": kind, "engine": engine, "load_average": load_average(), "facts": sums.facts, "rows": rows}

    def _measure(
        self, job: Job, corpus: Corpus, model: TorchModel, advance: Callable[[], None]
    ) -> Mapping[str, Measured]:
        from ragorder.benchmarks.fusion.fusion_deviation.measuring import Bench, Measured
        from ragorder.benchmarks.fusion.fusion_deviation.prompts import CorpusPrompts
        from ragorder.benchmarks.fusion.fusion_deviation.sequence import KVSequence

        cell: DeviationCell = job.cell
        prompts = CorpusPrompts(corpus, model.tokenizer, cell)
        drawn = list(prompts.draw(job.requests, job.seed))
        if not drawn:
            raise ValueError(f"no question of {corpus.name} has {cell.documents} documents: give fewer")
        longest = (max(cell.documents, cell.neighbours) + 1) * cell.document_tokens + _MORE_TOKENS
        measured = {kind: Measured(cell.documents) for kind in job.policies}
        with closing(KVSequence(model.model, longest)) as sequence:
            bench = Bench(sequence, prompts, cell)
            for prompt in drawn:
                for kind, found in bench.measure(prompt, job.policies).items():
                    measured[kind].add(*found)
                advance()
        if PREPROCESSED in measured:
            measured[PREPROCESSED].related = prompts.related()
        return measured

    def _load(self, corpus: Corpus) -> TorchModel:
        if self.options.model is not None:
            return TorchModel.load(self.options.model)
        from ragorder.kernels.random_model import make_model

        folder = Path(self.resources.enter_context(TemporaryDirectory())) / "model"
        texts = [document.text for document in corpus.documents]
        return TorchModel.load(make_model(folder, texts=texts, layers=6, hidden_size=256, vocab_size=4096))
