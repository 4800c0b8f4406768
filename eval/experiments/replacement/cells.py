"""Cells of the suites of kind "replacement"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ragorder.eval.experiments.replacement import KIB_PER_TOKEN, TierSize
from ragorder.eval.running.cells import SuiteCell

__all__ = ["ReplacementCell"]


def _size(value: object) -> object:
    if isinstance(value, str):
        TierSize.parse(value)
    return value


_Size = Annotated[str, BeforeValidator(_size)]


class ReplacementCell(SuiteCell):
    """`measure` "hits": a stream on simulated tiers; "scheduling": the time of a request on one tier of `nodes`.

    `workload` is a synthetic stream, `corpus` a folder below --corpora, or "pydocs". `device` and `host` are GiB
    ("8GiB") at `kib_per_token`, or shares of the stream's working set ("5%"), the device with room for the longest
    request at least. `ordered`: ragorder places the documents.
    """

    measure: Literal["hits", "scheduling"] = "hits"
    workload: str | None = None
    corpus: str | None = None
    order: Literal["data", "random"] = "random"
    top_k: int = Field(2, ge=1)
    ordered: bool = False
    device: _Size | None = None
    host: _Size | None = None
    kib_per_token: int = Field(KIB_PER_TOKEN, ge=1)
    nodes: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _whole(self) -> ReplacementCell:
        streams = [each for each in (self.workload, self.corpus) if each is not None]
        sizes = [each for each in (self.device, self.host) if each is not None]
        if self.measure == "scheduling":
            if self.nodes is None or streams or sizes or self.ordered:
                raise ValueError('measure = "scheduling" is of so many nodes, and of no stream or size')
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
