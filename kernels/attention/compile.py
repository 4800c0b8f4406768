"""Compilation of the table's kernels without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import click
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ragorder.kernels.attention.kernel import ANYWHERE, CHANGING, attend, attend_at, merge
from ragorder.kernels.attention.launch import INTERPRETED, constants, options
from ragorder.kernels.attention.table import ARCHITECTURES, HEAD_DIMS, ROWS, Tile, choose_tile

_DTYPES = {"fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Variant:
    family: str
    head_dim: int
    dtype: str
    tile: Tile
    group: int = 4
    block_size: int = 16
    window: bool = False
    softcap: bool = False
    split: bool = False
    sparse: bool = False
    runs: bool = False


@dataclass(frozen=True, slots=True)
class Compiled:
    """Registers of a thread, bytes of memory (`local`: spills), counts of instructions."""

    registers: int
    stack: int
    local: int
    shared: int
    wgmma: int
    mma: int
    copies: int

    def faults(self, variant: Variant) -> list[str]:
        found = []
        if self.stack or self.local:
            found.append(f"spills: {self.stack} bytes of stack, {self.local} local")
        most = ARCHITECTURES[variant.family]
        if self.shared > most:
            found.append(f"{self.shared} bytes of shared memory, but {variant.family} has {most}")
        if variant.family == "sm_90" and variant.tile.rows >= 64 and variant.dtype != "fp32" and not self.wgmma:
            found.append("no wgmma")
        return found


def variants(families: Sequence[str] = tuple(ARCHITECTURES), head_dims: Sequence[int] = HEAD_DIMS,
             dtypes: Sequence[str] = ("bf16", "fp32")) -> Iterator[Variant]:  # fmt: skip
    # fp16 differs from bf16 only in the instruction.
    seen = set()
    for family, head_dim, dtype, rows in product(families, head_dims, dtypes, ROWS):
        variant = Variant(family, head_dim, dtype, choose_tile(family, head_dim, _DTYPES[dtype], rows))
        if variant not in seen:
            seen.add(variant)
            yield variant


def compile_variant(variant: Variant) -> Compiled:
    sparse = variant.sparse or variant.runs
    block_size = 1 if variant.runs else variant.block_size
    constexprs = {
        **constants(variant.tile, variant.group, variant.head_dim, block_size),
        "CAPPED": variant.softcap,
        "SPLIT": variant.split,
        "UPCAST": False,
    }
    if sparse:
        constexprs |= {"RUNS": variant.runs, "ROTARY": variant.head_dim * variant.runs, "ADJACENT": False}
    else:
        constexprs |= {"WINDOWED": variant.window}
    kernel = attend_at if sparse else attend
    return _compile(kernel, _types(variant), constexprs, variant.family, options(variant.tile))


def merge_resources(family: str, head_dim: int, splits: int = 32) -> Compiled:
    names = {"parts_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16"}
    width = 1 << (head_dim - 1).bit_length()
    constexprs = {"HEADS": 32, "HEAD_DIM": head_dim, "WIDTH": width, "MOST": splits}
    return _compile(merge, names, constexprs, family, {"num_warps": 4})


def _types(variant: Variant) -> dict[str, str]:
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "key_cache_ptr", "value_cache_ptr"), f"*{variant.dtype}")
    types |= dict.fromkeys(ANYWHERE, "*i32") | {"scale": "fp32", "cap": "fp32", "lse_ptr": "*fp32"}
    types["turns_ptr"] = "*fp32" if variant.runs else "*i32"
    return types | {"out_ptr": "*fp32" if variant.split else f"*{variant.dtype}"}


def _compile(
    kernel: Any, types: dict[str, str], constexprs: Mapping[str, int], family: str, how: dict[str, Any]
) -> Compiled:
    # As in a launch, integers that do not change are multiples of 16.
    names: list[str] = kernel.arg_names
    signature = {name: "constexpr" if name in constexprs else types.get(name, "i32") for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name] not in ("constexpr", "fp32") and name not in CHANGING + ANYWHERE
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    target = GPUTarget("cuda", int(family.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options=how)
    usage = _usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Compiled(
        registers=usage["REG"],
        stack=usage["STACK"],
        local=usage["LOCAL"],
        shared=compiled.metadata.shared,
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        copies=len(re.findall(r"cp\.async\.c[ag]", ptx)),
    )


def _usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)  # noqa: S603
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", run.stdout + run.stderr)}


@click.command()
@click.option("--family", "families", multiple=True, type=click.Choice(tuple(ARCHITECTURES)), help="[default: all]")
@click.option("--head-dim", "head_dims", multiple=True, type=click.Choice(HEAD_DIMS), help="[default: all]")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(tuple(_DTYPES)), help="[default: bf16, fp32]")
@click.option("--rows", multiple=True, type=click.IntRange(min=16), help="Only tiles with this number of rows.")
@click.option("--group", type=click.IntRange(min=1), default=4, show_default=True, help="Query heads per KV head.")
@click.option("--block-size", type=click.IntRange(16, 128), default=16, show_default=True, help="Tokens of a block.")
@click.option("--split", is_flag=True, help="With split keys.")
@click.option("--window", is_flag=True, help="With a sliding window.")
@click.option("--softcap", is_flag=True, help="With capped scores.")
@click.option("--sparse", is_flag=True, help="The kernel for rows at any positions.")
@click.option("--runs", is_flag=True, help="The kernel for shared keys at any positions.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each kernel.")
def main(
    families: Sequence[str],
    head_dims: Sequence[int],
    dtypes: Sequence[str],
    rows: Sequence[int],
    as_json: bool,
    **options: Any,
) -> None:
    """Compile the table's kernels without a GPU; print registers, spills, shared memory and instructions."""
    if INTERPRETED:
        raise click.ClickException("TRITON_INTERPRET is set: nothing is compiled")
    if (options["sparse"] or options["runs"]) and options["window"]:
        raise click.UsageError("--sparse and --runs have no --window: rows at any positions see all keys before them")
    faulty = False
    chosen = variants(families or tuple(ARCHITECTURES), head_dims or HEAD_DIMS, dtypes or ("bf16", "fp32"))
    for plain in chosen:
        if rows and plain.tile.rows not in rows:
            continue
        variant = replace(plain, **options)
        compiled = compile_variant(variant)
        faults = compiled.faults(variant)
        faulty |= bool(faults)
        if as_json:
            click.echo(json.dumps({**asdict(variant), **asdict(compiled), "faults": faults}))
        else:
            tile = variant.tile
            click.echo(
                f"{variant.family} D{variant.head_dim:<3} {variant.dtype:4} tile {tile.rows:>3} x {tile.keys:<3}"
                f" {tile.warps} warps {tile.stages} stages: {compiled.registers:>3} registers, {compiled.shared:>6}"
                f" bytes shared, {compiled.wgmma:>3} wgmma, {compiled.mma:>4} mma, {compiled.copies:>3} copies"
                f"  {'; '.join(faults) or 'no spills'}"
            )
    if faulty:
        sys.exit(1)


if __name__ == "__main__":
    main()
