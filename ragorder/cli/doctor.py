"""The command `ragorder doctor`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragorder.cli.options import Command, Decorator, api_key, events_address, kv_events, option, section
from ragorder.cli.values import Choice, Count, Duration, Size, load_tokenizer
from ragorder.common.jsonl import JSONLinesError, decode
from ragorder.topic import checked_header

if TYPE_CHECKING:
    from ragorder.adapters.doctor import Finding, PromptSample

_MARKS = {"good": ("✓", "green"), "warning": ("!", "yellow"), "bad": ("✗", "red"), "unknown": ("?", "cyan")}


def _request_options() -> Decorator:
    return section(
        "Requests",
        option(
            "--requests",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="JSON lines with the bodies of requests in the order in which they were sent, and the usage of their "
            'answers: {"messages": […], "usage": {…}}, or {"request": {…}, "response": {…}}. Nothing of them is shown. '
            "Without URL, no server is asked.",
        ),
        option(
            "--tokenizer",
            metavar="FOLDER|NAME",
            help="The model's tokenizer, to render chats twice.",
            unset="by the server at URL",
        ),
        option(
            "--block-size",
            type=Count(1),
            metavar="N",
            help="Tokens in a block of the server's cache.",
            unset="from the server at URL, else from the log",
        ),
        option(
            "--topic-header",
            metavar="NAME",
            help="Check that the balancer at URL sends requests with the same topic in this header to one replica.",
        ),
    )


def _memory_options() -> Decorator:
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
            help="Times from `ragorder profile --placement`, with the sizes of model and index.",
            unset="times estimated from sizes",
        ),
        option(
            "--for",
            type=Choice(["ragorder", "vllm", "llama.cpp"]),
            help="Engine whose command is printed for the placement.",
            unset="ragorder",
        ),
        option("--device-bytes", type=Size(0), metavar="SIZE", help="Memory of the device.", unset="what is free"),
        option("--host-bytes", type=Size(0), metavar="SIZE", help="Host memory.", unset="what is free"),
        option(
            "--disk-bytes",
            type=Size(0),
            metavar="SIZE",
            help="Disk for KV.",
            unset="what is free, or none if both others are given",
        ),
        option(
            "--prompt-tokens",
            type=Count(1),
            metavar="N",
            help="Tokens of a prompt.",
            unset="2048, or fewer if the model is for fewer",
        ),
        option("--answer-tokens", type=Count(1), metavar="N", help="Tokens of an answer.", unset="128"),
        option("--partitions", type=Count(1), metavar="N", help="Parts of an IVF index.", unset="32"),
        option(
            "--backlog",
            type=Count(1),
            metavar="N",
            help="Waiting requests whose mean latency is minimised.",
            unset="the largest batch",
        ),
        option(
            "--dtype",
            type=Choice(["float32", "bfloat16", "float16"]),
            help="Of weights and KV.",
            unset="as the weights are stored",
        ),
        option(
            "--device",
            type=Choice(["cpu", "cuda"]),
            help="Device of the machine that is planned for: a CPU, or a GPU also where none is.",
            unset="a GPU if one is here",
        ),
    )


@click.command(
    cls=Command,
    examples=[
        "ragorder doctor http://127.0.0.1:8000",
        "ragorder doctor http://127.0.0.1:8000 --prompt one.txt --prompt two.txt",
        "ragorder doctor --requests log.jsonl --tokenizer Qwen/Qwen2.5-0.5B-Instruct",
        "ragorder doctor --memory --model /models/qwen",
    ],
)
@click.argument("url", required=False)
@section(
    "Server",
    option(
        "--model",
        metavar="NAME",
        help="Model for the requests; with --memory the folder of a model, or its config.json.",
        unset="the first that the server lists",
    ),
    api_key(),
    option(
        "--timeout",
        "timeout_s",
        type=Duration(above=True),
        default="30s",
        show_default=True,
        metavar="TIME",
        help="Maximum time for one request.",
    ),
)
@section("KV events", kv_events(environment=True))
@section(
    "Prompts",
    option(
        "--prompt",
        "prompts",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        multiple=True,
        metavar="FILE",
        help="A prompt as your application sends it: text, or a JSON list of chat messages. Give this option twice, "
        "with prompts of different requests, preferably of different users and days.",
    ),
    option(
        "--document-marker",
        metavar="TEXT",
        help="Text right before the first document in both prompts; the documents begin after it.",
    ),
)
@_request_options()
@_memory_options()
@option("--json", "as_json", is_flag=True, help="Write the findings as JSON.")
@click.pass_context
def doctor(
    context: click.Context,
    /,
    url: str | None,
    model: str | None,
    api_key: str | None,
    events_endpoint: str | None,
    replay_endpoint: str | None,
    events_topic: str | None,
    prompts: tuple[Path, ...],
    document_marker: str | None,
    timeout_s: float,
    requests: Path | None,
    memory: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Check whether a server and its prompts use the prefix cache.

    URL is an OpenAI-compatible server. Is its prefix cache on, how much does it hold, do answers report cached tokens,
    do KV events arrive? With two prompts: how much do they share, and does something volatile precede the documents? A
    few random tokens are sent to the server. The exit status is 1 if anything is bad, else 0.

    With --requests, with or without URL: why the requests of a log find little in the cache.

    With --memory and no URL: how much memory a model and an index need on this machine, and their best placement.
    """
    of_memory, of_requests = _under(context, "Memory"), _under(context, "Requests")
    if memory:
        if url is not None or prompts:
            raise click.UsageError("--memory examines this machine: leave out the URL and --prompt")
        if lonely := _given(context, but=(*of_memory, "memory", "model", "as_json")):
            raise click.UsageError(f"--memory examines this machine: leave out {lonely[0]}")
        context.exit(int(not _show_memory(model, as_json, of_memory)))
    if url is None and requests is None:
        raise click.MissingParameter(ctx=context, param_hint="'URL'", param_type="argument")
    _check_together(context, url, requests, of_memory, of_requests)
    how = _checked_requests(url, **of_requests)
    from ragorder.adapters.doctor import AddressError, Events, ServerError, examine, examine_requests

    if len(prompts) not in (0, 2):
        raise click.UsageError("--prompt is given twice, with prompts of different requests, or not at all")
    if document_marker and not prompts:
        raise click.UsageError("--document-marker requires two --prompt")
    samples = [_read(path) for path in prompts]
    address = events_address(events_endpoint, replay_endpoint, events_topic)
    events = None if address is None else Events(*address)
    asking: dict[str, Any] = {"model": model, "api_key": api_key, "timeout_s": timeout_s}
    findings: list[Finding] = []
    try:
        if url is not None:
            with Console(stderr=True).status("Examining the server"):
                findings += examine(
                    url,
                    events=events,
                    samples=(samples[0], samples[1]) if samples else None,
                    document_marker=document_marker or None,
                    **asking,
                )
        if requests is not None:
            with Console(stderr=True).status("Examining the requests"):
                findings += examine_requests(requests, **asking, **how)
    except AddressError as error:
        raise click.UsageError(str(error)) from None
    except (ServerError, ImportError, JSONLinesError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        _print(findings)
    context.exit(int(any(finding.verdict == "bad" for finding in findings)))


def _check_together(
    context: click.Context,
    url: str | None,
    requests: Path | None,
    of_memory: Mapping[str, object],
    of_requests: Mapping[str, object],
) -> None:
    for switch, options in (("--memory", of_memory), ("--requests", {} if requests else of_requests)):
        if lonely := [name for name, value in options.items() if value is not None]:
            raise click.UsageError(f"--{lonely[0].replace('_', '-')} requires {switch}")
    if url is None and (lonely := _given(context, but=("requests", *of_requests, "as_json"))):
        raise click.UsageError(f"{lonely[0]} requires the URL of a server")


def _under(context: click.Context, heading: str) -> dict[str, Any]:
    """Return the options under a heading, without the switch that they need."""
    names = [each.name for each in context.command.params if getattr(each, "heading", None) == heading]
    return {name: context.params[name] for name in names if name is not None and name != heading.lower()}


def _given(context: click.Context, *, but: Collection[str]) -> list[str]:
    return [
        each.opts[0]
        for each in context.command.params
        if each.name is not None
        and each.name not in but
        and context.get_parameter_source(each.name) is ParameterSource.COMMANDLINE
    ]


def _print(findings: Sequence[Finding]) -> None:
    console = Console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        mark, colour = _MARKS[finding.verdict]
        table.add_row(Text(mark, colour), Text(finding.check), Text(finding.found))
    console.print(table)
    # Below the table: text to be copied must not be broken into lines.
    said: set[str] = set()
    for finding in findings:
        if finding.advice:
            mark, colour = _MARKS[finding.verdict]
            # Advice that several findings share is shown once.
            new = [part for part in finding.advice.split("; ") if part not in said]
            said.update(new)
            advice = "; ".join(new) or "as above"
            console.print(Text.assemble("\n", (f"{mark} {finding.check}: ", f"bold {colour}"), advice), soft_wrap=True)


def _read(path: Path) -> PromptSample:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise click.BadParameter(f"{path}: {reason}", param_hint="--prompt") from None
    try:
        messages = decode(text.encode())
    except ValueError:
        return text
    if not isinstance(messages, list) or not any(isinstance(message, dict) for message in messages):
        return text
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise click.BadParameter(f'{path}: chat messages are objects with "role" and "content"', param_hint="--prompt")
    return messages


def _checked_requests(
    url: str | None, *, tokenizer: str | None, block_size: int | None, topic_header: str | None
) -> dict[str, Any]:
    if topic_header is not None:
        if url is None:
            raise click.UsageError("--topic-header requires URL, the address of the balancer")
        try:
            checked_header(topic_header)
        except ValueError as error:
            raise click.UsageError(f"--topic-header: {error}") from None
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    return {"base_url": url, "tokenizer": loaded, "block_size": block_size, "topic_header": topic_header}


def _show_memory(model: str | None, as_json: bool, given: dict[str, Any]) -> bool:
    from ragorder.adapters.doctor.commands import Served
    from ragorder.adapters.doctor.memory import choose_budgets, estimated_costs, examine_memory
    from ragorder.kernels.model_sizes import quantised_words, read_config
    from ragorder.pipelining.placement.base import PARTITIONS
    from ragorder.pipelining.placement.budgets import is_gpu

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
        budgets = choose_budgets(given["device_bytes"], given["host_bytes"], given["disk_bytes"], given["device"])
        tokens = {name: given[name] for name in ("prompt_tokens", "answer_tokens") if given[name] is not None}
        costs = profile or estimated_costs(
            Path(str(model)),
            given["index"],
            tokens=tokens,
            device=given["device"],
            partitions=given["partitions"] or PARTITIONS,
            dtype=given["dtype"],
        )
        report = examine_memory(costs, budgets, backlog=given["backlog"])
        quantised = None if model is None else quantised_words(read_config(Path(model))[0])
    except (OSError, ImportError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    facts, engine = getattr(report.costs, "facts", {}), given["for"] or "ragorder"
    name = str(facts.get("model", "FOLDER")) if model is None else model
    folder, index = Path(name).parent if Path(name).is_file() else name, given["index"] or facts.get("index")
    served = Served(str(folder), given["dtype"], given["device"], None if index is None else str(index))
    command = None if quantised and engine == "ragorder" else report.command(served, engine)
    if as_json:
        words = None if command is None else list(command.words)
        click.echo(json.dumps({**report.as_json(), "quantised": quantised, "command": words}, indent=1))
    else:
        click.echo(str(report))
        if not (profile or given["device"] or budgets.unified or is_gpu(None)):
            click.echo("The device is a CPU, as here: give --device cuda to plan for a GPU.")
        if quantised:
            counted = "as they are stored" if Path(name).is_dir() else "before quantisation: more layers fit"
            click.echo(f"\n{name}: {quantised}. The plan counts these weights {counted}.")
        if command is not None:
            click.echo(f"\nServe it as placed:\n{command}")
    if report.problem is not None:
        click.echo(f"Error: {report.problem}", err=True)
    return report.problem is None
