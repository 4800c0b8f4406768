"""The part of `ragorder doctor` that examines memory: `--memory`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ragorder.cli.options import Choice, Count, Decorator, Size, option, section

__all__ = ["MEMORY_OPTIONS", "memory_options", "show_memory"]

MEMORY_OPTIONS = (
    "index",
    "profile",
    "device_bytes",
    "host_bytes",
    "disk_bytes",
    "prompt_tokens",
    "answer_tokens",
    "partitions",
    "backlog",
    "dtype",
)
"""Parameters that are of no use without `--memory`."""


def memory_options() -> Decorator:
    return section(
        "Memory",
        option(
            "--memory",
            is_flag=True,
            help="Instead of a server, examine this machine: what --model and --index need, in bytes by part, and how "
            "they are best placed over device, host memory and disk (RAGDoll).",
        ),
        option(
            "--index",
            type=click.Path(path_type=Path, dir_okay=False, exists=True),
            metavar="FILE",
            help="An index written by FAISS; an IVF index need not fit into memory.",
        ),
        option(
            "--profile",
            type=click.Path(path_type=Path, dir_okay=False, exists=True),
            metavar="FILE",
            help="Times from `ragorder profile --placement`, with the sizes of model and index. [default: times "
            "estimated from sizes]",
        ),
        option("--device-bytes", type=Size(0), metavar="SIZE", help="Memory of the device. [default: what is free]"),
        option("--host-bytes", type=Size(0), metavar="SIZE", help="Host memory. [default: what is free]"),
        option(
            "--disk-bytes",
            type=Size(0),
            metavar="SIZE",
            help="Disk for KV. [default: what is free, or none if both others are given]",
        ),
        option("--prompt-tokens", type=Count(1), metavar="N", help="Tokens of a prompt. [default: 2048]"),
        option("--answer-tokens", type=Count(1), metavar="N", help="Tokens of an answer. [default: 128]"),
        option("--partitions", type=Count(1), metavar="N", help="Parts of an IVF index. [default: 32]"),
        option(
            "--backlog",
            type=Count(1),
            metavar="N",
            help="Waiting requests whose mean latency is minimised. [default: the largest batch]",
        ),
        option(
            "--dtype",
            type=Choice(["float32", "bfloat16", "float16"]),
            help="Of weights and KV. [default: as the weights are stored]",
        ),
    )


def show_memory(model: str | None, as_json: bool, given: dict[str, Any]) -> bool:
    """Print the report; False if no placement is within the budgets. `given`: values of MEMORY_OPTIONS, or None."""
    from ragorder.adapters.doctor.memory import choose_budgets, estimated_costs, examine_memory
    from ragorder.pipelining.placement.base import Workload

    profile: Path | None = given["profile"]
    if (profile is None) == (model is None):
        raise click.UsageError("--memory takes a --model, the folder of one or its config.json, or else a --profile")
    ignored = ("index", "prompt_tokens", "answer_tokens", "partitions", "dtype")
    if profile is not None and (named := [name for name in ignored if given[name] is not None]):
        flag = named[0].replace("_", "-")
        raise click.UsageError(f"--profile has been measured with its own: leave out --{flag}")
    if given["index"] is None and given["partitions"] is not None:
        raise click.UsageError("--partitions is of an index: give --index")
    try:
        budgets = choose_budgets(given["device_bytes"], given["host_bytes"], given["disk_bytes"])
        tokens = {name: given[name] for name in ("prompt_tokens", "answer_tokens") if given[name] is not None}
        costs = profile or estimated_costs(
            Path(str(model)),
            given["index"],
            workload=Workload(**tokens),
            on_a_cpu=budgets.unified,
            partitions=given["partitions"] or 32,
            dtype=given["dtype"],
        )
        report = examine_memory(costs, budgets, backlog=given["backlog"])
    except (OSError, ImportError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1))
    else:
        click.echo(str(report))
    if report.problem is not None:
        click.echo(f"Error: {report.problem}", err=True)
    return report.problem is None
