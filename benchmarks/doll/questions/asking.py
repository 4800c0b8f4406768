"""Questions to `ragorder engine --corpus` in a process of its own, by clients that stream the answers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ragorder.benchmarks.common.processes import ServerProcess, peak_mb, server_process
from ragorder.common.counts import parse_size
from ragorder.eval.data.machine import resident_mb
from ragorder.eval.engines.base import EngineError
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.load import closed_loop

_ADDRESS = r"Serving on http://127\.0\.0\.1:(\d+)/v1"
_CHAT = "/v1/chat/completions"
_MIB = 1 << 20


class QuestionsCell(SuiteCell):
    """Questions of a corpus with `documents` each and answers of `output_tokens`, `clients` of them at any time.

    The command has `device_bytes` and `host_bytes`. Of `batches` the size is taken that answers `tried` other questions
    in the least time.
    """

    corpus: str = "nqopen"
    requests: int = Field(500, ge=1)
    documents: int = Field(2, ge=1)
    output_tokens: int = Field(16, ge=1)
    clients: int = Field(16, ge=1)
    device_bytes: str = "288MiB"
    host_bytes: str = "12MiB"
    # Read from results it is a list.
    batches: Annotated[tuple[int, ...], Field(strict=False)] = (4, 8, 16)
    tried: int = Field(16, ge=1)

    @property
    def budget_mib(self) -> float:
        return (parse_size(self.device_bytes) + parse_size(self.host_bytes)) / _MIB


@dataclass(frozen=True, slots=True)
class Asked:
    """`questions` and, before them, `warm_up` ones, to a model in a folder, with the documents of a corpus's folder."""

    model: Path
    corpus: Path
    questions: Sequence[str]
    warm_up: Sequence[str]
    cell: QuestionsCell


@dataclass(frozen=True, slots=True)
class Found:
    replies: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]


def ask_command(asked: Asked, advance: Callable[[], None]) -> Found:
    """Return the replies in the order of the questions. Raises EngineError."""
    with _served(asked) as (port, pid):
        return asyncio.run(_ask_all(f"http://127.0.0.1:{port}", pid, asked, advance))


async def _ask_all(url: str, pid: int, asked: Asked, advance: Callable[[], None]) -> Found:
    import httpx2

    limits = httpx2.Limits(max_connections=asked.cell.clients)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        for question in asked.warm_up[:2]:
            await _ask(client, question, asked.cell)
        ready, began_s = resident_mb(pid), time.perf_counter()
        replies: list[Mapping[str, Any]] = [{}] * len(asked.questions)

        async def work(number: int) -> None:
            replies[number] = await _ask(client, asked.questions[number], asked.cell)
            advance()

        await closed_loop(work, range(len(asked.questions)), asked.cell.clients)
        total_s = time.perf_counter() - began_s
    return Found(replies, {"total_s": total_s, "ready_mb": ready, "peak_mb": peak_mb(pid), "batch": None})


async def _ask(client: Any, question: str, cell: QuestionsCell) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": cell.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_s, first_s, text = time.perf_counter(), None, ""
    found: dict[str, Any] = {}
    async with client.stream("POST", _CHAT, json=body) as stream:
        if stream.status_code != 200:
            raise EngineError(f"the command answers with {stream.status_code}: {(await stream.aread())[:300]!r}")
        async for line in stream.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise EngineError(f"the command ends an answer: {chunk['error']}")
            found |= {name: chunk[name] for name in ("documents", "usage") if chunk.get(name)}
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                if first_s is None and choice["delta"].get("content"):
                    first_s = time.perf_counter() - sent_s
    answer_s = time.perf_counter() - sent_s
    usage = found["usage"]
    return reply_of(
        [each["id"] for each in found["documents"]],
        text,
        (usage["prompt_tokens"], usage["completion_tokens"]),
        (answer_s if first_s is None else first_s, answer_s),
    )


def reply_of(
    documents: Sequence[str], text: str, tokens: tuple[int, int], seconds: tuple[float, float]
) -> dict[str, Any]:
    return {
        "documents": " ".join(documents),
        "answer": text.strip(),
        "prompt": tokens[0],
        "output": tokens[1],
        "first_s": round(seconds[0], 4),
        "answer_s": round(seconds[1], 4),
    }


def _served(asked: Asked) -> AbstractContextManager[ServerProcess]:
    cell = asked.cell
    options = ["--model", str(asked.model), "--corpus", str(asked.corpus), "--top-k", str(cell.documents)]
    options += ["--device-bytes", cell.device_bytes, "--host-bytes", cell.host_bytes, "--profile", "none"]
    command = [sys.executable, "-m", "ragorder", "engine", *options, "--device", "cpu", "--port", "0"]
    # Prompts are to be those of transformers.
    environment = os.environ | {"RAGORDER_MAX_DISPLACEMENT": "0"}
    return server_process(command, "stderr", _ADDRESS, env=environment)
