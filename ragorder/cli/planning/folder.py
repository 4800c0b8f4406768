"""The folder of a plan: shards, their manifest, and unfinished work."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import click

from ragorder.cli.planning.spill import Spill
from ragorder.common.jsonl import decode
from ragorder.errors import RagorderError

_FORMAT = 1


class PlanError(RagorderError, click.ClickException): ...


class PlanFolder:
    """`manifest.json` and `shard-00000.jsonl`, … of a plan; `.plan` has what is needed until it is finished.

    `state` says which stages are finished. A file has another name until it is whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / ".plan"
        self.manifest_path = path / "manifest.json"
        self._state_path = self.work / "state.json"
        self.whole = Spill(self.work, "requests")

    def spill(self, shard: int) -> Spill:
        return Spill(self.work, f"shard-{shard:05}")

    def shard_path(self, shard: int) -> Path:
        return self.path / f"shard-{shard:05}.jsonl"

    def counts_path(self, shard: int) -> Path:
        return self.work / f"shard-{shard:05}.json"

    def counts(self, shard: int) -> dict[str, Any] | None:
        if not self.shard_path(shard).exists():
            return None
        return _read_json(self.counts_path(shard))

    @property
    def manifest(self) -> dict[str, Any] | None:
        return self._checked(_read_json(self.manifest_path))

    @property
    def state(self) -> dict[str, Any]:
        return self._checked(_read_json(self._state_path)) or {}

    def save_state(self, state: Mapping[str, Any]) -> None:
        write_json(self._state_path, {"format": _FORMAT, **state}, self.work)

    def finish(self, manifest: Mapping[str, Any]) -> None:
        write_json(self.manifest_path, {"format": _FORMAT, **manifest}, self.work)
        self.clear_work()

    def clear_work(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)

    def refuse_foreign(self, source: IO[bytes]) -> None:
        if self.shards() and not (self.manifest_path.exists() or self.work.exists()):
            raise PlanError(f"{self.path} holds shards that are no plan of ragorder's: name another folder")
        # One that cannot be read may be a plan's.
        with suppress(OSError, ValueError):
            found = decode(self.manifest_path.read_bytes())
            if not isinstance(found, dict) or "format" not in found:
                raise PlanError(f"{self.manifest_path} is no manifest of ragorder's: name another folder")
        with suppress(OSError, AttributeError):
            read = os.fstat(source.fileno())
            if any(os.path.samestat(read, path.stat()) for path in self.shards()):
                raise PlanError(f"the input is a shard of the plan in {self.path}: name another folder")

    def clear(self) -> None:
        """Remove an earlier plan. Call `refuse_foreign` first."""
        self.manifest_path.unlink(missing_ok=True)
        for path in self.shards():
            path.unlink()
        self.clear_work()

    def shards(self) -> list[Path]:
        return sorted(self.path.glob("shard-[0-9][0-9][0-9][0-9][0-9]*.jsonl"))

    def _checked(self, found: dict[str, Any] | None) -> dict[str, Any] | None:
        if found is not None and found.get("format") != _FORMAT:
            raise PlanError(
                f"{self.path} was written by another version of ragorder: name another folder, or plan again with "
                "--no-resume"
            )
        return found


def write_json(path: Path, value: Mapping[str, Any], work: Path) -> None:
    """Write the whole file or nothing; a killed process leaves its part in `work`."""
    written = work / f"{path.name}.{os.getpid()}"
    with written.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(written, path)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise PlanError(f"{path} cannot be read: plan again with --no-resume, or name another folder")
    return found
