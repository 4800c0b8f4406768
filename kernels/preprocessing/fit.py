"""Whether requests can use the build in a disk tier's folder."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from ragorder.kernels.cache import Segment
from ragorder.kernels.preprocessing.manifest import Manifest, ManifestError, NoBuildError

_logger = logging.getLogger("ragorder.kernels.engine")

BUILD_FITS = ("used", "other_model", "other_prefix", "other_documents")
"""A fused request has documents of the build, or the first thing that differs."""


class BuildSide(NamedTuple):
    """A model, and the length of a system prompt, whose text is not shown."""

    model: str
    prefix_tokens: int


class BuildFit:
    """Counts fused requests by `BUILD_FITS`, and logs each first misfit, without quoting the prompt. `sides`: what the
    "build" is for, and what the "requests" ask for, with the latest system prompt that differs."""

    def __init__(self, manifest: Manifest, folder: Path, *, model: str, other_model: bool) -> None:
        facts = manifest.facts
        self.counts = Counter(dict.fromkeys(BUILD_FITS, 0))
        self._folder = folder
        built_by, prefix_tokens = facts.get("recipe", {}).get("model", "another model"), facts["prefix_tokens"]
        self.sides = {"build": BuildSide(built_by, prefix_tokens), "requests": BuildSide(model, prefix_tokens)}
        self._other_model = other_model
        self._prefix_key = bytes.fromhex(facts["prefix_key"])
        # Eight bytes a document: a build may have millions.
        self._contents = np.unique(np.fromiter(map(_short, manifest.contents()), np.uint64))
        if other_model:
            self._log("other_model")

    @classmethod
    def of(cls, folder: Path, *, model: str, other_model: bool) -> Self | None:
        """Return None without a build, or for an unreadable one (logged)."""
        try:
            with closing(Manifest.of(folder)) as manifest:
                return cls(manifest, folder, model=model, other_model=other_model)
        except NoBuildError:
            return None
        except (ManifestError, ValueError) as error:
            _logger.warning("%s: whether requests use the build is not known", error)
            return None

    def observe(self, path: Sequence[Segment]) -> None:
        documents = [segment.content for segment in path if segment.content]
        if not documents:
            return
        front = () if path[0].content else path[:1]
        fit = self._fit_of(front, documents)
        if fit == "other_prefix":
            self.sides["requests"] = BuildSide(self.sides["requests"].model, sum(segment.tokens for segment in front))
        if fit != "used" and not self.counts[fit] and not self._other_model:
            self._log(fit)
        self.counts[fit] += 1

    def _fit_of(self, front: Sequence[Segment], documents: Sequence[bytes]) -> str:
        if self._other_model:
            return "other_model"
        if [segment.key for segment in front] != [self._prefix_key]:
            return "other_prefix"
        asked = np.fromiter(map(_short, documents), np.uint64)
        return "used" if np.isin(asked, self._contents).any() else "other_documents"

    def _log(self, fit: str) -> None:
        built, asked = self.sides["build"], self.sides["requests"]
        reason = {
            "other_model": f"it was built for {built.model}, and this is {asked.model}, or the same model set up "
            "differently. Give the engine the --model, --dtype, --block-size and --device of the build, or build again",
            "other_prefix": f"it was built after a system prompt of {built.prefix_tokens} tokens, and a request begins "
            f"with another one, of {asked.prefix_tokens} tokens, or has another cache_salt. Build with the --system "
            "and --salt of the requests",
            "other_documents": "a request has the build's system prompt, and none of its documents. Build with the "
            "--document-template of the requests, or add their documents with `ragorder fuse add`",
        }[fit]
        _logger.warning("the build in %s is not used: %s", self._folder, reason)


def _short(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")
