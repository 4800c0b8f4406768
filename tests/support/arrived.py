"""Traces of arrivals, as Azure and Mooncake publish them."""

from __future__ import annotations

import gzip
from pathlib import Path

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2221670,879,55
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 27, "input_length": 7322}
{"timestamp": 3000, "input_length": 100, "output_length": 7}
"""


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path
