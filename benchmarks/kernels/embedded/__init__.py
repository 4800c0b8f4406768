"""The embedded engine measured with random weights: suites embedded-prefill, -fused, -serving and -recovery."""
