"""`python -m ragorder.kernels.random_model`: a model to try an engine with."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ragorder.kernels.random_model.__main__ import main


def test_makes_a_model_that_transformers_loads_and_prints_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    done = CliRunner().invoke(main, [str(folder), "--layers", "1", "--hidden-size", "64"])
    assert done.exit_code == 0 and done.output == f"{folder}\n"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (1, 64)
    tokens = tokenizer("How do I open a file?", return_tensors="pt")
    assert model(**tokens).logits.shape[-1] >= len(tokenizer)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--hidden-size", "100"], "give a multiple of 64"), ([], "has files that were not made here")],
)
def test_bad_input_is_a_clear_error(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "mine").write_text("kept")
    done = CliRunner().invoke(main, [str(tmp_path), *arguments])
    assert done.exit_code == 1 and said in done.output and "Traceback" not in done.output
    assert (tmp_path / "mine").read_text() == "kept"
