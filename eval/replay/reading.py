"""Logs of requests: JSON lines, read strictly, in ragorder's own format or as other software exports them.

Of the own format only time and documents are required. Fields that `RequestLine` does not have are counted in
`Log.passed_over`."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from ragorder.common.jsonl import JSONLines
from ragorder.common.request_lines import Length, PositiveLength, RequestLine, UnreadFields, seconds_of
from ragorder.eval.replay.formats import FORMATS
from ragorder.eval.replay.log import Log, LogBuilder, LogError

if TYPE_CHECKING:
    from ragorder.eval.running.progress import Progress

__all__ = ["DefaultLengths", "read_log"]

_MAX_LINE_BYTES = 1 << 24


class DefaultLengths(BaseModel):
    """Lengths where the log gives none."""

    model_config = ConfigDict(frozen=True)

    document_tokens: Length = Field(default=256, description="Length of a document.")
    prefix_tokens: Length = Field(default=64, description="Tokens before the documents (system prompt).")
    suffix_tokens: PositiveLength = Field(default=20, description="Tokens after the documents (question, template).")
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
        reader.unread.lines,
        estimated_lengths=reader.estimated_lengths,
        assumed_lengths=reader.assumed_lengths,
    )


class _Reader:
    def __init__(self, lengths: DefaultLengths, top_k: int | None) -> None:
        self.builder = LogBuilder()
        self.unread = UnreadFields()
        self.estimated_lengths = self.assumed_lengths = 0
        # Attributes of a pydantic model are read slowly, and these at every line.
        self._lengths = lengths.model_dump()
        self._top_k = top_k

    def add(self, line: RequestLine) -> None:
        """Raises ValueError for lengths that contradict each other."""
        default = self._lengths
        self.unread.add(line)
        tokens, estimated, assumed = line.lengths(default["document_tokens"])
        self.estimated_lengths += estimated
        self.assumed_lengths += assumed
        prefix_tokens = default["prefix_tokens"] if line.prefix_tokens is None else line.prefix_tokens
        suffix_tokens = line.tokens_after_documents(prefix_tokens + sum(tokens))
        self.builder.add(
            seconds_of(line.time or 0),
            line.names[: self._top_k],
            [int(each) for each in tokens[: self._top_k]],
            tenant=line.tenant,
            prefix_tokens=prefix_tokens,
            suffix_tokens=default["suffix_tokens"] if suffix_tokens is None else suffix_tokens,
            output_tokens=default["output_tokens"] if line.output_tokens is None else line.output_tokens,
        )
