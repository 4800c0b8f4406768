"""From a request to a sequence, or why that cannot be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from ragorder.kernels.cache import segments_of
from ragorder.kernels.engine.request import Request, RequestRefusedError
from ragorder.kernels.engine.sequence import Sequence

__all__ = ["Admission"]


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request may ask for: tokens of a vocabulary, so many of prompt and answer, so much of the pool."""

    vocabulary: int
    max_model_len: int
    device_tokens: int
    block_size: int
    chunk_tokens: int
    tokenizer: Any | None
    end_tokens: frozenset[int]

    def admit(self, request_id: int, request: Request) -> Sequence:
        """Raises RequestRefusedError, which says what to change."""
        tokens = self._checked(request.token_ids)
        self._check_room(len(tokens), request.sampling.max_tokens)
        if request.sampling.stop_strings and self.tokenizer is None:
            raise RequestRefusedError("stop strings need a tokenizer, and the engine has none: give stop tokens")
        path = segments_of(tokens, request.document_ends, salt=request.salt, chunk_tokens=self.chunk_tokens)
        return Sequence(request_id, replace(request, token_ids=tokens), path, self.tokenizer, self.end_tokens)

    def _checked(self, token_ids: Iterable[object]) -> list[int]:
        try:
            tokens = [index(token) for token in token_ids]  # type: ignore[arg-type]
        except TypeError as error:
            raise RequestRefusedError("the prompt has tokens that are no integers") from error
        if not tokens:
            raise RequestRefusedError("the prompt is empty: give one token or more")
        if min(tokens) < 0 or max(tokens) >= self.vocabulary:
            raise RequestRefusedError(
                f"the prompt has tokens that are not in the model's vocabulary of {self.vocabulary}: is it another "
                "model's tokenizer?"
            )
        return tokens

    def _check_room(self, prompt_tokens: int, max_tokens: int) -> None:
        total = prompt_tokens + max_tokens
        asked = f"the prompt's {prompt_tokens} tokens and max_tokens {max_tokens} are {total}"
        if total > self.max_model_len:
            raise RequestRefusedError(f"{asked}, more than the model's context of {self.max_model_len}: give less")
        # The last token's KV is never needed.
        if total - 1 > self.device_tokens:
            raise RequestRefusedError(
                f"{asked}, and the pool holds {self.device_tokens} in all (blocks of {self.block_size}): give less, or "
                "the engine more device_tokens"
            )
