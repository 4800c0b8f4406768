"""Corpora of the suites, each loaded once."""

from __future__ import annotations

from pathlib import Path

from ragorder.common.files import cache_folder
from ragorder.eval.data.corpora import PYDOCS, Corpus, CorpusError, load_folder, load_pydocs


def corpora_in(folder: Path) -> list[str]:
    """The names of the folders with documents."""
    return sorted({path.parent.name for kind in ("", ".gz") for path in folder.glob(f"*/documents.jsonl{kind}")})


class CorpusLoader:
    """The corpora in a folder, and "pydocs"."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._loaded: dict[str, Corpus | str] = {}

    def take(self, name: str) -> Corpus | str:
        """The corpus, or the reason for its absence. Raises CorpusError for one that cannot be read."""
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def _load(self, name: str) -> Corpus | str:
        if name == PYDOCS:
            try:
                return load_pydocs(cache=cache_folder())
            except (ImportError, CorpusError) as error:
                return f"corpus {PYDOCS}: {error}"
        if self._folder is None:
            return f"corpus {name} lies outside the project: give --corpora, the folder that it is in"
        if not (self._folder / name).is_dir():
            return f"there is no corpus {name} in {self._folder}"
        return load_folder(self._folder / name)
