"""Active profiling of placements: generation by batch and layers, retrieval by resident partitions (RAGDoll 4.4)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Protocol, Self

from ragorder.eval.running.load import Progress, silent
from ragorder.pipelining.placement.profile import GenerationSample, RetrievalSample

_Place = tuple[int, int]
_Sample = GenerationSample | RetrievalSample
_KINDS: Mapping[str, type[GenerationSample] | type[RetrievalSample]] = {
    "generation": GenerationSample,
    "retrieval": RetrievalSample,
}


class Measured(Protocol):
    """A model and an index that can be placed in different ways."""

    def place(self, device_layers: int, host_layers: int) -> bool:
        """Put these numbers of layers there and the others on the disk; False if there is no memory for it."""

    def generation_s(self, batch: int) -> float:
        """Seconds of a batch, as the layers are placed."""

    def retrieval_s(self, partitions: int) -> float | None:
        """Return a retrieval's seconds with these resident partitions, or None without memory for them."""


@dataclass(frozen=True, slots=True)
class PlacementGrid:
    """All `batches` at all `places` (layers on the device, in host memory), retrieval with `partitions` resident;
    everything `repeats` times."""

    batches: tuple[int, ...]
    places: tuple[_Place, ...]
    partitions: tuple[int, ...] = ()
    repeats: int = 3

    @classmethod
    def spread(
        cls,
        layers: int,
        partitions: int,
        *,
        from_host: bool,
        batches: Sequence[int] = (1, 4, 16, 64),
        device_layers: Sequence[int] | None = None,
        resident: Sequence[int] | None = None,
        repeats: int = 3,
    ) -> Self:
        """Five numbers of layers, and of partitions, at even distances, unless given; `from_host`: streamed layers from
        host memory too. Raises ValueError for numbers out of range."""
        chosen = _chosen("device_layers", device_layers, layers)
        places = [(device, 0) for device in chosen]
        places += [(device, layers - device) for device in chosen if from_host and device < layers]
        sizes = sorted(set(batches))
        if len(sizes) < 2 or sizes[0] < 1:
            raise ValueError(
                f"batches must be two sizes of 1 or more at least, from which times are fitted: got {sizes}"
            )
        return cls(
            tuple(sizes), tuple(places), _chosen("partitions", resident, partitions) if partitions else (), repeats
        )

    @property
    def cells(self) -> int:
        return self.repeats * (len(self.batches) * len(self.places) + len(self.partitions))


