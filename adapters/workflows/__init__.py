"""Workflows on ordered prompts: server, frameworks, metrics and traces."""

from __future__ import annotations

from ragorder.adapters.workflows.metrics import WorkflowMetrics
from ragorder.adapters.workflows.prompts import WorkflowPrompts
from ragorder.adapters.workflows.server import OrderedWorkflows, ordered_workflows
from ragorder.adapters.workflows.shared import SharedWorkflows
from ragorder.adapters.workflows.trace_log import TraceLog
from ragorder.adapters.workflows.tracing import WorkflowTracing

__all__ = [
    "OrderedWorkflows",
    "SharedWorkflows",
    "TraceLog",
    "WorkflowMetrics",
    "WorkflowPrompts",
    "WorkflowTracing",
    "ordered_workflows",
]
