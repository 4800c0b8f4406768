"""One request, and what shows whether its answer is right: the logarithms of its tokens' probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DTYPE = "float32"
"""Of a server whose answers are compared. In bfloat16 the last bit of a number, which depends on what else is computed
at the same time, is worth as much as a wrong block of KV."""

MAX_DIFFERENCE = 1e-3
"""Between two logarithms that count as the same. A prompt that is computed as a whole and one of which a part was
cached may take other ways through the same sums; in float32 that is worth a hundredth of this, and a single block of 32
tokens that is another prompt's ten times as much (prompts of 570 tokens, two layers)."""

OUTPUT_TOKENS = 4
_TOP = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of an answer, for each place the most likely ones with the logarithms of their probabilities, and how
    much of the prompt was cached."""

    tokens: tuple[str, ...]
    likely: tuple[Mapping[str, float], ...]
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Answer:
        """From the JSON of /v1/completions. Raises KeyError, TypeError for something else."""
        (choice,), usage = body["choices"], body["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return cls(
            tuple(choice["logprobs"]["tokens"]),
            tuple(choice["logprobs"]["top_logprobs"]),
            usage["prompt_tokens"],
            details.get("cached_tokens") or 0,
        )

    def difference(self, other: Answer) -> float:
        """The largest one between two logarithms, as far as both answers are known, and up to the first place where
        they part; infinite if a token of one is not even likely in the other."""
        worst = 0.0
        for mine, theirs, here, there in zip(self.tokens, other.tokens, self.likely, other.likely, strict=False):
            for token in {mine, theirs}:
                if token not in here or token not in there:
                    return math.inf
            worst = max(worst, *(abs(here[token] - there[token]) for token in here.keys() & there.keys()))
            if mine != theirs:
                break
        return worst

    def agrees(self, other: Answer) -> bool:
        """Whether both are answers to the same prompt, as far as the numbers can say. A token may differ where two were
        as likely as each other."""
        return self.difference(other) <= MAX_DIFFERENCE


def body_of(model: str, prompt: Sequence[int], salt: str | None = None) -> dict[str, Any]:
    """What /v1/completions of vLLM is sent."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "logprobs": _TOP,
        "ignore_eos": True,
        # Different tokens may have the same text.
        "return_tokens_as_token_ids": True,
    }
    return body if salt is None else body | {"cache_salt": salt}


def ask(client: Any, base_url: str, model: str, prompt: Sequence[int], salt: str | None = None) -> Answer:
    """Send one prompt with an httpx2 client. Raises httpx2.HTTPError, also for an answer with an HTTP error."""
    response = client.post(f"{base_url}/v1/completions", json=body_of(model, prompt, salt))
    response.raise_for_status()
    return Answer.of(response.json())
