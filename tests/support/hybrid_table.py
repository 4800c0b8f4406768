"""What a hybrid model on real vLLM resumes, by shared tokens and server options: the tables of docs/vllm.md.

PYTHONPATH=tests python -m support.hybrid_table > docs/vllm-hybrid.txt
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

_ENGINE = Path(__file__).with_name("hybrid_engine.py")
_TOKENS = 3_000
_SHARED = (3_000, 2_900, 2_500, 2_048, 1_500, 1_024, 600)
_ALIKE = 4
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"prefix_cache_retention_interval": 640},
    {"prefix_cache_retention_interval": None, "max_num_batched_tokens": 640},
    {"max_num_batched_tokens": 640},
    {"prefix_match_unit": 128},
    {"prefix_match_unit": 32},
)


def prompts() -> list[list[int]]:
    """One prompt, and for each number of shared tokens four that begin as it does and then differ."""
    rng = random.Random(0)

    def text(tokens: int) -> list[int]:
        return [rng.randrange(3, 1000) for _ in range(tokens)]

    first = text(_TOKENS)
    return [first, *(first[:shared] + text(_TOKENS - shared) for shared in _SHARED for _ in range(_ALIKE))]


def main() -> None:
    for changes in _OPTIONS:
        click.echo(f"\n{json.dumps(changes) if changes else 'all defaults'}")
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(_ENGINE), folder, json.dumps(changes)]
            done = subprocess.run(command, input=json.dumps(prompts()), capture_output=True, text=True)
        line = next((each for each in done.stdout.splitlines() if each.startswith("FOUND ")), None)
        if line is None:
            click.echo(f"not run: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
            continue
        cached = json.loads(line.removeprefix("FOUND "))["cached"][1:]
        click.echo("| shared | first such request | the next three |\n|---|---|---|")
        for place, shared in enumerate(_SHARED):
            first, *others = cached[place * _ALIKE : (place + 1) * _ALIKE]
            click.echo(f"| {shared:,} | {first:,} | {', '.join(dict.fromkeys(f'{each:,}' for each in others))} |")


if __name__ == "__main__":
    main()
