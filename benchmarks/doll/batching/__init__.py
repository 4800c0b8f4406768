"""Retrieval and generation within a memory budget on a virtual clock: the suites doll-serving, doll-ablation,
doll-trace, doll-placement, doll-idle, doll-index, doll-topk and doll-kept."""
