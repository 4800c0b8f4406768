"""Choices of neighbours for documents (FusionRAG 3.1)."""

from ragorder.kernels.preprocessing.neighbours.base import Neighbours, make_neighbours, neighbours
from ragorder.kernels.preprocessing.neighbours.embedding import EmbeddingNeighbours
from ragorder.kernels.preprocessing.neighbours.given import GivenNeighbours
from ragorder.kernels.preprocessing.neighbours.together import ServedTogether
from ragorder.kernels.preprocessing.neighbours.vectors import VectorNeighbours

__all__ = [
    "EmbeddingNeighbours",
    "GivenNeighbours",
    "Neighbours",
    "ServedTogether",
    "VectorNeighbours",
    "make_neighbours",
    "neighbours",
]

neighbours.load(__name__, __path__)
