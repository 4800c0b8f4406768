from ragorder.eval.running.reading import Results, ResultsError, read_results

ReportError = ResultsError
__all__ = ["ReportError", "Results", "read_results"]
