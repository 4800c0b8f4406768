"""A private vLLM server on free ports, removed with all its processes."""

from __future__ import annotations

import getpass
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol, Self

from ragorder.cli.main import end_on_signals
from ragorder.common.files import try_lock
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.vllm import has_fast_bfloat16

__all__ = ["API_SERVER", "ENVIRONMENT", "Launch", "OwnFolder", "Process", "VLLMServer", "launch_process"]

API_SERVER = "vllm.entrypoints.openai.api_server"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Variables of every server beside this process's own."""

_logger = logging.getLogger(__name__)
_TOPIC = "kv-events"
_ENGINE_ENDED = "Engine core initialization failed"
_ERROR = re.compile(r"\w(?:Error|Exception): ")
_MOST_ERRORS, _LONGEST_LINE, _LOG_END = 10, 300, 3000
_SHARED = "/dev/shm/"  # noqa: S108


class Process(Protocol):
    """The first process of a session of its own, like `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """None: running."""

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""

    def terminate(self) -> None: ...


Launch = Callable[[Sequence[str], Mapping[str, str], Path], Process]
"""How a server comes to run with these options and variables (`ENVIRONMENT` aside), its log appended to this file."""


def launch_process(options: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    with log.open("ab") as file:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", API_SERVER, *options],
            env={**os.environ, **ENVIRONMENT, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            # A group of its own: the engine's processes outlive a server that is killed alone.
            start_new_session=True,
        )


class VLLMServer:
    """`python -m vllm.entrypoints.openai.api_server` on 127.0.0.1, serving `model` as "served".

        with VLLMServer(model, blocks=2048) as server: ...

    A stopped server starts again on the same ports. Development routes (`/reset_prefix_cache`) are on. `dtype` None is
    bfloat16 where that is fast, else float32; without `kv_events` it publishes none; `environment` is added to this
    process's variables; `middleware` is the name of a class. Without `eager` it compiles the model and captures CUDA
    graphs, as vLLM does by default.
    Raises EngineError, with the end of the server's log, if it does not start."""

    model_name = "served"
    events_topic = _TOPIC

    def __init__(
        self,
        model: Path,
        *,
        blocks: int,
        block_size: int = 32,
        max_model_len: int = 2048,
        max_num_seqs: int = 64,
        prefix_caching: bool = True,
        kv_events: bool = True,
        dtype: str | None = None,
        kv_transfer_config: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        middleware: str | None = None,
        eager: bool = True,
        load_format: str = "auto",
        launch: Launch = launch_process,
    ) -> None:
        port, replay = _free_ports(2)
        self._folder = OwnFolder("ragorder-vllm-")
        self.base_url = f"http://127.0.0.1:{port}"
        # vLLM would bind a TCP endpoint on every interface of the machine.
        self.events_endpoint = f"ipc://{self._folder.path}/events"
        self.replay_endpoint = f"tcp://127.0.0.1:{replay}"
        self.block_size = block_size
        self.capacity_tokens = blocks * block_size
        self._log = self._folder.path / "server.log"
        self._process: Process | None = None
        self._launch = launch
        self._environment = {**_temporary(self._folder.path), **(environment or {})}
        published = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events_endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": 10_000,
            "topic": _TOPIC,
        }
        options: dict[str, Any] = {
            "model": model,
            "served-model-name": self.model_name,
            "host": "127.0.0.1",
            "port": port,
            "dtype": dtype or ("bfloat16" if has_fast_bfloat16() else "float32"),
            "block-size": block_size,
            # vLLM keeps one block of the pool for itself, as its null block.
            "num-gpu-blocks-override": blocks + 1,
            "kv-cache-memory-bytes": 1 << 26,
            "max-model-len": max_model_len,
            "max-num-batched-tokens": max(max_model_len, 8192),
            "max-num-seqs": max_num_seqs,
            "load-format": load_format,
        }
        if kv_events:
            options["kv-events-config"] = json.dumps(published)
        if kv_transfer_config is not None:
            options["kv-transfer-config"] = json.dumps(kv_transfer_config)
        if middleware is not None:
            options["middleware"] = middleware
        flags = ["enable-prompt-tokens-details", "disable-uvicorn-access-log"]
        flags += ["enforce-eager"] * eager
        flags += ["enable-prefix-caching" if prefix_caching else "no-enable-prefix-caching"]
        self._options = [f"--{name}={value}" for name, value in options.items()] + [f"--{flag}" for flag in flags]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 240) -> None:
        """Returns once it answers. SIGTERM to this process ends it, too. If its engine ends by itself meanwhile, it is
        started once more, with a warning."""
        end_on_signals()
        try:
            self._start(timeout_s)
        except EngineError as error:
            if _ENGINE_ENDED not in str(error):
                raise
            _logger.warning("vLLM's engine ended while it started; once more. %s", error)
            self._start(timeout_s)

    def _start(self, timeout_s: float) -> None:
        self._folder.take()
        self._process = self._launch(self._options, self._environment, self._log)
        deadline = time.monotonic() + timeout_s
        try:
            while not self._answers():
                ended = self._process.poll()
                if ended is not None or time.monotonic() > deadline:
                    how = f"did not answer in {timeout_s:g} s" if ended is None else f"ended with {ended}"
                    raise EngineError(f"vLLM did not come up: it {how}\n{self._said()}")
                time.sleep(0.1)
        except BaseException:
            self.kill()
            self._folder.remove()
            raise

    def _said(self) -> str:
        """Lines of the log that name an error, the cause first, and its end."""
        log = self._log.read_text("utf-8", "replace")
        errors = dict.fromkeys(line[-_LONGEST_LINE:] for line in log[:-_LOG_END].splitlines() if _ERROR.search(line))
        return "\n".join([*list(errors)[:_MOST_ERRORS], log[-_LOG_END:]])

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The leader of the server's process group; None: not running."""
        return None if self._process is None else self._process.pid

    def reset(self, *, host: bool = False) -> None:
        """Empty the prefix cache, and with `host` a connector's. Raises EngineError if blocks stay in use."""
        url = f"{self.base_url}/reset_prefix_cache" + "?reset_external=true" * host
        deadline = time.monotonic() + 30
        while True:
            with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:  # noqa: S310
                if json.load(answer)["success"]:
                    return
            if time.monotonic() > deadline:
                raise EngineError("the server did not empty its prefix cache: blocks are still in use")
            time.sleep(0.05)

    def stop(self, timeout_s: float = 30) -> None:
        """SIGTERM, then SIGKILL; removes the folder."""
        self._end(timeout_s)
        self._folder.remove()

    def kill(self) -> None:
        """SIGKILL the process group, as a power failure would, and clear its /dev/shm."""
        self._end(None)

    def _end(self, polite_s: float | None) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        shared = _shared_memory(process.pid)
        if polite_s is not None and process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(polite_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in shared:
            path.unlink(missing_ok=True)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5):  # noqa: S310
                return True
        except (urllib.error.URLError, OSError):
            return False


