"""Removal of documents from a build, without a model."""

from __future__ import annotations

from collections.abc import Container, Iterable

from ragorder.kernels.preprocessing.manifest import BuildError, Manifest
from ragorder.kernels.store import ChunkStore
from ragorder.kernels.store.variants import variant_content

__all__ = ["drop_copies", "remove_documents"]


def remove_documents(manifest: Manifest, store: ChunkStore, ids: Iterable[str]) -> None:
    """Remove documents, and their KV unless others with the same tokens need it.

    Raises BuildError for unknown ids, changing nothing, and for files that cannot be removed.
    """
    names = list(dict.fromkeys(ids))
    for name in names:
        if manifest.find(name) is None:
            raise BuildError(f"the build has no document {name!r}: nothing was removed")
    drop_copies(store, manifest.contents_only_of(names))
    manifest.remove(names)


def drop_copies(store: ChunkStore, contents: Container[bytes]) -> None:
    """Remove all KV of these contents. Raises BuildError for files that cannot be removed."""
    for key in store:
        if variant_content(key) in contents and not store.remove(key):
            raise BuildError("a file of the build cannot be removed: make its folder writable, and try again")
