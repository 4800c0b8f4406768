"""Engines and their orderers as an application of Ray Serve (docs/replicas.md)."""

from __future__ import annotations

from ragorder.common.extras import needs

with needs("ray", "Ray Serve"):
    import httpx2  # noqa: F401
    import msgspec  # noqa: F401
    import ray.serve  # noqa: F401
    import starlette  # noqa: F401

from ragorder.adapters.ray.application import EmbeddedEngine, UnsupportedRayError, make_application

__all__ = ["EmbeddedEngine", "UnsupportedRayError", "make_application"]
