"""Transformers models: loading, checks, and attention over paged KV."""

from ragorder.common.extras import install_hint

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    message = f"the embedded engine needs {error.name}: {install_hint('torch')}"
    raise ImportError(message, name=error.name) from error
