"""Tail policies: the order of the documents beyond the cached prefix."""

from ragorder.trie.tail.auto import AutoTail
from ragorder.trie.tail.base import Tail, Waiting
from ragorder.trie.tail.frequency import FrequencyTail
from ragorder.trie.tail.queue import QueueTail
from ragorder.trie.tail.rank import RankTail

__all__ = ["AutoTail", "FrequencyTail", "QueueTail", "RankTail", "Tail", "Waiting"]
