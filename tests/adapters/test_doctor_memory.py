"""`ragorder doctor --memory`: what a model and an index need, and where they are placed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command
from support.placed_memory import make_model
from support.rings import grid

from ragorder.adapters.doctor.memory import choose_budgets, estimated_costs
from ragorder.cli import main
from ragorder.cli.engine import engine as engine_command
from ragorder.pipelining.placement.base import NO_INDEX, ModelSizes, Placement
from ragorder.pipelining.placement.budgets import Budgets
from ragorder.pipelining.placement.costs import Footprint
from ragorder.pipelining.placement.plan import plan_placement
from ragorder.pipelining.placement.profile import GenerationSample, PlacementProfile

doctor = partial(run_command, main, "doctor", "--memory")

CONFIG = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "dtype": "float16",
}
BUDGETS = ("--device-bytes", "12GiB", "--host-bytes", "24GiB")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a 7B model, without weights."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def index(tmp_path: Path) -> Path:
    faiss, np = pytest.importorskip("faiss"), pytest.importorskip("numpy")
    made = faiss.index_factory(16, "IVF64,Flat")
    vectors = np.random.default_rng(0).random((5000, 16), dtype=np.float32)
    made.train(vectors)
    made.add(vectors)
    path = tmp_path / "index.faiss"
    faiss.write_index(made, str(path))
    return path


def reported(*arguments: Any) -> dict[str, Any]:
    done = doctor(*arguments, "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    assert (done.exit_code == 0) == (found["placement"] is not None), done.output
    return found


class TestReport:
    def test_shows_what_is_needed_and_what_results(self, config: Path) -> None:
        done = doctor("--model", config, *BUDGETS)
        assert done.exit_code == 0, done.output
        # 202 million parameters a layer, 32 of them, two bytes each.
        assert re.search(r"weights: 32 layers +12\.1 GiB", done.stdout)
        assert re.search(r"KV of one request \(2,176 tokens\) +1\.1 GiB", done.stdout)
        assert "Budgets: device 12.0 GiB, host 24.0 GiB, disk 0 B" in done.stdout
        assert re.search(r"Of 32 layers \d+ stay on the device, \d+ in host memory, 0 on the disk", done.stdout)
        assert "Bottleneck:" in done.stdout
        assert "These times are estimates" in done.stdout

    def test_as_json_has_the_same(self, config: Path) -> None:
        found = reported("--model", config, *BUDGETS)
        placement = found["placement"]
        assert found["estimated"] is True
        assert found["budgets"] == {"device_bytes": 12 << 30, "host_bytes": 24 << 30, "disk_bytes": 0, "unified": False}
        assert sum(placement["weights"].values()) == 32
        assert placement["used"]["device"] <= 12 << 30
        assert placement["used"]["host"] <= 24 << 30
        assert placement["engine_settings"]["max_requests"] == placement["batch"]
        assert sum(found["model"]["layers"]) == pytest.approx(32 * 202.4e6 * 2, rel=0.01)

    def test_request_lengths_dtype_backlog_and_disk_are_planned_for(self, config: Path) -> None:
        tokens = ("--prompt-tokens", "200", "--answer-tokens", "16")
        gpu = (*BUDGETS, "--device", "cuda")
        short, long = reported("--model", config, *gpu, *tokens), reported("--model", config, *gpu)
        assert short["workload"]["prompt_tokens"] == 200
        assert short["placement"]["batch"] > long["placement"]["batch"]
        half, whole = (reported("--model", config, *BUDGETS, "--dtype", dtype) for dtype in ("float16", "float32"))
        assert whole["model"]["layers"][0] == 2 * half["model"]["layers"][0]
        assert reported("--model", config, *BUDGETS, "--backlog", "1")["placement"]["batch"] == 1
        kv = reported("--model", config, *BUDGETS, "--disk-bytes", "10GiB")["placement"]["kv"]
        assert 9 << 30 < kv["disk"] <= 10 << 30

    def test_needs_no_torch(self, config: Path, python: Any) -> None:
        command = ("-c", "from ragorder.cli import main; main(prog_name='ragorder')", "doctor", "--memory")
        blocked = ("torch", "transformers", "numpy", "faiss", "httpx2", "psutil", "safetensors")
        done = python(*command, "--model", str(config), *BUDGETS, blocked=blocked)
        assert done.returncode == 0, done.stderr
        assert "Bottleneck:" in done.stdout


class TestServing:
    """One planner: the engine, started by the printed command or by the same budgets, is placed as planned."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        pytest.importorskip("transformers")
        return make_model(tmp_path_factory.mktemp("models") / "model", layers=24, hidden=64)

    def placed(self, words: Sequence[str]) -> Placement:
        """Return the placement of an engine that the command starts with these words."""
        from ragorder.kernels.engine import EngineSettings, TieredEngine

        options = engine_command.make_context("engine", list(words)).params
        chosen = {name: options[name] for name in EngineSettings.model_fields if options.get(name) is not None}
        settings = EngineSettings(**chosen | {"profile": None, "verify": False})
        with TieredEngine.load(options["model"], settings) as engine:
            return engine.placement

    @pytest.mark.parametrize(
        ("device", "host"),
        grid(
            [("40MiB", "8MiB"), ("4MiB", "12MiB"), (None, "5MiB"), ("5MiB", "0"), ("3MiB", "700KiB"), (None, "40MiB")],
            few=3,
        ),
    )
    def test_by_the_printed_command_is_placed_as_planned(self, device: str | None, host: str, folder: Path) -> None:
        tokens = ("--prompt-tokens", "100", "--answer-tokens", "20")
        budgets = ("--host-bytes", host, "--disk-bytes", "0", *(("--device-bytes", device) if device else ()))
        found = reported("--model", folder, *budgets, *tokens, "--dtype", "float32", "--device", "cpu")
        assert found["budgets"]["unified"] == (device is None)
        assert found["command"][:4] == ["ragorder", "engine", "--model", str(folder)]
        assert (found["placement"]["kv_host_layers"] > 0) == (host == "12MiB")
        placed, planned = self.placed(found["command"][2:]), found["placement"]
        assert asdict(placed) == {name: planned[name] for name in asdict(placed)}
        assert placed.kv_host_share == planned["kv_host_share"]

    @pytest.mark.parametrize(
        ("device", "host", "requests", "more"),
        grid(
            [
                ("60MiB", "8MiB", 64, ()),
                ("12MiB", "60MiB", 2, ()),
                ("34MiB", "0", 64, ("--max-model-len", "500")),
                ("32MiB", "0", 39, ()),
            ],
            few=2,
        ),
    )
    def test_by_budgets_alone_is_placed_as_planned_with_room_for_more_requests(
        self, device: str, host: str, requests: int, more: Sequence[str], folder: Path
    ) -> None:
        options = ("--model", folder, "--device-bytes", device, "--host-bytes", host)
        options += ("--dtype", "float32", "--device", "cpu")
        tokens = ("--prompt-tokens", "372", "--answer-tokens", "128") if more else ()
        found = reported(*options, *tokens)
        assert sum(found["workload"][name] for name in ("prompt_tokens", "answer_tokens")) == (500 if more else 2048)
        assert (found["placement"]["kv_host_layers"] > 0) == (device == "12MiB")
        placed, planned = self.placed([*map(str, options), *more]), found["placement"]
        same = ("weights", "kv_host_layers", "step_tokens", "slots")
        assert {name: asdict(placed)[name] for name in same} == {name: planned[name] for name in same}
        # The logits of more requests take what was left, then KV, down to that of one request.
        assert placed.batch == requests > planned["batch"]
        assert 0.9 * planned["kv"]["device"] < placed.kv.device <= planned["kv"]["device"]
        sizes = estimated_costs(folder, None, tokens={}, device="cpu", dtype="float32").model
        assert Footprint(sizes, NO_INDEX).fits(placed, Budgets(device, host))

    def test_by_options_that_are_given_has_them(self, folder: Path) -> None:
        from ragorder.kernels.engine import EngineSettings, TieredEngine

        given: dict[str, Any] = {"device_bytes": "40MiB", "host_bytes": 0, "device": "cpu", "verify": False}
        # Steps of 1,920 tokens leave fewer layers on the device than those that would be planned.
        wanted = (("max_requests", 50, "batch"), *(("max_batch_tokens", each, "step_tokens") for each in (100, 1920)))
        for name, value, reported_as in wanted:
            with TieredEngine.load(folder, EngineSettings(**given, **{name: value})) as engine:
                assert getattr(engine.placement, reported_as) == value

    def test_by_vllm_has_its_settings(self, config: Path) -> None:
        short = ("--prompt-tokens", "200", "--answer-tokens", "56")
        done = doctor("--model", config, "--for", "vllm", "--device-bytes", "8GiB", "--host-bytes", "2GiB", *short)
        planned = reported("--model", config, "--device-bytes", "8GiB", "--host-bytes", "2GiB", *short)["placement"]
        line = next(line for line in done.stdout.splitlines() if line.startswith("vllm serve"))
        words = shlex.split(line)
        assert words[2] == str(config.parent)
        options = dict(zip(words[3::2], words[4::2], strict=True))
        weights = planned["weights"]
        # 202 million parameters a layer, of two bytes.
        streamed = (weights["host"] + weights["disk"]) * 202.4e6 * 2 / (1 << 30)
        assert float(options.pop("--cpu-offload-gb")) == pytest.approx(streamed, rel=0.01)
        assert options == {
            "--max-model-len": "256",
            "--max-num-seqs": str(planned["batch"]),
            "--max-num-batched-tokens": str(planned["step_tokens"]),
            "--kv-cache-memory-bytes": str(planned["kv"]["device"]),
        } | ({"--kv-offloading-size": options["--kv-offloading-size"]} if "--kv-offloading-size" in options else {})
        assert "vLLM streams no weights from the disk" in done.stdout

    def test_by_llama_cpp_has_its_settings(self, config: Path) -> None:
        words = reported("--model", config, "--for", "llama.cpp", *BUDGETS)
        planned, options = words["placement"], dict(zip(words["command"][1::2], words["command"][2::2], strict=True))
        assert words["command"][0] == "llama-server"
        assert options["--n-gpu-layers"] == str(planned["weights"]["device"])
        assert options["--parallel"] == str(planned["batch"])
        assert int(options["--ctx-size"]) >= planned["batch"] * 2176

    def test_of_a_running_engine_is_the_one_it_is_given(self, folder: Path) -> None:
        from ragorder.kernels.engine import EngineSettings, TieredEngine

        tokens = {"prompt_tokens": 100, "answer_tokens": 20}
        costs = estimated_costs(folder, None, tokens=tokens, device="cpu", dtype="float32")
        plans = [plan_placement(Budgets(size, "700KiB"), costs) for size in ("4MiB", "6MiB", "40MiB")]
        plans.append(plan_placement(Budgets("4MiB", "12MiB"), costs))
        assert plans[3].kv_host_layers
        assert plans[0].weights != plans[1].weights != plans[2].weights
        settings = {**plans[0].engine_settings, "device": "cpu", "dtype": "float32", "verify": False}
        with TieredEngine.load(folder, EngineSettings(**settings)) as engine:
            for plan in (plans[1], plans[3], plans[2], plans[3], plans[0]):
                engine.place(plan)
                placed = engine.placement
                assert (placed.weights, placed.kv, placed.slots) == (plan.weights, plan.kv, plan.slots)
                assert placed.kv_host_layers == plan.kv_host_layers

    def test_of_quantised_weights_is_by_others(self, config: Path) -> None:
        config.write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq", "bits": 4}}))
        done = doctor("--model", config, *BUDGETS)
        assert done.exit_code == 0 and "ragorder engine" not in done.stdout
        assert "quantised (awq)" in done.stdout and "--for vllm|llama.cpp" in done.stdout
        assert "before quantisation: more layers fit" in done.stdout
        found = reported("--model", config, *BUDGETS)
        assert "quantised (awq)" in found["quantised"] and found["command"] is None
        assert reported("--model", config, *BUDGETS, "--for", "vllm")["command"][:2] == ["vllm", "serve"]


