"""Engines and their orderers as an application of Ray Serve (docs/replicas.md)."""

from __future__ import annotations

from ragorder.common.extras import install_hint

try:
    import httpx2  # noqa: F401
    import msgspec  # noqa: F401
    import ray.serve  # noqa: F401
    import starlette  # noqa: F401
except ImportError as error:
    raise ImportError(f"Ray Serve needs {error.name}: {install_hint('ray')}", name=error.name) from error

from ragorder.adapters.ray.application import EmbeddedEngine, make_application
from ragorder.adapters.ray.versions import UnsupportedRayError

__all__ = ["EmbeddedEngine", "UnsupportedRayError", "make_application"]
