"""The tests that the last run has seen fail, once more and alone: `python -m support.second_try`.

Those that pass now are named: each hides a race, in the product or in the test. More than ten failures are no accident.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click

MOST = 10
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    failed = list(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not 0 < len(failed) <= MOST:
        click.echo(f"{len(failed)} tests failed: no second try")
        return 1
    click.echo(f"\n{len(failed)} failed: a second try, alone")
    # In groups as before: a test is found by its name, and a group is part of it.
    pytest = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadgroup"]
    code = subprocess.call([*pytest, "--last-failed", "--last-failed-no-failures", "none"])
    if code == 0:
        click.secho("\n  ".join(("UNSTEADY, passed at the second try:", *failed)), fg="yellow")
    return code


if __name__ == "__main__":
    sys.exit(main())
