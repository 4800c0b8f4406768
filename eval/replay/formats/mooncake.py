"""Mooncake's traces of requests (FAST '25): blocks of 512 tokens, each by a hash of itself and all before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from ragorder.common.request_lines import Length, PositiveLength, RequestLine
from ragorder.eval.replay.formats.base import ExportLine, Step

_BLOCK_TOKENS = 512


class MooncakeRequest(ExportLine):
    """A request: its blocks but the last are the documents, and what the last holds is the suffix. An id says what
    stands before it, so no other order of these documents can be served: a replay shows what a cache holds of such a
    trace, and ordering has nothing to gain."""

    EXAMPLE = '{"timestamp": 27, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}'

    timestamp: Annotated[float, Field(ge=0, le=1e14)]
    """Milliseconds."""
    input_length: PositiveLength
    output_length: Length
    hash_ids: list[int]

    def steps(self) -> Iterable[Step]:
        blocks = (self.input_length - 1) // _BLOCK_TOKENS
        if len(self.hash_ids) < blocks:
            raise ValueError(f'"hash_ids" has too few blocks of {_BLOCK_TOKENS} tokens for "input_length"')
        request = RequestLine(
            time=self.timestamp / 1_000,
            documents=[*self.hash_ids[:blocks]],
            tokens=_BLOCK_TOKENS,
            prefix_tokens=0,
            suffix_tokens=self.input_length - blocks * _BLOCK_TOKENS,
            output_tokens=self.output_length,
        )
        yield Step(request)
