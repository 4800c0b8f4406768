"""Validation of requests, and their paths in the knowledge tree."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Literal

from ragorder.kernels.cache import Segment, segments_of
from ragorder.kernels.engine.request import Request, RequestRefusedError
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.fusion.selection import Fusion


@dataclass(frozen=True, slots=True)
class RequestValidator:
    vocabulary: int
    max_model_len: int
    device_tokens: int
    tokenizer: Any | None
    end_tokens: frozenset[int]
    settings: EngineSettings

    def admit(self, request_id: int, request: Request) -> Sequence:
        tokens = self._checked(request.token_ids)
        self._check_room(len(tokens), request.sampling.max_tokens)
        if request.sampling.stop_strings and self.tokenizer is None:
            raise RequestRefusedError("the engine has no tokenizer, which stop strings need: give stop tokens")
        deadline_s = min(self.settings.deadline_s or math.inf, self._checked_deadline(request.deadline_s))
        fusion = self._checked_fusion(request.fusion)
        request = replace(request, token_ids=tokens)
        path = _with_exact(self._path(request), request.exact_documents)
        return Sequence(request_id, request, path, self.tokenizer, self.end_tokens, deadline_s, fusion)

    def _path(self, request: Request) -> tuple[Segment, ...]:
        ends = list(request.document_ends[: self.settings.max_cached_documents])
        expected_uses = list(request.expected_uses)
        if ends and 0 < request.prefix_tokens < ends[0]:
            ends.insert(0, request.prefix_tokens)
            # Tokens before the documents are used at least as often as the first document.
            expected_uses[:0] = expected_uses[:1]
        known = bool(ends) and 0 <= request.prefix_tokens <= ends[0]
        return segments_of(
            request.token_ids,
            ends,
            salt=request.salt,
            chunk_tokens=self.settings.chunk_tokens,
            expected_uses=expected_uses,
            prefix_tokens=request.prefix_tokens if known and self.settings.fusion is not None else None,
        )

    def _checked_fusion(self, fusion: Fusion | Literal["exact"] | None) -> Fusion | None:
        if fusion is None:
            return self.settings.fusion
        if isinstance(fusion, str):
            return None
        if self.settings.fusion is None:
            raise RequestRefusedError("fusion needs an engine with reuse='fused': this one only reuses exact prefixes")
        return fusion

    def _checked_deadline(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return math.inf
        if not deadline_s > 0:
            raise RequestRefusedError(f"deadline_s is {deadline_s}: give more than 0 seconds, or None")
        return deadline_s

    def _checked(self, token_ids: Iterable[object]) -> list[int]:
        try:
            tokens = [index(token) for token in token_ids]  # type: ignore[arg-type]
        except TypeError as error:
            raise RequestRefusedError("the prompt's tokens are not all integers") from error
        if not tokens:
            raise RequestRefusedError("the prompt is empty: give one token or more")
        if min(tokens) < 0 or max(tokens) >= self.vocabulary:
            raise RequestRefusedError(
                f"the prompt has tokens outside the model's vocabulary of {self.vocabulary}: is the tokenizer another "
                "model's?"
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
                f"{asked}, but the pool holds {self.device_tokens} (blocks of {self.settings.block_size}): give less, "
                "or the engine more device_tokens"
            )


def _with_exact(path: tuple[Segment, ...], documents: int) -> tuple[Segment, ...]:
    marked = list(path)
    places = [place for place, segment in enumerate(path) if segment.content]
    for place in places[: max(0, documents)]:
        marked[place] = path[place]._replace(exact=True)
    return tuple(marked)
