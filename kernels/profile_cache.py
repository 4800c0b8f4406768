"""Measured profiles on disk, by model and machine."""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from ragorder.common.files import cache_folder, try_lock
from ragorder.trie.profile import PrefillProfile

_logger = logging.getLogger("ragorder.profile")

_POLL_S = 0.05
_WIDE_SPREAD = 0.25
# Maximum wait for another process that measures.
_PATIENCE_S = 120.0


def profile_key(identity: Mapping[str, Any]) -> str:
    """Return 24 hexadecimal digits of JSON values that determine times."""
    return sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]


class ProfileCache:
    """Profiles in `folder`, a file per `profile_key`. Never raises; a damaged file is ignored."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = _default_folder() if folder is None else folder

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def file_of(self, profile: PrefillProfile) -> Path | None:
        key = profile.facts.get("key")
        return self.path(key) if isinstance(key, str) and self.find(key) == profile else None

    def find(self, key: str) -> PrefillProfile | None:
        path = self.path(key)
        # Unlike Path.exists, this does not raise in an unreadable folder.
        if not os.path.exists(path):
            return None
        try:
            profile = PrefillProfile.from_file(path)
        except ValueError as error:
            _logger.warning("%s: the profile is ignored", error)
            return None
        # A copy under another name may be another machine's.
        return profile if profile.facts.get("key") == key else None

    def find_or_measure(
        self, key: str, measure: Callable[[], PrefillProfile], *, patience_s: float = _PATIENCE_S
    ) -> PrefillProfile:
        """Find or measure a profile; processes that start together measure once."""
        found = self.find(key)
        if found is not None:
            return found
        with self._lock(key, patience_s):
            return self.find(key) or self.keep(key, measure())

    def keep(self, key: str, profile: PrefillProfile) -> PrefillProfile:
        profile = replace(profile, facts={**profile.facts, "key": key})
        path = self.path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            number, written = tempfile.mkstemp(prefix=f".{path.stem}.", dir=self.folder)
            os.close(number)
            try:
                profile.to_file(written)
                os.replace(written, path)
                _report(path, profile)
            except BaseException:
                os.unlink(written)
                raise
        except OSError as error:
            _logger.warning(
                "%s: the profile cannot be stored (%s), the next start measures again", path, error.strerror
            )
        return profile

    @contextmanager
    def _lock(self, key: str, patience_s: float) -> Iterator[None]:
        path = self.path(key).with_suffix(".lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        except OSError:
            # If nothing can be written, each process measures for itself.
            yield
            return
        with file:
            deadline = time.monotonic() + patience_s
            while not try_lock(file, unsupported=True) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            yield


def _report(path: Path, profile: PrefillProfile) -> None:
    _logger.info("%s: the profile of this model and machine; --profile none disables it", path)
    spread = profile.facts.get("spread_share", {}).get("median", 0.0)
    if spread > _WIDE_SPREAD:
        why = f"the same prefill took times that differ by {spread:.0%}, as on a busy machine"
        _logger.warning("%s: delete the file on an idle one, to measure again", why)


def _default_folder() -> Path:
    try:
        return cache_folder() / "profiles"
    except RuntimeError:
        # A user without a home gets a folder that cannot be written.
        return Path(os.devnull) / "profiles"


def processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
