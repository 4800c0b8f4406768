"""The trained model as a checkpoint that an engine loads, with a tokenizer whose words are token numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ragorder.eval.experiments.all_three.questions import HOPS
from ragorder.eval.experiments.fusion.checkpoints import SHIPPED, checkpoint
from ragorder.eval.experiments.fusion.export import llama, llama_tokens
from ragorder.eval.experiments.fusion.model import ChainModel
from ragorder.eval.experiments.fusion.task import VOCABULARY

__all__ = ["NumberTokenizer", "save_model"]


class NumberTokenizer:
    """Of prompts: a text of token numbers, in the tokens of `fusion.export.llama`. A segment begins with a token that
    is the same behind everything."""

    def __init__(self) -> None:
        self.all_special_tokens: list[str] = []
        self.added_tokens_decoder: dict[int, Any] = {}

    def encode(self, text: str, **_: object) -> list[int]:
        return llama_tokens([int(word) for word in text.split()])

    def decode(self, token_ids: Iterable[int], **_: object) -> str:
        return " ".join(map(str, token_ids))


def save_model(folder: Path, idle_layers: int, seed: int) -> None:
    """Raises OSError."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    # Three were trained.
    model = ChainModel.load(checkpoint(SHIPPED, HOPS, seed % 3))
    llama(model, idle_layers).save_pretrained(folder)
    # Answers are of these words alone.
    words: Any = Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))  # noqa: S106
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
