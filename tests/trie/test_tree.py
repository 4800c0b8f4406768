"""The knowledge tree: sequences of documents as paths, and which blocks belong to which document."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from ragorder.trie.tree import KnowledgeTree, Node

KEYS = "abcde"


def paths(tree: KnowledgeTree) -> dict[tuple[object, ...], Node]:
    """Every node, by the keys from the root."""
    keys: dict[Node, tuple[object, ...]] = {tree.root: ()}
    for node in tree.walk():
        if node.parent is not None:
            keys[node] = (*keys[node.parent], node.key)
    return {path: node for node, path in keys.items()}


@given(
    st.lists(st.lists(st.sampled_from(KEYS), unique=True), max_size=12),
    st.lists(st.integers(0, 70), min_size=5, max_size=5),
    st.integers(1, 40),
    st.integers(0, 100),
    st.data(),
)
def test_is_the_set_of_the_prefixes_that_were_inserted_and_not_removed(
    sequences: list[list[str]], tokens: list[int], block_size: int, prefix_tokens: int, data: st.DataObject
) -> None:
    """Every full block of a prompt belongs to one document, and is missing at first."""
    tree = KnowledgeTree(block_size, prefix_tokens)
    expected: dict[tuple[object, ...], Node] = {(): tree.root}
    for sequence in sequences:
        order = [KEYS.index(key) for key in sequence]
        path = tree.insert(KEYS, tokens, order)
        owner = [0] * prefix_tokens + [place for place, rank in enumerate(order, 1) for _ in range(tokens[rank])]
        owners = owner[block_size - 1 :: block_size]
        ends = accumulate((tokens[rank] for rank in order), initial=prefix_tokens)
        for place, (node, end) in enumerate(zip(path, ends, strict=True)):
            assert expected.setdefault(tuple(sequence[:place]), node) is node
            assert node.parent is (path[place - 1] if place else None)
            assert (node.end, node.blocks) == (end, owners.count(place))
            assert (node.missing, node.stamp, node.leases) == (node.blocks, 0, 0)
        node.missing = missing = data.draw(st.integers(0, node.blocks), "missing")
        assert tree.insert(KEYS, tokens, order) == path and node.missing == missing, "inserted again it stays"
        assert tree.cached_tokens(node) == (len(owners) - missing) * block_size
        node.missing = node.blocks
        assert paths(tree) == expected
        leaves = [each for each in expected if each and expected[each].children is None]
        if leaves and data.draw(st.booleans(), "remove a leaf"):
            removed = data.draw(st.sampled_from(leaves), "leaf")
            tree.remove(expected.pop(removed))
            assert paths(tree) == expected
        assert tree.size == len(expected) - 1
        assert all(each.children != {} for each in expected.values()), "without children a node is a leaf again"


def test_ten_thousand_documents_deep() -> None:
    tree = KnowledgeTree(block_size=16, prefix_tokens=5)
    path = tree.insert(range(10_000), [7] * 10_000, range(10_000))
    assert tree.size == 10_000
    assert path[-1].end == 5 + 70_000
    assert sum(node.blocks for node in path) == 70_005 // 16
    assert len(list(tree.walk())) == 10_001
    for node in reversed(path):
        tree.remove(node)
    assert list(tree.walk()) == [tree.root]
    assert tree.root.children is None and tree.size == 0
