"""Placements around a given pool of KV: those that the planner finds, and what fits and what is missing."""

from __future__ import annotations

import re
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragorder.pipelining.placement.base import NO_INDEX, ModelSizes, Placement, Workload
from ragorder.pipelining.placement.budgets import Budgets
from ragorder.pipelining.placement.costs import EstimatedCosts, Footprint, Rates
from ragorder.pipelining.placement.fit import PlacementError, place_pool
from ragorder.pipelining.placement.plan import plan_placement

BLOCK = 64
RATES = Rates(flops=1e9, device=1e6, host=1e5, disk=1e4, scan=1e6)


def sizes(layers: int, layer: int = 1000, staging: int = 0) -> ModelSizes:
    """A token takes 100 bytes of workspace and 4 of KV."""
    steps = ((1, 100), (100, 10_000))
    return ModelSizes(layers=(layer,) * layers, outside=500, kv_token=4, step_bytes=steps, staging=staging)


def place(device: int, host: int, model: ModelSizes, **options: Any) -> Placement:
    options = {"device_tokens": 256, "batch": 1, "step_tokens": 64} | options
    return place_pool(Budgets(device, host), model, **options)


@given(
    device=st.integers(9_000, 60_000),
    host=st.integers(0, 60_000),
    layers=st.integers(1, 30),
    layer=st.integers(1, 3000),
    step=st.sampled_from([16, 64, 256, 8192]),
    tokens=st.integers(16, 300),
)
def test_never_takes_more_than_the_budgets(
    device: int, host: int, layers: int, layer: int, step: int, tokens: int
) -> None:
    model, budgets = sizes(layers, layer, staging=2 * layer), Budgets(device, host)
    try:
        made = place(device, host, model, step_tokens=step, device_tokens=tokens)
    except PlacementError:
        assert device < 500 + layer + model.workspace(min(step, 64)) + model.kv(tokens)
        return
    used = Footprint(model, NO_INDEX).total(made)
    assert used.device <= device
    # What streams passes host memory, also where that is missing.
    assert used.host <= max(host, 2 * layer)
    assert made.kv.device // BLOCK * 16 >= tokens - tokens % 16
    assert made.weights.total == layers and (made.slots > 0) == (made.streamed > 0)
    assert Footprint(model, NO_INDEX).fits(made, budgets) or used.host > host


@given(device=st.integers(30_000, 90_000), layers=st.integers(1, 80))
def test_without_a_given_pool_less_than_a_block_is_left(device: int, layers: int) -> None:
    costs = EstimatedCosts(sizes(layers), RATES, workload=Workload(prompt_tokens=200, answer_tokens=56))
    placed = plan_placement(Budgets(device, 0), costs)
    assert 0 <= device - placed.footprint.total(placed).device < BLOCK


def test_a_given_step_is_held_where_it_fits() -> None:
    model = sizes(40)
    assert place(60_000, 0, model, step_tokens=400).step_tokens < 400
    assert place(60_000, 0, model, step_tokens=400, held=True).step_tokens == 400
    assert place(60_000, 0, model, step_tokens=8192, held=True).step_tokens < 8192
    for step, held in ((400, True), (400, False), (8192, True)):
        costs = EstimatedCosts(model, RATES, workload=Workload(prompt_tokens=200, answer_tokens=56), step_tokens=step)
        assert (plan_placement(Budgets(60_000, 0), costs, held=held).step_tokens == step) == (held and step == 400)


def test_the_whole_model_stays_where_it_fits() -> None:
    model = sizes(10)
    least = 10 * 1000 + 500 + 6400 + model.kv(256)
    made = place(least, 5000, model)
    assert (made.weights.device, made.slots, made.kv.host) == (10, 0, 5000)
    smaller = place(least - 1, 5000, model)
    assert smaller.streamed and smaller.slots == 3


