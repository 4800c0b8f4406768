from ragorder.eval.running.suite import PaperRow, Suite, load_suites

SuiteInfo = Suite
known_suites = load_suites
__all__ = ["PaperRow", "SuiteInfo", "known_suites"]
