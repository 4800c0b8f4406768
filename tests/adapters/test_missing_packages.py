"""What an adapter says where its framework, client or library is not installed."""

from __future__ import annotations

from typing import Any

import pytest

MADE = "(object(), model='m', orderer=Orderer(), builder=PromptBuilder())"
OPENAI = "openai httpx httpx2"


@pytest.mark.parametrize(
    ("module", "call", "blocked", "words", "extra"),
    [
        ("langchain", "", "langchain_core", "ragorder.adapters.langchain needs langchain_core", "langchain"),
        ("langchain.middleware", "", "langchain", "needs langchain 1.x", "langchain"),
        ("llama_index", "", "llama_index", "ragorder.adapters.llama_index needs llama_index", "llama-index"),
        ("haystack", "", "haystack", "ragorder.adapters.haystack needs haystack", "haystack"),
        ("dspy", "", "dspy", "ragorder.adapters.dspy needs dspy", "dspy"),
        ("litellm", "", "litellm", "needs litellm", "litellm"),
        ("ray", "", "ray", "Ray Serve needs ray", "ray"),
        ("ray_data", "plan_dataset(None, 2)", "ray", "ragorder.adapters.ray_data needs ray", "ray"),
        ("observing.prometheus", "Metrics()", "prometheus_client", "needs prometheus_client", "proxy"),
        ("observing.opentelemetry", "Tracing()", "opentelemetry", "Tracing needs opentelemetry", "live"),
        ("openai", f"OrderedClient{MADE}", OPENAI, "OrderedClient needs openai", "live"),
        ("openai", f"AsyncOrderedClient{MADE}", OPENAI, "AsyncOrderedClient needs openai", "live"),
        ("openai.pipelined", "OpenAIStreams(None, 'm')", OPENAI, "a pipeline needs openai", "live"),
        ("vllm.async_engine", "AsyncVLLM(None)", "vllm torch", "needs vllm", "vllm"),
    ],
)
def test_the_extra_is_named_where_it_is_needed(
    python: Any, module: str, call: str, blocked: str, words: str, extra: str
) -> None:
    """A module without its package can be imported if there is a call that needs it."""
    script = f"from ragorder import Orderer, PromptBuilder\nimport ragorder.adapters.{module} as module\n"
    script += f"print('imported')\nmodule.{call}" if call else ""
    done = python("-c", script, blocked=tuple(blocked.split()))
    assert (done.returncode, done.stdout) == (1, "imported\n" if call else "")
    assert "ImportError: " in done.stderr
    assert f"{words}: in a clone of ragorder, pip install '.[{extra}]'" in done.stderr
