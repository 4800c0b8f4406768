"""Observation of an orderer: predictions against reports, as Prometheus metrics, traces and statistics."""