class Journal:
    """What has been measured so far, for a later run to go on with. A file of JSON lines: the measurement's identity,
    then a sample a line. Raises ValueError for a file of another measurement."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self._found: dict[tuple[int, tuple[object, ...]], _Sample] = {}
        wanted = json.loads(json.dumps(identity))
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        # A line without an end was being written when the run ended.
        whole = [line for line in lines if line.endswith("\n")]
        if whole and self._read(whole[0]) != wanted:
            raise ValueError(f"{path} is of another measurement: delete it, or give another --output")
        for line in whole[1:]:
            self._take(self._read(line))
        if not whole:
            path.write_text(json.dumps(wanted) + "\n", "utf-8")
        elif len(whole) < len(lines):
            path.write_text("".join(whole), "utf-8")

    def __len__(self) -> int:
        return len(self._found)

    def has(self, repeat: int, place: tuple[object, ...]) -> bool:
        return (repeat, place) in self._found

    def add(self, repeat: int, sample: _Sample) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"repeat": repeat, **sample.model_dump()}) + "\n")
        self._found[repeat, sample.setting] = sample

    def expected_s(self, batch: int, place: _Place) -> float:
        """Return a batch's seconds in proportion to the largest measured one up to it, at this place or else the
        slowest; 0 without any."""
        known = [each for each in self._found.values() if isinstance(each, GenerationSample) and each.batch <= batch]
        here = [each for each in known if (each.device_layers, each.host_layers) == place] or known
        largest = max((each.batch for each in here), default=0)
        return max((each.seconds * batch / largest for each in here if each.batch == largest), default=0.0)

    def medians(self) -> tuple[list[GenerationSample], list[RetrievalSample]]:
        """Over the repeats."""
        times: dict[tuple[object, ...], list[_Sample]] = {}
        for sample in self._found.values():
            times.setdefault(sample.setting, []).append(sample)
        generation, retrieval = [], []
        for samples in times.values():
            middle = samples[0].model_copy(update={"seconds": median(each.seconds for each in samples)})
            if isinstance(middle, GenerationSample):
                generation.append(middle)
            else:
                retrieval.append(middle)
        return generation, retrieval

    def _read(self, line: str) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise ValueError(f"{self.path} is damaged: delete it, or give another --output") from error

    def _take(self, content: Any) -> None:
        try:
            repeat = int(content.pop("repeat"))
            sample: _Sample = _KINDS[content["kind"]].model_validate(content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path} is damaged: delete it, or give another --output") from error
        self._found[repeat, sample.setting] = sample


def measure_placement(
    measured: Measured,
    grid: PlacementGrid,
    journal: Journal,
    *,
    seed: int = 0,
    limit_s: float = math.inf,
    progress: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Fill the journal, and return what had to be left out for want of memory or time. The two smallest batches with
    fewest and most layers on the device come first, with which times can be fitted. Other places, larger batches and
    repeats are measured if they are expected to end within `limit_s`. Places in changing order spread slow spells over
    all cells."""
    draw, advance, end_s = Random(seed), progress("placements", grid.cells), clock() + limit_s
    smallest, ends = grid.batches[0], list(dict.fromkeys((min(grid.places), max(grid.places))))
    others = [place for place in grid.places if place not in ends]
    notes: dict[str, None] = {}
    for repeat in range(grid.repeats):
        for batches in (grid.batches[:2], *((batch,) for batch in grid.batches[2:])):
            for place in [*ends, *draw.sample(others, len(others))]:
                known = [("generation", batch, *place) for batch in batches]
                due = [batch for batch, cell in zip(batches, known, strict=True) if not journal.has(repeat, cell)]
                if batches[0] > smallest and not journal.has(0, ("generation", smallest, *place)):
                    # A power law takes the smallest batches.
                    due = []
                required = not repeat and batches[0] == smallest and place in ends
                expected_s = sum(journal.expected_s(batch, place) for batch in due)
                if due and not required and clock() + expected_s > end_s:
                    notes[_late(repeat, batches[0])] = None
                    due = []
                if due and not measured.place(*place):
                    notes[f"{place[0]} layers on the device and {place[1]} in host memory: not enough memory"] = None
                    due = []
                for batch in batches:
                    if batch in due:
                        seconds = measured.generation_s(batch)
                        made = GenerationSample(
                            batch=batch, device_layers=place[0], host_layers=place[1], seconds=seconds
                        )
                        journal.add(repeat, made)
                    advance()
        for partitions in draw.sample(grid.partitions, len(grid.partitions)):
            if not journal.has(repeat, ("retrieval", partitions)) and not (repeat and clock() > end_s):
                taken = measured.retrieval_s(partitions)
                if taken is None:
                    notes[f"{partitions} resident partitions: not enough memory"] = None
                else:
                    journal.add(repeat, RetrievalSample(partitions=partitions, seconds=taken))
            advance()
    return list(notes)


def _late(repeat: int, batch: int) -> str:
    what = f"repeat {repeat + 1} of" if repeat else "some or all"
    return f"{what} batches of {batch}: no time is left (--placement-limit)"


def _chosen(name: str, given: Sequence[int] | None, most: int) -> tuple[int, ...]:
    if given is None:
        return tuple(dict.fromkeys(_evenly(most)))
    chosen = sorted(set(given))
    if len(chosen) < 2 or chosen[0] < 0 or chosen[-1] > most:
        raise ValueError(f"{name} must be two numbers from 0 to {most} at least, got {chosen}")
    return tuple(chosen)


def _evenly(most: int, count: int = 5) -> Iterator[int]:
    return (most * number // (count - 1) for number in range(count))
