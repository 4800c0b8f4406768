"""ragorder: orders retrieved documents so that a serving engine reuses more of its prefix cache."""

import logging

from ragorder.document import Document
from ragorder.orderer import Orderer
from ragorder.ordering import Ordering
from ragorder.prompt import Prompt, PromptBuilder, Span
from ragorder.settings import Settings

__all__ = ["Document", "Orderer", "Ordering", "Prompt", "PromptBuilder", "Settings", "Span"]

logging.getLogger(__name__).addHandler(logging.NullHandler())
