"""Memory plans, and an engine in a process that may have less memory than it asks for: it serves, slower."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st
from support.families import make_model
from support.streamed import saved

from ragorder.cli.values import Size
from ragorder.kernels.offload.budget import BudgetError, MemoryNeeds, MemoryPlan, format_bytes, plan_memory
from ragorder.pipelining.placement.base import ModelSizes, Spread, Workload, pool_spread
from ragorder.pipelining.placement.budgets import Budgets
from ragorder.pipelining.placement.costs import EstimatedCosts, Rates
from ragorder.pipelining.placement.plan import PlacementError, plan_placement

WORKSPACE = 100
RATES = Rates(flops=1e9, device=1e6, host=1e5, disk=1e4, scan=1e6)


def needs(layers: int, layer: int = 1000, outside: int = 500, block: int = 64, staging: int = 0) -> MemoryNeeds:
    return MemoryNeeds(outside, [layer] * layers, block, 16, lambda tokens: WORKSPACE * tokens, staging)


def plan(device: int, host: int, of: MemoryNeeds, **options: Any) -> MemoryPlan:
    return plan_memory(device, host, of, **{"longest": 256, "max_batch_tokens": 64} | options)


def taken(made: MemoryPlan, of: MemoryNeeds) -> int:
    layers = made.device_layers + made.slots
    return of.outside + layers * of.slot + pool_of(made, of).device + of.workspace(made.step_tokens)


def pool_of(made: MemoryPlan, of: MemoryNeeds) -> Spread:
    return pool_spread(made.blocks * of.block, len(of.layers), made.kv_host_layers)


class TestPlan:
    @given(
        device=st.integers(9_000, 60_000),
        host=st.integers(0, 60_000),
        layers=st.integers(1, 30),
        layer=st.integers(1, 3000),
        step=st.sampled_from([16, 64, 256, 8192]),
        tokens=st.none() | st.integers(16, 300),
    )
    def test_never_takes_more_than_the_budgets(
        self, device: int, host: int, layers: int, layer: int, step: int, tokens: int | None
    ) -> None:
        of = needs(layers, layer, staging=2 * layer)
        try:
            made = plan(device, host, of, max_batch_tokens=step, device_tokens=tokens)
        except BudgetError:
            request = tokens or 256
            assert device < 500 + layer + of.workspace(min(step, 64)) + of.kv(request)
            return
        assert taken(made, of) == made.device_bytes <= device
        assert made.blocks * 16 >= (256 if tokens is None else tokens - tokens % 16)
        assert made.streams == (made.device_layers < layers)
        assert made.device_layers + made.host_layers <= layers
        in_host = made.host_kv_bytes + made.host_layers * of.slot + pool_of(made, of).host
        assert in_host + of.staging * made.streams <= max(host, 2 * layer)
        assert made.host_kv_bytes >= 0

    @given(device=st.integers(20_000, 60_000), layers=st.integers(1, 80))
    def test_less_than_a_block_is_left_where_the_model_has_use_for_it(self, device: int, layers: int) -> None:
        of = needs(layers)
        assert device - plan(device, 0, of, max_batch_tokens=8192).device_bytes < of.block

    def test_a_given_step_is_held_where_it_fits(self) -> None:
        of = needs(40)
        assert plan(60_000, 0, of, max_batch_tokens=400).step_tokens < 400
        assert plan(60_000, 0, of, max_batch_tokens=400, held=True).step_tokens == 400
        assert plan(60_000, 0, of, max_batch_tokens=8192, held=True).step_tokens < 8192

    def test_keeps_the_whole_model_where_it_fits(self) -> None:
        of = needs(10)
        made = plan(10 * 1000 + 500 + 6400 + of.kv(256), 5000, of)
        assert (made.device_layers, made.slots, made.streams, made.host_kv_bytes) == (10, 0, False, 5000)
        smaller = plan(10 * 1000 + 499 + 6400 + of.kv(256), 5000, of)
        assert smaller.streams and smaller.slots == 3 and smaller.device_layers < 10

    @pytest.mark.parametrize("layer", [1000, 10_000])
    def test_one_layer_and_one_request_suffice_and_a_byte_less_says_what_is_missing(self, layer: int) -> None:
        of = needs(10, layer)
        least = 500 + layer + 6400 + of.kv(256)
        made = plan(least, 0, of)
        assert (made.slots, made.device_layers, made.blocks, made.host_layers) == (1, 0, 16, 0)
        said = rf"device_bytes is {least - 1}, and 1 bytes are missing.*one layer {layer}"
        with pytest.raises(BudgetError, match=said):
            plan(least - 1, 0, of)
        with pytest.raises(BudgetError, match=r"is 3072, .*Give device_bytes"):
            plan(3072, 0, of)

    @pytest.mark.parametrize("host_bytes", [0, 5000, 20_000, 200_000])
    def test_what_it_says_suffices_where_the_host_takes_kv(self, host_bytes: int) -> None:
        of = needs(10)
        with pytest.raises(BudgetError) as short:
            plan(3072, host_bytes, of, device_tokens=1024)
        missing = int(re.findall(r"(\d+) bytes are missing", str(short.value))[0])
        plan(3072 + missing, host_bytes, of, device_tokens=1024)
        with pytest.raises(BudgetError):
            plan(3071 + missing, host_bytes, of, device_tokens=1024)

    def test_more_budget_is_more_layers_that_stay(self) -> None:
        of = needs(40)
        kept = [plan(budget, 0, of).device_layers for budget in range(15_000, 60_000, 500)]
        assert kept == sorted(kept) and kept[-1] == 40 > kept[0]

    def test_host_memory_holds_layers_first_and_kv_from_the_rest(self) -> None:
        of = needs(10)
        least = 500 + 1000 + 6400 + of.kv(256)
        assert [plan(least, host, of).host_layers for host in (0, 999, 4000, 10_000, 99_000)] == [0, 0, 4, 10, 10]
        assert plan(least, 12_345, of).host_kv_bytes == 2345

    def test_large_steps_are_given_up_for_layers(self) -> None:
        of = needs(40)
        assert plan(60_000, 0, of, max_batch_tokens=8192).step_tokens < 8192
        assert plan(10**7, 0, of, max_batch_tokens=8192).step_tokens == 8192

    def test_of_a_placement_is_that_placement(self) -> None:
        """Of 500 drawn models, budgets and workloads, with the KV of running requests on the device or in the host."""
        random, compared = Random(3), Counter[bool]()
        while compared.total() < 500:
            layers, slot = random.randint(1, 24), random.randint(200, 4000)
            sizes = ModelSizes(
                layers=(slot,) * layers,
                outside=random.randint(0, 3000),
                kv_token=layers * random.choice([2, 8, 64]),
                step_bytes=((16, random.randint(10, 300)), (256, random.randint(300, 20_000))),
                staging=random.choice([0, 3 * slot]),
            )
            workload = Workload(prompt_tokens=random.randint(8, 200), answer_tokens=random.randint(1, 40))
            costs = EstimatedCosts(sizes, RATES, workload=workload, batches=(1, 2, 4, 8, 16), step_tokens=256)
            budgets = Budgets(random.randint(0, 3 * slot * layers), random.randint(0, 6 * slot * layers))
            try:
                placed = plan_placement(budgets, costs, backlog=random.choice([1, 4, 32]))
            except PlacementError:
                continue
            block = 16 * sizes.kv_token
            of = MemoryNeeds(
                sizes.outside, sizes.layers, block, 16, partial(sizes.workspace, requests=placed.batch), sizes.staging
            )
            given = placed.engine_settings
            made = plan_memory(
                given["device_bytes"],
                given["host_bytes"],
                of,
                longest=None,
                device_tokens=given["device_tokens"],
                max_batch_tokens=given["max_batch_tokens"],
                held=True,
            )
            compared[made.kv_host_layers > 0] += 1
            assert (made.step_tokens, made.slots) == (placed.step_tokens, placed.slots)
            assert (made.device_layers, made.host_layers) == (placed.weights.device, placed.weights.host)
            assert (made.kv_host_layers, made.blocks * block) == (placed.kv_host_layers, placed.kv.device)
            assert made.host_kv_bytes // block * block == placed.kv.host
        assert min(compared[True], compared[False]) > 100

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 5000, 10**6, 7 << 30, 123_456_789_012])
    def test_sizes_in_messages_suffice_and_are_read_back(self, nbytes: int) -> None:
        size = Size().convert(format_bytes(nbytes), None, None)
        assert nbytes <= size <= 1.25 * nbytes


SCRIPT = """
import json, os, resource, sys
import torch, transformers
torch.set_num_threads(1)
from ragorder.kernels.engine import EngineSettings, Request, Sampling, TieredEngine
folder, device_bytes, more, ballast = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "ballast"
transformers.LlamaForCausalLM
prompts = [[(7 * place + seed) % 300 for place in range(300)] for seed in range(3)]
requests = [Request(prompt, [100, 200], Sampling(max_tokens=5)) for prompt in prompts]
# What the process takes before it has a model, and what torch takes with its first product.
torch.ones(512, 512) @ torch.ones(512, 512)
taken = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
if more:
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, taken + more))
settings = EngineSettings(
    device_bytes=device_bytes, host_bytes=0, device_tokens=1024, max_batch_tokens=512, verify=False
)
engine = TieredEngine.load(folder, settings)
first = engine.generate(requests)
held = []
if ballast:
    # Someone else takes the rest, but for a megabyte.
    size = 64 << 20
    while size >= 1 << 20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8))
        except RuntimeError:
            size //= 2
