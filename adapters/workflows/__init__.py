"""Workflows on ordered prompts: a server for any engine, frameworks that submit to it, metrics and traces."""

from __future__ import annotations

from ragorder.adapters.workflows.prompts import WorkflowPrompts
from ragorder.adapters.workflows.shared import SharedWorkflows

__all__ = ["SharedWorkflows", "WorkflowPrompts"]
