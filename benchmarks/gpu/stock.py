"""Stock vLLM on a GPU day: its servers, and `vllm bench serve` with the same prompts in both orders."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click

from ragorder.adapters.vllm_tiers import TierSettings
from ragorder.adapters.vllm_tiers.versions import SUPPORTED_VLLM, vllm_version
from ragorder.eval.data.trace import Trace, trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.models import built_prompts
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.running.policies import ORDERERS
from ragorder.orderer import Orderer

_BLOCK = 32
_GIB = 1 << 30


class Served(NamedTuple):
    """A model's `shape` in a pool of `tokens`, with `host_gib` of host memory for KV that the pool evicts."""

    shape: str
    tokens: int
    host_gib: int = 0


SERVERS = {
    "qwen2.5-7b": Served("qwen2.5-7b", 100_000),
    "smollm2": Served("smollm2", 100_000),
    "host memory": Served("qwen2.5-7b", 20_000, host_gib=32),
}
_SMALL = Served("tiny", 20_000)


class Servers:
    """One server at a time: the parts of a day that follow each other share one."""

    def __init__(self, *, small: bool) -> None:
        self._small = small
        self._running: tuple[str, VLLMServer] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def url(self, name: str, model: Path) -> str:
        """Return the address of the server `name`, which serves `model`. Raises EngineError if it does not start."""
        if self._running is None or self._running[0] != name or not self._running[1].alive:
            self._stack.close()
            self._running = None
            server = self._stack.enter_context(self._server(name, model))
            self._running = name, server
        return self._running[1].base_url

    def _server(self, name: str, model: Path) -> VLLMServer:
        served = SERVERS[name]
        host_bytes = served.host_gib * (_GIB >> 8 if self._small else _GIB)
        served = _SMALL if self._small else served
        return VLLMServer(
            model,
            blocks=served.tokens // _BLOCK,
            block_size=_BLOCK,
            max_model_len=4_096,
            eager=self._small,
            # The folder has no weights.
            load_format="dummy",
            kv_transfer_config=_host_memory(host_bytes) if host_bytes else None,
        )


def _host_memory(size: int) -> dict[str, Any]:
    """Return ragorder's tiers where this vLLM has their interfaces, else vLLM's own offloading, which evicts by LRU."""
    if (vllm_version() or "").startswith(tuple(f"{minor}." for minor in SUPPORTED_VLLM)):
        return TierSettings.model_validate({"host_bytes": size}).kv_transfer_config()
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": size},
    }


def _orders(trace: Trace, model: Path, capacity_tokens: int) -> dict[str, list[str]]:
    """Return the prompts of a trace as texts, by order: the retriever's, and ragorder's for a cache of this size."""
    prompts = built_prompts(model)
    orderer = Orderer(
        tokens=prompts.document_tokens,
        prefix_tokens=prompts.prefix_tokens,
        capacity_tokens=capacity_tokens,
        block_size=_BLOCK,
        **ORDERERS["earned"],
    )
    texts: dict[str, list[str]] = {"retrieval": [], "earned": []}
    for request in trace.requests:
        texts["retrieval"].append(prompts.builder.build(request.question, request.documents).text)
        ordering = orderer.order(request.documents)
        texts["earned"].append(prompts.builder.build(request.question, ordering.documents).text)
        ordering.confirm()
    return texts


# `vllm bench serve`: the command itself fails if vLLM's package has another name, as its CPU build has.
_BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def _prefix_cache(url: str) -> tuple[float, float]:
    """Return the tokens that the server has looked up and found so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:  # noqa: S310
        text = answer.read().decode()
    found = []
    for name in ("queries", "hits"):
        samples = re.findall(rf"^vllm:prefix_cache_{name}_total\S* (\S+)$", text, re.MULTILINE)
        found.append(sum(map(float, samples)))
    return found[0], found[1]


def _bench(
    url: str, model: Path, prompts: Sequence[str], folder: Path, name: str, load: Sequence[str]
) -> dict[str, Any]:
    """Return what `vllm bench serve` saves, and the share of prompt tokens that was cached."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), "utf-8")
    # Orders do not find each other's blocks.
    salt = json.dumps({"cache_salt": secrets.token_hex(16)})
    command = [sys.executable, "-c", _BENCH_SERVE, "--backend", "openai"]
    command += ["--base-url", url, "--endpoint", "/v1/completions", "--model", VLLMServer.model_name]
    command += ["--tokenizer", str(model), "--dataset-name", "custom", "--dataset-path", str(data)]
    command += ["--num-prompts", str(len(prompts)), "--disable-shuffle", "--skip-chat-template", "--ignore-eos"]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,95", "--extra-body", salt]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", f"{name}.json", *load]
    before = _prefix_cache(url)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    queries, hits = (after - first for after, first in zip(_prefix_cache(url), before, strict=True))
    saved: dict[str, Any] = json.loads((folder / f"{name}.json").read_text("utf-8"))
    if saved["completed"] < len(prompts):
        raise click.ClickException(f"the server answered {saved['completed']} of {len(prompts)} requests: see its log")
    return saved | {"cached_percent": round(100 * hits / queries, 1) if queries else None}


_FIGURES = (
    "cached_percent",
    "p50_ttft_ms",
    "p95_ttft_ms",
    "p50_tpot_ms",
    "p95_itl_ms",
    "request_throughput",
    "completed",
)


@click.command()
@click.option("--base-url", "url", required=True, metavar="URL", help="A vLLM server.")
@click.option("--model", type=click.Path(path_type=Path), required=True, metavar="FOLDER", help="Of its tokenizer.")
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path), required=True, metavar="DIR")
@click.option("--workload", default="paper-shuf", show_default=True, help="One of `ragorder bench`'s.")
@click.option("--capacity-tokens", default=100_000, show_default=True, help="Of the server's cache.")
@click.option("--requests", default=200, show_default=True)
@click.option("--in-flight", default=8, show_default=True)
@click.option("--output-tokens", default=16, show_default=True)
def main(
    url: str, model: Path, folder: Path, workload: str, capacity_tokens: int, requests: int, in_flight: int,
    output_tokens: int,
) -> None:  # fmt: skip
    """Run `vllm bench serve` on the same requests in retrieval order and in ragorder's (policy earned)."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = trace_of_workload(make_workload(workload, 0), requests)
    load = ("--max-concurrency", str(in_flight), "--custom-output-len", str(output_tokens))
    table = {
        name: _bench(url, model, prompts, folder, name, load)
        for name, prompts in _orders(trace, model, capacity_tokens).items()
    }
    figures = {name: {figure: row.get(figure) for figure in _FIGURES} for name, row in table.items()}
    (folder / "orders.json").write_text(json.dumps(figures, indent=1), "utf-8")
    for name, row in figures.items():
        click.echo(f"{name}: " + ", ".join(f"{figure} {value}" for figure, value in row.items()))


if __name__ == "__main__":
    main()
