"""Workflows on ordered prompts: server, frameworks, metrics and traces."""

from __future__ import annotations

from ragorder.adapters.workflows.observers import TraceLog, WorkflowMetrics, WorkflowTracing
from ragorder.adapters.workflows.server import OrderedWorkflows, WorkflowPrompts, ordered_workflows
from ragorder.adapters.workflows.shared import SharedWorkflows

__all__ = [
    "OrderedWorkflows",
    "SharedWorkflows",
    "TraceLog",
    "WorkflowMetrics",
    "WorkflowPrompts",
    "WorkflowTracing",
    "ordered_workflows",
]
