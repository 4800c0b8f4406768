"""Errors of workflows."""

from __future__ import annotations

__all__ = ["GraphError", "NodeError", "RefusedSearchError", "UnknownNameError", "UnusableValueError", "WorkflowError"]


class WorkflowError(Exception):
    pass


class GraphError(WorkflowError, ValueError):
    """A graph that cannot be run, or an edge that led nowhere. The message names graph, node, and what to change."""


class UnknownNameError(WorkflowError, KeyError):
    """A name that the state does not have."""

    __str__ = Exception.__str__


class UnusableValueError(WorkflowError, TypeError):
    """A prompt, query or result of another type."""


class RefusedSearchError(WorkflowError, ValueError):
    """A search that the index cannot answer: a vector of another dimension, more results than it has vectors."""


class NodeError(WorkflowError, RuntimeError):
    """A node that failed in one request. The message names graph and node, never a text; `__cause__` is the failure."""

    def __init__(self, graph: str, node: object, failure: str) -> None:
        super().__init__(f"workflow {graph!r}, node {node!r}: {failure}")
        self.graph = graph
        self.node = node
        self.failure = failure

    def __reduce__(self) -> tuple[type[NodeError], tuple[str, object, str]]:
        return NodeError, (self.graph, self.node, self.failure)

    @classmethod
    def of(cls, graph: str, node: object, error: BaseException) -> NodeError:
        """To be raised from `error`, whose own message is shown only if it is ours."""
        return cls(graph, node, str(error) if isinstance(error, WorkflowError) else type(error).__name__)
