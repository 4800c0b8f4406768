"""vLLM servers that start in seconds, forked from one process that has imported vLLM.

`python -m support.fork_server` is that process: it reads JSON lines (options, environment, log) and answers each with
the process id of a server.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.server import API_SERVER, ENVIRONMENT, Process

_MODULES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen2",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "ragorder.adapters.vllm_tiers.spec",
    "ragorder.adapters.vllm_tiers.disk",
    "ragorder.adapters.vllm_tiers.ordered_connector",
)
"""What a server of ours imports beside vLLM's API server. One that is missing makes it slower and nothing else."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A process that is forked has none of the threads that its parent's libraries believe to have."""

# pyarrow, which pandas imports, starts one that frees memory.
_NO_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}

_IMPORTS_S = 240.0
_FORK_S = 30.0


class ForkServer:
    """Launches servers for `VLLMServer`. Use it in a `with` block, and end them before it ends.

    A server of it is the real one, in a session of its own: vLLM's main function from its first line, with an engine
    and a worker in processes of their own, which are forked as well. What it shares with others is what comes with
    importing: modules, and the seed of Python's string hashes. It computes with one thread.

    Raises EngineError, with the end of what the process said, if it does not come up.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[str] | None = None

    def __enter__(self) -> Self:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.fork_server"],
            env={
                **os.environ,
                **ENVIRONMENT,
                **_ONE_THREAD,
                **_NO_THREAD,
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "PYTHONPATH": _path(),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            # Ctrl-C is ours to handle.
            start_new_session=True,
        )
        try:
            self._answer(_IMPORTS_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process is not None
        assert self._said is not None
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def launch(self, options: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """A server, as `launch_process` starts one."""
        assert self._process is not None
        assert self._process.stdin is not None, "use the fork server in a `with` block"
        request = {"options": list(options), "environment": dict(environment), "log": str(log)}
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return _Forked(self._answer(_FORK_S)["pid"])

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            assert self._said is not None
            self._said.seek(0)
            raise EngineError(f"vLLM could not be imported to be forked:\n{self._said.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _Forked:
    """Another process's child. That process keeps what is left of it, so that its number is not reused."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._file = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        ended = self._ended(timeout)
        if ended is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return ended

    def terminate(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, signal.SIGTERM)

    def _ended(self, timeout: float | None) -> int | None:
        """With which status only its parent knows."""
        return -1 if select.select([self._file], [], [], timeout)[0] else None

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._file)


def _path() -> str:
    return os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))


def main() -> None:
    """Import, and fork for each line of stdin; in the forked process, serve. Ends with its stdin."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What libraries print is no answer.
    os.dup2(2, 1)
    importlib.import_module(API_SERVER)
    for module in _MODULES:
        with suppress(ImportError):
            importlib.import_module(module)
    _fork_engines()
    gc.collect()
    gc.freeze()
    _say(answers, {"imported": len(sys.modules)})
    for request in _requests():
        if not os.fork():
            os.setsid()
            _say(answers, {"pid": os.getpid()})
            answers.close()
            _serve(**request)
            return


def _fork_engines() -> None:
    """vLLM spawns its other processes on a CPU, since each sets up OpenMP for itself. Not used here yet."""
    import vllm.envs

    vllm.envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"


def _requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        # Of the servers before, nothing is asked any more.
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        threads = os.listdir("/proc/self/task")
        if len(threads) > 1:
            sys.exit(f"imports have started {len(threads) - 1} threads, which a forked process would lack")
        yield json.loads(line)


def _say(answers: IO[str], answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _serve(options: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    """`python -m vllm.entrypoints.openai.api_server` with these options."""
    with open(log, "ab") as said, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.argv = [API_SERVER, *options]
    runpy.run_module(API_SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
