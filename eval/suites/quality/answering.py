"""Sources of answers: an engine in this process, a server, a stub."""

from __future__ import annotations

import hashlib
import json
import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Protocol, Self

from ragorder.adapters.openai.tokenizer import load_tokenizer
from ragorder.common.jsonl import JSONLines
from ragorder.eval.engines.base import Cache, EngineError, RequestError
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.models import longest_prompt, random_model
from ragorder.eval.engines.prompts import PromptIds
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.engines.torch import TorchEngine, need_torch
from ragorder.eval.engines.vllm import VLLMEngine
from ragorder.eval.running.load import Progress
from ragorder.eval.suites.quality.metrics import extract_answer
from ragorder.eval.suites.quality.orders import FusedReuse, GradedQuestion, QualityError, answer_fused
from ragorder.eval.suites.quality.questions import QuestionSet
from ragorder.eval.suites.quality.specs import RANDOM_WEIGHTS, AnswererSpec, ModelFacts, QualityBench, model_facts
from ragorder.prompt import Prompt, PromptBuilder

SYSTEM = (
    "Answer the question from the documents below. Give the answer itself and nothing else, as short as possible: "
    "a name, a number, a date, yes or no."
)
"""The system prompt of every question."""
BATCH = 16
"""Prompts that an engine in this process answers at the same time."""

_TIMEOUT_S = 600.0
_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_CAPACITY_TOKENS = 262_144
CAPACITY = Capacity(tokens=100_000)
# Of prompts that are answered together.
_POOL_TOKENS = 32_768
# Engines in this process, with their default block sizes.
_ENGINES = {"vllm": (VLLMEngine, 32), "torch": (TorchEngine, 16)}


