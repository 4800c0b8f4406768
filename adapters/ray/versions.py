"""Supported versions of Ray, and the used parts of its API, whose request routers are alpha."""

from __future__ import annotations

import inspect
import warnings
from importlib import import_module
from typing import Any

import ray

from ragorder.common.degraded import DegradedWarning
from ragorder.common.extras import install_hint
from ragorder.errors import RagorderError

__all__ = ["CONTRACT", "SUPPORTED_RAY", "UnsupportedRayError", "check_ray", "missing_parts"]

SUPPORTED_RAY = "2.60"

CONTRACT: dict[str, tuple[str, ...]] = {
    "ray.exceptions:RayError": (),
    "ray.exceptions:RayTaskError": (),
    "ray.exceptions:TaskCancelledError": (),
    "ray.serve:deployment": ("name", "max_ongoing_requests", "request_router_config"),
    "ray.serve.config:RequestRouterConfig": ("request_router_class", "request_router_kwargs"),
    "ray.serve.exceptions:BackPressureError": (),
    "ray.serve.exceptions:DeploymentUnavailableError": (),
    "ray.serve.exceptions:ReplicaUnavailableError": (),
    "ray.serve.exceptions:RequestCancelledError": (),
    "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter": (),
    "ray.serve.handle:DeploymentHandle.options": ("method_name", "session_id", "stream"),
    "ray.serve.handle:DeploymentResponseGenerator.__anext__": (),
    "ray.serve.handle:DeploymentResponseGenerator.cancel": (),
}
"""Used names, as "module:name", with the parameters that are passed or received."""


class UnsupportedRayError(RagorderError, RuntimeError): ...


def check_ray() -> None:
    """Raise UnsupportedRayError, which says what to install; warn of a version without tests."""
    installed = ray.__version__
    if missing := missing_parts():
        raise UnsupportedRayError(
            f"Ray {installed} lacks {', '.join(missing)}: {install_hint('ray')}, which brings Ray {SUPPORTED_RAY}.x"
        )
    if installed.rpartition(".")[0] != SUPPORTED_RAY:
        message = (
            f"ragorder is tested with Ray {SUPPORTED_RAY}.x, and Ray {installed} is installed: its request routers may "
            f"have changed; {install_hint('ray')} brings the tested one"
        )
        warnings.warn(message, DegradedWarning, stacklevel=3)


def missing_parts() -> list[str]:
    return [name for name, parameters in CONTRACT.items() if not _has(name, parameters)]


def _has(name: str, parameters: tuple[str, ...]) -> bool:
    module, _, path = name.partition(":")
    try:
        part: Any = import_module(module)
        for each in path.split("."):
            part = getattr(part, each)
    except (ImportError, AttributeError):
        return False
    if not parameters:
        return True
    taken = inspect.signature(part).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    return takes_any or all(each in taken for each in parameters)
