"""transformers with model, index and documents in memory, in a process of its own: a peer of the command."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragorder.benchmarks.common.processes import peak_mb, started
from ragorder.benchmarks.doll.questions.asking import Asked, Found, reply_of
from ragorder.eval.data.machine import resident_mb
from ragorder.eval.engines.base import EngineError


def ask_transformers(asked: Asked, batches: Sequence[int], advance: Callable[[], None]) -> Found:
    """Return the replies, in the fastest of these sizes of a batch. Raises EngineError."""
    given = {
        "model": str(asked.model),
        "corpus": str(asked.corpus),
        "questions": list(asked.questions),
        "warm_up": list(asked.warm_up),
        "documents": asked.cell.documents,
        "output_tokens": asked.cell.output_tokens,
        "clients": asked.cell.clients,
        "batches": list(batches),
    }
    replies: list[Mapping[str, Any]] = [{}] * len(asked.questions)
    command = [sys.executable, "-m", "ragorder.benchmarks.doll.questions.peer"]
    with started(command, "stdout", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(given))
        process.stdin.close()
        for line in process.stdout:
            told = json.loads(line)
            if "facts" in told:
                return Found(replies, told["facts"])
            replies[told.pop("number")] = told
            advance()
    raise EngineError("transformers ended before all questions were answered: its error is above")


def main() -> None:
    given = json.load(sys.stdin)
    peer = Peer(Path(given["model"]), Path(given["corpus"]), given["documents"], given["output_tokens"])
    batch = _fastest(peer, given["warm_up"], given["batches"])
    ready, began_s = resident_mb(), time.perf_counter()
    for number, reply in peer.serve(given["questions"], batch, given["clients"]):
        _tell({"number": number, **reply})
    total_s = time.perf_counter() - began_s
    facts = {"total_s": total_s, "ready_mb": ready, "peak_mb": peak_mb(os.getpid()), "batch": batch}
    _tell({"facts": facts})


def _tell(said: Mapping[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(said)}\n")
    sys.stdout.flush()


def _fastest(peer: Peer, questions: Sequence[str], batches: Sequence[int]) -> int:
    seconds: dict[int, float] = {}
    # The first answers pay for what later ones have.
    list(peer.serve(questions[:2], 1, 1))
    for batch in batches if len(batches) > 1 else ():
        began_s = time.perf_counter()
        list(peer.serve(questions, batch, len(questions)))
        seconds[batch] = time.perf_counter() - began_s
    return min(seconds, key=seconds.__getitem__) if seconds else batches[0]


@dataclass(slots=True)
class _Task:
    """What a search reads of a question."""

    question: Any
    checkpoint: Any = None
    cancel_search: Any = None
    abandoned: bool = False


class Peer:
    """A model of transformers, and the command's own index, documents and prompts."""

    def __init__(self, model: Path, corpus: Path, documents: int, output_tokens: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from ragorder.adapters.embedded.library import Library
        from ragorder.prompt import PromptBuilder

        self._tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
        self._builder = PromptBuilder(tokenizer=self._tokenizer)
        library = Library(corpus, top_k=documents, say=lambda said: None)
        self._retrieval = library.retrieval(self._builder, None)
        self._output_tokens = output_tokens

    def serve(self, questions: Sequence[str], batch: int, clients: int) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Answer batch after batch; a question arrives at the beginning, or when another one is answered."""
        batch = min(batch, clients)
        arrived_s: deque[float] = deque([time.perf_counter()] * clients)
        for first in range(0, len(questions), batch):
            part = questions[first : first + batch]
            arrivals = [arrived_s.popleft() for _ in part]
            found = asyncio.run(self._search(part))
            prompts = [self._builder.build(each, found[place]).token_ids or [] for place, each in enumerate(part)]
            answers, first_s = self._generate(prompts)
            ended_s = time.perf_counter()
            arrived_s.extend([ended_s] * len(part))
            for place, answer in enumerate(answers):
                ids = [each.id for each in found[place]]
                text = self._tokenizer.decode(answer, skip_special_tokens=True)
                seconds = first_s - arrivals[place], ended_s - arrivals[place]
                yield first + place, reply_of(ids, text, (len(prompts[place]), len(answer)), seconds)

    async def _search(self, questions: Sequence[str]) -> Mapping[int, Any]:
        from ragorder.adapters.openai.prompts import Question

        found = {}
        async for place, documents in self._retrieval.search_batch([_Task(Question(each)) for each in questions]):
            if isinstance(documents, Exception):
                raise documents
            found[place] = documents
        return found

    def _generate(self, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], float]:
        """Return the answers' tokens, and when the first ones were there."""
        import torch

        end = self._tokenizer.eos_token_id
        longest, clock = max(map(len, prompts)), FirstToken()
        ids = torch.tensor([[end] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            made = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self._output_tokens,
                do_sample=False,
                pad_token_id=end,
                streamer=clock,
            )
        rows = made[:, longest:].tolist()
        return [row[: row.index(end) + 1] if end in row else row for row in rows], clock.first_s


class FirstToken:
    """A streamer of `generate` that notes when the first tokens are there."""

    def __init__(self) -> None:
        self.first_s = 0.0
        self._puts = 0

    def put(self, value: Any) -> None:
        # The prompt comes first.
        self._puts += 1
        if self._puts == 2:
            self.first_s = time.perf_counter()

    def end(self) -> None:
        pass


if __name__ == "__main__":
    main()