@pytest.mark.parametrize("layer", [1000, 10_000])
def test_one_layer_and_the_pool_suffice_and_a_byte_less_says_what_is_missing(layer: int) -> None:
    model = sizes(10, layer)
    least = 500 + layer + 6400 + model.kv(256)
    made = place(least, 0, model)
    assert (made.slots, made.weights.device, made.kv.device, made.weights.host) == (1, 0, 16 * BLOCK, 0)
    said = rf"device_bytes is {least - 1}, and 1 bytes are missing.*one layer {layer}.* Give device_bytes {least} "
    with pytest.raises(PlacementError, match=said):
        place(least - 1, 0, model)


@pytest.mark.parametrize("host_bytes", [0, 5000, 20_000, 200_000])
def test_what_it_says_suffices_where_the_host_takes_kv(host_bytes: int) -> None:
    model = sizes(10)
    with pytest.raises(PlacementError) as short:
        place(3072, host_bytes, model, device_tokens=1024)
    missing = int(re.findall(r"(\d+) bytes are missing", str(short.value))[0])
    place(3072 + missing, host_bytes, model, device_tokens=1024)
    with pytest.raises(PlacementError):
        place(3071 + missing, host_bytes, model, device_tokens=1024)


def test_more_budget_is_more_layers_that_stay() -> None:
    kept = [place(budget, 0, sizes(40)).weights.device for budget in range(15_000, 60_000, 500)]
    assert kept == sorted(kept) and kept[-1] == 40 > kept[0]


def test_host_memory_holds_layers_first_and_kv_from_the_rest() -> None:
    model = sizes(10)
    least = 500 + 1000 + 6400 + model.kv(256)
    hosts = (0, 999, 4000, 10_000, 99_000)
    assert [place(least, host, model).weights.host for host in hosts] == [0, 0, 4, 10, 10]
    assert place(least, 12_345, model).kv.host == 2345


def test_large_steps_are_given_up_for_layers() -> None:
    assert place(60_000, 0, sizes(40), step_tokens=8192).step_tokens < 8192
    assert place(10**7, 0, sizes(40), step_tokens=8192).step_tokens == 8192


def test_around_the_pool_of_a_plan_it_is_that_plan() -> None:
    """Of 500 drawn models, budgets and workloads, with the KV of running requests on the device or in the host."""
    random, compared = Random(3), Counter[bool]()
    while compared.total() < 500:
        layers, slot = random.randint(1, 24), random.randint(200, 4000)
        model = ModelSizes(
            layers=(slot,) * layers,
            outside=random.randint(0, 3000),
            kv_token=layers * random.choice([2, 8, 64]),
            step_bytes=((16, random.randint(10, 300)), (256, random.randint(300, 20_000))),
            staging=random.choice([0, 3 * slot]),
        )
        workload = Workload(prompt_tokens=random.randint(8, 200), answer_tokens=random.randint(1, 40))
        costs = EstimatedCosts(model, RATES, workload=workload, batches=(1, 2, 4, 8, 16), step_tokens=256)
        budgets = Budgets(random.randint(0, 3 * slot * layers), random.randint(0, 6 * slot * layers))
        try:
            placed = plan_placement(budgets, costs, backlog=random.choice([1, 4, 32]))
        except PlacementError:
            continue
        given = placed.engine_settings
        made = place_pool(
            Budgets(given["device_bytes"], given["host_bytes"]),
            model,
            device_tokens=given["device_tokens"],
            batch=given["max_requests"],
            step_tokens=given["max_batch_tokens"],
            held=True,
        )
        compared[made.kv_host_layers > 0] += 1
        block = 16 * model.kv_token
        assert (made.weights, made.slots, made.batch) == (placed.weights, placed.slots, placed.batch)
        assert (made.kv_host_layers, made.step_tokens) == (placed.kv_host_layers, placed.step_tokens)
        assert (made.kv.device, made.kv.host // block * block) == (placed.kv.device, placed.kv.host)
    assert min(compared[True], compared[False]) > 100
