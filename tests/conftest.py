"""Fixtures that several test files share: tokenizers and a model made on the spot, a real engine, blocked imports."""

from __future__ import annotations

import gc
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Models of tests are tiny. Side by side, threads that share a core wait for each other's barriers: five times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from click.testing import CliRunner, Result
from hypothesis import settings
from support.links import restore_links
from support.rings import ALL, examples

# Before anything is imported from the package.
restore_links(Path(__file__).resolve().parents[1])

# A test of a property takes as long as it takes: on a busy machine a deadline fails at random.
# A merge depends on no luck: other examples are drawn in `make test-all` alone.
settings.register_profile("ragorder", deadline=None, max_examples=examples(100), derandomize=not ALL)
settings.load_profile("ragorder")

# Before 8.2 click mixes the two streams, or else leaves standard error out of `output`: the tests know what came later.
if "mix_stderr" in inspect.signature(CliRunner).parameters:
    CliRunner.__init__ = partialmethod(CliRunner.__init__, mix_stderr=False)  # type: ignore[method-assign]
    Result.output = property(lambda result: result.stdout + result.stderr)  # type: ignore[method-assign]

TEXTS = [
    "The cat sleeps on the warm windowsill in the afternoon, and hunts at night.",
    "Interest rates were raised by the central bank on Tuesday. Question: by how much?",
    "A recursive descent parser consumes tokens from left to right: it never looks back.",
    "[d1]\nd2, d3, d4: documents from most to least relevant\n\nd5 d6 d7 d8 d9",
]
NO_SYSTEM_ROLE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>model\n"
)
TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZERS = ("chatml", "plain", "no-system", "trimming")

BENCHMARKS = Path(__file__).parent / "benchmarks"
ENGINES = {"vllm_engine", "vllm_server"}

Python = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file all of whose tests are left out: it brings Ray, FAISS or a whole suite along."""
    if "not slow" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text("utf-8")
    slow = BENCHMARKS in collection_path.parents or re.search(
        r"^pytestmark = \[?pytest\.mark\.slow\b", text, re.MULTILINE
    )
    return True if slow else None


# Before xdist, which reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side (pytest-xdist): all that needs a real engine in one process, which starts each engine once, and
    begins with it, as it takes longest; every other file goes whole to whoever is free."""

    def needs_engine(item: pytest.Item) -> bool:
        return item.get_closest_marker("vllm") is not None or not ENGINES.isdisjoint(getattr(item, "fixturenames", ()))

    for item in filter(needs_engine, items):
        item.add_marker(pytest.mark.merge)
    # Tests of what is not installed: `make test-benchmarks`, and part of `make test-all`.
    for item in items:
        if BENCHMARKS in item.path.parents:
            item.add_marker(pytest.mark.slow)
    # Each worker collects for itself, and is told of no number of processes.
    if hasattr(config, "workerinput"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group("engines" if needs_engine(item) else item.path.name))
        items.sort(key=lambda item: not needs_engine(item))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What the imports made, a million objects, is left out of every collection of garbage from now on."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def no_garbage_of_others() -> None:
    """Leave what earlier tests made out of every collection of garbage: its time is not the test's. It stays left out,
    or every later collection would look at a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model with a tokenizer and a chat template."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from ragorder.kernels.random_model import make_model

    folder = tmp_path_factory.mktemp("models") / "smallest"
    return make_model(folder, texts=TEXTS, layers=1, hidden_size=64, vocab_size=600, max_position_embeddings=2048)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct: a real model, in the user's cache. The first time it takes a minute."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from ragorder.kernels.smollm2 import smollm2

    try:
        return smollm2()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tokenizers(model_folder: Path) -> dict[str, Any]:
    """Tokenizers by name: a usual chat template, none at all, one that refuses a system role, one that trims."""
    from transformers import AutoTokenizer

    loaded = {name: AutoTokenizer.from_pretrained(model_folder) for name in TOKENIZERS}
    loaded["plain"].chat_template = None
    loaded["plain"].bos_token = "<|endoftext|>"  # noqa: S105
    loaded["no-system"].chat_template = NO_SYSTEM_ROLE
    loaded["trimming"].chat_template = TRIMMING
    return loaded


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Any]) -> Any:
    """Each tokenizer in turn."""
    return tokenizers[request.param]


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """Runs this Python in a process of its own, in an empty folder; `blocked` modules cannot be imported there."""
    hook = tmp_path_factory.mktemp("hook")
    (hook / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in os.environ.get('BLOCKED', '').split(','):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n",
        "utf-8",
    )
    empty = tmp_path_factory.mktemp("empty")

    def run(
        *arguments: str | Path,
        blocked: tuple[str, ...] = (),
        cwd: Path = empty,
        input: str | bytes | None = None,
        path: tuple[str | Path, ...] = (),
        timeout: int = 120,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        # A checkout that is tested by its path is the one that is run.
        folders = os.pathsep.join(filter(None, [*map(str, [hook, *path]), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            input=input.encode() if isinstance(input, str) else input,
            capture_output=True,
            timeout=timeout,
            check=False,
            env=os.environ | {"BLOCKED": ",".join(blocked), "PYTHONPATH": folders, "COLUMNS": "200"} | environment,
        )
        output = [stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr)]
        return subprocess.CompletedProcess(done.args, done.returncode, *output)

    return run


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the real engine serves: small, with a tokenizer for the words of the synthetic workloads."""
    pytest.importorskip("vllm")
    from ragorder.eval.data.workloads import make_workload
    from ragorder.kernels.random_model import make_model

    texts = [document.text for document in make_workload("paper-shuf", 0, requests=1).documents[:40]]
    folder = tmp_path_factory.mktemp("models") / "served"
    return make_model(folder, texts=texts, layers=2, hidden_size=256, vocab_size=2048, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def vllm_engine(vllm_model: Path) -> Iterator[Any]:
    """One real vLLM for the session: 64 blocks of 32 tokens, the room of about three prompts."""
    from ragorder.eval.engines.vllm import VLLMEngine

    # bm25s brings llvmlite along, over which vLLM used to stumble when it started after it.
    pytest.importorskip("bm25s")
    engine = VLLMEngine(vllm_model, block_size=32, capacity_tokens=64 * 32, max_model_len=2048)
    engine.warm_up()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def vllm_server(vllm_model: Path) -> Iterator[Any]:
    """One real vLLM server for the session, with KV events: 128 blocks of 32 tokens. A test may kill and restart it."""
    from ragorder.eval.engines.server import VLLMServer

    with VLLMServer(vllm_model, blocks=128) as server:
        # vLLM's engine has died of a first prompt of a few tokens, on a CPU, and of none after a longer one.
        body = {"model": server.model_name, "prompt": [5] * 100, "max_tokens": 1, "cache_salt": "first"}
        request = urllib.request.Request(
            f"{server.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).close()
        yield server


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray for the session, on this machine; its processes import the tests' support, too."""
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        yield
        return
    tests = Path(__file__).parent
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED")}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, [tests.parent, tests]), before["PYTHONPATH"]]))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=10**8
        )
        yield
    finally:
        ray.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@pytest.fixture(scope="session")
def ray_serve(ray_cluster: None) -> Iterator[str]:
    """Ray Serve; the URL of its HTTP server."""
    serve = pytest.importorskip("ray.serve")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
