"""Tail policies: the order of the documents beyond the cached prefix."""

from typing import Literal

from ragorder.trie.tail.auto import AutoTail
from ragorder.trie.tail.base import Tail, Waiting, tails
from ragorder.trie.tail.frequency import FrequencyTail
from ragorder.trie.tail.queue import QueueTail
from ragorder.trie.tail.rank import RankTail

__all__ = ["AutoTail", "FrequencyTail", "QueueTail", "RankTail", "Tail", "TailName", "Waiting", "tails"]

TailName = Literal["auto", "frequency", "queue", "rank"] | str
"""The registered names, of which type checkers see these."""

tails.load(__name__, __path__)
