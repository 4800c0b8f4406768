"""Corpora of the suites, each loaded once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ragorder.common.files import cache_folder
from ragorder.eval.data.corpora import PYDOCS, Corpus, load_folder, load_pydocs
from ragorder.eval.data.corpora.pydocs import lacks_pydocs


def corpora_in(folder: Path) -> list[str]:
    """The names of the folders with documents."""
    return sorted({path.parent.name for kind in ("", ".gz") for path in folder.glob(f"*/documents.jsonl{kind}")})


class CorpusLoader:
    """The corpora in a folder, and "pydocs"."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._loaded: dict[str, Corpus] = {}
        self._lacks_pydocs = cache(lacks_pydocs)

    def lacks(self, name: str) -> str | None:
        """Return the reason why the corpus is not here."""
        if name == PYDOCS:
            return self._lacks_pydocs()
        if self._folder is None:
            return f"corpus {name} lies outside the project: give --corpora, the folder that it is in"
        return None if (self._folder / name).is_dir() else f"there is no corpus {name} in {self._folder}"

    def load(self, name: str) -> Corpus:
        """Raises CorpusError for a corpus that cannot be read."""
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def _load(self, name: str) -> Corpus:
        if name == PYDOCS:
            return load_pydocs(cache=cache_folder())
        assert self._folder is not None, "a missing corpus was an obstacle"
        return load_folder(self._folder / name)
