"""Checks of servers, KV events, prompts and request logs."""

from ragorder.adapters.doctor.case import Finding, Verdict
from ragorder.adapters.doctor.events import Events
from ragorder.adapters.doctor.prompts import PromptSample
from ragorder.adapters.doctor.requests import examine_requests
from ragorder.adapters.doctor.server import examine
from ragorder.adapters.http_client import AddressError, ServerError

__all__ = ["AddressError", "Events", "Finding", "PromptSample", "ServerError", "Verdict", "examine", "examine_requests"]
