"""Transformers models: loading, checks, and attention over paged KV."""

from ragorder.common.extras import needs

with needs("torch", "the embedded engine"):
    import torch  # noqa: F401
    import transformers  # noqa: F401