class TestIndex:
    def test_is_in_the_printed_command(self, config: Path, index: Path) -> None:
        done = doctor("--model", config, *BUDGETS, "--index", index, "--partitions", "40")
        words = shlex.split(next(line for line in done.stdout.splitlines() if line.startswith("ragorder engine")))
        options = dict(zip(words[2::2], words[3::2], strict=True))
        assert options == {
            "--model": str(config.parent),
            "--corpus": "CORPUS",
            "--index": str(index),
            "--device-bytes": str(12 << 30),
            "--host-bytes": str(24 << 30),
        }
        assert "longest prompt of the corpus instead of 2,048 tokens" in done.stdout
        assert "cuts the index into 32 partitions" in done.stdout

    def test_is_cut_into_partitions_at_most_one_for_each_cluster(self, config: Path, index: Path) -> None:
        found = reported("--model", config, *BUDGETS, "--index", index, "--partitions", "8")
        sizes = found["index"]["partitions"]
        assert len(sizes) == 8
        # Vectors and their ids.
        assert sum(sizes) == 5000 * (16 * 4 + 8)
        assert found["index"]["fixed"] + sum(sizes) == index.stat().st_size
        assert found["placement"]["partitions"] == 8
        found = reported("--model", config, *BUDGETS, "--index", index, "--partitions", "1000")
        assert len(found["index"]["partitions"]) == 64

    def test_that_is_no_ivf_is_in_memory_as_a_whole(self, config: Path, tmp_path: Path) -> None:
        faiss, np = pytest.importorskip("faiss"), pytest.importorskip("numpy")
        flat = faiss.IndexFlatL2(16)
        flat.add(np.zeros((100, 16), np.float32))
        faiss.write_index(flat, str(tmp_path / "flat.faiss"))
        found = reported("--model", config, *BUDGETS, "--index", tmp_path / "flat.faiss")
        assert found["index"] == {"fixed": (tmp_path / "flat.faiss").stat().st_size, "partitions": []}

    @pytest.mark.parametrize("content", [b"", b"junk", b"IxFI"])
    def test_that_is_none_is_refused(self, content: bytes, config: Path, tmp_path: Path) -> None:
        pytest.importorskip("faiss")
        (tmp_path / "none.faiss").write_bytes(content)
        done = doctor("--model", config, *BUDGETS, "--index", tmp_path / "none.faiss")
        assert done.exit_code == 1
        assert "none.faiss" in done.stderr


