"""OpenAI's API on the embedded engine, `ragorder.kernels.engine` (docs/embedded.md)."""

from __future__ import annotations

from ragorder.common.extras import needs

with needs("torch,proxy", "the embedded engine's server"):
    import httpx2  # noqa: F401
    import msgspec  # noqa: F401
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401

from ragorder.adapters.embedded.app import hosted, make_engine_app
from ragorder.adapters.embedded.metrics import EngineMetrics
from ragorder.adapters.embedded.streams import EmbeddedRequestError, EmbeddedStreams
from ragorder.adapters.embedded.worker import (
    EngineStoppedError,
    EngineWorker,
    TooManyAtOnceError,
    TooManyWaitingError,
    with_sizes,
)
from ragorder.adapters.http_server.app_transport import AppTransport

__all__ = [
    "AppTransport",
    "EmbeddedRequestError",
    "EmbeddedStreams",
    "EngineMetrics",
    "EngineStoppedError",
    "EngineWorker",
    "TooManyAtOnceError",
    "TooManyWaitingError",
    "hosted",
    "make_engine_app",
    "with_sizes",
]
