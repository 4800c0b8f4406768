"""Cells of suites about reused KV."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from ragorder.benchmarks.fusion.fusion.arms import CORPUS_DOCUMENTS, NEIGHBOURS
from ragorder.eval.running.cells import SuiteCell

__all__ = ["FusionCell", "Order", "TrainingCell"]

Order = Literal["in front", "behind", "any"]
"""Where the document stands that another one refers to."""


class FusionCell(SuiteCell):
    """Questions of so many `hops` on so many `documents`. In `order` a document that another one refers to stands in
    front of it, behind it, or anywhere. `neighbours` are for preprocessing; `models` is a folder of suite
    fusion-training, instead of the models that come with ragorder; answers are `by` a reference in plain torch, or the
    embedded engine, compared with that. `idle_layers` change no answer, and give the engine's model the times of a
    larger one. `topic`: how many documents of a corpus refer only to each other, and are likelier to be retrieved
    together (0: references lead anywhere)."""

    hops: int = Field(2, ge=2, le=3)
    documents: int = Field(8, ge=2, le=24)
    order: Order = "in front"
    neighbours: int = Field(NEIGHBOURS, ge=0, le=23)
    models: str | None = None
    by: Literal["reference", "engine"] = "reference"
    idle_layers: int = Field(0, ge=0, le=64)
    topic: int = Field(0, ge=0, le=CORPUS_DOCUMENTS)

    @model_validator(mode="after")
    def _enough_documents(self) -> Self:
        if self.documents < self.hops:
            raise ValueError(f"documents = {self.documents} for {self.hops} hops: a question needs {self.hops}")
        if self.idle_layers and self.by != "engine":
            raise ValueError(f"idle_layers = {self.idle_layers} of the reference: they go with by = engine")
        if self.topic and (self.topic < self.hops or CORPUS_DOCUMENTS % self.topic):
            raise ValueError(f"topic = {self.topic}: give a divisor of {CORPUS_DOCUMENTS}, {self.hops} at least")
        return self

    @property
    def folder(self) -> Path | None:
        return None if self.models is None else Path(self.models)


class TrainingCell(SuiteCell):
    """A model for questions of up to so many `hops`. `start` is a folder of earlier models ("shipped": those that come
    with ragorder), whose training goes on: of as many hops with its last stage again, else of fewer."""

    hops: Literal[2, 3] = 2
    start: str | None = None
