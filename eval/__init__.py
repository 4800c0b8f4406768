"""The evaluation harness: workloads, corpora, engines, policies and what they measure."""
