"""Questions computed by a warm-up, while documents are searched for, and used by the fused request that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.inside import questions_of
from support.small_engine import Make, tokens

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.fused_reference import prompt_of

from ragorder.kernels.engine import Completion, Fusion, Request, TieredEngine
from ragorder.kernels.engine.scoring import Scorer

SYSTEM = tokens(21, 100)
A, B, NEW = (tokens(length, seed) for length, seed in ((37, 1), (30, 2), (16, 3)))
QUESTION = tokens(9, 5)
FUSION = Fusion(0.3, "query")


def warm_up(question: Sequence[int] = QUESTION, *, system: Sequence[int] = SYSTEM, salt: str | None = None) -> Request:
    """A system prompt and a question, without documents."""
    request = prompt_of(system, [], question, salt=salt)
    return replace(request, document_ends=[len(system)], keep_question=True)


def counts(engine: TieredEngine) -> tuple[int, int]:
    stats = engine.stats()
    return stats.questions_kept, stats.questions_used


def served(engine: TieredEngine, documents: Sequence[Sequence[int]], **options: Any) -> Completion:
    for document in (A, B):
        engine.generate([prompt_of(SYSTEM, [document], tokens(3, 77), fusion="exact")])
    if options.pop("warmed", False):
        engine.generate([warm_up()])
    [completion] = engine.generate([prompt_of(SYSTEM, documents, QUESTION, fusion=FUSION)])
    return completion


@pytest.mark.parametrize("documents", [[B, A], [NEW, B, A]], ids=["all have KV", "one has none"])
def test_selects_by_the_question_alone(
    fusing: Make, chosen: list[list[int]], monkeypatch: pytest.MonkeyPatch, documents: list[list[int]]
) -> None:
    engine = fusing()
    warmed = served(engine, documents, warmed=True)
    attention = Scorer.attention
    monkeypatch.setattr(Scorer, "attention", lambda *given, **options: attention(*given, **options | {"alone": True}))
    alone = served(fusing(), documents)
    assert chosen[0] == chosen[1]
    assert float((warmed.logits - alone.logits).abs().max()) <= 1e-4
    assert counts(engine) == (1, 1)


def test_saves_the_questions_forward(fusing: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    reading = Scorer.read

    def recorded(self: Scorer, scene: Any, start: int, *most: Any) -> Any:
        read.append(start)
        return reading(self, scene, start, *most)

    monkeypatch.setattr(Scorer, "read", recorded)
    served(fusing(), [B, A], warmed=True)
    assert read == [len(SYSTEM)]


OTHERS = {
    "question": warm_up(tokens(9, 6)),
    "system prompt": warm_up(system=tokens(21, 101)),
    "tenant": warm_up(salt="red"),
    "not asked for": replace(warm_up(), keep_question=False),
    "another end": replace(warm_up(), prefix_tokens=20),
    "no question": replace(warm_up(), token_ids=SYSTEM),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_one_is_not_used(fusing: Make, other: Request) -> None:
    engine = fusing()
    engine.generate([other])
    served(engine, [B, A])
    assert counts(engine)[1] == 0


def test_an_exact_engine_keeps_none(make: Make) -> None:
    engine = make()
    [completion] = engine.generate([warm_up()])
    assert completion.finish_reason == "length"
    assert counts(engine) == (0, 0)


def test_a_failure_leaves_the_answer(
    fusing: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("Zanzibar")

    engine = fusing()
    with monkeypatch.context() as patched:
        patched.setattr(Scorer, "read", fail)
        [completion] = engine.generate([warm_up()])
    assert completion.finish_reason == "length"
    assert "Zanzibar" not in caplog.text
    assert served(engine, [B, A]).recomputed == round(0.3 * len(A))
    assert counts(engine) == (0, 0)


def test_is_forgotten_with_the_cache(fusing: Make) -> None:
    engine = fusing()
    engine.generate([warm_up()])
    engine.clear_cache()
    served(engine, [B, A])
    assert counts(engine) == (1, 0)


class TestBounds:
    """Of what is kept."""

    @pytest.fixture
    def engine(self, fusing: Make) -> TieredEngine:
        return fusing()

    def test_the_latest_fit(self, engine: TieredEngine) -> None:
        questions = questions_of(engine, most_tokens=25)
        for seed in range(4):
            engine.generate([warm_up(tokens(9, seed))])
        assert len(questions) == 2
        for seed, used in ((3, 1), (0, 1), (2, 2)):
            engine.generate([prompt_of(SYSTEM, [document], QUESTION) for document in (A, B)])
            engine.generate([prompt_of(SYSTEM, [B, A], tokens(9, seed), fusion=FUSION)])
            assert counts(engine) == (4, used)

    @pytest.mark.parametrize(("most_tokens", "count"), [(9, 1), (8, 0)])
    def test_one_is_kept_once_unless_it_is_too_long(self, engine: TieredEngine, most_tokens: int, count: int) -> None:
        questions = questions_of(engine, most_tokens=most_tokens)
        for _ in range(3):
            engine.generate([warm_up()])
            assert len(questions) == count

    def test_they_expire(self, engine: TieredEngine) -> None:
        times = [0.0]
        questions = questions_of(engine, clock=lambda: times[-1])
        engine.generate([warm_up()])
        for now, count in ((59.0, 1), (61.0, 0)):
            times.append(now)
            assert len(questions) == count
        served(engine, [B, A])
        assert counts(engine) == (1, 0)
