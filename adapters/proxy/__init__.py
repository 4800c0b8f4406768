"""Ordering proxy for OpenAI- and Anthropic-compatible servers."""

from __future__ import annotations

from ragorder.common.extras import install_hint

try:
    import httpx2  # noqa: F401
    import msgspec  # noqa: F401
    import starlette  # noqa: F401
except ImportError as error:
    raise ImportError(f"the proxy needs {error.name}: {install_hint('proxy')}", name=error.name) from error

from ragorder.adapters.proxy.admission import AdmissionQueue
from ragorder.adapters.proxy.app import make_app
from ragorder.adapters.proxy.bodies.template import DocumentTemplate, TemplateError
from ragorder.adapters.proxy.bodies.turns import RepeatedDocuments
from ragorder.adapters.proxy.fleet import Fleet, ReplicaAddress
from ragorder.adapters.proxy.upstream import Timeouts

__all__ = [
    "AdmissionQueue",
    "DocumentTemplate",
    "Fleet",
    "RepeatedDocuments",
    "ReplicaAddress",
    "TemplateError",
    "Timeouts",
    "make_app",
]
