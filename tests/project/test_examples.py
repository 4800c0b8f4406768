"""The examples run as a reader would run them, against a real server."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.serve_process import SERVE, ServeProcess, launching

pytestmark = pytest.mark.merge

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHATS = [
    ("langchain_chat.py", ("langchain_classic", "langchain_openai")),
    ("langgraph_chat.py", ("langgraph", "langchain_openai")),
    ("llama_index_chat.py", ("llama_index.llms.openai_like",)),
    ("haystack_chat.py", ("haystack",)),
]
Run = Callable[..., str]


def need(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module)


@pytest.fixture
def run(python: Any) -> Run:
    """Run an example to its end and return what it prints."""

    def run(example: str, *arguments: object, timeout: int = 180, **environment: str) -> str:
        done = python(EXAMPLES / example, *arguments, timeout=timeout, **environment)
        assert done.returncode == 0, done.stderr
        printed: str = done.stdout
        return printed

    return run


def cached_tokens(text: str) -> list[int]:
    return [int(tokens) for tokens in re.findall(r"cached (\d+) of \d+ tokens$", text, re.MULTILINE)]


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))
    examples = [path.name for path in EXAMPLES.iterdir() if path.is_file()]
    assert len(examples) >= 4
    assert [name for name in examples if name not in tests] == []


@pytest.mark.vllm
def test_the_openai_client(vllm_server: Any, run: Run) -> None:
    vllm_server.reset()
    printed = run("openai_client.py", vllm_server.base_url)
    *answers, summary = printed.strip().splitlines()
    cached = cached_tokens(printed)
    assert len(cached) == len(answers) == 6
    assert cached[0] == 0
    assert all(tokens > 0 for tokens in cached[1:])
    ordered, retrieval = map(int, re.findall(r"(\d+) %", summary))
    assert ordered > retrieval > 0, "the first prompts begin alike in any order"


def test_the_offline_batch_asks_for_its_model(python: Any) -> None:
    done = python(EXAMPLES / "offline_batch.py")
    assert done.returncode == 1
    assert done.stderr.startswith("Name a model") and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.vllm
def test_a_conversation(vllm_server: Any, run: Run) -> None:
    vllm_server.reset()
    printed = run("conversation.py", vllm_server.base_url)
    named = re.findall(r"named (\[.*?\]), cached", printed)
    assert named == ["[]", "['orders', 'hours']", "['orders']"]
    cached = cached_tokens(printed)
    assert cached[0] == 0 < cached[1] <= cached[2]


@pytest.mark.slow
@pytest.mark.vllm
def test_the_pipelined_client(vllm_server: Any, run: Run) -> None:
    vllm_server.reset()
    printed = run("pipelined.py", vllm_server.base_url)
    lines = printed.splitlines()[::2]
    assert len(lines) == 4 and lines[0].endswith("warmed up")
    assert all(re.search(r"begun after (stage \d of 3|the search), cached \d+ of \d+ tokens", line) for line in lines)
    assert any("stage" in line for line in lines)
    assert all(int(re.findall(r"cached (\d+)", line)[0]) > 0 for line in lines[1:])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("example", ["pipelined.py", "conversation.py"])
def test_what_smollm2_says_is_in_the_documentation(example: str, smollm2_folder: Path, run: Run) -> None:
    """On the embedded engine: the texts, without the stages and the cached tokens of that run."""
    need("openai", "starlette")
    options = ("--model", "smollm2", "--dtype", "float32", "--profile", "none", "--port", "0")
    with launching(ServeProcess, *SERVE[:-1], "engine", *options) as serve:
        folder = [smollm2_folder] if example == "pipelined.py" else []
        printed = run(example, serve().url, *folder, timeout=1800)
    name = {"pipelined.py": "pipelining.md", "conversation.py": "conversations.md"}[example]
    page = (EXAMPLES.parent / "docs" / name).read_text("utf-8")
    texts = printed.splitlines()[1::2]
    assert len(texts) > 2 and [text for text in texts if text not in page] == []


@pytest.mark.slow
@pytest.mark.vllm
def test_the_offline_batch(vllm_model: Path, run: Run) -> None:
    printed = run("offline_batch.py", vllm_model, timeout=300, VLLM_LOGGING_LEVEL="ERROR")
    *answers, summary = [line for line in printed.strip().splitlines() if "cached" in line.lower()]
    questions = re.findall(r'^    "(.+?)": \[', (EXAMPLES / "offline_batch.py").read_text("utf-8"), re.MULTILINE)
    assert [line[:28].strip() for line in answers] == questions, "each answer stands where its question does"
    ordered, retrieval = map(int, re.findall(r"(\d+) %", summary))
    assert ordered > retrieval > 0, "the first prompts begin alike in any order"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "needs"),
    [
        ("langgraph_rag.py", ("langgraph", "langchain_openai")),
        ("haystack_pipeline.py", ("haystack",)),
        ("dspy_rag.py", ("dspy",)),
        *CHATS,
    ],
)
def test_a_framework(vllm_server: Any, run: Run, example: str, needs: tuple[str, ...]) -> None:
    need(*needs)
    vllm_server.reset()
    printed = run(example, f"{vllm_server.base_url}/v1")
    cached = cached_tokens(printed)
    assert len(cached) == 4
    assert cached[0] == 0
    # More than what stands before the documents, which every question after the first finds.
    assert max(cached) > min(cached[1:])


@pytest.mark.slow
class TestChats:
    """On a simulated cache, without a network: each turn finds the whole history."""

    @pytest.mark.parametrize(("example", "needs"), CHATS)
    def test_of_a_framework(self, run: Run, example: str, needs: tuple[str, ...]) -> None:
        need(*needs, "starlette")
        from support.chat_server import BLOCK, chat_server

        with chat_server() as server:
            printed = run(example, f"{server.url}/v1")
            server.forget(lambda body: body["messages"][0]["role"] != "system")
            server.check_replay()
        cached = cached_tokens(printed)
        assert len(cached) == 4
        assert cached[0] == 0 and cached[1:] == server.cached[1:] and cached[1] >= 8 * BLOCK

    def test_of_an_agent(self, run: Run) -> None:
        need("langchain.agents", "langchain_openai", "starlette")
        from support.chat_server import chat_server

        with chat_server() as server:
            printed = run("langchain_agent.py", f"{server.url}/v1")
            server.check_replay()
        assert re.findall(r"named (.+)$", printed, re.MULTILINE) == ["nothing", "wool, dye", "nothing"]

    def test_of_a_cloud(self, run: Run) -> None:
        need("langchain_anthropic", "starlette")
        from support.cloud import Cloud
        from support.serving_app import serving

        cloud = Cloud()
        with serving() as serve:
            printed = run("langchain_cloud.py", serve(cloud))
        assert len(re.findall(r"cached \d+ tokens$", printed, re.MULTILINE)) == 5
        assert printed.count("is above") == 2
        replayed, sent = (body["messages"][0]["content"] for body in (cloud.last, cloud.bodies[-2]))
        assert [part["text"] for part in replayed] == [part["text"] for part in sent] and len(sent) == 6
        assert any("cache_control" in part for part in sent)


@pytest.mark.slow
def test_a_workflow(run: Run, python: Any, tmp_path: Path) -> None:
    need("faiss", "torch", "transformers", "starlette")
    trace = tmp_path / "trace.jsonl"
    printed = run("workflow.py", trace)
    cached = cached_tokens(printed)
    assert len(cached) == 12 and max(cached) > 0
    shown = python("-m", "ragorder", "workflow", "trace", trace)
    assert "12 (12 answered)" in shown.stdout


@pytest.mark.slow
def test_workflows_on_a_server(run: Run) -> None:
    need("numpy", "openai", "starlette")
    from support.chat_server import chat_server

    with chat_server() as server:
        printed = run("workflow_server.py", server.url)
    lines = printed.strip().splitlines()
    assert sorted(line.split()[0] for line in lines[::2]) == ["checked"] * 3 + ["irg"] * 3
    assert all("This is answer" in text for text in lines[1::2]) and len(lines) == 12


@pytest.mark.slow
def test_frameworks_that_share_workflows(run: Run) -> None:
    need("faiss", "torch", "transformers", "starlette", "langgraph", "langchain_core", "haystack")
    printed = run("shared_workflows.py")
    *answers, summary = printed.strip().splitlines()
    assert [line.split()[0] for line in answers] == ["langgraph", "langchain", "haystack"] * 3
    cached, length = map(int, re.findall(r"^9 workflows, cached (\d+) of (\d+) tokens$", summary)[0])
    assert 0 < cached < length


@pytest.mark.slow
def test_a_vector_database(run: Run) -> None:
    need("qdrant_client", "torch", "transformers", "starlette")
    printed = run("vector_database.py")
    *requests, summary = printed.strip().splitlines()
    early = [int(found) for found in re.findall(r" (\d+) of \d+ searches started early$", printed, re.MULTILINE)]
    assert len(early) == len(requests) == 4 and min(early[:2]) > 0
    assert re.fullmatch(r"\d+ tokens wasted, [1-9]\d* used", summary)


@pytest.mark.slow
def test_batches_of_a_backlog(run: Run) -> None:
    need("faiss", "torch", "transformers", "starlette")
    printed = run("batching.py")
    *searches, generated, answered = printed.strip().splitlines()
    assert searches[0].startswith("searched in a batch of ") and "2 partitions in memory" in searches[-1]
    most, last = map(int, re.findall(r"\d+", generated))
    assert 1 <= last <= most
    assert answered.startswith("answered 40 questions, ")


@pytest.mark.slow
def test_a_small_machine(run: Run, python: Any) -> None:
    need("faiss", "torch", "transformers", "starlette")
    printed = run("small_machine.py")
    assert printed.count("answered in") == 10
    _, exact, copied = map(int, re.search(r"(\d+) prompt tokens: (\d+) exact, (\d+) copied", printed).groups())
    assert min(exact, copied) > 0
    assert int(re.search(r"read (\d+) MB of weights", printed)[1]) > 0
    refused = python(EXAMPLES / "small_machine.py", "8MiB", timeout=180)
    assert "bytes are missing" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ray_serve(run: Run) -> None:
    need("ray.serve", "openai", "torch", "transformers")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Ray Serve gives its proxy 5 seconds to start, and replaces it after that.
    patience = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300"}
    printed = run("ray_serve.py", str(port), timeout=1200, RAY_USAGE_STATS_ENABLED="0", **patience)
    engines = re.findall(r"^engine \w+: (\d+) questions, (\d+) of (\d+) prompt tokens cached$", printed, re.MULTILINE)
    assert sum(int(questions) for questions, _, _ in engines) == 36
    cached, prompts = (sum(int(each[place]) for each in engines) for place in (1, 2))
    assert cached > prompts / 3
    assert printed.count("questions at one engine") == 6


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ray_data(run: Run) -> None:
    need("ray.data", "pyarrow", "torch", "transformers")
    printed = run("ray_data.py", timeout=1200, RAY_USAGE_STATS_ENABLED="0")
    saved = re.findall(r"(\d+) of (\d+) document tokens saved$", printed, re.MULTILINE)
    (as_they_come, one_plan, in_shards), (tokens,) = [int(each) for each, _ in saved], {each for _, each in saved}
    assert as_they_come < one_plan < int(tokens)
    assert in_shards >= 0.95 * one_plan, "shards may lose a twentieth of one plan's saving"
    assert "800 of 800 questions answered, 800 answers" in printed


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ray_data_with_vllm(vllm_model: Path, run: Run) -> None:
    pytest.importorskip("ray.data.llm")
    printed = run("ray_data.py", vllm_model, timeout=1200, RAY_USAGE_STATS_ENABLED="0")
    assert "800 of 800 questions answered, 800 answers" in printed


@pytest.mark.slow
def test_spark(run: Run) -> None:
    need("pyspark", "pandas", "pyarrow")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java")
    printed = run("spark_plan.py", timeout=300)
    as_they_come, one_plan, in_shards = map(int, re.findall(r"(\d+) documents shared", printed))
    assert as_they_come < one_plan / 5
    assert in_shards >= 0.95 * one_plan
    assert "4000 of 4000 rows written" in printed
