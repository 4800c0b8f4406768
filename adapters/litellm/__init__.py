"""LiteLLM: proxy callback for ordering documents.

# litellm_settings: callbacks: my_callbacks.order_documents   (my_callbacks.py, beside LiteLLM's configuration)
order_documents = OrderDocuments(Orderer.for_vllm("http://host:8000"), template=DocumentTemplate("<doc>{text}</doc>"))
"""

from __future__ import annotations

from ragorder.common.extras import install_hint

try:
    from ragorder.adapters.litellm.callback import OrderDocuments
except ImportError as error:
    message = f"ragorder.adapters.litellm needs {error.name}: {install_hint('litellm')}"
    raise ImportError(message, name=error.name) from error

from ragorder.adapters.proxy import DocumentTemplate, RepeatedDocuments

__all__ = ["DocumentTemplate", "OrderDocuments", "RepeatedDocuments"]
