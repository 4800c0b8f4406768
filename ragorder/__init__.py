"""Order of retrieved documents for the prefix cache of a serving engine."""

import logging
from typing import TYPE_CHECKING

from ragorder.common.degraded import DegradedWarning
from ragorder.conversation import Turn
from ragorder.document import Document
from ragorder.orderer import Orderer
from ragorder.ordering import Ordering
from ragorder.prompt import Prompt, PromptBuilder, Span
from ragorder.scope.request import Lengths
from ragorder.settings import Settings
from ragorder.trie.histories import History, Segment

__all__ = [
    "DegradedWarning",
    "Document",
    "History",
    "Lengths",
    "Orderer",
    "Ordering",
    "Prompt",
    "PromptBuilder",
    "Segment",
    "Settings",
    "Span",
    "Turn",
]

if TYPE_CHECKING:
    __version__: str

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> str:
    # Read on first use: searching the installed packages takes longer than importing this one.
    if name == "__version__":
        from importlib.metadata import version

        return version("ragorder")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
