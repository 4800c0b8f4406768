"""What goes wrong on the command line ends in a line that says what to change, never in a traceback."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command

from ragorder import Settings
from ragorder.cli import main
from ragorder.common.counts import parse_count
from ragorder.eval.data.names import unknown
from ragorder.eval.engines.capacity import Capacity

COMMAND = "from ragorder.cli import main; main(prog_name='ragorder')"
LINE = '{"documents": ["a", "b"]}\n'

invoke = partial(run_command, main, env={"COLUMNS": "200"})


def shell(command: str, input: str = "") -> subprocess.CompletedProcess[str]:
    """`ragorder` in a shell, which can close streams before it starts."""
    script = f'exec "$0" -c "{COMMAND}" {command}'
    return subprocess.run(
        ["/bin/sh", "-c", script, sys.executable], input=input, capture_output=True, text=True, check=False, timeout=120
    )


class TestStreams:
    @pytest.mark.parametrize(("redirection", "stream"), [("<&-", "input"), (">&-", "output")])
    def test_a_closed_standard_stream_is_said(self, redirection: str, stream: str) -> None:
        done = shell(f"order - {redirection}", LINE)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert f"standard {stream} is closed: name a file" in done.stderr

    def test_closed_standard_output_does_not_matter_with_a_file(self, tmp_path: Path) -> None:
        done = shell(f"order - -o {tmp_path / 'orders.jsonl'} >&-", LINE)
        assert done.returncode == 0, done.stderr
        assert '"documents": ["a", "b"]' in (tmp_path / "orders.jsonl").read_text("utf-8")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    @pytest.mark.parametrize(
        "command", ["order - >/dev/full", "order - -o /dev/full", "bench --limit 2 -o - >/dev/full"]
    )
    def test_a_full_disk_is_one_line(self, command: str) -> None:
        done = shell(command, LINE)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
        assert "No space left on device" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("module", ["ragorder.cli.main", "ragorder.cli.order"])
def test_an_interrupt_while_importing_is_one_line(python: Any, module: str) -> None:
    script = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
    )
    done = python("-c", script + COMMAND, "order")
    assert (done.returncode, done.stderr.strip()) == (1, "Aborted!")


class TestUnknownNames:
    @pytest.mark.parametrize(
        ("arguments", "meant"),
        [
            (("bench", "--limit", "2", "--policy", "fere"), "unknown policy 'fere': did you mean 'free'?"),
            (("bench", "--limit", "2", "--workload", "papr"), "unknown workload 'papr': did you mean 'paper'?"),
            (("eval", "run", "tabel-1", "-o", "DIR"), "unknown suite 'tabel-1': did you mean 'table-1'?"),
            (("eval", "run", "table-1", "--policy", "gredy", "-o", "DIR"), "'gredy': did you mean 'greedy'?"),
            (("replay", "-", "--policy", "fere"), "'fere' cannot be replayed: did you mean 'free'?"),
        ],
    )
    def test_are_wrong_use_with_the_nearest_name(self, arguments: tuple[str, ...], meant: str, tmp_path: Path) -> None:
        arguments = tuple(str(tmp_path) if each == "DIR" else each for each in arguments)
        done = invoke(*arguments, input='{"time": 0, "documents": ["a"]}\n')
        assert done.exit_code == 2
        assert meant in " ".join(done.output.split())

    def test_a_name_that_is_near_none_gets_the_choices_alone(self) -> None:
        assert unknown("policy", "zzzz", ["auto", "best"]) == "unknown policy 'zzzz': choose from auto, best"


class TestCounts:
    @pytest.mark.parametrize(
        ("text", "count"),
        [("10k", 10_000), ("25.6k", 25_600), ("1m", 10**6), ("16K", 16_384), ("2M", 2 << 20), ("100_000", 100_000)],
    )
    def test_units_are_those_of_vllm(self, text: str, count: int) -> None:
        assert parse_count(text) == count
        assert Settings(capacity_tokens=text).capacity_tokens == count  # type: ignore[arg-type]
        assert Capacity.parse(text) == Capacity(tokens=count)

    @pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "1.5K", "10kb", "-1k", "1e5", "٣"])
    def test_others_are_refused(self, text: str) -> None:
        with pytest.raises(ValueError):
            parse_count(text)


class TestWords:
    def test_the_columns_and_policies_of_bench_are_explained(self) -> None:
        said = " ".join(invoke("bench", "--limit", "20", "--policy", "earned", "--policy", "prefix").output.split())
        assert "Saved: cached tokens beyond retrieval order, for each prompt with a document that moves" in said
        assert "moved: places between a document and its retrieval rank, on average" in said
        assert "predicted: requests whose cached tokens the policy predicted to within one block" in said
        assert "ragorder (earned): the default" in said and "prefix: the longest cached prefix" in said
        assert "oracle" not in said, "of what is not in the table nothing is said"
