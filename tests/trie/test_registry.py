"""A tail or a search is added by one class."""

from __future__ import annotations

from typing import Any

# As an application's module registers them, before it imports the rest.
POLICIES = """
import sys
from ragorder.trie.search import PrefixSearch, searches
from ragorder.trie.tail import Tail, tails

@tails.register("reversed", "the least relevant document first")
class ReversedTail(Tail):
    def arrange(self, request, prefix, rest, waiting):
        return rest[::-1]

@searches.register("nothing", "no cached document is reused")
class NoSearch(PrefixSearch):
    def find(self, tree, ranks, permits=None):
        return tree.root
"""

ORDER = """
from ragorder import Document, Orderer
orderer = Orderer(moves="reversed", search="nothing")
for names in ("abc", "cx"):
    ordering = orderer.order([Document(id=name, text=name * 100) for name in names])
    print(*(document.id for document in ordering.documents), sep="")
"""

COMMAND = "from ragorder.cli import main\nmain(sys.argv[1:])"


def test_the_orderer_uses_the_new_policies_by_their_names(python: Any) -> None:
    done = python("-c", POLICIES + ORDER)
    assert done.stdout.split() == ["cba", "xc"], done.stderr


def test_the_command_line_offers_them(python: Any) -> None:
    request = '{"documents": [{"id": "a", "tokens": 9}, {"id": "b", "tokens": 9}]}'
    done = python("-c", POLICIES + COMMAND, "order", "--moves", "reversed", input=request)
    assert '"documents": ["b", "a"]' in done.stdout, done.stderr
    shown = " ".join(python("-c", POLICIES + COMMAND, "order", "--help").stdout.split())
    assert "reversed: the least relevant document first" in shown
    assert "nothing: no cached document is reused" in shown
