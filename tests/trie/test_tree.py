"""The knowledge tree: sequences of documents as paths, and which blocks belong to which document."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ragorder.trie.tree import KnowledgeTree, Node

LENGTHS = st.lists(st.integers(0, 70), max_size=12)


def chain(tree: KnowledgeTree, lengths: Sequence[int]) -> list[Node]:
    """The path of documents 0, 1, 2 … of these lengths."""
    return tree.insert(range(len(lengths)), lengths, range(len(lengths)))


def edges(tree: KnowledgeTree) -> set[tuple[object, ...]]:
    """Every path of the tree, as keys from the root."""
    paths: dict[Node, tuple[object, ...]] = {tree.root: ()}
    for node in tree.walk():
        if node.parent is not None:
            paths[node] = (*paths[node.parent], node.key)
    return set(paths.values())


def test_a_path_begins_with_the_root_and_follows_the_order() -> None:
    tree = KnowledgeTree(block_size=16)
    path = tree.insert(["a", "b", "c"], [10, 20, 30], [2, 0])
    assert [node.key for node in path] == [None, "c", "a"]
    assert path[0] is tree.root
    assert [node.end for node in path] == [0, 30, 40]
    assert all(child.parent is parent for parent, child in pairwise(path))
    assert tree.size == 2


def test_inserting_again_changes_nothing() -> None:
    tree = KnowledgeTree(block_size=16)
    path = tree.insert(["a", "b"], [16, 16], [0, 1])
    path[1].missing = path[2].missing = 0
    assert tree.insert(["a", "b"], [16, 16], [0, 1]) == path
    assert (tree.size, path[1].missing) == (2, 0)


def test_a_new_node_misses_every_block_and_is_unused() -> None:
    node = KnowledgeTree(block_size=16).insert(["a"], [40], [0])[1]
    assert (node.blocks, node.missing, node.stamp, node.leases, node.children) == (2, 2, 0, 0, None)


@given(LENGTHS, st.integers(1, 40), st.integers(0, 100))
def test_every_full_block_of_the_prompt_belongs_to_exactly_one_document(
    lengths: list[int], block_size: int, prefix_tokens: int
) -> None:
    tree = KnowledgeTree(block_size, prefix_tokens)
    path = chain(tree, lengths)
    owner = [0] * prefix_tokens + [place for place, length in enumerate(lengths, 1) for _ in range(length)]
    last_tokens = range(block_size - 1, len(owner), block_size)
    owners = [owner[token] for token in last_tokens]
    assert [node.blocks for node in path] == [owners.count(place) for place in range(len(path))]


@given(LENGTHS, st.integers(1, 40), st.integers(0, 100), st.integers(0, 10))
def test_cached_tokens_are_the_whole_blocks_up_to_the_first_missing(
    lengths: list[int], block_size: int, prefix_tokens: int, missing: int
) -> None:
    tree = KnowledgeTree(block_size, prefix_tokens)
    node = chain(tree, lengths)[-1]
    node.missing = min(missing, node.blocks)
    whole = (prefix_tokens + sum(lengths)) // block_size
    assert tree.cached_tokens(node) == (whole - node.missing) * block_size


def test_removing_the_last_child_makes_a_leaf_again() -> None:
    tree = KnowledgeTree(block_size=16)
    (_, a, b) = tree.insert(["a", "b"], [16, 16], [0, 1])
    tree.remove(b)
    assert a.children is None
    tree.remove(a)
    assert tree.root.children is None
    assert tree.size == 0


@given(st.lists(st.lists(st.sampled_from("abcde"), unique=True), max_size=12), st.data())
def test_is_the_set_of_the_prefixes_that_were_inserted_and_not_removed(
    sequences: list[list[str]], data: st.DataObject
) -> None:
    tree = KnowledgeTree(block_size=16)
    expected: set[tuple[object, ...]] = {()}
    for sequence in sequences:
        tree.insert(sequence, [16] * len(sequence), range(len(sequence)))
        expected |= {tuple(sequence[:length]) for length in range(len(sequence) + 1)}
        assert edges(tree) == expected
        leaves = [node for node in tree.walk() if node.parent is not None and not node.children]
        if leaves and data.draw(st.booleans(), "remove a leaf"):
            leaf = data.draw(st.sampled_from(leaves), "leaf")
            keys = []
            node: Node | None = leaf
            while node is not None and node.parent is not None:
                keys.append(node.key)
                node = node.parent
            tree.remove(leaf)
            expected.remove(tuple(reversed(keys)))
            assert edges(tree) == expected
        assert tree.size == len(expected) - 1


def test_ten_thousand_documents_deep() -> None:
    tree = KnowledgeTree(block_size=16, prefix_tokens=5)
    path = chain(tree, [7] * 10_000)
    assert tree.size == 10_000
    assert path[-1].end == 5 + 70_000
    assert sum(node.blocks for node in path) == 70_005 // 16
    assert len(list(tree.walk())) == 10_001
    for node in reversed(path):
        tree.remove(node)
    assert list(tree.walk()) == [tree.root]
    assert tree.size == 0
