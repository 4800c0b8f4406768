"""The embedded engine measured with random weights: suites embedded-prefill and embedded-serving."""