class Builders:
    """Prompt builders without and with a note of the ranking."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._make = cache(
            lambda state_ranking: PromptBuilder(SYSTEM, tokenizer=tokenizer, state_ranking=state_ranking)
        )

    def __call__(self, *, state_ranking: bool) -> PromptBuilder:
        builder: PromptBuilder = self._make(state_ranking)
        return builder


def corpus_tokens(data: QuestionSet, builders: Builders) -> int:
    builder = builders(state_ranking=False)
    documents = {document.id: document for question in data.questions for document in question.documents}
    return sum(builder.document_tokens(document) for document in documents.values())


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """`cached_tokens` of the prompt were an exact prefix, `fused_tokens` reused, and `recomputed_tokens` of these
    recomputed; None if not reported."""

    text: str
    cached_tokens: int | None
    prompt_tokens: int | None = None
    fused_tokens: int | None = None
    recomputed_tokens: int | None = None


class Answerer(Cache, Protocol):
    """An engine that answers greedily."""

    def reset(self, *, reuse: bool = True, fused: FusedReuse | None = None) -> None:
        """Empty the cache; without `reuse` before every further request, too. `fused`: how further requests take
        documents over."""

    def answer(self, question: GradedQuestion, prompt: Prompt) -> ModelAnswer:
        """Raises RequestError, which never quotes the prompt."""


class StubAnswers:
    """Fixed answers for dry runs."""

    name = "stub"
    kept_output_tokens = 0
    partial_blocks_first = True

    def __init__(
        self, say: Callable[[GradedQuestion], str], block_size: int | None, capacity_tokens: int | None
    ) -> None:
        self.block_size = block_size or _DEFAULT_BLOCK_SIZE
        self.capacity_tokens = capacity_tokens
        self._say = say

    def reset(self, *, reuse: bool = True, fused: FusedReuse | None = None) -> None:
        pass

    def answer(self, question: GradedQuestion, prompt: Prompt) -> ModelAnswer:
        return ModelAnswer(self._say(question), None)


class _FusedAnswers:
    """One question after another, with what the engine has cached."""

    def __init__(self, engine: TorchEngine) -> None:
        self.name = engine.name
        self.block_size = engine.block_size
        self.capacity_tokens = engine.capacity_tokens
        self.kept_output_tokens = engine.kept_output_tokens
        self.partial_blocks_first = engine.partial_blocks_first
        self._engine = engine
        self._reuse = True
        self._fused: FusedReuse | None = None

    def reset(self, *, reuse: bool = True, fused: FusedReuse | None = None) -> None:
        self._reuse, self._fused = reuse, fused
        self._engine.reset()

    def answer(self, question: GradedQuestion, prompt: Prompt) -> ModelAnswer:
        if not self._reuse:
            self._engine.reset()
        if self._fused is not None:
            done = answer_fused(self._engine, PromptIds.of(prompt), self._fused)
            return ModelAnswer(done.text, done.cached.total, done.prompt_tokens, done.fused.total, done.recomputed)
        served = self._engine.generate(PromptIds.of(prompt))
        return ModelAnswer(served.text, served.cached_tokens, served.prompt_tokens)


class OnceAnswers:
    """Answers of an engine in this process, each prompt's once, however many orders lead to it: no answer depends on
    what is cached, which a simulated engine counts with these blocks, this capacity and these tokens of answers. Ask
    everything once, then `answer_missing`, then ask again. Answers are appended to `file`, and read from there.
    `whole`: none ends early, at the end of the line that counts."""

    def __init__(
        self,
        engine: VLLMEngine | TorchEngine,
        output_tokens: int,
        *,
        capacity_tokens: int | None,
        model: str,
        whole: bool = False,
        file: Path | None = None,
    ) -> None:
        self.name = engine.name
        self.block_size = engine.block_size
        self.capacity_tokens = capacity_tokens
        self.kept_output_tokens = output_tokens - 1 if engine.kept_output_tokens else 0
        self.partial_blocks_first = engine.partial_blocks_first
        self._engine = engine
        self._output_tokens = output_tokens
        self._stop = () if whole else ("\n",)
        self._file = file
        self._kind = f"{engine.name}\n{model}\n{output_tokens}\n".encode()
        self._known: dict[str, str] = {}
        self._missing: dict[str, tuple[int, PromptIds]] = {}
        self._places: dict[str, int] = {}
        if file is not None and file.exists():
            lines = JSONLines(file, max_line_bytes=None).objects()
            self._known = {str(line["prompt"]): str(line["answer"]) for _, line in lines if "answer" in line}
            if not file.read_bytes().endswith(b"\n"):
                self._append("\n")
        self.reset()

    def reset(self, *, reuse: bool = True, fused: FusedReuse | None = None) -> None:
        assert fused is None, "a simulated engine takes no documents over"
        self._cache = SimEngine(
            block_size=self.block_size,
            capacity_tokens=self.capacity_tokens,
            output_tokens=self.kept_output_tokens,
            prefix_caching=reuse,
            like="vllm-0.32" if self.partial_blocks_first else "lru",
        )

    def answer(self, question: GradedQuestion, prompt: Prompt) -> ModelAnswer:
        ids = PromptIds.of(prompt)
        key = hashlib.sha256(self._kind + array("q", ids).tobytes()).hexdigest()
        place = self._places.setdefault(question.id, len(self._places))
        if key not in self._known:
            self._missing[key] = place, ids
        return ModelAnswer(self._known.get(key, ""), self._cache.generate(ids).cached_tokens, len(ids))

    def answer_missing(self, progress: Progress) -> None:
        """One question after another, so that its orders are answered together. Raises EngineError, OSError."""
        todo = sorted(self._missing.items(), key=lambda item: item[1])
        advance = progress("answering", len(todo))
        for start in range(0, len(todo), BATCH):
            batch = todo[start : start + BATCH]
            texts = self._texts([ids for _, (_, ids) in batch])
            found = {key: text for (key, _), text in zip(batch, texts, strict=True)}
            self._keep(found)
            for key in found:
                del self._missing[key]
                advance()

    def _texts(self, prompts: list[PromptIds]) -> list[str]:
        texts = self._engine.answers(prompts, self._output_tokens, self._stop)
        if self._stop:
            # What began with an empty line, or with thoughts, was ended too early.
            early = [place for place, text in enumerate(texts) if not extract_answer(text)]
            again = self._engine.answers([prompts[place] for place in early], self._output_tokens)
            for place, text in zip(early, again, strict=True):
                texts[place] = text
        return texts

    def _keep(self, found: Mapping[str, str]) -> None:
        self._known |= found
        self._append("".join(json.dumps({"prompt": key, "answer": text}) + "\n" for key, text in found.items()))

    def _append(self, text: str) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(text)


class ServerAnswers:
    """Chat completions of a server, in a `with` block and from several threads. `block_size` and `capacity_tokens` None
    are read from its /metrics, else 16 and 262,144. Every `reset` draws a new `cache_salt`, if the server takes one.
    Raises EngineError for an invalid address or key, ImportError."""

    name = "openai"
    partial_blocks_first = True

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        output_tokens: int,
        block_size: int | None = None,
        capacity_tokens: int | None = None,
        unlimited: bool = False,
        api_key: str | None = None,
    ) -> None:
        from ragorder.adapters.http_client import Server, ServerError
        from ragorder.adapters.vllm.cache_config import read_cache_config

        self.kept_output_tokens = output_tokens - 1
        self._model = model
        self._failure = ServerError
        try:
            self._server = Server(base_url, timeout_s=_TIMEOUT_S, api_key=api_key)
        except ServerError as error:
            raise EngineError(str(error)) from None
        if block_size is None or (capacity_tokens is None and not unlimited):
            found = _DEFAULT_BLOCK_SIZE, _DEFAULT_CAPACITY_TOKENS
            try:
                config = read_cache_config(base_url, api_key=api_key)
                found = config.block_size, config.capacity_tokens
            except ServerError:
                pass
            block_size = block_size or found[0]
            capacity_tokens = None if unlimited else capacity_tokens or found[1]
        self.block_size = block_size
        self.capacity_tokens = capacity_tokens
        self._forms: list[dict[str, Any]] = [
            {"max_tokens": output_tokens, "cache_salt": ""},
            {"max_tokens": output_tokens},
            {"max_completion_tokens": output_tokens},
        ]
        self._form = 0
        self._works = False
        self._lock = Lock()
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.__exit__(kind, error, at)

    def reset(self, *, reuse: bool = True, fused: FusedReuse | None = None) -> None:
        self._salt = secrets.token_hex(16) if reuse else None

    def answer(self, question: GradedQuestion, prompt: Prompt) -> ModelAnswer:
        while True:
            form = self._form
            try:
                answer = self._ask(prompt, self._forms[form])
            except RequestError as error:
                # Another thread may have found the form that works while this request was in flight.
                if error.status not in (400, 422) or (self._works and form >= self._form):
                    raise
                with self._lock:
                    # This request is refused in every form, so the form is not the cause.
                    if form + 1 == len(self._forms):
                        self._form = 0
                        raise
                    self._form = max(self._form, form + 1)
            else:
                self._works = True
                return answer

    def _ask(self, prompt: Prompt, form: Mapping[str, Any]) -> ModelAnswer:
        body = {"model": self._model, "messages": prompt.messages, "temperature": 0, **form}
        if "cache_salt" in form:
            body["cache_salt"] = self._salt or secrets.token_hex(16)
        try:
            answer = self._server.post_json("/v1/chat/completions", body)
            text = answer["choices"][0]["message"]["content"]
            usage = answer.get("usage") or {}
            cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            prompt_tokens = usage.get("prompt_tokens")
        except self._failure as error:
            raise RequestError(f"HTTP {error.status}" if error.status else "no answer", error.status) from None
        except (KeyError, IndexError, TypeError, AttributeError):
            raise RequestError("the answer is not a chat completion") from None
        if text is not None and not isinstance(text, str):
            raise RequestError("the answer has no text")
        # Without a salt one order finds blocks of another in the cache.
        told = "cache_salt" in form and isinstance(cached_tokens, int)
        counted = prompt_tokens if isinstance(prompt_tokens, int) else None
        return ModelAnswer(text or "", cached_tokens if told else None, counted)


@contextmanager
def serve_answers(
    bench: QualityBench, data: QuestionSet, progress: Progress
) -> Iterator[tuple[Answerer, Builders, ModelFacts]]:
    """Raises QualityError for prompts that do not fit, EngineError for a server that does not answer, OSError for a
    model that cannot be loaded, ImportError."""
    spec = bench.engine
    with _server(spec, data) if spec.engine == "openai" else _local(bench, data, progress) as ready:
        yield ready


@contextmanager
def _server(spec: AnswererSpec, data: QuestionSet) -> Iterator[tuple[Answerer, Builders, ModelFacts]]:
    from ragorder.eval.engines.openai import find_model

    assert spec.base_url is not None
    served = find_model(spec.base_url, spec.served_model, api_key=spec.api_key)
    builders = Builders(load_tokenizer(spec.model) if spec.model is not None else None)
    capacity = spec.capacity_tokens
    with ServerAnswers(
        spec.base_url,
        served.id,
        output_tokens=spec.output_tokens,
        block_size=spec.block_size,
        capacity_tokens=capacity.resolve(corpus_tokens(data, builders)) if capacity else None,
        unlimited=capacity == Capacity(),
        api_key=spec.api_key,
    ) as answers:
        yield answers, builders, model_facts(served.id, spec.model or served.root)


@contextmanager
def _local(
    bench: QualityBench, data: QuestionSet, progress: Progress
) -> Iterator[tuple[Answerer, Builders, ModelFacts]]:
    spec, fuses = bench.engine, bench.fuses
    if spec.engine == "torch":
        need_torch()
    start, block_size = _ENGINES[spec.engine]
    model = spec.model or random_model()
    builders = Builders(load_tokenizer(model))
    builder, lengths = builders(state_ranking=True), []
    advance = progress(f"{data.dataset.name}: counting tokens", len(data.questions))
    for question in data.questions:
        lengths.append(len(builder.build(question.text, list(question.documents)).token_ids or ()))
        advance()
    longest = max(lengths) + spec.output_tokens
    size, room = spec.block_size or block_size, longest_prompt(model)
    capacity_tokens = (spec.capacity_tokens or CAPACITY).resolve(corpus_tokens(data, builders))
    for takes, whose in ((room, "the model takes"), (capacity_tokens, "the cache (--capacity-tokens) holds")):
        if takes is not None and takes < longest:
            raise QualityError(
                f"the longest prompt has {longest:,} tokens, answer included, and {whose} {takes:,}: "
                "lower --top-k or --document-words"
            )
    if fuses and capacity_tokens is not None and capacity_tokens < 2 * longest:
        raise QualityError(
            f"the longest prompt has {longest:,} tokens, and the cache holds {capacity_tokens:,}: give "
            f"--capacity-tokens {2 * longest} for what fused requests copy"
        )
    options: dict[str, Any] = {
        "block_size": size,
        "max_model_len": min(room, longest + size),
        "output_tokens": spec.output_tokens,
    }
    named = str(spec.model or RANDOM_WEIGHTS)
    facts = model_facts(Path(named).name if Path(named).is_dir() else named, model)
    if fuses:
        unlimited = 2 * (sum(lengths) + len(lengths) * (spec.output_tokens + size))
        options |= {"capacity_tokens": capacity_tokens, "unlimited_tokens": unlimited, "reuse": "fused"}
    else:
        held = max(2, min(BATCH, _POOL_TOKENS // (longest + size)))
        options |= {"capacity_tokens": held * (longest + size)} | ({"at_once": BATCH} if spec.engine == "vllm" else {})
    engine = start(model, **options)
    try:
        if not fuses:
            thinks = "<think>" in builders(state_ranking=False).build("", []).text
            once = OnceAnswers(
                engine,
                spec.output_tokens,
                capacity_tokens=capacity_tokens,
                model=named,
                whole=thinks,
                file=bench.answers,
            )
            yield once, builders, facts
        else:
            with engine.answering(spec.output_tokens):
                yield _FusedAnswers(engine), builders, facts
    finally:
        engine.close()
