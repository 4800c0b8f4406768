"""The files of deploy/, as the tools that take them see them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
_ROUTERS = ("llm-d", "production-stack", "aibrix", "dynamo")
OVERLAYS = ("kubernetes/base", "kubernetes/front", *(f"routers/{name}" for name in _ROUTERS))
"""Folders that `kubectl apply -k` takes."""

Manifest = dict[str, Any]


def documents(path: Path) -> list[Any]:
    """The documents of a YAML file."""
    return [each for each in yaml.safe_load_all(path.read_text("utf-8")) if each is not None]


def tool(name: str) -> str:
    """The path of a program, or the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@cache
def render(folder: Path) -> tuple[Manifest, ...]:
    """What kubectl would apply of a folder with a kustomization."""
    done = subprocess.run([tool("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.safe_load_all(done.stdout) if each)


def of_kind(manifests: tuple[Manifest, ...], *kinds: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] in kinds]


def containers(manifests: tuple[Manifest, ...], name: str) -> Iterator[Manifest]:
    """Containers of this name in all deployments, native sidecars included."""
    for deployment in of_kind(manifests, "Deployment"):
        spec = deployment["spec"]["template"]["spec"]
        yield from (each for each in [*spec.get("initContainers", []), *spec["containers"]] if each["name"] == name)


def variables(container: Manifest, manifests: tuple[Manifest, ...]) -> dict[str, str]:
    """Environment variables of a container; those from secrets are their key in it."""
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(manifests, "ConfigMap")}
    found: dict[str, str] = {}
    for each in container.get("env", []):
        source = each.get("valueFrom", {})
        if entry := source.get("configMapKeyRef"):
            found[each["name"]] = maps[entry["name"]][entry["key"]]
        else:
            found[each["name"]] = each["value"] if "value" in each else source["secretKeyRef"]["key"]
    return found


def arguments(container: Manifest, manifests: tuple[Manifest, ...]) -> list[str]:
    """Its arguments, variables replaced as Kubernetes does it."""
    known = variables(container, manifests)
    return [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], each) for each in container["args"]]
