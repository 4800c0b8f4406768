"""The same questions answered by the embedded engine, by the model as a stock Llama."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ragorder.benchmarks.fusion.fusion.cells import Arm
from ragorder.benchmarks.fusion.fusion.prompts import Measured, Prompts, Questions
from ragorder.benchmarks.fusion.fusion.task import ASK, BOS, EPSILON, OPENING, THETA, VOCABULARY, ChainModel
from ragorder.benchmarks.kernels.embedded.models import timed
from ragorder.eval.engines.base import EngineError
from ragorder.eval.running.load import rotated

if TYPE_CHECKING:
    from torch import Tensor

    from ragorder.kernels.engine import Completion, Fusion, Request, TieredEngine

_LONGEST_TOKENS = 4096
_IDLE_UNITS = 4096


def llama(model: ChainModel, idle_layers: int = 0) -> Any:
    """Return the model in transformers' terms; `idle_layers` change nothing, and take a larger model's time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers = model.width, model.passes + idle_layers
    units = max(2 * width, _IDLE_UNITS) if idle_layers else 2 * width
    config: Any = LlamaConfig(
        vocab_size=VOCABULARY**2,
        hidden_size=width,
        intermediate_size=units,
        num_hidden_layers=layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads,
        head_dim=model.head_dim,
        max_position_embeddings=_LONGEST_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        rms_norm_eps=EPSILON,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        made: Any = LlamaForCausalLM(config)
    query, key, value = model.weights["qkv"].chunk(3)
    gate, up = (pad(each, (0, 0, 0, units - 2 * width)) for each in model.weights["up"].chunk(2))
    head = torch.zeros(VOCABULARY**2, width)
    head[:VOCABULARY] = model.weights["head"]
    state = {"model.embed_tokens.weight": _pairs(model), "model.norm.weight": model.weights["norm"]}
    state["lm_head.weight"] = head
    for layer in range(layers):
        idle = model.passes - 1 <= layer < layers - 1
        of_layer = {
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": model.weights["output"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": pad(model.weights["down"], (0, units - 2 * width)),
            "input_layernorm": model.weights["attention_norm"],
            "post_attention_layernorm": model.weights["mlp_norm"],
        }
        for name, weight in of_layer.items():
            state[f"model.layers.{layer}.{name}.weight"] = torch.zeros_like(weight) if idle else weight.clone()
    made.load_state_dict(state)
    return made.eval().requires_grad_(False)


def llama_tokens(tokens: Sequence[int]) -> list[int]:
    """A prompt in the tokens of `llama`. What opens a document or a question is the same after everything."""
    behind = (0 if token in OPENING else before for before, token in zip([0, *tokens], tokens, strict=False))
    return [before * VOCABULARY + token for before, token in zip(behind, tokens, strict=True)]


def _pairs(model: ChainModel) -> Tensor:
    every = torch.arange(VOCABULARY)
    return torch.cat([model.embed(every, torch.full_like(every, before)) for before in range(VOCABULARY)])


_POOL_TOKENS = 8_192
_SYSTEM = [BOS]


@dataclass(slots=True)
class ServedCurve(Measured):
    """Rows also have wall and CPU times. Of `compared` answers `others` differ from the reference's."""

    compared: int = 0
    others: int = 0
    apart: float = 0.0

    @property
    def facts(self) -> dict[str, Any]:
        return {"compared": self.compared, "others": self.others, "apart": self.apart}

    def add(self, ratio: float, value: int, done: Completion, wall_ms: float, cpu_ms: float) -> None:
        row = {"": float(done.token_ids[0] == value), "wall_ms ": round(wall_ms, 3), "cpu_ms ": round(cpu_ms, 3)}
        for name, figure in row.items():
            self.rows.setdefault(f"{name}{ratio:g}", []).append(figure)

    def compare(self, done: Completion, expected: Tensor) -> None:
        assert done.logits is not None
        self.compared += 1
        self.others += done.token_ids[0] != int(expected.argmax())
        self.apart = max(self.apart, float((done.logits[: len(expected)] - expected).abs().max()))


@contextmanager
def chain_engine(model: ChainModel, idle_layers: int = 0) -> Iterator[TieredEngine]:
    from ragorder.kernels.engine import EngineSettings, TieredEngine

    settings = EngineSettings(reuse="fused", device_tokens=_POOL_TOKENS, replicate_nodes=0)
    with TieredEngine(llama(model, idle_layers), settings=settings) as engine:
        yield engine


def measure_on_engine(
    model: ChainModel,
    questions: Questions,
    arms: Mapping[str, Arm],
    *,
    idle_layers: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, ServedCurve]:
    """Right answers, as `measure_curves` has them. Arms take turns on the same questions."""
    found = {name: ServedCurve() for name in arms}
    with chain_engine(model, idle_layers) as engine:
        for number, value in enumerate(questions.values.tolist()):
            prompts = Prompts(model, questions.part(number, number + 1), neighbours=0, seed=0)
            for name in rotated(list(arms), number):
                arm, like = arms[name], reference_arm(arms[name], questions)
                # What is recomputed as a whole is exact, and the next arm would find it.
                prepare(engine, questions, number, arm)
                for ratio in arm.ratios:
                    ask = partial(answer_on_engine, engine, questions, number, arm, ratio, keep_logits=True)
                    done, wall_ms, cpu_ms = timed(ask)
                    found[name].add(ratio, value, done, wall_ms, cpu_ms)
                    # Random draws are others.
                    if arm.select != "random" or ratio in (0.0, 1.0):
                        found[name].compare(done, prompts.answer(like, prompts.budget(like, ratio))[0])
            advance()
    return found


def reference_arm(arm: Arm, questions: Questions) -> Arm:
    """What the reference does as the engine: a document that stands directly after the system prompt is exact."""
    return replace(arm, exact=max(arm.exact, 1 / questions.level.documents))


def prepare(engine: TieredEngine, questions: Questions, number: int, arm: Arm) -> None:
    """An empty cache, then each document of a question after the system prompt, and an exact prefix of them."""
    documents = questions.documents[number].tolist()
    exact = round(arm.exact * len(documents))
    paths = [[document] for document in documents]
    engine.clear_cache()
    for path in [*paths, documents[:exact]] if exact else paths:
        _generate(engine, _request(path, [ASK], "exact"))


def answer_on_engine(
    engine: TieredEngine, questions: Questions, number: int, arm: Arm, ratio: float, *, keep_logits: bool = False
) -> Completion:
    """Raises EngineError if another prefix was exact than the arm has, or a document was not reused."""
    documents = questions.documents[number].tolist()
    question = [ASK, int(questions.names[number])]
    request = _request(documents, question, _fusion(arm, ratio), keep_logits=keep_logits)
    done = _generate(engine, request)
    level = questions.level
    exact = len(_SYSTEM) + round(reference_arm(arm, questions).exact * level.documents) * level.document_tokens
    expected = exact, len(_SYSTEM) + level.tokens - exact
    if (done.cached.total, done.fused.total) != expected:
        found = f"{done.cached.total} and {done.fused.total}"
        raise EngineError(f"{expected[0]} tokens should be exact and {expected[1]} reused, not {found}")
    return done


def _fusion(arm: Arm, ratio: float) -> Fusion:
    from ragorder.kernels.engine import Fusion

    # With nothing or everything recomputed there is nothing to select.
    return Fusion(ratio, arm.select, arm.rounds) if 0 < ratio < 1 else Fusion(ratio)


def _request(
    documents: Sequence[Sequence[int]],
    question: Sequence[int],
    fusion: Fusion | Literal["exact"],
    *,
    keep_logits: bool = False,
) -> Request:
    from ragorder.kernels.engine import Request, Sampling

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
        fusion=fusion,
    )


def _generate(engine: TieredEngine, request: Request) -> Completion:
    (done,) = engine.generate([request])
    if done.error is not None:
        raise EngineError(done.error)
    return done
