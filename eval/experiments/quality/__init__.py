"""Does the order of the documents change the answers? Questions with known answers, asked in every order."""

from __future__ import annotations

from ragorder.eval.experiments.quality.base import QualityError, Question
from ragorder.eval.experiments.quality.bench import run_quality, serve_quality
from ragorder.eval.experiments.quality.compare import compare_orders, gold_places, judge, summarise
from ragorder.eval.experiments.quality.extract import extract_answer
from ragorder.eval.experiments.quality.metrics import SCORERS, Scorer
from ragorder.eval.experiments.quality.orders import DEFAULT_ORDERS, Order
from ragorder.eval.experiments.quality.sources import DATASETS, Dataset, QuestionSet, load_questions
from ragorder.eval.experiments.quality.specs import QualityBench

__all__ = [
    "DATASETS",
    "DEFAULT_ORDERS",
    "SCORERS",
    "Dataset",
    "Order",
    "QualityBench",
    "QualityError",
    "Question",
    "QuestionSet",
    "Scorer",
    "compare_orders",
    "extract_answer",
    "gold_places",
    "judge",
    "load_questions",
    "run_quality",
    "serve_quality",
    "summarise",
]
