"""The simulated engine for prompts of whole documents.

One entry is a document after one path, and counts its blocks. Cached tokens equal those of `SimEngine`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from ragorder.eval.engines.base import EngineCompletion


class PathPrompt(NamedTuple):
    """The system prompt of a scope, documents by number, and at least one token that no other prompt has."""

    scope: int
    documents: Sequence[int]
    suffix_tokens: int


class _Node:
    """A document after one path: the first `held` of `blocks` are cached. Without `siblings` it is a request's own."""

    __slots__ = ("blocks", "children", "held", "key", "references", "siblings")

    def __init__(self, key: int, siblings: dict[int, _Node] | None, blocks: int, held: int) -> None:
        self.key = key
        self.siblings = siblings
        self.blocks = blocks
        self.held = held
        self.references = 1
        self.children: dict[int, _Node] = {}


class _Engine:
    name = "sim"
    partial_blocks_first = False

    def __init__(
        self,
        document_tokens: Sequence[int],
        prefix_tokens: Sequence[int],
        block_size: int,
        capacity_tokens: int | None,
        output_tokens: int,
    ) -> None:
        self.block_size = block_size
        self.capacity_tokens = capacity_tokens
        self.kept_output_tokens = output_tokens
        self._document_tokens = document_tokens
        self._prefix_tokens = prefix_tokens


class PathEngine(_Engine):
    """vLLM's block pool as in `SimEngine`, for prompts made of documents. A prompt ends with a token of its own: the
    last block, which is always recomputed, is never one of a document."""

    def __init__(self, *lengths_and_sizes: Any) -> None:
        super().__init__(*lengths_and_sizes)
        assert self.capacity_tokens is not None
        self._unused = max(1, self.capacity_tokens // self.block_size)
        self._roots: dict[int, _Node] = {}
        self._free: OrderedDict[_Node, None] = OrderedDict()
        self._free_blocks = 0
        self._running: OrderedDict[int, tuple[list[_Node], int]] = OrderedDict()
        self._answered = 0

    def has_room(self, prompt: PathPrompt, output_tokens: int | None = None) -> bool:
        needed = self._blocks(prompt, output_tokens)
        available = self._unused + self._free_blocks
        if needed <= available:
            return True
        path, _ = self._hits(prompt)
        free = sum(node.held for node in path if not node.references)
        return needed - sum(node.held for node in path) <= available - free

    def admit(self, prompt: PathPrompt, output_tokens: int | None = None) -> tuple[EngineCompletion, int]:
        """The cached tokens of a request, and a handle for `finish`."""
        self._answered += 1
        handle = self._answered
        path, documents = self._hits(prompt)
        for node in path:
            if not node.references:
                del self._free[node]
                self._free_blocks -= node.held
            node.references += 1
        hits = sum(node.held for node in path)
        taken = self._take(self._blocks(prompt, output_tokens) - hits)
        own = self._fill(prompt, path, documents, taken)
        self._running[handle] = path, own
        return EngineCompletion(None, hits * self.block_size, self._prompt_tokens(prompt)), handle

    def finish(self, handle: int) -> None:
        """Free the request's blocks, once."""
        path, own = self._running.pop(handle, ([], 0))
        if own:
            self._free[_Node(0, None, own, own)] = None
            self._free_blocks += own
        for node in reversed(path):
            node.references -= 1
            if not node.references:
                self._free[node] = None
                self._free_blocks += node.held

    def _prompt_tokens(self, prompt: PathPrompt) -> int:
        documents_tokens = sum(map(self._document_tokens.__getitem__, prompt.documents))
        return self._prefix_tokens[prompt.scope] + documents_tokens + prompt.suffix_tokens

    def _blocks(self, prompt: PathPrompt, output_tokens: int | None) -> int:
        answer = self.kept_output_tokens if output_tokens is None else output_tokens
        return -(-(self._prompt_tokens(prompt) + answer) // self.block_size)

    def _hits(self, prompt: PathPrompt) -> tuple[list[_Node], int]:
        node = self._roots.get(prompt.scope)
        if node is None:
            return [], 0
        path = [node]
        passed = 0
        for document in prompt.documents:
            if node.held < node.blocks:
                break
            if self._document_tokens[document]:
                child = node.children.get(document)
                if child is None:
                    break
                node = child
                path.append(node)
            passed += 1
        return path, passed

    def _fill(self, prompt: PathPrompt, path: list[_Node], passed: int, taken: int) -> int:
        size, lengths = self.block_size, self._document_tokens
        end = self._prefix_tokens[prompt.scope]
        if not path:
            root = self._roots[prompt.scope] = _Node(prompt.scope, self._roots, end // size, min(taken, end // size))
            path.append(root)
            taken -= root.held
        else:
            end += sum(map(lengths.__getitem__, prompt.documents[:passed]))
            missing = path[-1].blocks - path[-1].held
            path[-1].held += min(taken, missing)
            taken -= min(taken, missing)
        for document in prompt.documents[passed:]:
            if not taken:
                return 0
            if lengths[document]:
                start, end = end, end + lengths[document]
                blocks = end // size - start // size
                siblings = path[-1].children
                node = siblings[document] = _Node(document, siblings, blocks, min(taken, blocks))
                path.append(node)
                taken -= node.held
        return taken

    def _take(self, blocks: int) -> int:
        taken = min(self._unused, blocks)
        self._unused -= taken
        while taken < blocks:
            while not self._free_blocks and self._running:
                self.finish(next(iter(self._running)))
            if not self._free_blocks:
                break
            evicted = min(blocks - taken, self._free_blocks)
            self._evict(evicted)
            taken += evicted
        return taken

    def _evict(self, blocks: int) -> None:
        self._free_blocks -= blocks
        while blocks:
            node = next(iter(self._free))
            if node.held > blocks:
                node.held -= blocks
                return
            blocks -= node.held
            del self._free[node]
            if node.siblings is not None:
                del node.siblings[node.key]


class UnlimitedPathEngine(_Engine):
    """`PathEngine` without evictions: a set of paths."""

    def __init__(self, *lengths_and_sizes: Any) -> None:
        super().__init__(*lengths_and_sizes)
        self._width = len(self._document_tokens) + len(self._prefix_tokens)
        self._children: dict[int, int] = {}

    def has_room(self, prompt: PathPrompt, output_tokens: int | None = None) -> bool:
        return True

    def admit(self, prompt: PathPrompt, output_tokens: int | None = None) -> tuple[EngineCompletion, int]:
        children, width, lengths = self._children, self._width, self._document_tokens
        end, cached_end = self._prefix_tokens[prompt.scope], 0
        edge = len(lengths) + prompt.scope
        node = children.get(edge)
        if node is None:
            node = children[edge] = len(children) + 1
        else:
            cached_end = end
        for document in prompt.documents:
            if not lengths[document]:
                continue
            end += lengths[document]
            edge = node * width + document
            node = children.get(edge)
            if node is None:
                node = children[edge] = len(children) + 1
            else:
                cached_end = end
        return EngineCompletion(None, cached_end // self.block_size * self.block_size, end + prompt.suffix_tokens), 0

    def finish(self, handle: int) -> None:
        """Without effect."""


def make_engine(
    document_tokens: Sequence[int],
    prefix_tokens: Sequence[int],
    *,
    block_size: int,
    capacity_tokens: int | None,
    output_tokens: int,
) -> PathEngine | UnlimitedPathEngine:
    """`capacity_tokens` None: unlimited."""
    kind = UnlimitedPathEngine if capacity_tokens is None else PathEngine
    return kind(document_tokens, prefix_tokens, block_size, capacity_tokens, output_tokens)
