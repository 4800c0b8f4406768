"""A tail or a search is added by one class."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TAIL = """
@tails.register("reversed", "the least relevant document first")
class ReversedTail(Tail):
    def arrange(self, request, prefix, rest, waiting):
        return rest[::-1]
"""

SEARCH = """
@searches.register("nothing", "no cached document is reused")
class NoSearch(PrefixSearch):
    def __init__(self, budget):
        pass

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


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree with one more tail and one more search."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "trie", folder / "trie")
    shutil.copytree(ROOT / "ragorder", folder / "ragorder", symlinks=True)
    for name in ("adapters", "eval", "kernels", "pipelining"):
        (folder / name).symlink_to(ROOT / name)
    for name, policy in (("tail", TAIL), ("search", SEARCH)):
        with open(folder / "trie" / f"{name}.py", "a") as file:
            file.write(policy)
    return folder


def python(tree: Path, *arguments: str, input: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=tree, input=input, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_orderer_uses_the_new_policies_by_their_names(tree: Path) -> None:
    assert python(tree, "-c", ORDER).split() == ["cba", "xc"]


def test_the_command_line_offers_them(tree: Path) -> None:
    request = '{"documents": [{"id": "a", "tokens": 9}, {"id": "b", "tokens": 9}]}'
    assert '"documents": ["b", "a"]' in python(tree, "-m", "ragorder", "order", "--moves", "reversed", input=request)
    shown = " ".join(python(tree, "-m", "ragorder", "order", "--help").split())
    assert "reversed: the least relevant document first" in shown
    assert "nothing: no cached document is reused" in shown
