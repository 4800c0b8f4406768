"""Inputs from public reports on other projects, run by their scripts in ../shared/cases: what the people wanted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CASES.is_dir(), reason="needs the cases of ../shared")]
DIRECT_AND_PROXIED = re.compile(r"direct +([\d.]+) %,? +proxy ([\d.]+)")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command of this checkout, for the scripts."""
    command = tmp_path / "ragorder"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ragorder "$@"\n', "utf-8")
    command.chmod(0o755)
    monkeypatch.setenv("RAGORDER", str(command))
    return command


def run(case: str, *changes: tuple[str, str]) -> str:
    """Return what the script of a case prints, with other options than those that its person tried."""
    file = CASES / case / "case.py"
    script = file.read_text("utf-8")
    for old, new in changes:
        assert old in script
        script = script.replace(old, new)
    done = subprocess.run(
        [sys.executable, "-c", f"__file__ = {str(file)!r}\n{script}"], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shares(line: str) -> tuple[float, float]:
    found = DIRECT_AND_PROXIED.search(line)
    assert found is not None, line
    return float(found[1]), float(found[2])


@pytest.mark.usefixtures("command")
class TestCases:
    def test_savings_are_shown_in_chinese_as_in_english(self) -> None:
        for line in run("cjk-savings").splitlines():
            direct, proxied = shares(line)
            assert proxied > direct + 15
            shown = re.search(r"'saved_share': ([\d.]+)", line)
            assert shown is not None and abs(100 * float(shown[1]) - (proxied - direct)) < 5, line
            assert "'cannot_compare': None" in line

    def test_compressed_bodies_are_ordered(self) -> None:
        lines = run("compressed-bodies").splitlines()
        assert [each.split(" permutation ") for each in lines[:2]] == [
            ["by template 200", "0,1"],
            ["tagged 200", "0,1"],
        ]
        assert lines[2] == "passed: {}"

    def test_the_doctor_names_what_ends_the_hits(self) -> None:
        logs = re.split(r"^== ", run("doctor-misses"), flags=re.MULTILINE)[1:]
        assert len(logs) == 6
        for number, named in enumerate(
            ("chat_template_kwargs", "cache_salt", "system message", "documents", "system message", "documents")
        ):
            assert named in logs[number], logs[number]
            assert "exit 1" in logs[number], logs[number]

    def test_lists_before_everything_are_sent_in_one_order(self) -> None:
        options = '"--stable-tools", "--template", template'
        form = r'"[User Memory]\n- {text}\n- {text}\n\n"'
        every_line = 'if "text before" in line', ""
        printed = run("lists-in-front", ('"--template", template', options), (r'"- {text}\n"', form), every_line)
        for share in re.findall(r"through the proxy: (.*)", printed):
            assert float(share) > 90, printed
        assert printed.count("through the proxy") == 2
        diagnoses = printed.split("doctor, exit")[1:]
        assert all(each.lstrip().startswith("1") for each in diagnoses)
        assert "tools" in diagnoses[1], printed

    def test_an_example_in_open_webuis_instructions_costs_nothing(self) -> None:
        for line in run("open-webui-example-tag").splitlines():
            direct, proxied = shares(line)
            assert proxied > 35 > 2 * direct and "ordered 60 of 60" in line

    def test_names_of_files_stay(self) -> None:
        client, sent = (line.partition(":")[2].strip() for line in run("open-webui-names-lost").splitlines())
        assert client == sent and "name=" in sent

    def test_a_browser_may_ask_before_a_request_with_a_key(self) -> None:
        without, keyed = (line.partition("] ")[2] for line in run("preflight-with-key").splitlines())
        assert without == keyed and keyed.startswith("200 {'access-control")

    def test_traces_are_read(self) -> None:
        printed = run("replay-traces")
        assert printed.count(" exit 0") == len(printed.splitlines()) == 6, printed

    def test_documents_of_vllms_chats_are_ordered(self) -> None:
        direct, proxied = shares(printed := run("vllm-documents-field"))
        assert proxied > 35 > 2 * direct and printed.endswith("{}\n")
