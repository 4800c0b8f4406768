"""The same questions answered by the embedded engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ragorder.eval.engines.base import EngineError
from ragorder.eval.experiments.fusion.arms import Arm
from ragorder.eval.experiments.fusion.curves import Measured
from ragorder.eval.experiments.fusion.export import llama, llama_tokens
from ragorder.eval.experiments.fusion.model import ChainModel
from ragorder.eval.experiments.fusion.questions import Questions
from ragorder.eval.experiments.fusion.task import ASK, BOS

if TYPE_CHECKING:
    from ragorder.kernels.engine import Completion, Request, TieredEngine

__all__ = ["answer_on_engine", "chain_engine", "measure_on_engine", "prepare"]

_POOL_TOKENS = 8_192
_SYSTEM = [BOS]


@contextmanager
def chain_engine(model: ChainModel) -> Iterator[TieredEngine]:
    from ragorder.kernels.engine import EngineSettings, TieredEngine

    settings = EngineSettings(reuse="fused", device_tokens=_POOL_TOKENS, replicate_nodes=0)
    with TieredEngine(llama(model), settings=settings) as engine:
        yield engine


def measure_on_engine(
    model: ChainModel, questions: Questions, arms: Mapping[str, Arm], *, advance: Callable[[], None] = lambda: None
) -> dict[str, Measured]:
    """Right answers, as `measure_curves` has them."""
    found = {name: Measured() for name in arms}
    with chain_engine(model) as engine:
        for number in range(len(questions)):
            for name, arm in arms.items():
                prepare(engine, questions, number, arm)
                for ratio in arm.ratios:
                    answer = answer_on_engine(engine, questions, number, arm, ratio).token_ids[0]
                    right = float(answer == int(questions.values[number]))
                    found[name].rows.setdefault(f"{ratio:g}", []).append(right)
            advance()
    return found


def prepare(engine: TieredEngine, questions: Questions, number: int, arm: Arm) -> None:
    """An empty cache, then each document of a question behind the system prompt, and an exact prefix of them."""
    documents = questions.documents[number].tolist()
    exact = round(arm.exact * len(documents))
    paths = [[document] for document in documents]
    engine.clear_cache()
    for path in [*paths, documents[:exact]] if exact else paths:
        _generate(engine, _request(path, [ASK], exact=True))


def answer_on_engine(
    engine: TieredEngine, questions: Questions, number: int, arm: Arm, ratio: float, *, keep_logits: bool = False
) -> Completion:
    """Raises EngineError if a document was neither found nor taken over."""
    documents = questions.documents[number].tolist()
    question = [ASK, int(questions.names[number])]
    select = {0.0: "none", 1.0: "all"}.get(ratio, arm.select)
    last = arm.as_if_last and ratio > 0
    request = _request(documents, question, ratio=ratio, select=select, as_if_last=last, keep_logits=keep_logits)
    done = _generate(engine, request)
    found, expected = done.cached.total + done.fused.total, len(request.token_ids) - len(question)
    if found != expected:
        raise EngineError(f"{expected} tokens should be cached or taken over and {found} are: nothing is measured")
    return done


def _request(
    documents: Sequence[Sequence[int]],
    question: Sequence[int],
    *,
    exact: bool = False,
    ratio: float = 0.0,
    select: str = "none",
    as_if_last: bool = False,
    keep_logits: bool = False,
) -> Request:
    from ragorder.kernels.engine import Fusion, Request, Sampling

    tokens, ends = list(_SYSTEM), []
    for document in documents:
        tokens += document
        ends.append(len(tokens))
    return Request(
        llama_tokens([*tokens, *question]),
        ends,
        Sampling(max_tokens=1, ignore_eos=True),
        keep_logits=keep_logits,
        prefix_tokens=len(_SYSTEM),
        fusion="exact" if exact else Fusion(ratio, select, as_if_last),
    )


def _generate(engine: TieredEngine, request: Request) -> Completion:
    (done,) = engine.generate([request])
    if done.error is not None:
        raise EngineError(done.error)
    return done
