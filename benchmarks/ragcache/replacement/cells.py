"""Cells of the suites of kind "replacement"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ragorder.eval.running.cells import SuiteCell

__all__ = ["KIB_PER_TOKEN", "ReplacementCell", "SizeText", "TierSize"]

KIB_PER_TOKEN = 128
"""KV size of a token of Mistral-7B (RAGCache Table 1)."""


@dataclass(frozen=True, slots=True)
class TierSize:
    """GiB, or percent of the stream's working set."""

    gib: float | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, text: str) -> TierSize:
        """From "8GiB" or "5%". Raises ValueError."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(GiB|%)", text)
        if match is None or not float(match[1]):
            raise ValueError(f"{text!r} is no size of a tier: give GiB (8GiB) or a share of the working set (5%)")
        number = float(match[1])
        return cls(gib=number) if match[2] == "GiB" else cls(percent=number)

    def tokens(self, working_set_tokens: int, kib_per_token: int = KIB_PER_TOKEN) -> int:
        if self.gib is not None:
            return int(self.gib * (1 << 20) / kib_per_token)
        assert self.percent is not None
        return int(self.percent / 100 * working_set_tokens)


def _size(value: object) -> object:
    if isinstance(value, str):
        TierSize.parse(value)
    return value


SizeText = Annotated[str, BeforeValidator(_size)]
"""What `TierSize.parse` reads."""


class ReplacementCell(SuiteCell):
    """`measure` "hits": a stream on simulated tiers; "scheduling": the time of a request on one tier of `nodes`.

    `device` and `host` are GiB ("8GiB") at `kib_per_token`, or shares of the working set ("5%"). `ordered`: ragorder
    places the documents; it `follow`s the tiers by their events, or by a mirror of its own. The next `waiting` requests
    are known.
    """

    measure: Literal["hits", "scheduling"] = "hits"
    workload: str | None = None
    corpus: str | None = None
    order: Literal["data", "random"] = "random"
    top_k: int = Field(2, ge=1)
    ordered: bool = False
    follow: Literal["mirror", "events"] = "mirror"
    waiting: int = Field(0, ge=0)
    device: SizeText | None = None
    host: SizeText | None = None
    kib_per_token: int = Field(KIB_PER_TOKEN, ge=1)
    nodes: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _whole(self) -> ReplacementCell:
        streams = [each for each in (self.workload, self.corpus) if each is not None]
        sizes = [each for each in (self.device, self.host) if each is not None]
        if self.measure == "scheduling":
            if self.nodes is None or streams or sizes or self.ordered:
                raise ValueError('measure = "scheduling" needs nodes, and no stream or size')
            return self
        if self.nodes is not None:
            raise ValueError('nodes go with measure = "scheduling"')
        if len(streams) != 1:
            raise ValueError("a cell has either a workload or a corpus")
        if len(sizes) != 2:
            raise ValueError("device and host: give the sizes of both")
        if self.corpus is None and "order" in self.model_fields_set:
            raise ValueError("order is that of a corpus' questions: a workload has none")
        return self

    @property
    def varies_with_seed(self) -> bool:
        return self.corpus is None or self.order == "random"
