"""Measured costs of placements, by active profiling (RAGDoll 4.4)."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ragorder.common.jsonl import decode
from ragorder.pipelining.placement.base import NO_INDEX, PARTITIONS, Curve, IndexSizes, ModelSizes, Spread, Workload
from ragorder.pipelining.power_law import PowerLaw

if TYPE_CHECKING:
    from ragorder.pipelining.batching.partition_file import PartitionFile

_MEASURE = "measure one with `ragorder profile --placement`"
_Seconds = Annotated[float, Field(gt=0, le=1e6)]
_Rows = list[tuple[int, PowerLaw]]


class _Sample(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: _Seconds


class GenerationSample(_Sample):
    """Seconds of a batch; the other decoder layers were on the disk."""

    kind: Literal["generation"] = "generation"
    batch: int = Field(ge=1)
    device_layers: int = Field(ge=0)
    host_layers: int = Field(ge=0)

    @property
    def setting(self) -> tuple[object, ...]:
        return self.kind, self.batch, self.device_layers, self.host_layers


class RetrievalSample(_Sample):
    """Seconds of a retrieval with `partitions` resident ones."""

    kind: Literal["retrieval"] = "retrieval"
    partitions: int = Field(ge=0)

    @property
    def setting(self) -> tuple[object, ...]:
        return self.kind, self.partitions


class PlacementProfile(BaseModel):
    """Times of generation and retrieval, with sizes.

        profile = PlacementProfile.from_file("placement.json")

    - by batch: a power law (Eq. 4) for each measured number of layers
    - by layers on the device: linear in between; a mixture of streamed layers counts in proportion
    - retrieval: linear in resident partitions, the same for all batches (4.4)

    More memory never takes longer. Times are for steps of up to `step_tokens` tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["ragorder-placement-profile"] = "ragorder-placement-profile"
    version: Literal[1] = 1
    model: ModelSizes
    index: IndexSizes = NO_INDEX
    workload: Workload = Workload()
    step_tokens: int = Field(default=8192, ge=1)
    generation: tuple[GenerationSample, ...]
    retrieval: tuple[RetrievalSample, ...] = ()
    facts: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _enough(self) -> Self:
        whole, most = len(self.model.layers), len(self.index.partitions)
        batches: dict[tuple[int, int], set[int]] = {}
        for each in self.generation:
            if each.device_layers > whole or each.host_layers not in (0, whole - each.device_layers):
                raise ValueError(
                    f"a sample has {each.device_layers} of {whole} layers on the device and {each.host_layers} in host "
                    "memory: the others must be all in host memory, or all on the disk"
                )
            batches.setdefault((each.device_layers, each.host_layers), set()).add(each.batch)
        if all(device == whole for device, _ in batches) or len({device for device, _ in batches}) < min(2, whole):
            raise ValueError("generation was measured with one number of layers on the device: measure two or more")
        for (device, host), measured in batches.items():
            if len(measured) < 2:
                raise ValueError(
                    f"{device} layers on the device and {host} in host memory were measured with one batch: a power "
                    "law takes two or more"
                )
        partitions = {each.partitions for each in self.retrieval}
        if len(partitions) < min(2, most) or max(partitions, default=0) > most:
            raise ValueError(
                f"retrieval was measured with {sorted(partitions)} resident partitions: measure two numbers or more, "
                f"up to the {most} of the index"
            )
        return self

    @property
    def estimated(self) -> bool:
        return False

    @property
    def batches(self) -> Sequence[int]:
        measured = {each.batch for each in self.generation}
        return sorted(measured | {1 << power for power in range(max(measured).bit_length())})

    def generation_s(self, batch: int, weights: Spread, step_tokens: int, kv_host_layers: int = 0) -> float:
        streamed = weights.host + weights.disk
        from_host, from_disk = self._rows
        host_s = _at(from_host or from_disk, weights.device, batch)
        if kv_host_layers:
            host_s += self._copy_s(batch, kv_host_layers, from_host or from_disk)
        if not streamed:
            return host_s
        disk_s = max(host_s, _at(from_disk or from_host, weights.device, batch))
        return host_s + weights.disk / streamed * (disk_s - host_s)

    def _copy_s(self, batch: int, kv_host_layers: int, rows: _Rows) -> float:
        """Return the seconds of copies of KV: a byte is copied as fast as one of layers."""
        (fewest, slowest), (most, fastest) = rows[0], rows[-1]
        layers_s = max(0.0, slowest(batch) - fastest(batch)) / max(1, most - fewest)
        kv = self.model.kv_token * self.workload.kv_tokens(batch) * kv_host_layers / len(self.model.layers)
        return layers_s * kv / self.model.slot

    def retrieval_s(self, partitions: int) -> float:
        return _linear(self._retrieval, partitions) if self.retrieval else 0.0

    @cached_property
    def _rows(self) -> tuple[_Rows, _Rows]:
        times: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for each in self.generation:
            times.setdefault((each.device_layers, each.host_layers), []).append((each.batch, each.seconds))
        laws = {layers: PowerLaw.fit(samples) for layers, samples in sorted(times.items())}
        whole = len(self.model.layers)
        from_host = [(device, law) for (device, host), law in laws.items() if device + host == whole]
        from_disk = [(device, law) for (device, host), law in laws.items() if not host]
        # Samples with all layers on the device tell nothing about streamed ones.
        streamed = [rows if any(device < whole for device, _ in rows) else [] for rows in (from_host, from_disk)]
        return streamed[0], streamed[1]

    @cached_property
    def _retrieval(self) -> list[tuple[int, float]]:
        times: dict[int, list[float]] = {}
        for each in self.retrieval:
            times.setdefault(each.partitions, []).append(each.seconds)
        return _never_rising([(partitions, median(seconds)) for partitions, seconds in sorted(times.items())])

    @classmethod
    def from_file(cls, path: Path | str) -> Self:
        text = Path(path).read_bytes()
        try:
            content = decode(text)
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {_MEASURE}") from error
        if not isinstance(content, dict) or content.get("format") != "ragorder-placement-profile":
            raise ValueError(f"{path} is no profile of placements: {_MEASURE}")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path}: {where + ': ' if where else ''}{first['msg']}: {_MEASURE}") from error

    def to_file(self, path: Path | str) -> None:
        Path(path).write_text(self.model_dump_json(indent=1) + "\n", "utf-8")


