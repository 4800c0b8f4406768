"""Knowledge tree with prefix searches, tail policies, residency and batch plans."""

from ragorder.trie.plan import CachedPath, plan, plan_backlog
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["CachedPath", "Key", "KnowledgeTree", "Node", "plan", "plan_backlog"]
