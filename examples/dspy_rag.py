"""A DSPy program whose prompts reuse the server's prefix cache.

    pip install '.[dspy,live]'
    vllm serve MODEL --enable-prompt-tokens-details
    python examples/dspy_rag.py [http://127.0.0.1:8000/v1]

The passages are the first field of the signature: the prompt before them is the same for each question.
Without a GPU see docs/vllm.md for the server's command.
"""

from __future__ import annotations

import click
import dspy
from openai import OpenAI

from ragorder import Orderer
from ragorder.adapters.dspy import CacheOrderRetriever

TEXTS = [
    "A sundial tells the time by the shadow of its gnomon, which is parallel to the axis of the earth.",
    "A water clock tells the time by the level of water that runs from one vessel into another.",
    "A pendulum clock keeps time by a pendulum, which takes as long for a wide swing as for a narrow one.",
    "A quartz clock keeps time by a crystal that swings 32,768 times in a second.",
    "An hourglass tells the time by sand that runs from one glass into another, and is turned when it is empty.",
]
QUESTIONS = [
    "Which clock tells the time by water or sand that runs?",
    "Which clock keeps time by something that swings?",
    "How does a water clock or an hourglass tell the time by what runs from one vessel into another?",
    "Does a pendulum clock keep time by a crystal that swings?",
]


def search(question: str) -> list[str]:
    """The three passages with most words of the question; replace it by `dspy.Embeddings` or another retriever."""
    words = set(question.lower().strip("?").split())
    return sorted(TEXTS, key=lambda text: -len(words & set(text.lower().split())))[:3]


class Answer(dspy.Signature):
    """Answer the question from the passages."""

    passages: list[str] = dspy.InputField()
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Rag(dspy.Module):
    def __init__(self, orderer: Orderer) -> None:
        super().__init__()
        self.retrieve = CacheOrderRetriever(search, orderer)
        self.answer = dspy.Predict(Answer)

    def forward(self, question: str) -> dspy.Prediction:
        return self.answer(passages=self.retrieve(question).passages, question=question)


@click.command()
@click.argument("base_url", default="http://127.0.0.1:8000/v1")
def main(base_url: str) -> None:
    model = OpenAI(base_url=base_url, api_key="none").models.list().data[0].id
    lm = dspy.LM(f"openai/{model}", api_base=base_url, api_key="none", max_tokens=24, temperature=0, cache=False)
    rag = Rag(Orderer.for_vllm(base_url))
    # One call per question: a second attempt in another form would find the first one in the cache.
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
        for question in QUESTIONS:
            try:
                rag(question)
            except dspy.utils.exceptions.AdapterParseError:
                click.echo("(the model does not answer in the form that DSPy asks for)")
            usage = lm.history[-1]["usage"]
            cached = dict(usage.get("prompt_tokens_details") or {}).get("cached_tokens", "unknown")
            click.echo(f"{question:52.52} cached {cached} of {usage['prompt_tokens']} tokens")


if __name__ == "__main__":
    main()
