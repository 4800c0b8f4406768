"""Answer quality: questions with known answers, asked with the documents in several orders."""

from __future__ import annotations

from ragorder.eval.suites.quality.base import GradedQuestion, QualityError
from ragorder.eval.suites.quality.bench import done_in, run_quality, serve_quality
from ragorder.eval.suites.quality.compare import compare_orders, gold_places, judge, summarise
from ragorder.eval.suites.quality.datasets import DATASETS, Dataset, QuestionSet, load_questions
from ragorder.eval.suites.quality.metrics import SCORERS, Scorer, extract_answer
from ragorder.eval.suites.quality.orders import DEFAULT_ORDERS, Order
from ragorder.eval.suites.quality.specs import AnswererSpec, QualityBench, QuestionsSpec

__all__ = [
    "DATASETS",
    "DEFAULT_ORDERS",
    "SCORERS",
    "AnswererSpec",
    "Dataset",
    "GradedQuestion",
    "Order",
    "QualityBench",
    "QualityError",
    "QuestionSet",
    "QuestionsSpec",
    "Scorer",
    "compare_orders",
    "done_in",
    "extract_answer",
    "gold_places",
    "judge",
    "load_questions",
    "run_quality",
    "serve_quality",
    "summarise",
]
