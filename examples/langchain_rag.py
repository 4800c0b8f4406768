"""A LangChain RAG chain with documents in the order that reuses most of the engine's prefix cache.

    pip install '.[langchain,live]' langchain-openai
    vllm serve MODEL --enable-prompt-tokens-details
    python examples/langchain_rag.py [http://127.0.0.1:8000/v1]

It asks the same questions in retrieval order and in ragorder's order, and prints the cached tokens of each prompt.
Without a GPU see docs/vllm.md for the server's command.
"""

from __future__ import annotations

import re
from uuid import uuid4
from zlib import crc32

import click
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import RetrieverLike
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI
from openai import OpenAI

from ragorder import Orderer
from ragorder.adapters.langchain import CacheOrderRetriever, FeedbackHandler

MANUAL = {
    "water": "Fill the tank with fresh cold water every day. Hard water leaves scale in the boiler, so use a filter.",
    "beans": "Fill the hopper with roasted beans. Oily beans clog the grinder, and ground coffee must never go in.",
    "grinder": "Turn the ring of the grinder while it runs. A finer grind makes coffee stronger, and too fine clogs.",
    "milk": "Put the hose into cold milk for foam. Rinse the hose after each use, or milk will clog it within a day.",
    "scale": "When the lamp blinks, the boiler has scale. Empty the tank, add descaler and water, and press start.",
    "clean": "Clean the brew group every week. Take it out, rinse it under water without soap, and let it dry.",
    "lamps": "A red lamp means that the tank is empty, a blinking lamp that there is scale, two that the tray is full.",
    "strong": "For strong coffee, choose a finer grind, more beans in each cup, and less water. Preheat the cup.",
}
QUESTIONS = [
    "Why does the lamp blink, and what has the water to do with scale in the boiler?",
    "What do I do about scale when the lamp is blinking and the tank has hard water?",
    "Is the tank empty or is there scale in the boiler when a lamp will blink?",
    "How do I make strong coffee: a finer grind, more beans, less water?",
    "The grinder clogs: are the beans too oily or is the grind too fine for coffee?",
    "Which beans and which grind make the coffee in my cup stronger?",
]
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from the manual."), ("human", "{context}\n\nQuestion: {question}")]
)


class WordEmbeddings(Embeddings):
    """The words of a text as a vector; replace it by your embedding model."""

    def embed_query(self, text: str) -> list[float]:
        vector = [0.0] * 512
        for word in re.findall(r"\w{4,}", text.lower()):
            vector[crc32(word[:5].encode()) % 512] = 1.0
        return vector

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return list(map(self.embed_query, texts))


def show(documents: list[Document]) -> str:
    """Join the texts. Numbers by position would be harmless; retrieval ranks would end the reuse."""
    return "\n\n".join(document.page_content for document in documents)


def ask(name: str, base_url: str, retriever: RetrieverLike, tenant: str) -> None:
    model = OpenAI(base_url=base_url, api_key="none").models.list().data[0].id
    # The salt gives each of the two rounds its own cache, empty at first.
    salt = {"cache_salt": tenant}
    llm = ChatOpenAI(
        base_url=base_url, api_key="none", model=model, max_completion_tokens=32, temperature=0, extra_body=salt
    )
    chain = {"context": retriever | show, "question": RunnablePassthrough()} | PROMPT | llm
    handler = FeedbackHandler()
    cached = prompt = 0
    for question in QUESTIONS:
        answer = chain.invoke(question, config={"callbacks": [handler], "metadata": {"tenant": tenant}})
        usage = answer.usage_metadata
        reused = usage["input_token_details"].get("cache_read")
        if reused is None:
            raise click.ClickException("no cached tokens are reported: start vLLM with --enable-prompt-tokens-details")
        click.echo(f"  {question}\n    {answer.text[:80]!r}  ({reused} of {usage['input_tokens']} tokens cached)")
        cached += reused
        prompt += usage["input_tokens"]
    click.echo(f"{name}: {cached} of {prompt} prompt tokens from the cache\n")


@click.command()
@click.argument("base_url", default="http://127.0.0.1:8000/v1")
def main(base_url: str) -> None:
    store = InMemoryVectorStore(WordEmbeddings())
    store.add_documents([Document(text, id=id) for id, text in MANUAL.items()])
    retriever = store.as_retriever(search_kwargs={"k": 4})
    ask("retrieval order", base_url, retriever, uuid4().hex)

    orderer = Orderer.for_vllm(base_url)
    ordered = CacheOrderRetriever(retriever=retriever, orderer=orderer, scope=lambda metadata: metadata["tenant"])
    ask("ordered", base_url, ordered, uuid4().hex)


if __name__ == "__main__":
    main()
