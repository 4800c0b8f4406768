"""Discovery of cached paths that other processes had computed."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from ragorder.trie.residency.base import RequestedDocuments
from ragorder.trie.residency.blocks import Content, EngineBlocks, PathContents, pack_tokens
from ragorder.trie.tree import KnowledgeTree, Node

__all__ = ["ServedPath", "discover"]

_BUDGET = 256


class ServedPath(NamedTuple):
    """Ranks of consecutive documents and their contents; the engine holds all but the last whole."""

    ranks: tuple[int, ...] = ()
    contents: tuple[PathContents, ...] = ()


def discover(
    tree: KnowledgeTree,
    blocks: EngineBlocks,
    known: Mapping[Node, PathContents],
    taken: Container[Content],
    requested: RequestedDocuments,
) -> Iterator[ServedPath]:
    """The paths of a request's documents that the engine holds beyond those of the tree (`known` contents, `taken`
    blocks).

    The first block of each document after a path is looked up in the engine's table: at most `_BUDGET` times, depth
    first, in rank order. Only the request's documents and the scope's own prefix and salt are tried: nothing of another
    tenant can be found.
    """
    top = known.get(tree.root)
    if top is None or (top.blocks and not blocks.holds(top.last)):
        return
    size, keys = tree.block_size, requested.keys
    heads = {
        rank: pack_tokens(ids[:size])
        for rank, (ids, length) in enumerate(zip(requested.token_ids, requested.tokens, strict=True))
        # An empty document fills nothing, wherever it stands.
        if len(ids) == length > 0
    }
    budget = _BUDGET
    stack: list[tuple[ServedPath, PathContents, Node | None]] = [(ServedPath(), top, tree.root)]
    while stack and budget > 0:
        path, end, node = stack.pop()
        children = node.children or {} if node is not None else {}
        further: list[tuple[ServedPath, PathContents, Node | None]] = []
        for rank, head in heads.items():
            if rank in path.ranks:
                continue
            child = children.get(keys[rank])
            if child is not None:
                if child in known and not child.missing:
                    further.append((_extend(path, rank, known[child]), known[child], child))
                continue
            budget -= 1
            first = end.first_block(head, size)
            # Documents of equal tokens are one to the engine, and the tree already has it.
            if first is not None and (first in taken or not blocks.holds(first)):
                continue
            behind = end.extend(pack_tokens(requested.token_ids[rank]), size)
            longer = _extend(path, rank, behind)
            if first is not None:
                yield longer
            if all(map(blocks.holds, behind.blocks)):
                further.append((longer, behind, None))
        stack += reversed(further)


def _extend(path: ServedPath, rank: int, contents: PathContents) -> ServedPath:
    return ServedPath((*path.ranks, rank), (*path.contents, contents))
