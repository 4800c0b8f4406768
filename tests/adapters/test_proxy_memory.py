"""The memory of a proxy: of bodies of each shape, and attacked in every known way at once (docs/security.md)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.rings import grid
from support.serve_process import ServeProcess, launching

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2

from ragorder.adapters.http_server.untrusted_json import MAX_VALUES, VALUE_BYTES
from ragorder.benchmarks.proxy.client import instant_server
from ragorder.benchmarks.proxy.memory import (
    ATTACKS,
    EVERYTHING,
    TEMPLATE,
    ProxyMemoryCell,
    attacked_proxy,
    measure_peak,
)
from ragorder.cli import main

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's memory from /proc"),
    pytest.mark.timeout(300),
]


MIB = 1 << 20
CLIENTS = 8
# Each is kept twice, once received and once in pieces; one of them at a time as texts of four bytes a character.
COPIES = 4
ROOM_MB = 60
FOUND = json.dumps("".join(TEMPLATE.replace("{id}", name).replace("{text}", "text") for name in "ab"))
TAG = '"ragorder":{"documents":[{"id":"a","text":"t"},{"id":"b","text":"t"}],"query":"?"}'
NAMES = '"%06x":0'
CHAT, COMPLETIONS, MESSAGES, RESPONSES, OTHER = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses", "embeddings")
)
SHAPES = {
    "names in a chat": (CHAT, f'{{"messages":[{{"role":"user","content":{FOUND}}}],ITEMS}}', NAMES),
    "names in a tagged chat": (CHAT, f'{{"messages":[],{TAG},ITEMS}}', NAMES),
    "names in a message": (CHAT, f'{{"messages":[{{"role":"user","content":{FOUND},ITEMS}}]}}', NAMES),
    "names in a part": (CHAT, f'{{"messages":[{{"content":[{{"type":"text","text":{FOUND},ITEMS}}]}}]}}', NAMES),
    "names in a tag": (CHAT, '{"messages":[],"ragorder":{"documents":[],"query":"",ITEMS}}', NAMES),
    "names in a document": (CHAT, '{"ragorder":{"query":"","documents":[{"id":"","text":"",ITEMS}]}}', NAMES),
    "names in tools": (CHAT, f'{{"messages":[],"tools":[{{ITEMS}}],{TAG}}}', NAMES),
    "names in facts": (CHAT, f'{{"messages":[],"kv_transfer_params":{{ITEMS}},{TAG}}}', NAMES),
    "messages": (CHAT, f'{{"messages":[ITEMS],{TAG}}}', '{"content":""}'),
    "parts": (CHAT, f'{{"messages":[{{"content":[ITEMS]}}],{TAG}}}', '{"text":""}'),
    "lists of lists": (CHAT, f'{{"messages":[ITEMS],{TAG}}}', "[[]]"),
    "documents": (CHAT, '{"messages":[],"ragorder":{"query":"","documents":[ITEMS]}}', '{"id":"","text":""}'),
    "surrogates": (CHAT, f'{{"messages":[],"x":[ITEMS],{TAG}}}', '"\\ud83d"'),
    "names in a completion": (COMPLETIONS, f'{{"prompt":{FOUND},ITEMS}}', NAMES),
    "names in a tagged completion": (COMPLETIONS, f'{{"prompt":"",{TAG},ITEMS}}', NAMES),
    "token ids": (COMPLETIONS, f'{{"prompt":[ITEMS],{TAG}}}', "[7]"),
    "names in a tool's result": (
        MESSAGES,
        f'{{"messages":[{{"role":"user","content":[{{"type":"tool_result","content":[{{"text":{FOUND},ITEMS}}]}}]}}]}}',
        NAMES,
    ),
    "parts of a system prompt": (MESSAGES, f'{{"messages":[],"system":[ITEMS],{TAG}}}', '{"text":""}'),
    "names in an input": (RESPONSES, f'{{"input":[{{"role":"user","content":{FOUND},ITEMS}}]}}', NAMES),
    "items of an input": (RESPONSES, f'{{"instructions":"","input":[ITEMS],{TAG}}}', "{}"),
    "inputs of another route": (OTHER, '{"input":[ITEMS]}', "[7]"),
    "names in another route": (OTHER, f'{{"input":"",{TAG},ITEMS}}', NAMES),
}


@pytest.fixture(scope="module")
def serving() -> Iterator[ServeProcess]:
    command = (sys.executable, "-c", "from ragorder.cli.serve import serve; serve()")
    options = ("--port", "0", "--capacity-tokens", "100000", "--template", TEMPLATE)
    with (
        instant_server() as upstream,
        launching(ServeProcess, *command, "--upstream", f"http://127.0.0.1:{upstream.port}", *options) as launch,
    ):
        yield launch()


def body_of(frame: str, item: str, count: int) -> bytes:
    items = (item % number if "%" in item else item for number in range(count))
    return frame.replace("ITEMS", ",".join(items)).encode()


@pytest.mark.parametrize("name", grid(list(SHAPES), 4))
def test_no_shape_of_a_body_takes_more_than_its_copies(name: str, serving: ServeProcess) -> None:
    """Of 2 MiB, far beyond what is read, and with as many values as are."""
    path, frame, item = SHAPES[name]
    at_limit = (MAX_VALUES - 100) // (sum(map(item.count, ("[", "{", '":', ","))) or 1)
    for count in (2 * MIB // (len(item) + 1), at_limit):
        body = body_of(frame, item, count)
        statuses, grown_mb = serving.statuses_and_growth(path, body, CLIENTS)
        assert statuses <= {200, 400}
        values_mb = CLIENTS * MAX_VALUES * VALUE_BYTES / 1e6 if count == at_limit else 0
        assert grown_mb < ROOM_MB + COPIES * CLIENTS * len(body) / 1e6 + values_mb


def test_refused_bodies_are_not_kept(serving: ServeProcess) -> None:
    body = body_of(*SHAPES["names in a tagged chat"][1:], 3 * MIB // 11)
    statuses, grown_mb = serving.statuses_and_growth(CHAT, body, 1)
    for _ in range(20):
        more, again_mb = serving.statuses_and_growth(CHAT, body, 1)
        grown_mb = max(grown_mb, again_mb)
        statuses |= more
    assert statuses == {400}
    assert grown_mb < ROOM_MB


@pytest.mark.slow
def test_memory_stays_below_a_gigabyte_under_all_attacks_together() -> None:
    with attacked_proxy() as proxy:
        rows = measure_peak(proxy, EVERYTHING, ProxyMemoryCell(seconds=40))
        assert rows["steps"][0] > 100 and rows["peak_mb"][0] < 1000
        health = httpx2.get(f"http://127.0.0.1:{proxy.port}/ragorder/health", timeout=60)
    assert health.status_code == 200


@pytest.mark.slow
def test_the_suite_measures_each_attack(tmp_path: Path) -> None:
    small = [each for value in ("share=0.05", "seconds=1", "settled=1") for each in ("--set", value)]
    done = CliRunner().invoke(main, ["eval", "run", "proxy-memory", *small, "--seeds", "0", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    lines = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    found = {line["policy"]: line["rows"] for line in lines if line["type"] == "proxy-memory"}
    assert [*found] == ["nothing", *ATTACKS, EVERYTHING]
    idle = found["nothing"]["peak_mb"][0]
    assert 20 < idle < 200
    # Half bodies, with room for all of them, are all kept.
    assert found["half bodies"]["clients"] == [100] and found["half bodies"]["peak_mb"][0] > idle + 40
    assert found[EVERYTHING]["steps"][0] > 0
    page = CliRunner().invoke(main, ["report", str(tmp_path), "--markdown", "-"]).output
    assert "| none, at its start |" in page and "| 100 clients with half a body of 1 MiB |" in page
