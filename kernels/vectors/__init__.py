"""Vectors of an index's clusters on a device (HedraRAG section 4.4)."""

from ragorder.kernels.vectors.scan import TorchClusterScan

__all__ = ["TorchClusterScan"]
