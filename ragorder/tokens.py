"""The served model's tokenizer, as the prompt builder uses it: segment by segment, never across a seam."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import Any, NamedTuple

from ragorder import _fork

__all__ = ["Frame", "SegmentTokenizer"]

_SLOT = "@@ragorder-documents@@"


class Frame(NamedTuple):
    """What the chat template puts before and after the user's turn, the system prompt included; whether that has a role
    of its own or opens the user's turn."""

    before: str
    after: str
    system_role: bool


class SegmentTokenizer:
    """Wraps a Hugging Face tokenizer (`transformers.PreTrainedTokenizerBase`). Thread-safe.

    Raises TypeError for anything else.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not hasattr(tokenizer, "encode") or not hasattr(tokenizer, "added_tokens_decoder"):
            kind = type(tokenizer).__name__
            raise TypeError(f"tokenizer must be one of transformers, got {kind}: use AutoTokenizer.from_pretrained")
        self._tokenizer = tokenizer
        self.after_fork()
        _fork.follow(self)

    def after_fork(self) -> None:
        """A lock of its own for a child process."""
        self._lock = Lock()

    def encode(self, text: str) -> list[int]:
        """The token ids of one segment; control tokens in it count as such."""
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def special_tokens(self) -> Iterator[str]:
        """The texts that the tokenizer turns into a control token wherever they stand."""
        yield from self._tokenizer.all_special_tokens
        for added in self._tokenizer.added_tokens_decoder.values():
            text = added.content
            if added.special or (text[:1] in "<[" and text[-1:] in ">]"):
                yield text

    def frame(self, system: str) -> Frame:
        """The frame of a prompt. A tokenizer without a chat template frames with its begin-of-sequence token.

        Raises ValueError if the template does not show the user's text exactly once.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            bos = getattr(self._tokenizer, "bos_token", None) or ""
            return Frame(f"{bos}{system}\n\n", "\n", system_role=True)
        user = {"role": "user", "content": _SLOT}
        system_role = True
        try:
            rendered = self._render([{"role": "system", "content": system}, user] if system else [user])
        except Exception:
            # Some templates (Gemma's, Mistral's first) know no system role.
            system_role = False
            rendered = self._render([{"role": "user", "content": f"{system}\n\n{_SLOT}"}])
        before, slot, after = rendered.partition(_SLOT)
        if not slot or _SLOT in after:
            raise ValueError("the tokenizer's chat template must show the user's message exactly once")
        return Frame(before, after, system_role)

    def _render(self, messages: list[dict[str, str]]) -> str:
        rendered: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return rendered
