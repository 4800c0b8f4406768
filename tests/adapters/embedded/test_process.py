"""`ragorder engine` in a process of its own: clients, tenants, and its end."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from click.testing import CliRunner
from support.embedded_app import CHAT, COMPLETIONS, LONGEST, SYSTEM, TEXTS, WORD
from support.serve_process import ServeProcess, launching
from support.waiting import eventually

from ragorder import Orderer
from ragorder.cli import main

pytestmark = pytest.mark.merge

COMMAND = (sys.executable, "-c", "from ragorder.cli import main; main()")
Launch = Callable[..., "EngineProcess"]


@dataclass
class EngineProcess(ServeProcess):
    """With the embedded engine."""

    model: str

    def openai(self, **options: Any) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def stream(self, prompt: Any = "a", tokens: int = 1900) -> Any:
        """A completion of so many tokens, streamed by the OpenAI client."""
        return self.openai().completions.create(
            model=self.model, prompt=prompt, max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
        )

    def metric(self, name: str) -> float:
        lines = httpx2.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@pytest.fixture(scope="module")
def launch(model: Path) -> Iterator[Launch]:
    options = ["--model", str(model), "--port", "0", "--profile", "none"]
    with launching(
        lambda popen, url: EngineProcess(popen, url, str(model)), *COMMAND, "engine", *options, OMP_NUM_THREADS="1"
    ) as launch:
        yield launch


@pytest.fixture(scope="module")
def served(launch: Launch) -> EngineProcess:
    return launch("--device-tokens", "8192", "--host-bytes", "8MiB", "--dtype", "float32")


def tagged(names: str, **fields: Any) -> dict[str, Any]:
    """What is sent beside the messages, with a document for each letter."""
    documents = [{"id": name, "text": TEXTS[name]} for name in names]
    return {"ragorder": {"documents": documents, "query": "Which?", **fields}}


def ask(client: Any, served: EngineProcess, names: str, **fields: Any) -> Any:
    return client.chat.completions.create(
        model=served.model, messages=[SYSTEM], max_tokens=4, temperature=0, extra_body=tagged(names, **fields)
    )


class TestServer:
    @pytest.mark.slow
    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's memory from /proc")
    @pytest.mark.parametrize(
        ("path", "frame", "item"),
        [
            (COMPLETIONS, '{"prompt":"a","metadata":[ITEMS]}', "[]"),
            (COMPLETIONS, '{"prompt":[ITEMS]}', "[1]"),
            (CHAT, '{"messages":[ITEMS]}', '{"role":""}'),
            (CHAT, '{"messages":[],"x":[ITEMS]}', "{}"),
            ("/tokenize", '{"messages":[{"role":"user","content":[ITEMS]}]}', "{}"),
        ],
    )
    def test_no_shape_of_a_body_takes_more_than_its_copies(
        self, path: str, frame: str, item: str, served: EngineProcess
    ) -> None:
        body = frame.replace("ITEMS", ",".join([item] * (3_000_000 // (len(item) + 1)))).encode()
        for _ in range(3):
            statuses, grown_mb = served.statuses_and_growth(path, body)
            assert statuses == {400}
            # Kept by the proxy, and by the engine's server, and each once more in pieces.
            assert grown_mb < 60 + 8 * 8 * len(body) / 1e6

    def test_the_openai_client_is_answered(self, served: EngineProcess) -> None:
        with served.openai() as client:
            assert [(model.id, model.max_model_len) for model in client.models.list()] == [(served.model, LONGEST)]
            completion = client.completions.create(model=served.model, prompt="a is", max_tokens=4, temperature=0)
            assert completion.usage.completion_tokens <= 4
            messages = [SYSTEM, {"role": "user", "content": "Which?"}]
            asked = {"model": served.model, "messages": messages, "max_tokens": 8, "temperature": 0}
            answer = client.chat.completions.create(**asked)
            streamed = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            *chunks, last = list(streamed)
        first, *deltas = [chunk.choices[0].delta for chunk in chunks]
        assert (first.role, first.content) == ("assistant", "")
        assert "".join(delta.content or "" for delta in deltas) == answer.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason == "length"
        assert last.usage == answer.usage

    def test_tagged_documents_are_ordered_and_found_again(self, served: EngineProcess) -> None:
        before = served.metric("ragorder_documents_total")
        with served.openai() as client:
            first, second = ask(client, served, "abc"), ask(client, served, "cab")
            third = ask(client, served, "dcba")
        cached = [each.usage.prompt_tokens_details.cached_tokens for each in (first, second, third)]
        documents = first.usage.prompt_tokens - 20
        assert cached[0] < documents / 3
        assert cached[1] > documents * 0.9
        assert cached[2] > documents * 0.9
        assert second.choices[0].message.content == first.choices[0].message.content, "they were put in one order"
        assert served.metric("ragorder_documents_total") - before == 10
        assert served.metric("vllm:ragorder_requests_with_facts_total") >= 3

    def test_a_prompt_before_documents_is_shared(self, served: EngineProcess) -> None:
        """In a completion, whose documents' place the proxy tells; in a chat the engine finds it."""
        found, before = [], "Be brief, please.\n"
        tokens = httpx2.post(f"{served.url}/tokenize", json={"prompt": before}).json()["count"]
        with served.openai() as client:
            for names in ("ab", "cd", "ef"):
                asked = {"model": served.model, "prompt": before, "max_tokens": 1}
                usage = client.completions.create(**asked, extra_body=tagged(names, scope="front")).usage
                found.append(usage.prompt_tokens_details.cached_tokens)
        assert found == [0, tokens, tokens]

    def test_stats_show_the_tiers_and_that_predictions_were_right(self, served: EngineProcess) -> None:
        rng = random.Random(0)
        with served.openai() as client:
            for _ in range(20):
                ask(client, served, "".join(rng.sample("abcdefgh", 4)), scope="predicted")
        done = CliRunner().invoke(main, ["stats", served.url, "--json"])
        assert done.exit_code == 0, done.output
        figures = json.loads(done.stdout)
        assert figures["prediction_error_tokens"] < 16
        assert figures["saved_tokens"] > 0
        assert figures["reports"] == figures["served"] > 0
        assert figures["fallbacks"] == 0
        device, host = figures["kv"]["tiers"]
        assert (device["tier"], host["tier"]) == ("device", "host")
        assert device["chunks"] > 0
        assert host["capacity_bytes"] <= 8 << 20
        assert figures["kv"]["hits"]["computed"] > 0
        assert figures["kv"]["with_facts"] > 0

    def test_tenants_find_nothing_of_each_other(self, served: EngineProcess) -> None:
        with served.openai() as client:
            red = [ask(client, served, "efgh", scope="red") for _ in range(2)]
            blue = ask(client, served, "efgh", scope="blue")
        assert [each.usage.prompt_tokens_details.cached_tokens > 0 for each in (*red, blue)] == [False, True, False]

    def test_a_disconnect_frees_the_engine(self, served: EngineProcess) -> None:
        assert served.metric("ragorder_engine_running_requests") == 0
        aborted = served.metric('ragorder_engine_requests_total{end="abort"}')
        with served.stream(["a", "b"]) as stream:
            next(iter(stream))
            assert served.metric("ragorder_engine_running_requests") == 2
        assert eventually(lambda: served.metric("ragorder_engine_running_requests") == 0, 10)
        assert served.metric('ragorder_engine_requests_total{end="abort"}') == aborted + 2

    def test_doctor_and_an_orderer_learn_its_size(self, served: EngineProcess) -> None:
        settings = Orderer.for_vllm(served.url).settings
        assert (settings.block_size, settings.capacity_tokens) == (16, 8192)
        done = CliRunner().invoke(main, ["doctor", served.url, "--json"])
        assert done.exit_code == 0, done.output
        findings = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
        for check in ("server", "prefix caching", "cached tokens"):
            assert findings[check]["verdict"] == "good", findings[check]
        assert "8,192 tokens in blocks of 16" in findings["capacity"]["found"]

    def test_web_pages_of_this_machine_may_use_it(self, served: EngineProcess) -> None:
        page = {"origin": "http://localhost:3000"}
        asked = page | {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        allowed = httpx2.options(f"{served.url}/v1/chat/completions", headers=asked)
        assert (allowed.status_code, allowed.headers["access-control-allow-headers"]) == (200, "content-type")
        assert httpx2.get(f"{served.url}/v1/models", headers=page).headers["access-control-allow-origin"] == "*"
        foreign = httpx2.options(f"{served.url}/v1/models", headers=asked | {"origin": "https://evil.example"})
        assert foreign.status_code == 403
        assert "access-control-allow-origin" not in foreign.headers

    def test_it_listens_on_this_machine_alone(self, served: EngineProcess) -> None:
        connections = psutil.Process(served.popen.pid).net_connections()
        assert [each.laddr for each in connections if each.status == "LISTEN"] == [served.address]


class TestStreamedWeights:
    @pytest.mark.slow
    def test_answers_are_those_of_the_whole_model(self, model: Path, served: EngineProcess, launch: Launch) -> None:
        from transformers import AutoConfig

        from ragorder.kernels.offload import ModelMemory

        size = ModelMemory.of(AutoConfig.from_pretrained(model), "float32")
        # One of the two layers, with room to align it.
        budget = size.outside + max(size.layers) + (1 << 15) + size.workspace(64) + 2048 * size.kv_token
        sizes = ["--device-bytes", str(budget), "--host-bytes", "0", "--device-tokens", "2048", "--dtype", "float32"]
        streamed = launch(*sizes)
        texts = []
        for each in (served, streamed):
            asked = {"model": each.model, "prompt": "the quick brown fox " * 9, "max_tokens": 20, "temperature": 0}
            with each.openai() as client:
                texts.append(client.completions.create(**asked).choices[0].text)
        assert texts[0] == texts[1] != ""
        assert streamed.metric("ragorder_engine_streamed_bytes_total") > 0
        assert streamed.metric("ragorder_engine_kv_layers") == streamed.metric("ragorder_engine_layers") == 2
        assert streamed.stop() == ""


class TestEnd:
    @pytest.mark.slow
    def test_streams_in_flight_may_end(self, launch: Launch) -> None:
        served = launch("--device-tokens", "4096")
        with served.stream(tokens=200) as stream:
            pieces = iter(stream)
            next(pieces)
            served.popen.send_signal(signal.SIGTERM)
            *_, last = pieces
        assert last.choices[0].finish_reason == "length"
        assert served.popen.communicate(timeout=60)[1] == ""
        assert served.popen.returncode == 128 + signal.SIGTERM

    @pytest.mark.slow
    def test_longer_streams_are_cut_off_without_a_trace_in_the_log(self, launch: Launch, tmp_path: Path) -> None:
        served = launch("--grace", "1", "--disk-path", str(tmp_path / "kv"), "--dtype", "float32")
        body = {"messages": [{"role": "user", "content": WORD}], "max_tokens": 2, "user": WORD, "cache_salt": WORD}
        tag = {"documents": [{"id": WORD, "text": f"{WORD} "}], "query": WORD, "scope": WORD}
        for each in (body, body | {"ragorder": tag}, body | {"n": WORD}, {"messages": WORD}, body | {WORD: 1}):
            httpx2.post(f"{served.url}{CHAT}", json=each)
        httpx2.post(f"{served.url}/{WORD}", content=WORD)
        assert WORD not in httpx2.get(f"{served.url}/metrics").text
        with served.stream(WORD, 2000) as stream:
            next(iter(stream))
            began = time.monotonic()
            logged = served.stop()
            assert time.monotonic() - began < 30
        assert WORD not in logged

    @pytest.mark.slow
    def test_a_kill_leaves_nothing_but_the_disks_folder(self, launch: Launch, tmp_path: Path) -> None:
        temporary = tmp_path / "tmp"
        temporary.mkdir()
        served = launch("--disk-path", str(tmp_path / "kv"), TMPDIR=str(temporary))
        with served.openai() as client:
            ask(client, served, "abc")
        served.popen.kill()
        served.popen.communicate(timeout=60)
        left = [path for path in temporary.rglob("*") if path.is_file() or path.is_socket()]
        assert left == []