second = engine.generate([Request(prompt[50:], [100], Sampling(max_tokens=5)) for prompt in prompts])
stream = engine.stats().stream
del held
print(json.dumps({
    "tokens": [[*each.token_ids] for each in (*first, *second)],
    "errors": [each.error for each in (*first, *second) if each.error],
    "layers": [stream.device_layers, stream.disk_layers, stream.slots],
    "failed_steps": engine.stats().failed_steps,
}))
engine.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
class TestLessMemoryThanAsked:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """160 MB of weights in 16 layers."""
        sizes = {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 16, "num_attention_heads": 8}
        model = make_model("Llama", max_position_embeddings=1024, **sizes)
        return saved(model, tmp_path_factory.mktemp("models") / "llama")

    def run(self, folder: Path, more: int, ballast: str = "") -> dict[str, Any]:
        # Each arena of the allocator reserves 64 MB of addresses, which count although nothing is there.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder), str(1 << 30), str(more), ballast],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def test_it_serves_with_the_layers_that_fit(self, folder: Path) -> None:
        whole = self.run(folder, 0)
        assert whole["layers"] == [16, 0, 0]
        less = self.run(folder, 160 << 20)
        assert less["errors"] == []
        assert less["tokens"] == whole["tokens"]
        device, disk, slots = less["layers"]
        assert 0 < disk <= 16 and device + disk == 16 and slots >= 1

    def test_it_goes_on_when_others_take_the_rest(self, folder: Path) -> None:
        whole = self.run(folder, 0)
        less = self.run(folder, 320 << 20, "ballast")
        assert less["errors"] == []
        assert less["tokens"] == whole["tokens"]
        assert less["failed_steps"] > 0
