"""The evaluation harness: a small suite, its runs in this process, and a corpus for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ragorder.eval.cli.eval import eval as evaluate
from ragorder.eval.running.load import silent
from ragorder.eval.running.options import Options
from ragorder.eval.running.session import Outcome, run_suites
from ragorder.eval.running.store import Store
from ragorder.eval.running.suite import Suite, read_suite
from support import suites
from support.commands import run_command

SUITE = """
title = "A suite"
source = "tests"
says = "Something."
policies = ["retrieval", "free"]
baseline = "retrieval"
requests = 30

[cell]
capacity_tokens = 20_000

[sweep]
workload = ["paper-shuf", "geo"]

[report]
chart = "strategies"
"""
QUALITY = """
title = "Answers"
source = "tests"
says = "Something."
kind = "quality"
policies = ["retrieval", "free+keep_first=2"]
warmup = 0
[cell]
top_k = 5
question_order = "random"
[sweep]
dataset = ["hotpotqa"]
[report]
chart = "quality"
"""

REDUCED = """
[reduced]
policies = ["retrieval", "greedy"]
requests = 10
cell = { workload = "unique" }
sweep = { capacity_tokens = [4_000, 8_000] }

[report]
"""
SHORTENED = SUITE.replace("\n[report]\n", REDUCED)

invoke = partial(run_command, evaluate, env={"COLUMNS": "200", "OPENAI_API_KEY": ""})


def suite(text: str = SUITE) -> Suite:
    return read_suite("mine", text, "mine.toml")


def run(folder: Path, *suites: Suite, **options: Any) -> Outcome:
    with Store(folder) as store:
        return run_suites(suites, Options(**options), store, silent)


def write_corpus(folder: Path, *, top_k: int, questions: int = 12) -> None:
    texts = [f"words of number {number}" for number in range(6)]
    asked = [{"question": f"What about {number}?", "answers": ["words"]} for number in range(questions)]
    suites.write_corpus(folder, texts, asked, [[(number + k) % 6 for k in range(top_k)] for number in range(questions)])
