"""Questions to one command within a memory budget, and to transformers with all in memory (suite doll-questions)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

from ragorder.benchmarks.doll.questions.asking import Asked, QuestionsCell, ask_command
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.report.declared import Block, Column, Row, TableForm, figure, policy_column
from ragorder.eval.report.words import format_number
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Experiment, Job, Line, Suite
from ragorder.eval.suites.quality.metrics import SCORERS

COMMAND, SINGLE, BATCHES = "ragorder engine", "transformers", "transformers, batches"
_NO_MODEL = "answers need a model in the embedded engine: give --engine torch --model smollm2, or another one"
_MIB = 1 << 20
_LATE = 0.95


class Questions(Experiment):
    """Columns, of each question: `id`, its `documents`, the `answer` and whether it `contains` an accepted one, tokens
    of `prompt` and `output`, seconds from its arrival to the first token (`first_s`) and to the answer (`answer_s`).
    Facts: seconds of all questions (`total_s`), the process's memory in MB before the first question (`ready_mb`) and
    at most (`peak_mb`), and the `batch` (None: as the placement has it)."""

    kind = "doll-questions"
    cell = QuestionsCell
    columns = ("id", "documents", "answer", "contains", "prompt", "output", "first_s", "answer_s")
    facts = ("total_s", "ready_mb", "peak_mb", "batch")
    policies: ClassVar[Any] = (COMMAND, SINGLE, BATCHES)
    unit = "questions"
    packages: ClassVar[Any] = {"faiss": "retrieval", "torch": "torch", "transformers": "torch", "httpx2": "proxy"}
    tables: ClassVar[Any] = (
        TableForm(
            lambda block: f"{_questions(block)} questions of {block.cell.corpus}, {block.cell.clients} at a time",
            [
                policy_column(""),
                figure("contains a right answer, %", lambda run: 100 * fmean(run.rows["contains"])),
                Column("same answer, %", lambda row: _alike(row, "answer")),
                Column("same documents, %", lambda row: _alike(row, "documents")),
                figure("questions a minute", lambda run: 60 * len(run.rows["id"]) / run.facts["total_s"]),
                figure("first token, s", lambda run: median(run.rows["first_s"]), 2),
                figure("95 % of them, s", lambda run: _late(run.rows["first_s"]), 2),
                figure("whole answer, s", lambda run: median(run.rows["answer_s"]), 2),
            ],
            note=lambda block: _note(block),
        ),
        TableForm(
            lambda block: f"Memory, MiB, while {_questions(block)} questions are answered",
            [
                policy_column(""),
                Column("budgets", lambda row: _budget(row)),
                figure("process, ready", "ready_mb", 0, scale=1e6 / _MIB),
                figure("process, at most", "peak_mb", 0, scale=1e6 / _MIB, over=max),
                Column("beside the budgets", lambda row: _beside(row)),
            ],
            note="The budgets are for weights, KV, the workspace of a step and the index. The process has Python, "
            "torch, the embedding model and the documents' texts besides.",
        ),
    )

    def obstacle(self, suite: Suite, cell: QuestionsCell, policy: str) -> str | None:
        if self.options.engine != "torch" or self.options.model is None:
            return _NO_MODEL
        return lacks_torch() or super().obstacle(suite, cell, policy)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.doll.questions.peer import ask_transformers

        cell, corpus, model = job.cell, job.corpus, self.options.model
        assert corpus is not None and model is not None and self.options.corpora is not None
        places = [place for place, each in enumerate(corpus.questions) if each.answers]
        # Each seed has questions of its own.
        random.Random(0).shuffle(places)
        first = job.seed * (job.requests + cell.tried)
        chosen = [corpus.questions[place] for place in places[first : first + job.requests + cell.tried]]
        asked = Asked(
            Path(model),
            self.options.corpora / cell.corpus,
            [each.text for each in chosen[: job.requests]],
            # Answered before the others, in no figure.
            [each.text for each in chosen[job.requests :]],
            cell,
        )
        for policy in job.policies:
            if policy == COMMAND:
                found = ask_command(asked, advance)
            else:
                found = ask_transformers(asked, cell.batches if policy == BATCHES else (1,), advance)
            rows: dict[str, list[Any]] = {name: [] for name in self.columns}
            for question, reply in zip(chosen, found.replies, strict=False):
                contains = int(SCORERS["nq"].occurs(question.answers, reply["answer"]))
                for name, value in {"id": question.id, "contains": contains, **reply}.items():
                    rows[name].append(value)
            yield {
                "policy": policy,
                "engine": {"name": "torch", "model": Path(model).name},
                "rows": rows,
                "facts": found.facts,
            }


def _questions(block: Block) -> str:
    return f"{len(block.first.rows['id']):,}"


def _alike(row: Row, column: str) -> str:
    """Return for which share of the questions this column is that of transformers, one question after another."""
    same: list[bool] = []
    for single, run in row.group.pairs(SINGLE, row.policy):
        other = dict(zip(single.rows["id"], single.rows[column], strict=True))
        same += [other[id] == value for id, value in zip(run.rows["id"], run.rows[column], strict=True) if id in other]
    return format_number(100 * fmean(same) if same and row.policy != SINGLE else None)


def _late(seconds: list[float]) -> float:
    return sorted(seconds)[round(_LATE * (len(seconds) - 1))]


def _budget(row: Row) -> str:
    return format_number(row.cell.budget_mib if row.policy == COMMAND else None, 0)


def _beside(row: Row) -> str:
    peaks = row.values("peak_mb") if row.policy == COMMAND else []
    return format_number(max(peaks) * 1e6 / _MIB - row.cell.budget_mib if peaks else None, 0)


def _batch_words(run: Record) -> str:
    return f"batches of {run.facts['batch']}"


def _note(block: Block) -> str:
    cell, runs = block.cell, [run for run in block.runs if run.policy == BATCHES]
    prompts = [tokens for run in block.runs for tokens in run.rows["prompt"]]
    batches = " and ".join(sorted({_batch_words(run) for run in runs}))
    return (
        f"{cell.documents} documents a question, prompts of {format_number(fmean(prompts), 0)} tokens on average, "
        f"greedy answers of up to {cell.output_tokens} tokens, in the dtype of the weights. A question arrives when "
        f"another one is answered. The same: as transformers with one question at a time. Of the sizes tried, "
        f"{batches or 'none'} were the fastest. Documents keep their retrieval order in all."
    )
