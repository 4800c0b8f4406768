"""Hooks of decoder layers, and access to their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ragorder.kernels.offload.store import LayerStore

__all__ = ["After", "Before", "placeholders", "targets"]


class _Hook:
    """Supplies weights without changing results, so a model's identity ignores it."""

    without_effect = True

    def __init__(self, call: Callable[[int], None], layer: int) -> None:
        self._call = call
        self._layer = layer


class Before(_Hook):
    def __call__(self, module: Any, arguments: Any) -> None:
        self._call(self._layer)


class After(_Hook):
    def __call__(self, module: Any, arguments: Any, result: Any) -> None:
        self._call(self._layer)


def targets(layer: Any, store: LayerStore, number: int) -> dict[str, tuple[Any, str]]:
    """Return the dictionary and the key of each parameter in its module."""
    found = {}
    for parameter in store.layouts[number].parameters:
        module, _, attribute = parameter.name.rpartition(".")
        found[parameter.name] = layer.get_submodule(module)._parameters, attribute
    return found


def placeholders(store: LayerStore, layer: int, device: torch.device) -> dict[str, torch.nn.Parameter]:
    """Return parameters of the right shape and dtype that take no memory."""
    found = {}
    for each in store.layouts[layer].parameters:
        number = torch.zeros((), dtype=each.dtype, device=device)
        found[each.name] = torch.nn.Parameter(number.expand(each.shape), requires_grad=False)
    return found
