"""A toy: a small language model that follows links between documents, and its training (suite toy-training)."""
