"""Active profiling of placements: the grid, and runs that go on where another ended."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ragorder.eval.experiments.profiling.placement import Journal, PlacementGrid, measure_placement

GRID = PlacementGrid.spread(4, 8, from_host=True, batches=[1, 2], repeats=2)


class System:
    """Times by formula; fails after `most` measurements. `lacking`: what there is no memory for."""

    def __init__(self, most: int = 10_000, lacking: tuple[Any, ...] = ()) -> None:
        self.most = most
        self.lacking = lacking
        self.placed = (0, 0)
        self.measured: Counter[tuple[Any, ...]] = Counter()

    def place(self, device_layers: int, host_layers: int) -> bool:
        self.placed = (device_layers, host_layers)
        return self.placed not in self.lacking

    def generation_s(self, batch: int) -> float:
        self._count("generation", batch, *self.placed)
        return (10.0 - self.placed[0]) * batch

    def retrieval_s(self, partitions: int) -> float | None:
        if partitions in self.lacking:
            return None
        self._count("retrieval", partitions)
        return 10.0 - partitions

    def _count(self, *cell: Any) -> None:
        if not self.most:
            raise KeyboardInterrupt
        self.most -= 1
        self.measured[cell] += 1


class TestGrid:
    def test_is_spread_evenly(self) -> None:
        assert GRID.places == ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 4), (1, 3), (2, 2), (3, 1))
        assert GRID.partitions == (0, 2, 4, 6, 8)
        assert GRID.cells == 2 * (2 * 9 + 5)

    def test_takes_numbers_that_are_given(self) -> None:
        grid = PlacementGrid.spread(4, 8, from_host=False, batches=[8, 1], device_layers=[4, 0], resident=[8, 1])
        assert (grid.batches, grid.places, grid.partitions) == ((1, 8), ((0, 0), (4, 0)), (1, 8))

    def test_of_few_layers_has_each_once(self) -> None:
        assert PlacementGrid.spread(1, 0, from_host=False).places == ((0, 0), (1, 0))

    @pytest.mark.parametrize(
        "changes",
        [
            {"batches": [4]},
            {"batches": [0, 4]},
            {"device_layers": [0, 5]},
            {"device_layers": [3]},
            {"resident": [0, 9]},
        ],
    )
    def test_refuses_numbers_out_of_range(self, changes: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="must be two"):
            PlacementGrid.spread(4, 8, from_host=False, **changes)


class TestMeasuring:
    def test_measures_each_cell_as_often_as_told(self, tmp_path: Path) -> None:
        system, steps = System(), Counter[str]()

        def progress(description: str, total: int) -> Any:
            steps["total"] = total
            return lambda: steps.update(done=1)

        assert measure_placement(system, GRID, Journal(tmp_path / "part", {}), progress=progress) == []
        assert set(system.measured.values()) == {2}
        assert len(system.measured) == 2 * 9 + 5
        assert steps["done"] == steps["total"] == GRID.cells

    @pytest.mark.parametrize("most", [0, 1, 7, 30, 45])
    def test_goes_on_where_it_was_interrupted(self, most: int, tmp_path: Path) -> None:
        first, second = System(most), System()
        with pytest.raises(KeyboardInterrupt):
            measure_placement(first, GRID, Journal(tmp_path / "part", {"a": 1}))
        measure_placement(second, GRID, Journal(tmp_path / "part", {"a": 1}))
        assert first.measured.total() == most
        assert set((first.measured + second.measured).values()) == {2}

    def test_gives_medians(self, tmp_path: Path) -> None:
        journal = Journal(tmp_path / "part", {})
        measure_placement(System(), GRID, journal)
        generation, retrieval = journal.medians()
        assert {(each.batch, each.device_layers, each.seconds) for each in generation} == {
            (batch, device, (10.0 - device) * batch) for batch in (1, 2) for device in range(5)
        }
        assert sorted((each.partitions, each.seconds) for each in retrieval) == [(n, 10.0 - n) for n in (0, 2, 4, 6, 8)]

    def test_leaves_out_what_there_is_no_memory_for(self, tmp_path: Path) -> None:
        system = System(lacking=((4, 0), 8))
        notes = measure_placement(system, GRID, Journal(tmp_path / "part", {}))
        assert sorted(notes) == [
            "4 layers on the device and 0 in host memory: not enough memory",
            "8 resident partitions: not enough memory",
        ]
        assert not any(cell[-2:] == (4, 0) for cell in system.measured)


class TestJournal:
    def test_of_another_measurement_is_refused(self, tmp_path: Path) -> None:
        Journal(tmp_path / "part", {"model": "a"})
        with pytest.raises(ValueError, match="another measurement"):
            Journal(tmp_path / "part", {"model": "b"})

    def test_a_line_that_was_being_written_is_dropped(self, tmp_path: Path) -> None:
        path = tmp_path / "part"
        measure_placement(System(), GRID, Journal(path, {}))
        path.write_bytes(path.read_bytes()[:-5])
        journal = Journal(path, {})
        assert len(journal) == GRID.cells - 1
        system = System()
        measure_placement(system, GRID, journal)
        assert system.measured.total() == 1
        assert len(Journal(path, {})) == GRID.cells

    @pytest.mark.parametrize("line", ["junk\n", "[]\n", '{"repeat": 0}\n', '{"repeat": 0, "kind": "other"}\n'])
    def test_that_is_damaged_is_refused(self, line: str, tmp_path: Path) -> None:
        (tmp_path / "part").write_text("{}\n" + line)
        with pytest.raises(ValueError, match="damaged"):
            Journal(tmp_path / "part", {})
