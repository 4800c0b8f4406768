"""Times of the smallest pieces of work: scans of clusters, and decoding steps (HedraRAG Figures 4 and 6)."""
