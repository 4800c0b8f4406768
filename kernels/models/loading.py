"""Loading of models and tokenizers from a folder or the Hub."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as bars

from ragorder.errors import RagorderError
from ragorder.kernels.engine_settings import EngineSettings, has_gpu
from ragorder.kernels.models.support import UnsupportedModelError

_logger = logging.getLogger("ragorder.kernels.engine")

_OLD_HUB_NAME = re.compile(r"\w[\w.-]*")
_HUB_NAME = re.compile(rf"{_OLD_HUB_NAME.pattern}/{_OLD_HUB_NAME.pattern}")
_HUB_TIMEOUT_S = 10.0
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
_loading = threading.RLock()


class ModelLoadError(RagorderError, ValueError):
    """The model cannot be loaded."""


def pick_device(name: str | None) -> torch.device:
    """Return the device, by default a GPU if there is one. Raises ValueError."""
    if name is None:
        return torch.device("cuda" if has_gpu() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"there is no device {name!r}: give cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the embedded engine does not run on {name!r}: give cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f"device {name!r} is not available: torch sees {count} CUDA devices")
    return device


@contextmanager
def loading(*, quiet: bool = False) -> Iterator[None]:
    """Let one thread at a time load a model, with progress bars on terminals unless `quiet`.

    transformers disables tied weights in its base class while it loads: threads side by side leave them disabled.
    """
    with _loading:
        if not bars.is_progress_bar_enabled() or (sys.stderr.isatty() and not quiet):
            yield
            return
        bars.disable_progress_bar()
        try:
            yield
        finally:
            bars.enable_progress_bar()


def load_config(name: str | Path) -> Any:
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} is not a model: it has no config.json")
    _check_found(name)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{name}: its configuration cannot be read: {first_line(error)}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(f"{name} ({config.model_type}) is not a causal language model of transformers")
    return config


def load_model(name: str | Path, settings: EngineSettings) -> Any:
    """Load a causal language model. Raises ModelLoadError, UnsupportedModelError, ValueError for an absent device."""
    device = pick_device(settings.device)
    config = load_config(name)
    try:
        with loading():
            model, report = AutoModelForCausalLM.from_pretrained(
                name, config=config, dtype=settings.dtype or "auto", output_loading_info=True
            )
    except OSError as error:
        raise ModelLoadError(f"{name}: its weights cannot be read: {first_line(error)}") from error
    except Exception as error:
        raise ModelLoadError(f"{name} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error
    check_loaded(name, report)
    return model.to(device)


def check_loaded(name: str | Path, report: Mapping[str, Any]) -> None:
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelLoadError(f"{name} lacks {len(missing)} of its weights: {shown}")
    if report.get("mismatched_keys"):
        raise ModelLoadError(
            f"{name}: {len(report['mismatched_keys'])} of its weights do not have the configured shape"
        )


def load_tokenizer(name: str | Path) -> Any | None:
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        _logger.warning("%s has no tokenizer: answers have tokens, but no text", folder)
        return None
    _check_found(name)
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise ModelLoadError(f"{name}: its tokenizer cannot be read: {first_line(error)}") from error


def may_be_on_hub(name: str) -> bool:
    """Old names without an organisation count only if downloaded: without a network the Hub takes a minute."""
    if _HUB_NAME.fullmatch(name):
        return True
    return _OLD_HUB_NAME.fullmatch(name) is not None and isinstance(try_to_load_from_cache(name, "config.json"), str)


def _check_found(name: str | Path) -> None:
    if Path(name).is_dir():
        return
    if not may_be_on_hub(str(name)):
        raise ModelLoadError(
            f"there is no folder {name}: give the folder of a model, or its full name on the Hugging Face Hub "
            "(organisation/name)"
        )
    if isinstance(try_to_load_from_cache(str(name), "config.json"), str):
        return
    try:
        # Ask once: transformers would ask for each file, five times.
        get_hf_file_metadata(hf_hub_url(str(name), "config.json"), timeout=_HUB_TIMEOUT_S)
    except RepositoryNotFoundError as error:
        why = "the model is private, or there is none of this name"
        raise ModelLoadError(f"there is no folder {name}, and it cannot be downloaded from the Hub: {why}") from error
    except Exception as error:
        why = first_line(error)
        raise ModelLoadError(f"there is no folder {name}, and it cannot be downloaded from the Hub: {why}") from error


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
