"""The kernels as GPUs would get them: compiled ahead of time, and read. `python -m ragorder.kernels.attention.compile`
does this for the whole table."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.rings import grid

pytest.importorskip("torch")
pytest.importorskip("triton")

from ragorder.kernels.attention.compile import Compiled, Variant, variants
from ragorder.kernels.attention.table import ARCHITECTURES, HEAD_DIMS, Tile

pytestmark = pytest.mark.merge

COMMAND = ("-m", "ragorder.kernels.attention.compile")
HOPPER = "--family sm_90 --dtype bf16"
CAPPED = "--family sm_80 --dtype fp16 --head-dim 96 --rows 128 --split --softcap --group 7"
CHOICES = {
    "hopper": f"{HOPPER} --head-dim 128 --rows 16 --rows 128",
    "ampere": "--family sm_80 --dtype fp16 --head-dim 128 --rows 16 --rows 128",
    "a head in two parts, a group of seven": f"{HOPPER} --head-dim 80 --rows 64 --group 7 --block-size 128",
    "all that a model may ask for": f"{HOPPER} --head-dim 64 --rows 128 --window --softcap --split",
    "the widest head": f"{HOPPER} --head-dim 256 --rows 128",
    "single precision": "--family sm_90 --dtype fp32 --head-dim 128 --rows 16",
    "rows at any positions": f"--sparse {HOPPER} --head-dim 128 --rows 16 --rows 128",
    "shared keys": f"--runs {HOPPER} --head-dim 128 --rows 16 --rows 128",
    "shared keys on ampere, split and capped": f"--runs {CAPPED}",
    "rows at any positions on ampere, split and capped": f"--sparse {CAPPED}",
}
CHOICES = dict(grid(list(CHOICES.items()), 3))


SCRIPT = """
import json, sys
from ragorder.kernels.attention.compile import main, merge_resources
for arguments in json.loads(sys.argv[1]):
    main.main([*arguments.split(), "--json"], standalone_mode=False)
for head_dim in (64, 96, 256):
    merged = merge_resources("sm_90", head_dim)
    assert merged.stack == merged.local == 0, merged
"""


@pytest.fixture(scope="module")
def compiled(python: Any) -> dict[str, list[dict[str, Any]]]:
    """What the command says of each choice. One process for all of them: it takes as long to start as to compile."""
    done = python("-c", SCRIPT, json.dumps(list(CHOICES.values())), timeout=500, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {choice: [lines.pop(0) for _ in range(given.count("--rows"))] for choice, given in CHOICES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES, ids=list(CHOICES))
def test_a_kernel_spills_nothing_and_fits(choice: str, compiled: dict[str, list[dict[str, Any]]]) -> None:
    for line in compiled[choice]:
        assert line["faults"] == []
        assert line["stack"] == line["local"] == 0
        assert 0 < line["registers"] <= 255
        assert 0 < line["shared"] <= ARCHITECTURES[line["family"]]
        assert line["copies"] > 0
        wide = line["family"] == "sm_90" and line["tile"]["rows"] >= 64
        assert (line["wgmma"] > 0) == wide
        assert (line["mma"] > 0) == (not wide and line["dtype"] != "fp32")


@pytest.mark.slow
def test_under_the_interpreter_nothing_is_compiled(python: Any) -> None:
    done = python(*COMMAND, TRITON_INTERPRET="1")
    assert done.returncode == 1
    assert "TRITON_INTERPRET is set" in done.stderr


def test_the_whole_table_is_each_of_its_tiles_once() -> None:
    whole = list(variants())
    assert len(whole) == len(set(whole))
    assert {(variant.family, variant.head_dim) for variant in whole} == {
        (family, head_dim) for family in ARCHITECTURES for head_dim in HEAD_DIMS
    }


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (Compiled(255, 8, 0, 100_000, 24, 0, 40), "spills: 8 bytes of stack"),
        (Compiled(200, 0, 16, 100_000, 24, 0, 40), "16 local"),
        (Compiled(200, 0, 0, 300_000, 24, 0, 40), "300000 bytes of shared memory"),
        (Compiled(200, 0, 0, 100_000, 0, 96, 40), "no wgmma"),
    ],
)
def test_faults_of_a_compiled_kernel_are_named(bad: Compiled, fault: str) -> None:
    variant = Variant("sm_90", 128, "bf16", Tile(128, 64, 8, 3))
    good = Compiled(registers=200, stack=0, local=0, shared=100_000, wgmma=24, mma=0, copies=40)
    assert good.faults(variant) == []
    assert any(fault in found for found in bad.faults(variant))
