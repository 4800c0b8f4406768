"""The knowledge tree: sequences of documents as paths, and which blocks belong to which document."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder.trie.tree import KnowledgeTree, Node

LENGTHS = st.lists(st.integers(0, 70), max_size=12)


def chain(tree: KnowledgeTree, lengths: Sequence[int]) -> list[Node]:
    """The path of documents 0, 1, 2 … of these lengths."""
    return tree.insert(range(len(lengths)), lengths, range(len(lengths)))


def keys_of(path: Sequence[Node]) -> list[object]:
    return [node.key for node in path]


def edges(tree: KnowledgeTree) -> set[tuple[object, ...]]:
    """Every path of the tree, as keys from the root."""
    paths: dict[Node, tuple[object, ...]] = {tree.root: ()}
    for node in tree.walk():
        if node.parent is not None:
            paths[node] = (*paths[node.parent], node.key)
    return set(paths.values())


def test_an_empty_tree_is_its_root() -> None:
    tree = KnowledgeTree(block_size=16, prefix_tokens=40)
    assert list(tree.walk()) == [tree.root]
    assert tree.size == 0
    assert (tree.root.parent, tree.root.children) == (None, None)
    assert (tree.root.end, tree.root.blocks) == (40, 2)


def test_a_path_begins_with_the_root_and_follows_the_order() -> None:
    tree = KnowledgeTree(block_size=16)
    path = tree.insert(["a", "b", "c"], [10, 20, 30], [2, 0, 1])
    assert keys_of(path) == [None, "c", "a", "b"]
    assert path[0] is tree.root
    assert [node.end for node in path] == [0, 30, 40, 60]
    assert all(child.parent is parent for parent, child in pairwise(path))


def test_only_the_ranks_in_the_order_are_inserted() -> None:
    tree = KnowledgeTree(block_size=16)
    assert keys_of(tree.insert(["a", "b", "c"], [10, 20, 30], [1])) == [None, "b"]
    assert tree.size == 1


def test_no_documents_are_the_root_alone() -> None:
    tree = KnowledgeTree(block_size=16)
    assert tree.insert([], [], []) == [tree.root]
    assert tree.root.children is None


def test_a_shared_beginning_is_one_path() -> None:
    tree = KnowledgeTree(block_size=16)
    one = tree.insert(["a", "b", "c"], [16] * 3, [0, 1, 2])
    other = tree.insert(["d", "b", "a"], [16] * 3, [2, 1, 0])
    assert one[:3] == other[:3]
    assert one[3] is not other[3]
    assert tree.size == 4


def test_a_document_after_other_documents_is_another_node() -> None:
    tree = KnowledgeTree(block_size=16)
    first = tree.insert(["a", "b"], [16, 16], [0, 1])[1]
    second = tree.insert(["a", "b"], [16, 16], [1, 0])[2]
    assert (first.key, second.key) == ("a", "a")
    assert first is not second


def test_inserting_again_changes_nothing() -> None:
    tree = KnowledgeTree(block_size=16)
    path = tree.insert(["a", "b"], [16, 16], [0, 1])
    path[1].missing = path[2].missing = 0
    assert tree.insert(["a", "b"], [16, 16], [0, 1]) == path
    assert (tree.size, path[1].missing) == (2, 0)


def test_a_new_node_misses_every_block_and_is_unused() -> None:
    node = KnowledgeTree(block_size=16).insert(["a"], [40], [0])[1]
    assert (node.blocks, node.missing, node.stamp, node.leases, node.children) == (2, 2, 0, 0, None)


@pytest.mark.parametrize(
    ("prefix_tokens", "lengths", "blocks"),
    [
        (0, [16, 16], [0, 1, 1]),
        (0, [15, 1, 16], [0, 0, 1, 1]),
        (0, [17, 14, 1], [0, 1, 0, 1]),
        (10, [5, 1, 0, 100], [0, 0, 1, 0, 6]),
        (16, [0], [1, 0]),
        (31, [1, 33], [1, 1, 2]),
    ],
)
def test_a_block_belongs_to_the_document_in_which_its_last_token_lies(
    prefix_tokens: int, lengths: list[int], blocks: list[int]
) -> None:
    tree = KnowledgeTree(16, prefix_tokens)
    assert [node.blocks for node in chain(tree, lengths)] == blocks


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


def test_a_removed_leaf_is_gone_and_its_siblings_stay() -> None:
    tree = KnowledgeTree(block_size=16)
    (_, a, b) = tree.insert(["a", "b"], [16, 16], [0, 1])
    (_, _, c) = tree.insert(["a", "c"], [16, 16], [0, 1])
    tree.remove(b)
    assert set(tree.walk()) == {tree.root, a, c}
    assert tree.size == 2


def test_removing_the_last_child_makes_a_leaf_again() -> None:
    tree = KnowledgeTree(block_size=16)
    (_, a, b) = tree.insert(["a", "b"], [16, 16], [0, 1])
    tree.remove(b)
    assert a.children is None
    tree.remove(a)
    assert tree.root.children is None
    assert tree.size == 0


def test_the_root_stays() -> None:
    tree = KnowledgeTree(block_size=16)
    tree.remove(tree.root)
    assert list(tree.walk()) == [tree.root]
    assert tree.size == 0


def test_a_removed_document_can_come_back_as_a_new_node() -> None:
    tree = KnowledgeTree(block_size=16)
    first = tree.insert(["a"], [16], [0])[1]
    first.missing = 0
    tree.remove(first)
    second = tree.insert(["a"], [16], [0])[1]
    assert second is not first
    assert second.missing == 1


def test_walk_gives_every_node_once_parents_first() -> None:
    tree = KnowledgeTree(block_size=16)
    for order in ([0, 1, 2], [1, 0, 2], [0, 2, 1], [2]):
        tree.insert(["a", "b", "c"], [16] * 3, order)
    nodes = list(tree.walk())
    assert len(nodes) == len(set(nodes)) == tree.size + 1
    place = {node: number for number, node in enumerate(nodes)}
    assert all(node.parent is None or place[node.parent] < place[node] for node in nodes)


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


def test_keys_may_be_any_hashable_objects() -> None:
    tree = KnowledgeTree(block_size=16)
    keys = [("a", 1), None, 0, "", frozenset({1}), b"x"]
    assert keys_of(tree.insert(keys, [16] * 6, range(6))[1:]) == keys
    assert tree.size == 6
