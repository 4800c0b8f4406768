"""Retrieval and generation within a memory budget on a virtual clock: the suites doll-serving, doll-ablation,
doll-placement, doll-idle and doll-kept."""
