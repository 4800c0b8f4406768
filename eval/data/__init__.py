"""Workloads, corpora, arrivals and traces: what is served."""
