"""Pipelines on a real server."""

from ragorder.eval.suites.pipelining.bench import PIPELINES, PipelineError, PipelineResult, run_pipelines
from ragorder.eval.suites.pipelining.cold import ALONE, measure_cold, time_system
from ragorder.eval.suites.pipelining.modes import MODES, long_builder
from ragorder.eval.suites.pipelining.search import SearchPlan, embed, paced, plan_search, played, real_retrieval
from ragorder.eval.suites.pipelining.server import Counters, MeasuredServer, ServerFacts, find_server
from ragorder.eval.suites.pipelining.speculation import measure_speculation, measure_throughput

__all__ = [
    "ALONE",
    "MODES",
    "PIPELINES",
    "Counters",
    "MeasuredServer",
    "PipelineError",
    "PipelineResult",
    "SearchPlan",
    "ServerFacts",
    "embed",
    "find_server",
    "long_builder",
    "measure_cold",
    "measure_speculation",
    "measure_throughput",
    "paced",
    "plan_search",
    "played",
    "real_retrieval",
    "run_pipelines",
    "time_system",
]
