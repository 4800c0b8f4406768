"""Simulated prompt caches of clouds, by their documented rules, without any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from ragorder.clouds.rules import CacheRules, UsageFields
from ragorder.errors import RagorderError

_OPENAI = UsageFields(
    "prompt_tokens_details.cached_tokens", "prompt_tokens_details.cache_write_tokens", "prompt_tokens"
)


class CloudError(RagorderError, ValueError):
    """The provider refuses a request."""


@dataclass(frozen=True, slots=True)
class CloudAnswer:
    """Of the `prompt_tokens`, `cached_tokens` were read and `written_tokens` are written; `entries` can be read from
    the first token on, until `until_s`."""

    prompt_tokens: int
    cached_tokens: int
    written_tokens: int
    entries: tuple[bytes, ...]
    until_s: float


_MESSAGES = 20


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    marked: bool
    ends_message: bool = False
    hour: bool = False


class SimulatedCloud:
    """A provider's cache: what it reads and writes for request bodies of its API.

        cloud = SimulatedCloud(cache_rules("anthropic", "claude-opus-5"))
        answer = cloud.begin(prompt.anthropic(), now_s=0.0)
        cloud.first_token(answer)

    `count` has the tokens of a text. An entry is a mark with all texts up to it. A mark within what is read costs
    nothing; what is read lives again from the request's start, what is marked again from its first token.
    """

    def __init__(self, rules: CacheRules, count: Callable[[str], int] | None = None) -> None:
        self.rules = rules
        self._count = count or estimated_tokens
        self._entries: dict[bytes, float] = {}

    def begin(self, body: Mapping[str, Any], now_s: float) -> CloudAnswer:
        """Raises CloudError for a body that the provider would refuse."""
        rules = self.rules
        parts, automatic = _read(body, rules)
        marks = [place for place, part in enumerate(parts) if part.marked]
        if automatic and len(parts) - 1 not in marks:
            marks.append(len(parts) - 1)
        if rules.resume == "marks" and len(marks) > rules.marks and rules.read_marks is None:
            raise CloudError(f"a request has {rules.marks} marks at most, and not {len(marks)}")
        ends = list(accumulate(self._count(part.text) for part in parts))
        digests = list(_chain(parts))
        until_s = now_s + rules.ttl_s
        if rules.resume == "interval":
            live = [place for place, digest in enumerate(digests) if self._entries.get(digest, now_s) > now_s]
            cached = ends[live[-1]] // rules.interval_tokens * rules.interval_tokens if live else 0
            if cached < rules.minimum_tokens:
                cached = 0
            for place in live:
                self._entries[digests[place]] = until_s
            return CloudAnswer(ends[-1], cached, 0, tuple(digests), until_s)
        hours = [parts[mark].hour for mark in marks if parts[mark].marked]
        if self._additive and hours != sorted(hours, reverse=True):
            raise CloudError("marks of an hour must stand before those of five minutes")
        eligible = [mark for mark in marks[-rules.marks :] if ends[mark] >= rules.minimum_tokens]
        looked_at = self._looked_at(marks)
        found = max((place for mark in looked_at for place in self._found(digests, ends, mark, now_s)), default=None)
        if automatic and not self._additive:
            # In implicit mode OpenAI looks at the ends of earlier messages, too.
            earlier = [place for place, part in enumerate(parts[:-1]) if part.ends_message][-_MESSAGES:]
            places = [place for place in earlier if self._lives(digests, ends, place, now_s)]
            found = max([*places, *([] if found is None else [found])], default=None)
        cached = 0
        if found is not None:
            cached = ends[found]
            self._entries[digests[found]] = until_s
        written = max(0, ends[eligible[-1]] - cached) if eligible else 0
        return CloudAnswer(ends[-1], cached, written, tuple(digests[mark] for mark in eligible), until_s)

    def first_token(self, answer: CloudAnswer) -> None:
        for entry in answer.entries:
            self._entries[entry] = max(answer.until_s, self._entries.get(entry, 0.0))

    def usage(self, answer: CloudAnswer) -> dict[str, Any]:
        """As the provider reports it."""
        fields = self.rules.usage or _OPENAI
        read, written, prompt = answer.cached_tokens, answer.written_tokens, answer.prompt_tokens
        counts = {fields.read: read, fields.written: written}
        counts[fields.prompt] = prompt - read - written if fields.additive else prompt
        usage: dict[str, Any] = {}
        for name, tokens in counts.items():
            if name:
                *folders, last = name.split(".")
                place = usage
                for folder in folders:
                    place = place.setdefault(folder, {})
                place[last] = tokens
        return usage

    def _looked_at(self, marks: list[int]) -> list[int]:
        if self.rules.read_marks is None:
            return marks
        first, latest = self.rules.read_marks
        return [mark for number, mark in enumerate(marks) if number < first or number >= len(marks) - latest]

    def _found(self, digests: list[bytes], ends: list[int], mark: int, now_s: float) -> Iterator[int]:
        """Places of live entries that a mark finds, the longest alone."""
        for place in range(mark, max(-1, mark - self.rules.lookback_parts), -1):
            if self._lives(digests, ends, place, now_s):
                yield place
                return

    def _lives(self, digests: list[bytes], ends: list[int], place: int, now_s: float) -> bool:
        return self._entries.get(digests[place], now_s) > now_s and ends[place] >= self.rules.minimum_tokens

    @property
    def _additive(self) -> bool:
        return self.rules.usage is not None and self.rules.usage.additive


def estimated_tokens(text: str) -> int:
    """A token for each four characters."""
    return -(-len(text) // 4)


def _chain(parts: list[_Part]) -> Iterator[bytes]:
    digest = b""
    for part in parts:
        digest = blake2b(digest + part.text.encode(), digest_size=16).digest()
        yield digest


def _read(body: Mapping[str, Any], rules: CacheRules) -> tuple[list[_Part], bool]:
    """The parts of a body of any of the APIs, and whether the provider adds a mark after the last one."""
    contents = [body["system"]] if "system" in body else []
    contents += [message["content"] for message in body["messages"]]
    parts: list[_Part] = []
    for content in contents:
        pieces: list[dict[str, Any]] = [{"text": content}] if isinstance(content, str) else content
        for part in pieces:
            if "cachePoint" in part:
                if not parts:
                    raise CloudError("a cachePoint must stand after a text")
                parts[-1] = replace(parts[-1], marked=True, hour=part["cachePoint"].get("ttl") == "1h")
                continue
            if not part["text"].strip():
                raise CloudError("a text must not be empty")
            marked = "cache_control" in part or "prompt_cache_breakpoint" in part
            parts.append(_Part(part["text"], marked, hour=part.get("cache_control", {}).get("ttl") == "1h"))
        if parts:
            parts[-1] = replace(parts[-1], ends_message=True)
    if not parts:
        raise CloudError("a request needs a text")
    additive = rules.usage is not None and rules.usage.additive
    if additive:
        return parts, "cache_control" in body
    # OpenAI's marks are implicit unless the body says otherwise.
    options = body.get("prompt_cache_options", {})
    return parts, rules.resume == "marks" and options.get("mode", "implicit") == "implicit"