def _temporary(folder: Path) -> dict[str, str]:
    """Sockets of killed servers would stay in the system's folder. torch's compiled code stays shared."""
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    return {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": compiled}


def _shared_memory(group: int) -> set[Path]:
    """Files in /dev/shm that a group's processes mapped or named, and leave there if killed."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # Others come and go meanwhile, and may belong to another process.
        with suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                found.update(Path(_SHARED).glob(f"*-{process.name}-*"))
                maps = (process / "maps").read_text("utf-8", "replace").splitlines()
                found.update(Path(line[line.index(_SHARED) :]) for line in maps if _SHARED in line)
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


_LOCK = "owner.lock"
_YOUNG_S = 60.0


class OwnFolder:
    """A private temporary folder, made by `take`. Folders of killed processes are removed by the next process with the
    same `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock: IO[bytes] | None = None
        self.path = Path(tempfile.gettempdir(), f"{prefix}{secrets.token_hex(8)}")

    def take(self) -> None:
        if self._lock is not None:
            return
        _remove_abandoned(self._prefix)
        self.path.mkdir(mode=0o700)
        self._lock = (self.path / _LOCK).open("ab")
        try_lock(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _remove_abandoned(prefix: str) -> None:
    """Those whose lock is free. A young one may be about to be locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        # It may belong to another process, or go meanwhile.
        with suppress(OSError), (folder / _LOCK).open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _YOUNG_S and try_lock(file):
                shutil.rmtree(folder)
