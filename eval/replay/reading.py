"""Logs of requests: JSON lines, read strictly, in ragorder's own format or as other software exports them.

Of the own format only time and documents are required. Fields that `LogLine` does not have are counted in
`Log.passed_over`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from ragorder.adapters.http_client import printable
from ragorder.document import estimate_tokens
from ragorder.eval.replay.formats import FORMATS
from ragorder.eval.replay.formats.base import Length, LogDocument, LogLine, PositiveLength
from ragorder.eval.replay.log import Log, LogBuilder, LogError
from ragorder.jsonl import JSONLines

if TYPE_CHECKING:
    from ragorder.eval.running.progress import Progress

__all__ = ["DefaultLengths", "read_log"]

_MAX_LINE_BYTES = 1 << 24
_MAX_NAMES = 100
_MAX_NAME_LENGTH = 40


class DefaultLengths(BaseModel):
    """Lengths where the log gives none."""

    model_config = ConfigDict(frozen=True)

    document_tokens: Length = Field(default=256, description="Length of a document.")
    prefix_tokens: Length = Field(default=64, description="Tokens in front of the documents (system prompt).")
    suffix_tokens: PositiveLength = Field(default=20, description="Tokens behind the documents (question, template).")
    output_tokens: Length = Field(default=32, description="Tokens of an answer.")


def read_log(
    source: str | Path | IO[bytes],
    *,
    format: str = "ragorder",
    lengths: DefaultLengths | None = None,
    top_k: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Log:
    """The first `limit` requests of a log in one of `FORMATS`, each with its first `top_k` documents.

    Raises LogError naming file, line and what to change; it quotes nothing of the line."""
    if format not in FORMATS:
        raise LogError(f"there is no format of that name: choose {', '.join(FORMATS)}")
    exported = FORMATS[format]
    lines = JSONLines(
        source, error=LogError, example=exported.EXAMPLE, max_line_bytes=_MAX_LINE_BYTES, progress=progress
    )
    reader = _Reader(lengths or DefaultLengths(), top_k)
    for number, line in lines.read(exported):
        try:
            for request in line.requests():
                reader.add(request)
                if len(reader.builder) == limit:
                    break
        except ValueError as error:
            raise lines.error(number, str(error)) from None
        if len(reader.builder) == limit:
            break
    if not len(reader.builder):
        raise LogError(f"{lines.name}: no requests in it: a line looks like {exported.EXAMPLE}")
    return reader.builder.build(
        Path(lines.name).name,
        reader.passed_over,
        estimated_lengths=reader.estimated_lengths,
        assumed_lengths=reader.assumed_lengths,
    )


class _Reader:
    def __init__(self, lengths: DefaultLengths, top_k: int | None) -> None:
        self.builder = LogBuilder()
        self.passed_over: dict[str, int] = {}
        self.estimated_lengths = self.assumed_lengths = 0
        # Attributes of a pydantic model are read slowly, and these at every line.
        self._lengths = lengths.model_dump()
        self._top_k = top_k

    def add(self, line: LogLine) -> None:
        """Raises ValueError for fields that contradict each other."""
        default = self._lengths
        for name in line.model_extra or ():
            self._pass_over(name)
        ids, tokens = self._documents(line)
        prefix_tokens = default["prefix_tokens"] if line.prefix_tokens is None else line.prefix_tokens
        suffix_tokens = default["suffix_tokens"] if line.suffix_tokens is None else line.suffix_tokens
        if line.prompt_tokens is not None:
            if line.suffix_tokens is not None:
                raise ValueError('"prompt_tokens" and "suffix_tokens" say the same: leave one of them out')
            others = prefix_tokens + sum(tokens)
            suffix_tokens = line.prompt_tokens - others
            if suffix_tokens < 1:
                raise ValueError(
                    '"prompt_tokens" must be more than prefix and documents together, which are '
                    f"{others:,} tokens: correct it, or leave it out"
                )
        self.builder.add(
            line.time,  # type: ignore[arg-type]
            ids[: self._top_k],
            tokens[: self._top_k],
            tenant=line.tenant,
            prefix_tokens=prefix_tokens,
            suffix_tokens=suffix_tokens,
            output_tokens=default["output_tokens"] if line.output_tokens is None else line.output_tokens,
        )

    def _documents(self, line: LogLine) -> tuple[list[Hashable], Sequence[int]]:
        tokens, documents = line.tokens, line.documents
        if isinstance(tokens, list):
            if len(tokens) != len(documents):
                raise ValueError(
                    f'"tokens" has {len(tokens):,} entries and "documents" has {len(documents):,}: give one for each'
                )
            lengths = tokens
        else:
            lengths = [self._lengths["document_tokens"] if tokens is None else tokens] * len(documents)
        unknown = len(documents) if tokens is None else 0
        ids: list[Hashable] = []
        others: dict[str, None] = {}
        for place, document in enumerate(documents):
            if isinstance(document, LogDocument):
                if tokens is not None:
                    raise ValueError('give the lengths in "tokens" or in the documents, not in both')
                if document.tokens is not None:
                    lengths[place] = document.tokens
                    unknown -= 1
                elif document.text is not None:
                    lengths[place] = int(estimate_tokens(document.text))
                    self.estimated_lengths += 1
                    unknown -= 1
                others |= dict.fromkeys(document.model_extra or ())
                ids.append(document.id)
            else:
                ids.append(document)
        self.assumed_lengths += unknown
        for name in others:
            self._pass_over(f"documents[].{name}")
        return ids, lengths

    def _pass_over(self, name: str) -> None:
        """Only so many names are kept: each line of a foreign log may have one of its own."""
        name = printable(name)[:_MAX_NAME_LENGTH]
        if name in self.passed_over or len(self.passed_over) < _MAX_NAMES:
            self.passed_over[name] = self.passed_over.get(name, 0) + 1