def test_a_profile_has_the_sizes_and_measured_times(tmp_path: Path) -> None:
    samples = [
        GenerationSample(batch=batch, device_layers=device, host_layers=0, seconds=(9 - device) * batch**0.5)
        for device in (0, 8)
        for batch in (1, 8)
    ]
    model = ModelSizes(layers=(100,) * 8, outside=50, kv_token=1, step_bytes=((64, 30),))
    profile = tmp_path / "profile.json"
    PlacementProfile(model=model, generation=tuple(samples), step_tokens=64).to_file(profile)
    found = reported("--profile", profile, "--device-bytes", "100000", "--host-bytes", "1000")
    assert found["estimated"] is False
    assert found["placement"]["weights"] == {"device": 8, "host": 0, "disk": 0}
    assert found["placement"]["generation_s"] == pytest.approx(8**0.5)


class TestBudgets:
    def test_that_are_too_small_say_what_is_missing(self, config: Path) -> None:
        done = doctor("--model", config, "--device-bytes", "512MiB", "--host-bytes", "24GiB")
        assert done.exit_code == 1
        missing, least = re.findall(r"and (\d+) bytes are missing.*Give device_bytes (\d+) or more", done.stderr)[0]
        assert int(least) - int(missing) == 512 << 20
        assert re.search(r"weights: 32 layers", done.stdout)
        again = doctor("--model", config, "--device-bytes", least, "--host-bytes", "24GiB")
        assert again.exit_code == 0
        found = reported("--model", config, "--device-bytes", "512MiB", "--host-bytes", "24GiB")
        assert str(missing) in found["problem"]

    def test_that_are_not_given_are_this_machines(self) -> None:
        pytest.importorskip("psutil")
        machine = choose_budgets(None, None, None)
        assert machine.host_bytes > 0
        assert choose_budgets(1 << 20, None, None).device_bytes == 1 << 20
        assert choose_budgets(1, 2, None) == Budgets(1, 2, 0)

    def test_without_psutil_both_must_be_given(self, config: Path, python: Any) -> None:
        command = ("-c", "from ragorder.cli import main; main(prog_name='ragorder')", "doctor", "--memory")
        done = python(*command, "--model", str(config), blocked=("psutil",))
        assert done.returncode == 1
        assert "pip install '.[live]'" in done.stderr


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "status", "said"),
        [
            (["--memory", *BUDGETS], 2, "takes a --model"),
            (["--memory", *BUDGETS, "--model", "FOLDER"], 1, "has no weights"),
            (["--memory", "http://127.0.0.1:1", "--model", "CONFIG"], 2, "leave out the URL"),
            (["--memory", "--model", "CONFIG", *BUDGETS, "--document-marker", "D"], 2, "leave out --document-marker"),
            (["--memory", "--model", "CONFIG", *BUDGETS, "--timeout", "3s"], 2, "leave out --timeout"),
            (["--memory", "--model", "CONFIG", *BUDGETS, "--api-key", "key"], 2, "leave out --api-key"),
            (["--memory", "--model", "CONFIG", *BUDGETS, "--partitions", "8"], 2, "give --index"),
            (["--memory", "--model", "CONFIG", "--device-bytes=-1"], 2, "is not a size"),
            (["--memory", "--model", "CONFIG", "--host-bytes=many"], 2, "is not a size"),
            (["--memory", "--model", "CONFIG", "--disk-bytes=6 apples"], 2, "is not a size"),
            (["--memory", "--profile", "CONFIG", *BUDGETS], 1, "no profile of placements"),
            (["--memory", "--profile", "CONFIG", "--model", "CONFIG", *BUDGETS], 2, "or else a --profile"),
            (["--memory", "--profile", "CONFIG", *BUDGETS, "--prompt-tokens", "9"], 2, "leave out --prompt-tokens"),
            (["http://127.0.0.1:1", "--backlog", "3"], 2, "--backlog requires --memory"),
            (["http://127.0.0.1:1", "--partitions", "3"], 2, "--partitions requires --memory"),
            (["http://127.0.0.1:1", "--dtype", "float16"], 2, "--dtype requires --memory"),
            (["http://127.0.0.1:1", "--answer-tokens", "3"], 2, "--answer-tokens requires --memory"),
            (["http://127.0.0.1:1", "--host-bytes", "3"], 2, "--host-bytes requires --memory"),
            ([], 2, "Missing argument 'URL'"),
        ],
    )
    def test_wrong_options_are_refused(self, arguments: list[str], status: int, said: str, config: Path) -> None:
        known = {"CONFIG": config, "FOLDER": config.parent}
        done = run_command(main, "doctor", *(known.get(each, each) for each in arguments))
        assert done.exit_code == status and said in done.stderr, done.output
