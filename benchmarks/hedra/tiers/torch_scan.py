"""Scan of clusters in torch, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["TorchClusterScan"]

_WORST = float(np.finfo(np.float32).max)
# The product form of a distance loses digits: further candidates are computed by differences.
_SLACK = 8


class TorchClusterScan:
    """The `ClusterScan` of `IndexTiers` on a torch device.

        tiers = IndexTiers(TorchClusterScan("L2", "cuda"), capacity_bytes=4 << 30)
        search = ContinuousIVF(index, scanner=partial(TieredScanner, tiers))

    Vectors are float32.
    """

    def __init__(self, metric: Literal["L2", "inner product"], device: str | torch.device = "cpu") -> None:
        if metric not in ("L2", "inner product"):
            raise ValueError(f"metric must be 'L2' or 'inner product', got {metric!r}")
        self.metric = metric
        self.device = torch.device(device)
        self._clusters: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def bytes_of(self, vectors: int, dimensions: int) -> int:
        return 4 * vectors * (dimensions + 1)

    def put(self, cluster: int, vectors: NDArray[np.float32]) -> None:
        stored = torch.from_numpy(vectors).to(self.device, copy=True)
        self._clusters[cluster] = stored, stored.square().sum(1)

    def drop(self, cluster: int) -> None:
        del self._clusters[cluster]

    def scan(
        self, queries: NDArray[np.float32], k: int, clusters: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        with torch.inference_mode():
            on_device = torch.from_numpy(queries).to(self.device)
            shape = (*clusters.shape, k)
            keys = torch.full(shape, _WORST, device=self.device)
            places = torch.full(shape, -1, dtype=torch.int64, device=self.device)
            for cluster, row, column in _by_cluster(clusters):
                rows, columns = (torch.from_numpy(array).to(self.device) for array in (row, column))
                found, offsets = self._best(on_device[rows], k, cluster)
                kept = found.shape[1]
                keys[rows, columns, :kept] = found
                places[rows, columns, :kept] = offsets + (cluster << 32)
            keys, places = keys.flatten(1), places.flatten(1)
            best, chosen = keys.topk(k, largest=False)
            places = places.gather(1, chosen)
            distances = -best if self.metric == "inner product" else best
            return distances.cpu().numpy(), places.cpu().numpy()

    def _best(self, queries: torch.Tensor, k: int, cluster: int) -> tuple[torch.Tensor, torch.Tensor]:
        vectors, squares = self._clusters[cluster]
        products = queries @ vectors.T
        if self.metric == "inner product":
            keys, offsets = products.topk(min(k, len(vectors)))
            return -keys, offsets
        near = (squares - 2 * products).topk(min(k + _SLACK, len(vectors)), largest=False).indices
        keys = (vectors[near] - queries[:, None]).square().sum(2)
        keys, chosen = keys.topk(min(k, len(vectors)), largest=False)
        return keys, near.gather(1, chosen)


def _by_cluster(clusters: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.intp]]]:
    rows, columns = np.nonzero(clusters >= 0)
    of = clusters[rows, columns]
    order = np.argsort(of, kind="stable")
    numbers, starts = np.unique(of[order], return_index=True)
    for number, part in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
        yield number, rows[part], columns[part]
