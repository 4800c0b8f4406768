"""Templates of known applications, and their recognition in other prompts."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from ragorder.adapters.observing.observed import Observation, ObservedOrderer
from ragorder.adapters.proxy.bodies.lists import list_templates
from ragorder.adapters.proxy.bodies.parsed import ParsedBody
from ragorder.adapters.proxy.bodies.template import DocumentTemplate, TemplateError
from ragorder.adapters.structs import readable_by_threads
from ragorder.orderer import Orderer
from ragorder.ordering import RequestOutcome
from ragorder.scope.request import Lengths
from ragorder.settings import Settings

AUTO, JSON, MEMORIES, NONE = "auto", "json", "memories", "none"


@readable_by_threads
class Preset(Struct, frozen=True, forbid_unknown_fields=True):
    """Entry of presets.toml: an application's template. A user's file has `form` and, if needed, `head`, `between` and
    `tail`."""

    form: str
    head: str = ""
    between: str | None = None
    tail: str | list[str] = []
    application: str = ""
    origin: str = ""
    citations: Literal["none", "moved", "places"] = "none"
    automatic: bool = False
    note: str = ""
    sample: str = ""

    def template(self, name: str) -> DocumentTemplate:
        return DocumentTemplate(self.form, head=self.head, between=self.between, tail=self.tail, name=name)


@cache
def presets() -> Mapping[str, Preset]:
    content = files(__package__).joinpath("presets.toml").read_bytes()
    return msgspec.toml.decode(content, type=dict[str, Preset])


def find_templates(text: str) -> list[DocumentTemplate]:
    """Return the templates of a preset, "json", "memories", "auto", "none", a TOML file, or a form. Raises
    TemplateError."""
    if text == NONE:
        return []
    if text == AUTO:
        return [preset.template(name) for name, preset in presets().items() if preset.automatic]
    if text == JSON:
        return [JSONTemplate()]
    if text == MEMORIES:
        return list_templates()
    if text in presets():
        return [presets()[text].template(text)]
    if text.endswith(".toml"):
        return [_read_file(Path(text))]
    if "{" not in text:
        known = ", ".join([*presets(), JSON, MEMORIES, AUTO, NONE])
        raise TemplateError(f"no form with {{text}}, no .toml file, and no preset: {known}")
    return [DocumentTemplate(text)]


def _read_file(path: Path) -> DocumentTemplate:
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Preset).template(str(path))
    except OSError as error:
        raise TemplateError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TemplateError(f"{path}: {error}") from None


_JSON = json.JSONDecoder()
_JSON_LIST = re.compile(r"\[\s{0,64}\{")
_JSON_NEXT = re.compile(r"\s{0,64}(?:,\s{0,64}(?=\{)|\])")
# Lists in a text that are read, and the longest text.
_MOST_LISTS = 64
_LONGEST_JSON = 1 << 20


class JSONTemplate(DocumentTemplate):
    """Form of a JSON list in a text: objects with the same keys, each with a string."""

    def __init__(self) -> None:
        super().__init__("[{text}\n{text}]", name="json")

    def _check(self) -> None:
        """JSON needs no marks."""

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        if len(text) > _LONGEST_JSON:
            return
        for found in islice(_JSON_LIST.finditer(text), _MOST_LISTS):
            items = list(_json_items(text, found.end() - 1))
            if len(items) > 1:
                yield from items
                return

    def _are_adjacent(self, text: str, start: int, end: int) -> bool:
        return True


def _json_items(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of a list's objects, the first at `at`; nothing if one is no document or the list has no end."""
    items: list[tuple[int, int]] = []
    names: set[str] | None = None
    while True:
        try:
            item, end = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        if not isinstance(item, dict) or not any(isinstance(value, str) for value in item.values()):
            return
        if names is not None and item.keys() != names:
            return
        names = set(item)
        items.append((at, end))
        following = _JSON_NEXT.match(text, end)
        if following is None:
            return
        if following[0].endswith("]"):
            yield from items
            return
        at = following.end()


class PromptRecogniser:
    """Recognises presets in prompts without a template, and orders their documents on a mirror. `on_recognised` gets
    the preset's name, the tokens up to the last document, and those that would be cached in ragorder's and in retrieval
    order. Thread-safe."""

    def __init__(self, settings: Settings, on_recognised: Callable[[str, int, int, int], None]) -> None:
        self._settings = settings
        self._on_recognised = on_recognised
        self._templates = {name: preset.template(name) for name, preset in presets().items()}
        self._orderers: dict[str, ObservedOrderer] = {}
        self._requests: Counter[str] = Counter()
        self._lock = threading.Lock()

    def look(self, texts: Sequence[str], read: Callable[[DocumentTemplate], object]) -> bool:
        """Return whether the texts have a preset's form, by which `read` parses the request."""
        for name, template in self._templates.items():
            if any(map(template.find, texts)):
                parsed = read(template)
                if isinstance(parsed, ParsedBody) and parsed.error is None:
                    self._order(name, parsed)
                return True
        return False

    def hint(self) -> str:
        if not self._requests:
            return ""
        name = self._requests.most_common(1)[0][0]
        return f"; prompts look like those of {presets()[name].application}: see --template {name}"

    def _order(self, name: str, parsed: ParsedBody) -> None:
        with self._lock:
            self._requests[name] += 1
            orderer = self._orderers.get(name)
            if orderer is None:
                if self._orderers:
                    # One more mirror is enough memory.
                    return
                told = _Told(name, self._on_recognised)
                orderer = self._orderers[name] = ObservedOrderer(Orderer(self._settings), [told], shadow=True)
        lengths = Lengths(parsed.prefix_tokens, parsed.suffix_tokens)
        orderer.order(parsed.documents, scope=parsed.scope, lengths=lengths).confirm()


class _Told(NamedTuple):
    name: str
    on_recognised: Callable[[str, int, int, int], None]

    def ordered(self, seen: Observation) -> Callable[[RequestOutcome], None]:
        if seen.ordered_tokens is not None and seen.retrieval_tokens is not None:
            self.on_recognised(self.name, seen.documents_end, seen.ordered_tokens, seen.retrieval_tokens)
        return lambda outcome: None
