"""Scan of clusters in torch, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

_WORST = float(np.finfo(np.float32).max)


class TorchClusterScan:
    """The `ClusterScan` of `IndexTiers` on a torch device: by inner product, of float32 vectors."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self._clusters: dict[int, torch.Tensor] = {}

    def bytes_of(self, vectors: int, dimensions: int) -> int:
        return 4 * vectors * dimensions

    def put(self, cluster: int, vectors: NDArray[np.float32]) -> None:
        self._clusters[cluster] = torch.from_numpy(vectors).to(self.device, copy=True)

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
            return (-best).cpu().numpy(), places.cpu().numpy()

    def _best(self, queries: torch.Tensor, k: int, cluster: int) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = self._clusters[cluster]
        products, offsets = (queries @ vectors.T).topk(min(k, len(vectors)))
        return -products, offsets


def _by_cluster(clusters: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.intp]]]:
    rows, columns = np.nonzero(clusters >= 0)
    of = clusters[rows, columns]
    order = np.argsort(of, kind="stable")
    numbers, starts = np.unique(of[order], return_index=True)
    for number, part in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
        yield number, rows[part], columns[part]
