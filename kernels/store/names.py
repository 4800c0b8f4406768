"""How a chunk's file is called: `ab/ab12….<serial>.kv`, a digest of the key and the number of the writing.

The digest spreads the files over 256 subfolders, and no two writings have the same name: whoever removes a file that
was given up long ago cannot hit the one that has taken its place. The highest serial is the youngest.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ragorder.kernels.store.format import digest

__all__ = ["SUBFOLDER", "ChunkName"]

SUBFOLDER = re.compile(r"[0-9a-f]{2}")

_NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{16})\.(kv|tmp)")


class ChunkName(NamedTuple):
    """`digest` is the key's, in hexadecimal; `finished` is False as long as the file is being written."""

    digest: str
    serial: int
    finished: bool = True

    @classmethod
    def of(cls, key: bytes, serial: int) -> ChunkName:
        return cls(digest(key).hex(), serial)

    @classmethod
    def parse(cls, file_name: str) -> ChunkName | None:
        """None if no store calls a file so."""
        match = _NAME.fullmatch(file_name)
        return match and cls(match[1], int(match[2], 16), match[3] == "kv")

    @property
    def subfolder(self) -> str:
        return self.digest[:2]

    @property
    def path(self) -> str:
        """Below the folder of the chunks."""
        return f"{self.subfolder}/{self.digest}.{self.serial:016x}.{'kv' if self.finished else 'tmp'}"

    @property
    def temporary(self) -> ChunkName:
        """What it is called until it is written."""
        return self._replace(finished=False)

    def is_of(self, key: bytes) -> bool:
        return self.digest == digest(key).hex()
