"""One run of the evaluation: engines, drivers, policies, suites, and where results are kept."""
