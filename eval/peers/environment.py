"""Virtual environments of peers, made on first use in the cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ragorder.common.files import cache_folder
from ragorder.errors import RagorderError

_INSTALL_S = 600.0


class PeerError(RagorderError, RuntimeError):
    """A peer is not available on this machine, or failed."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A package, installed without its dependencies but for those that ordering needs."""

    name: str
    requirement: str
    dependencies: Sequence[str]

    @property
    def folder_name(self) -> str:
        return f"{self.requirement.replace('==', '-')}-py{sys.version_info.major}{sys.version_info.minor}"


# Of ContextPilot's 14 dependencies (830 MB) its index imports three; with and without the others it orders the same.
PEERS = {
    "contextpilot": Peer("contextpilot", "contextpilot==0.5.0", ("numpy>=1.26,<3", "scipy>=1.11,<2", "tqdm>=4.60,<5"))
}


def prepare_peer(name: str, *, folder: Path | None = None, timeout_s: float = _INSTALL_S) -> Path:
    """The Python of a peer's environment, installed if necessary. Raises PeerError; a failed installation leaves
    nothing in `folder`."""
    peer = PEERS[name]
    folder = cache_folder() / "peers" if folder is None else folder
    place = folder / peer.folder_name
    if not (place / "bin" / "python").exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{peer.folder_name}-", dir=folder))
        except OSError as error:
            raise PeerError(f"{peer.requirement} cannot be installed: {error}") from None
        try:
            _install(peer, made, timeout_s)
            _move(made, place)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return place / "bin" / "python"


def _install(peer: Peer, place: Path, timeout_s: float) -> None:
    _run(peer, [sys.executable, "-m", "venv", str(place)], timeout_s)
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run(peer, [*pip, "--no-deps", peer.requirement], timeout_s)
    _run(peer, [*pip, *peer.dependencies], timeout_s)


def _run(peer: Peer, command: Sequence[str], timeout_s: float) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise PeerError(f"{peer.requirement} cannot be installed: no end after {timeout_s:.0f} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or error.stdout or "").splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR:").strip() if lines else f"exit code {error.returncode}"
        raise PeerError(f"{peer.requirement} cannot be installed: {reason}") from None
    except OSError as error:
        raise PeerError(f"{peer.requirement} cannot be installed: {error}") from None


def _move(made: Path, place: Path) -> None:
    try:
        os.rename(made, place)
    except OSError:
        # Another process was faster; its environment is as good as ours.
        if not (place / "bin" / "python").exists():
            raise
