"""Running of measurements: specifications, drivers, policies, suites and records."""
