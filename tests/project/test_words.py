"""Plain words: what a reader of code, help and docs must not have to decode."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from support.links import LINKED

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = re.compile(
    r"\b(?i:behind|in front of|taken over|ahead of need|anew|of which|of whom|so many|as far as|all the same)\b"
    r"|\bnone: "
)
IN_PROSE = re.compile(rf"{FORBIDDEN.pattern}|\b(?i:as many|whatever|none:)(?!\w)")
PAGES = [
    path
    for folder in ("", "docs", "docs/results", "notebooks")
    for kind in ("md", "ipynb")
    for path in sorted((ROOT / folder).glob(f"*.{kind}"))
]


def found(pattern: re.Pattern[str], text: str) -> list[str]:
    """Return each match with the words around it. A phrase may go on in the next line, comment or string."""
    joined = " ".join(re.sub(r'"\s+f?"|\s# ', " ", text).split())
    return [joined[max(0, match.start() - 30) : match.end() + 30] for match in pattern.finditer(joined)]


@pytest.mark.parametrize("folder", ["ragorder", *LINKED, "examples", "deploy", ".github"])
def test_names_strings_and_comments_are_plain(folder: str) -> None:
    places = [Path(parent) / name for parent, _, names in os.walk(ROOT / folder) for name in names]
    texts = {path: path.read_text("utf-8") for path in places if path.suffix not in (".pyc", ".gz", ".jsonl")}
    assert texts
    assert {path: words for path, text in texts.items() if (words := found(FORBIDDEN, text))} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_prose_of_pages_and_notebooks_is_plain(page: Path) -> None:
    text = page.read_text("utf-8")
    if page.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] != "code")
    assert found(IN_PROSE, re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)) == []
