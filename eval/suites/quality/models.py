"""Facts of a model."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from ragorder.common.jsonl import decode

__all__ = ["RANDOM_WEIGHTS", "ModelFacts", "model_facts"]

RANDOM_WEIGHTS = "random weights"

_FINGERPRINT = "fingerprint.json"
_BILLIONS = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])")
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`parameters` None: unknown; `from_name`: read from the model's name."""

    name: str
    parameters: int | None = None
    random_weights: bool = False
    from_name: bool = False

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def model_facts(name: str, root: str | Path | None = None) -> ModelFacts:
    """`root` is the folder or Hub name that the model was loaded from (None: `name`)."""
    folder = Path(root or name)
    if folder.is_dir():
        counted = _count(folder)
        if counted or (folder / _FINGERPRINT).is_file():
            return ModelFacts(name, counted, (folder / _FINGERPRINT).is_file())
    sizes = [float(size) for text in (name, str(root or "")) for size in _BILLIONS.findall(text.rpartition("/")[2])]
    return ModelFacts(name, int(sizes[0] * 1e9), from_name=True) if sizes else ModelFacts(name)


def _count(folder: Path) -> int | None:
    total = 0
    for path in folder.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = decode(file.read(length)) if length < _LONGEST_HEADER else {}
            total += sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return total or None
