"""The command `ragorder tiers`."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ragorder.adapters.vllm_tiers import SUPPORTED_VLLM, TierSettings, UnsupportedVLLMError, check_vllm
from ragorder.cli.options import Command, CommandGroup, build, given, option, options_from
from ragorder.cli.values import ProfileSource


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
def tiers() -> None:
    """Keep documents' KV in host memory and on disk, in vLLM."""


@tiers.command(
    cls=Command,
    examples=[
        "ragorder tiers config --host-bytes 8GiB",
        "ragorder tiers config --host-bytes 8GiB --disk-path /var/kv --disk-bytes 500GB",
    ],
)
@options_from(
    TierSettings,
    *TierSettings.model_fields,
    profile={"type": ProfileSource(), "metavar": ProfileSource.name, "unset": "auto"},
)
@option("--pretty", is_flag=True, help="Print on several lines.")
def config(pretty: bool, **options: Any) -> None:
    """Print the value of vLLM's --kv-transfer-config.

    It is one line without single quotes: put it between single quotes, or write

    \b
        vllm serve MODEL \\
          --kv-transfer-config "$(ragorder tiers config --host-bytes 8GiB)"
    """
    settings = build(TierSettings, {"profile": "auto"} | given(options))
    try:
        # Fail here rather than when the server starts.
        settings.prefill_profile()
    except ValueError as error:
        raise click.UsageError(f"--profile: {error}") from None
    text = json.dumps(settings.kv_transfer_config(), indent=2 if pretty else None)
    click.echo(text.replace("'", "\\u0027"))
    console = Console(stderr=True, highlight=False)
    for heading, note in _notes(settings):
        console.print(Text.assemble((heading, "bold"), f": {note}"))


def _notes(settings: TierSettings) -> list[tuple[str, str]]:
    versions = f"the plug-in runs in {' and '.join(f'{minor}.x' for minor in SUPPORTED_VLLM)}, and refuses others"
    try:
        check_vllm()
    except UnsupportedVLLMError as error:
        versions += f". Here: {error}"
    notes = [("vLLM", versions)]
    if settings.disk_path is not None:
        restarts = (
            "a server finds chunks that an earlier one left on the disk if prompts have the same hashes: start all "
            "with the same --prefix-caching-hash-algo, sha256 (the default) or sha256_cbor, and either all without "
            "PYTHONHASHSEED or all with the same one; with another algorithm it must be set"
        )
        privacy = (
            "prompts can be read back from KV. Only its owner can read the folder (0700): keep it on an encrypted disk "
            "and out of backups, and remove it when it is no longer needed"
        )
        notes += [("Restarts", restarts), ("Secrets", privacy)]
    return notes
