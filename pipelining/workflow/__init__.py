"""Workflows of searches and generations as graphs (HedraRAG)."""

from __future__ import annotations

from ragorder.pipelining.workflow.graph import CompiledGraph, RAGraph
from ragorder.pipelining.workflow.join import interpret
from ragorder.pipelining.workflow.library import hyde, irg, multistep, one_shot, recomp
from ragorder.pipelining.workflow.nodes import (
    END,
    START,
    DeadlineError,
    Generation,
    GraphError,
    NodeError,
    NodeQuestion,
    Retrieval,
    State,
    Step,
    WorkflowError,
)
from ragorder.pipelining.workflow.result import WorkflowResult, WorkflowStream, WorkflowTrace
from ragorder.pipelining.workflow.run import RunOptions
from ragorder.pipelining.workflow.server import WorkflowServer

__all__ = [
    "END",
    "START",
    "CompiledGraph",
    "DeadlineError",
    "Generation",
    "GraphError",
    "NodeError",
    "NodeQuestion",
    "RAGraph",
    "Retrieval",
    "RunOptions",
    "State",
    "Step",
    "WorkflowError",
    "WorkflowResult",
    "WorkflowServer",
    "WorkflowStream",
    "WorkflowTrace",
    "hyde",
    "interpret",
    "irg",
    "multistep",
    "one_shot",
    "recomp",
]