def _at(rows: _Rows, device_layers: int, batch: int) -> float:
    return _linear(_never_rising([(device, law(batch)) for device, law in rows]), device_layers)


def _never_rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    least = accumulate((seconds for _, seconds in points), min)
    return [(count, seconds) for (count, _), seconds in zip(points, least, strict=True)]


def _linear(points: Sequence[tuple[int, float]], at: int) -> float:
    if at >= points[-1][0] or len(points) == 1:
        return points[-1][1]
    right = max(1, bisect_left(points, at, key=itemgetter(0)))
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


_SEARCHER = "a placement"


def index_sizes(path: Path | str, partitions: int = PARTITIONS) -> IndexSizes:
    """Return the sizes of an index file; one that is not IVF is in memory as a whole."""
    if partitions < 1:
        raise ValueError(f"partitions must be 1 or more, got {partitions}")
    whole = os.path.getsize(path)
    try:
        # One partition is always possible, and opening it reads the number of clusters.
        one = _cut(path, 1)
        one.close()
        file = _cut(path, min(partitions, one.index.ivf.nlist))
    except TypeError:
        return IndexSizes(fixed=whole)
    try:
        sizes = tuple(int(size) for size in file.partition_bytes)
        inside = os.path.samefile(file.path, path)
    finally:
        file.close()
    return IndexSizes(fixed=max(0, whole - sum(sizes)) if inside else whole, partitions=sizes)


def _cut(path: Path | str, count: int) -> PartitionFile:
    from ragorder.pipelining.batching.partition_file import PartitionFile

    return PartitionFile(path, count, searcher=_SEARCHER)


R = TypeVar("R")


def shared_tokens(requests: Sequence[R], kv_tokens: Callable[[Sequence[R]], int], batches: Iterable[int]) -> Curve:
    """Return `Workload.shared`: the most KV tokens of consecutive requests, for each size."""
    sizes = sorted(set(batches))
    if not requests or not sizes or sizes[0] < 1:
        raise ValueError(f"requests and sizes of 1 or more are needed, got {len(requests)} requests and sizes {sizes}")
    points: list[tuple[int, int]] = []
    for size in (size for size in sizes if size <= len(requests)):
        # Windows overlap by half, so there are twice the number of separate batches.
        starts = range(0, len(requests) - size + 1, max(1, size // 2))
        most = max(kv_tokens(requests[start : start + size]) for start in starts)
        points.append((size, max(most, points[-1][1] if points else 0)))
    return tuple(points)
