"""Active profiling of placements: the grid, runs that go on where another ended, and the command."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command

from ragorder.cli import main
from ragorder.eval.suites.profiling.placement import Journal, PlacementGrid, measure_placement
from ragorder.eval.suites.profiling.placement_engine import MemoryPeak
from ragorder.kernels.model_sizes import model_sizes
from ragorder.pipelining.placement.profile import PlacementProfile, index_sizes

GRID = PlacementGrid.spread(4, 8, from_host=True, batches=[1, 2], repeats=2)


class System:
    """Times by formula; fails after `most` measurements."""

    def __init__(self, most: int = 10_000) -> None:
        self.most = most
        self.placed = (0, 0)
        self.measured: Counter[tuple[Any, ...]] = Counter()

    def place(self, device_layers: int, host_layers: int) -> bool:
        self.placed = (device_layers, host_layers)
        return True

    def generation_s(self, batch: int) -> float:
        self._count("generation", batch, *self.placed)
        return (10.0 - self.placed[0]) * batch

    def retrieval_s(self, partitions: int) -> float:
        self._count("retrieval", partitions)
        return 10.0 - partitions

    def _count(self, *cell: Any) -> None:
        if not self.most:
            raise KeyboardInterrupt
        self.most -= 1
        self.measured[cell] += 1


class TestGrid:
    def test_is_spread_evenly_or_of_numbers_that_are_given(self) -> None:
        assert GRID.places == ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 4), (1, 3), (2, 2), (3, 1))
        assert GRID.partitions == (0, 2, 4, 6, 8)
        assert GRID.cells == 2 * (2 * 9 + 5)
        assert PlacementGrid.spread(1, 0, from_host=False).places == ((0, 0), (1, 0)), "each once"
        grid = PlacementGrid.spread(4, 8, from_host=False, batches=[8, 1], device_layers=[4, 0], resident=[8, 1])
        assert (grid.batches, grid.places, grid.partitions) == ((1, 8), ((0, 0), (4, 0)), (1, 8))

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
    def test_measures_each_cell_as_often_as_told_and_gives_medians(self, tmp_path: Path) -> None:
        system, steps, journal = System(), Counter[str](), Journal(tmp_path / "part", {})

        def progress(description: str, total: int) -> Any:
            steps["total"] = total
            return lambda: steps.update(done=1)

        assert measure_placement(system, GRID, journal, progress=progress) == []
        assert set(system.measured.values()) == {2}
        assert len(system.measured) == 2 * 9 + 5
        assert steps["done"] == steps["total"] == GRID.cells
        generation, retrieval = journal.medians()
        assert {(each.batch, each.device_layers, each.seconds) for each in generation} == {
            (batch, device, (10.0 - device) * batch) for batch in (1, 2) for device in range(5)
        }
        assert sorted((each.partitions, each.seconds) for each in retrieval) == [(n, 10.0 - n) for n in (0, 2, 4, 6, 8)]

    @pytest.mark.parametrize("most", [0, 1, 7, 30, 45])
    def test_goes_on_where_it_was_interrupted(self, most: int, tmp_path: Path) -> None:
        first, second = System(most), System()
        with pytest.raises(KeyboardInterrupt):
            measure_placement(first, GRID, Journal(tmp_path / "part", {"a": 1}))
        measure_placement(second, GRID, Journal(tmp_path / "part", {"a": 1}))
        assert first.measured.total() == most
        assert set((first.measured + second.measured).values()) == {2}

    def test_ends_in_time_with_small_batches_at_all_places(self, tmp_path: Path) -> None:
        system, grid = System(), PlacementGrid.spread(4, 8, from_host=False, batches=[1, 4, 16, 64], repeats=3)
        system_s = {"now": 0.0}

        def generation_s(batch: int) -> float:
            seconds = System.generation_s(system, batch)
            system_s["now"] += seconds
            return seconds

        system.generation_s = generation_s  # type: ignore[method-assign]
        clocked: dict[str, Any] = {"limit_s": 1000.0, "clock": lambda: system_s["now"]}
        notes = measure_placement(system, grid, Journal(tmp_path / "part", {}), **clocked)
        # 40 s for each request of a batch, at five places together: 16 requests fit, 64 do not.
        assert 40 * (1 + 4 + 16) <= system_s["now"] <= 1000
        once = {cell[1:3] for cell in system.measured if cell[0] == "generation"}
        assert once == {(batch, device) for batch in (1, 4, 16) for device in range(5)}
        assert "some or all batches of 64: no time is left (--placement-limit)" in notes
        measure_placement(system, grid, Journal(tmp_path / "part", {}))
        assert set(system.measured.values()) == {3}
        assert len(Journal(tmp_path / "part", {})) == grid.cells


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


class TestMemoryPeak:
    @pytest.mark.parametrize("chunks", [4, 256], ids=["mapped", "in the heap"])
    def test_counts_memory_that_was_used_before(self, chunks: int) -> None:
        """An allocator keeps what was freed: it must not seem to be free of charge the second time."""
        torch = pytest.importorskip("torch")
        for _ in range(3):
            peak = MemoryPeak(cuda=False)
            held = [torch.ones((64 << 20) // 4 // chunks) for _ in range(chunks)]
            del held
            assert peak.taken() == pytest.approx(64 << 20, rel=0.1)


profile = partial(run_command, main, "profile", "--placement")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four small layers of random weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    config = transformers.Qwen2Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    faiss, np = pytest.importorskip("faiss"), pytest.importorskip("numpy")
    made = faiss.index_factory(16, "IVF16,Flat")
    vectors = np.random.default_rng(0).random((2000, 16), dtype=np.float32)
    made.train(vectors)
    made.add(vectors)
    path = tmp_path_factory.mktemp("index") / "index.faiss"
    faiss.write_index(made, str(path))
    return path


BUDGETS = ("--device-bytes", "64MiB", "--host-bytes", "64MiB")
LENGTHS = ("--prompt-tokens", "40", "--answer-tokens", "3")
SMALL = ("--batches", "1,3", "--device-layers", "0,4", *LENGTHS, "--repeats", "1")


class TestCommand:
    def test_measures_a_real_model_and_index(self, model: Path, index: Path, tmp_path: Path) -> None:
        output = tmp_path / "profile.json"
        of_index = ("--index", index, "--partitions", "4", "--resident", "0,4")
        done = profile("--model", model, *of_index, *BUDGETS, *SMALL, "-o", output)
        assert done.exit_code == 0, done.output
        made = PlacementProfile.from_file(output)
        assert len(made.model.layers) == 4
        assert {(each.batch, each.device_layers) for each in made.generation} == {(1, 0), (1, 4), (3, 0), (3, 4)}
        assert [each.partitions for each in sorted(made.retrieval, key=lambda each: each.partitions)] == [0, 4]
        assert made.workload.prompt_tokens == 40
        assert made.model.step_bytes[-1][0] <= made.step_tokens
        assert "Bottleneck:" in done.stdout
        assert not (tmp_path / "profile.json.part").exists()
        again = run_command(main, "doctor", "--memory", "--profile", output, *BUDGETS, "--json")
        assert json.loads(again.stdout)["placement"]["weights"]["device"] == 4

    def test_leaves_out_what_is_above_a_budget(self, model: Path, index: Path, tmp_path: Path) -> None:
        sizes, cut = model_sizes(model), index_sizes(index, 4)
        # Three requests of 43 tokens, each in three blocks and one more, and three layers.
        device = sizes.outside + 3 * 4 * 16 * sizes.kv_token + sizes.workspace(64) + 3 * sizes.slot
        budgets = ("--device-bytes", device, "--host-bytes", cut.total - 1)
        layers = ("--device-layers", "0,2,4", "--batches", "1,3", "--repeats", "1", *LENGTHS)
        of_index = ("--index", index, "--partitions", "4", "--resident", "0,1,4")
        done = profile("--model", model, *budgets, *layers, *of_index, "-o", tmp_path / "profile.json")
        assert done.exit_code == 0, done.output
        said = " ".join(done.stderr.split())
        assert said.count("left out: ") == 2
        assert said.count("left out: 4 layers on the device and 0 in host memory: not enough memory") == 1
        assert said.count("left out: 4 resident partitions: not enough memory") == 1
        made = PlacementProfile.from_file(tmp_path / "profile.json")
        assert {each.device_layers for each in made.generation} == {0, 2}
        assert {each.partitions for each in made.retrieval} == {0, 1}

    def test_measures_the_least_if_there_is_no_time_for_more(self, model: Path, tmp_path: Path) -> None:
        sizes = ("--batches", "1,2,4", "--device-layers", "0,4", *LENGTHS)
        output = tmp_path / "profile.json"
        done = profile("--model", model, *BUDGETS, *sizes, "--placement-limit", "1ms", "-o", output)
        assert done.exit_code == 0, done.output
        assert "batches of 4: no time is left (--placement-limit)" in " ".join(done.stderr.split())
        made = PlacementProfile.from_file(output)
        assert {(each.batch, each.device_layers) for each in made.generation} == {(1, 0), (1, 4), (2, 0), (2, 4)}

    def test_long_prompts_are_measured_in_part_if_there_is_no_time_for_them(self, model: Path, tmp_path: Path) -> None:
        lengths = ("--prompt-tokens", "300", "--answer-tokens", "30", "--batches", "1,2", "--device-layers", "0,4")
        output = tmp_path / "profile.json"
        done = profile("--model", model, *BUDGETS, *lengths, "--placement-limit", "1ms", "-o", output)
        assert done.exit_code == 0, done.output
        assert "of prompts of 300 tokens the first 64 were computed" in " ".join(done.stderr.split())
        made = PlacementProfile.from_file(output)
        assert (made.workload.prompt_tokens, made.facts["measured_prompt_tokens"]) == (300, 64)

    def test_goes_on_with_what_is_there(self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("faiss")
        output = tmp_path / "profile.json"
        from ragorder.eval.suites.profiling.placement_engine import PlacedEngine

        measured = Counter[int]()
        real, calls = PlacedEngine.generation_s, iter(range(100))

        def failing(engine: PlacedEngine, batch: int) -> float:
            if next(calls) == 2:
                raise RuntimeError("the power went out")
            measured[batch] += 1
            return real(engine, batch)

        monkeypatch.setattr(PlacedEngine, "generation_s", failing)
        first = profile("--model", model, *BUDGETS, *SMALL, "-o", output)
        assert first.exit_code == 1
        assert "the power went out" in first.stderr
        assert not output.exists()
        second = profile("--model", model, *BUDGETS, *SMALL, "-o", output)
        assert second.exit_code == 0, second.output
        assert "2 times have been measured before" in second.stderr.replace("\n", " ")
        # Each of the four cells once.
        assert measured.total() == 4
        assert len(PlacementProfile.from_file(output).generation) == 4

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ((), "give --model"),
            (("--base-url", "http://127.0.0.1:1"), "leave out --base-url"),
            (("--cached", "0"), "leave out --base-url"),
            (("--model", "MODEL", "--resident", "0,1"), "give --index"),
            (("--model", "MODEL", "--device-bytes", "1KiB", "--host-bytes", "1KiB", *SMALL), "bytes are missing"),
            (("--model", "MODEL", "--index", "none.faiss", *BUDGETS, *SMALL), "none.faiss"),
        ],
    )
    def test_what_cannot_be_measured_is_refused(
        self, arguments: tuple[str, ...], said: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("faiss")
        monkeypatch.chdir(tmp_path)
        Path("none.faiss").write_bytes(b"junk")
        done = profile(*(model if each == "MODEL" else each for each in arguments), "-o", "profile.json")
        assert done.exit_code in (1, 2)
        assert said in done.stderr

    def test_its_options_go_with_it(self, tmp_path: Path) -> None:
        for flag in ("--batches", "--device-layers", "--prompt-tokens", "--host-bytes"):
            done = run_command(main, "profile", flag, "3", "-o", tmp_path / "profile.json")
            assert done.exit_code == 2
            assert f"{flag} requires --placement" in done.stderr
