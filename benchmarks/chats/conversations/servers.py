"""The server that conversations are sent to: a simulated one, or vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ragorder.eval.engines.server import VLLMServer
from ragorder.kernels.random_model import make_model

if TYPE_CHECKING:
    from ragorder.benchmarks.chats.conversations.server import SimulatedServer
    from ragorder.eval.running.options import Options

    ChatServer = VLLMServer | SimulatedServer

__all__ = ["ChatServers", "whole_conversations"]


class ChatServers:
    """Servers for prompts of up to `longest_prompt` tokens. `model` is the folder of the one that vLLM serves: the
    user's, or one of random weights; None with a simulated server."""

    def __init__(self, options: Options, longest_prompt: int) -> None:
        self._options = options
        self._longest_prompt = longest_prompt
        self.model: Path | None = None

    @property
    def obstacle(self) -> str | None:
        if self._options.engine not in ("sim", "openai") or self._options.base_url is not None:
            return "a server is simulated or started: use --engine sim, or openai without --base-url"
        return None

    def start(self, blocks: int, texts: Iterable[str], resources: ExitStack) -> ChatServer:
        """A server with a cache of `blocks`. The tokenizer of a model of random weights is made from `texts`."""
        if self._options.engine == "sim":
            from ragorder.benchmarks.chats.conversations.server import SimulatedServer

            return SimulatedServer(blocks)
        if self._options.model is None:
            folder = Path(resources.enter_context(TemporaryDirectory()))
            shape = {"layers": 2, "hidden_size": 256, "vocab_size": 4096}
            self.model = make_model(
                folder / "model", texts=list(texts), max_position_embeddings=self._longest_prompt, **shape
            )
        else:
            self.model = self._options.model
        return resources.enter_context(VLLMServer(self.model, blocks=blocks, max_model_len=self._longest_prompt))

    def describe(self, server: ChatServer) -> dict[str, Any]:
        """What the record of a run says of its engine."""
        return {
            "name": self._options.engine,
            "model": None if self.model is None else str(self._options.model or "random weights"),
            "block_size": server.block_size,
            "capacity_tokens": server.capacity_tokens,
        }


def whole_conversations(conversations: int, turns: int, limit: int | None) -> int:
    """The turns of as many whole conversations as the limit has room for, one at least."""
    asked = conversations * turns
    return max(turns, min(asked, limit or asked) // turns * turns)
