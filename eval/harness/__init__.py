"""The evaluation harness: suites, each a table or figure, run and kept so that a run can be resumed."""

from ragorder.eval.harness.cells import Cell, SuiteError
from ragorder.eval.harness.corpora import corpora_in
from ragorder.eval.harness.options import HarnessError, Options
from ragorder.eval.harness.plan import Job, Missing
from ragorder.eval.harness.run import Outcome, plan_run, run_suites
from ragorder.eval.harness.store import RESULTS, Store, StoreError
from ragorder.eval.harness.suite import GROUPS, PaperRow, Report, Suite, choose_suites, load_suite, load_suites

__all__ = [
    "GROUPS",
    "RESULTS",
    "Cell",
    "HarnessError",
    "Job",
    "Missing",
    "Options",
    "Outcome",
    "PaperRow",
    "Report",
    "Store",
    "StoreError",
    "Suite",
    "SuiteError",
    "choose_suites",
    "corpora_in",
    "load_suite",
    "load_suites",
    "plan_run",
    "run_suites",
]
