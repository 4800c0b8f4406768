"""The proxy's template for a log of prompts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import contains

from ragorder.adapters.learning.learned import BY_PLACE, Found, LearnedTemplate
from ragorder.adapters.learning.learner import TemplateLearner
from ragorder.adapters.learning.texts import END, NUMBER, START, DigitText
from ragorder.adapters.observing.observed import predict_reuse
from ragorder.adapters.proxy.bodies.template import (
    DocumentRun,
    DocumentTemplate,
    TemplateError,
    numbered_by_place,
)
from ragorder.document import Document
from ragorder.orderer import Orderer
from ragorder.scope.request import Lengths

_CHARACTERS_PER_TOKEN = 4
_EXAMPLES = 3
_FIRST_LINES = 3
_MOST_REQUESTS = 300
# Two documents of a small corpus are always together by chance.
_MOST_TORN = 0.02


@dataclass(frozen=True, slots=True)
class Saving:
    """Tokens up to the last document of requests with documents, and those cached in ragorder's order and the log's."""

    tokens: int
    ordered_tokens: int
    retrieval_tokens: int

    @property
    def share(self) -> float:
        computed = self.tokens - self.retrieval_tokens
        return (self.ordered_tokens - self.retrieval_tokens) / computed if computed else 0.0


@dataclass(slots=True)
class Suggestion:
    """A template learned from `seen` requests; it `fits` some of them.

    `doubts`: reasons to look at the `examples` before use; `refused`: why it must not be used live.
    """

    form: str
    head: str = ""
    between: str | None = None
    tail: str = ""
    seen: int = 0
    fits: int = 0
    saving: Saving | None = None
    refused: str = ""
    doubts: list[str] = field(default_factory=list)
    examples: list[DocumentRun] = field(default_factory=list)

    def template(self) -> DocumentTemplate:
        """Raises TemplateError if the proxy cannot recognise documents by it."""
        return DocumentTemplate(self.form, head=self.head, between=self.between, tail=self.tail or ())

    def toml(self) -> str:
        names = ("form", "head", "between", "tail")
        fields = [(name, getattr(self, name)) for name in names]
        # JSON's strings are TOML's, but for a character that no template has.
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in fields if value]
        citations = "places" if "{n}" in self.form else "moved" if "{id}" in self.form else "none"
        return "".join([*lines, f'citations = "{citations}"\n'])


def suggest(requests: Sequence[Sequence[str]], capacity_tokens: int) -> Suggestion | str:
    """Return a template for the texts of requests' messages, learned from the first 300, or why there is none. Its
    saving is that of all requests, with a cache of `capacity_tokens`."""
    learner = TemplateLearner()
    for texts in requests[:_MOST_REQUESTS]:
        learner.add(texts)
    learned = learner.learn()
    if isinstance(learned, str):
        return learned
    if learned.is_marked or learned.proves_by_number:
        suggestion, template, runs = _fitting(_written(learned), requests)
        suggestion.seen = len(requests)
        if template is not None:
            _complete(suggestion, runs, capacity_tokens, _names(template))
            suggestion.doubts += _doubts(learned, template, requests[:_MOST_REQUESTS], runs)
            torn = 0 if learned.proves_by_number else _torn(learned, template, requests[:_MOST_REQUESTS])
            if torn > _MOST_TORN * len(runs):
                suggestion.refused = f"in {torn} requests a document seems to contain the text around documents, and "
                suggestion.refused += "no number shows where it ends"
            return suggestion
    else:
        suggestion = _written(learned)[-1]
        suggestion.refused = "the text between documents is too plain: a document that contains it would be torn"
    suggestion.seen = len(requests)

    def proven(text: str) -> DocumentRun | None:
        found = learned.find(text)
        return found.run() if isinstance(found, Found) else None

    runs = [run for texts in requests if (run := _first(proven, texts)) is not None]
    _complete(suggestion, runs, capacity_tokens, str)
    return suggestion


def predict_saving(
    template: DocumentTemplate, requests: Sequence[Sequence[str]], capacity_tokens: int
) -> tuple[int, Saving | None]:
    """Return how many requests have documents that the template may order, and their saving."""
    runs = []
    for texts in requests:
        run = _first(template.find, texts)
        if run is not None and (not template.shows_number or _is_numbered(template, run)):
            runs.append(run)
    return len(runs), _saving(runs, capacity_tokens, _names(template))


def _names(template: DocumentTemplate) -> Callable[[str], str]:
    """Return what identifies a document: its text without a number by place."""
    return (lambda document: template.split(document).rest) if template.shows_number else str


def _is_numbered(template: DocumentTemplate, run: DocumentRun) -> bool:
    return numbered_by_place([template.split(each) for each in run.documents], from_0=True) is not None


def _fitting(
    candidates: Sequence[Suggestion], requests: Sequence[Sequence[str]]
) -> tuple[Suggestion, DocumentTemplate | None, Sequence[DocumentRun]]:
    """Return the form that fits most requests, its template (None if the proxy takes none) and the documents."""
    best: tuple[Suggestion, DocumentTemplate | None, Sequence[DocumentRun]] = (candidates[0], None, [])
    for suggestion in candidates:
        try:
            template = suggestion.template()
        except TemplateError as error:
            suggestion.refused = str(error)
            continue
        runs = [run for texts in requests if (run := _first(template.find, texts)) is not None]
        if len(runs) > len(best[2]):
            best = suggestion, template, runs
    if best[1] is None and not best[0].refused:
        best[0].refused = "the proxy finds no documents by it, because they contain the text around documents"
    return best


def _complete(
    suggestion: Suggestion, runs: Sequence[DocumentRun], capacity_tokens: int, name: Callable[[str], str]
) -> None:
    suggestion.fits = len(runs)
    suggestion.examples = list(runs[:: max(1, len(runs) // _EXAMPLES)][:_EXAMPLES])
    suggestion.saving = _saving(runs, capacity_tokens, name)


def _first(find: Callable[[str], DocumentRun | None], texts: Sequence[str]) -> DocumentRun | None:
    return next(filter(None, map(find, texts)), None)


def _written(learned: LearnedTemplate) -> list[Suggestion]:
    """Return the learned template as forms of the proxy: with marks around documents, and with text between them."""
    separator, end, begin = learned.separator, learned.footer, learned.header
    if begin < end:
        # What head and tail share with it overlaps: a mark begins its line.
        begin = end = separator.rfind("\n", begin, end) + 1 or begin
    head = learned.head[: len(learned.head) - (len(separator) - begin)].rpartition(NUMBER)[2]
    tail = learned.tail[end:].partition(NUMBER)[0]
    shown = _Shown(learned)
    closing, between, opening = shown(0, end), shown(end, begin), shown(begin, len(separator))
    forms = []
    if opening.strip() and closing.strip() and not between.strip():
        forms.append(Suggestion(f"{opening}{{text}}{closing}"))
    # White space is no mark: it is between documents, after the head and before the tail, except at the text's ends.
    mark = closing if tail == END else closing.rstrip()
    between, tail, closing = closing[len(mark) :] + between, closing[len(mark) :] + tail, mark
    mark = opening if head == START else opening.lstrip()
    space = opening[: len(opening) - len(mark)]
    between, head, opening = between + space, head + space, mark
    starts = "{start}" if head == START else head.strip(START)
    ends = "{end}" if tail == END else tail.strip(END)
    return [*forms, Suggestion(f"{opening}{{text}}{closing}", starts, between or None, ends)]


class _Shown:
    """Writes a part of a separator: numbers become {n}, or one {id} and else {*}."""

    def __init__(self, learned: LearnedTemplate) -> None:
        self._text = learned.separator
        self._kinds = dict(zip(learned.numbers, learned.kinds, strict=True))
        self._may_have_id = BY_PLACE not in learned.kinds
        self._header = learned.header

    def __call__(self, start: int, end: int) -> str:
        return "".join(map(self._character, range(start, end)))

    def _character(self, at: int) -> str:
        character = self._text[at]
        if character != NUMBER:
            return character * 2 if character in "{}" else character
        kind = self._kinds[at]
        if kind.isdigit():
            return kind
        if kind == BY_PLACE:
            return "{n}"
        if self._may_have_id and at >= self._header:
            self._may_have_id = False
            return "{id}"
        return "{*}"


def _doubts(
    learned: LearnedTemplate,
    template: DocumentTemplate,
    requests: Sequence[Sequence[str]],
    runs: Sequence[DocumentRun],
) -> Iterator[str]:
    yield "a list whose order means something (steps, ranked choices) looks the same: look at the examples"
    if "{n}" in template.form:
        yield "numbers stay at their places: what an answer cites as [2] is the second document of the sent order"
    elif not learned.proves_by_number:
        yield "no number proves a boundary: a document that contains the text around documents is torn, or left alone"
    pairs = [
        (known.documents, run.documents)
        for texts in requests
        for text in texts
        if isinstance(known := learned.find(text), Found) and (run := template.find(text)) is not None
    ]
    # Documents that were never seen apart are one in the log.
    differs = sum(len(known) >= len(found) and not _hold(found, known) for known, found in pairs)
    if differs:
        yield f"in {differs} of {len(pairs)} requests it finds other documents than the repeats of the log prove"
    if line := _changing_line(template, runs):
        yield (
            f"a text before the document's own changes from request to request ({line!r}): nothing after it is cached, "
            "so move it after the text, or leave it out"
        )


def _torn(learned: LearnedTemplate, template: DocumentTemplate, requests: Sequence[Sequence[str]]) -> int:
    """Count texts that the template divides where there is no boundary, or inside what was always together."""
    torn = 0
    for text in (text for texts in requests for text in texts):
        digits = DigitText(text)
        region = learned.region(digits.text)
        if isinstance(region, str) or (run := template.find(text)) is None:
            continue
        boundaries = learned.evidence.boundaries(digits.text, *region)
        torn += len(run.documents) > len(boundaries) + 1 or any(map(learned.evidence.is_inner, boundaries))
    return torn


def _hold(documents: Sequence[str], texts: Sequence[str]) -> bool:
    return len(documents) == len(texts) and all(map(contains, documents, (each.strip() for each in texts)))


def _changing_line(template: DocumentTemplate, runs: Sequence[DocumentRun]) -> str:
    """Return a line near the beginning of documents that changes while the text after it stays, or ""."""
    found = [document for run in runs for document in run.documents]
    shown = [template.split(each).rest for each in found] if template.shows_number else found
    documents = [each.strip().splitlines() for each in shown]
    for at in range(_FIRST_LINES):
        lines: defaultdict[str, list[str]] = defaultdict(list)
        for document in documents:
            if len(document) > at + 1:
                lines[_digest("\n".join(document[at + 1 :]))].append(document[at])
        repeated = [each for each in lines.values() if len(each) > 1]
        changing = [each for each in repeated if len(set(each)) > 1]
        if len(changing) > 0.5 * max(1, len(repeated)):
            return min(changing[0])
    return ""


def _saving(runs: Sequence[DocumentRun], capacity_tokens: int, name: Callable[[str], str]) -> Saving | None:
    requests = (
        (
            [Document(id=_digest(name(each)), tokens=_tokens(each)) for each in run.documents],
            {"scope": _digest(run.head), "lengths": Lengths(_tokens(run.head), _tokens(run.tail))},
        )
        for run in runs
    )
    return Saving(*predict_reuse(Orderer(capacity_tokens=capacity_tokens), requests)) if runs else None


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _tokens(text: str) -> int:
    return max(1, len(text) // _CHARACTERS_PER_TOKEN)
