"""Tail policies: the order of the documents beyond the cached prefix."""

from typing import Literal

from ragorder.trie.tail.base import Tail, Waiting, tails
from ragorder.trie.tail.cohort import CohortTail
from ragorder.trie.tail.earned import EarnedTail
from ragorder.trie.tail.free import FreeTail
from ragorder.trie.tail.frequency import FrequencyTail
from ragorder.trie.tail.popularity import PopularityTail
from ragorder.trie.tail.queue import QueueTail
from ragorder.trie.tail.rank import RankTail

__all__ = [
    "CohortTail",
    "EarnedTail",
    "FreeTail",
    "FrequencyTail",
    "PopularityTail",
    "QueueTail",
    "RankTail",
    "Tail",
    "TailName",
    "Waiting",
    "tails",
]

TailName = Literal["cohort", "earned", "free", "frequency", "popularity", "prefix", "queue"] | str
"""The registered names, of which type checkers see these."""

tails.load(__name__, __path__)
