"""`ragorder tiers`: documents' KV beyond the GPU, in host memory and on disk."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from ragorder.cli.options import Size
from ragorder.cli.tiers_stats import stats

if TYPE_CHECKING:
    from pydantic import ValidationError

    from ragorder.adapters.vllm_tiers import TierSettings

__all__ = ["tiers"]

_HELP = {"help_option_names": ["-h", "--help"]}


@click.group(context_settings=_HELP)
def tiers() -> None:
    """Keep documents' KV in host memory and on disk, in vLLM."""


@tiers.command(context_settings=_HELP)
@click.option("--host-bytes", type=Size(), required=True, metavar="SIZE", help="Host memory: 8GiB, 500MB or bytes.")
@click.option(
    "--disk-path",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Where chunks are kept on disk. One server at a time uses it. [default: no disk]",
)
@click.option("--disk-bytes", type=Size(), metavar="SIZE", help="What they may take there.")
@click.option("--policy", metavar="NAME", help="What goes first: pgdsf, gdsf, lru or lfu. [default: pgdsf]")
@click.option(
    "--history",
    type=int,
    metavar="N",
    help="Of so many evicted chunks each tier remembers how often they were used; 0: of none. [default: 65536]",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="What prefill takes on your engine, as `ragorder profile` has measured it.",
)
@click.option(
    "--device-order/--no-device-order", default=None, help="The policy also in the device's own pool. [default: yes]"
)
@click.option("--blocks-per-chunk", type=int, metavar="N", help="KV blocks of a chunk. [default: 1]")
@click.option("--io-threads", type=int, metavar="N", help="That read and write the disk. [default: 2]")
@click.option("--pretty", is_flag=True, help="On several lines, for reading.")
def config(pretty: bool, **options: Any) -> None:
    """Print what vLLM's --kv-transfer-config is to be.

    On one line, which has no single quote in it: paste it between two of them, or write

    \b
        vllm serve MODEL --kv-transfer-config "$(ragorder tiers config --host-bytes 8GiB)"
    """
    from pydantic import ValidationError

    from ragorder.adapters.vllm_tiers import TierSettings

    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = TierSettings.model_validate(given)
        # The server would find out when it starts, which is late.
        settings.prefill_profile()
    except ValidationError as error:
        raise click.UsageError(_complaint(error)) from None
    except ValueError as error:
        raise click.UsageError(f"--profile: {error}") from None
    text = json.dumps(settings.kv_transfer_config(), indent=2 if pretty else None)
    click.echo(text.replace("'", "\\u0027"))
    console = Console(stderr=True, highlight=False)
    for heading, note in _notes(settings):
        console.print(Text.assemble((heading, "bold"), f": {note}"))


def _complaint(error: ValidationError) -> str:
    """What is wrong, in the names of the options."""
    from ragorder.adapters.vllm_tiers import TierSettings

    def option(found: re.Match[str]) -> str:
        return _option(found[0]) if found[0] in TierSettings.model_fields else found[0]

    lines = []
    for each in error.errors(include_url=False, include_context=False):
        message = each["msg"].removeprefix("Value error, ")
        # Fields of one word are ordinary words, too.
        message = re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", option, message)
        lines.append(": ".join([*(_option(str(part)) for part in each["loc"][:1]), message]))
    return "; ".join(lines)


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _notes(settings: TierSettings) -> list[tuple[str, str]]:
    """What to know before a server is started with it."""
    from ragorder.adapters.vllm_tiers import SUPPORTED_VLLM, UnsupportedVLLMError, check_vllm

    versions = f"the plug-in runs in {' and '.join(f'{minor}.x' for minor in SUPPORTED_VLLM)}, and refuses others"
    try:
        check_vllm()
    except UnsupportedVLLMError as error:
        versions += f". Here: {error}"
    notes = [("vLLM", versions)]
    if settings.disk_path is not None:
        restarts = (
            "a server finds again what another one has left on the disk if prompts hash to the same: start all with "
            "the same --prefix-caching-hash-algo, sha256 (the default) or sha256_cbor, and either all without "
            "PYTHONHASHSEED or all with the same one; with another algorithm it must be set"
        )
        privacy = (
            "prompts can be read back from KV. The folder is its owner's alone (0700): keep it on an encrypted disk "
            "and out of backups, and remove it when nobody needs it any more"
        )
        notes += [("Restarts", restarts), ("Secrets", privacy)]
    return notes


tiers.add_command(stats)
