"""Tail policies: the order of the documents beyond the cached prefix."""

from typing import Literal

from ragorder.trie.tail.auto import AutoTail
from ragorder.trie.tail.base import Tail, Waiting, tails
from ragorder.trie.tail.cohort import CohortTail
from ragorder.trie.tail.frequency import FrequencyTail
from ragorder.trie.tail.popularity import PopularityTail
from ragorder.trie.tail.queue import QueueTail
from ragorder.trie.tail.rank import RankTail

__all__ = [
    "AutoTail",
    "CohortTail",
    "FrequencyTail",
    "PopularityTail",
    "QueueTail",
    "RankTail",
    "Tail",
    "TailName",
    "Waiting",
    "tails",
]

TailName = Literal["auto", "cohort", "frequency", "popularity", "queue", "rank"] | str
"""The registered names, of which type checkers see these."""

tails.load(__name__, __path__)
