"""The learner of a template."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from ragorder.adapters.learning.evidence import ANCHOR, CONTEXT, KEY, Boundary, Evidence
from ragorder.adapters.learning.learned import (
    BY_PLACE,
    CROSSED,
    WITH_DOCUMENT,
    Found,
    LearnedTemplate,
    increments,
)
from ragorder.adapters.learning.texts import (
    CONTROL,
    END,
    START,
    DigitText,
    agreement,
    is_visible,
    places,
    shared_beginning,
)

_SHORTEST = 200
_REPEAT = 40
_WINDOW = 600
_EDGE = 300
_ZONE = 20_000
_FEWEST = 6
"""Boundaries that must be proven, and most earlier places that a word is compared with."""


class TemplateLearner:
    """Learns head, separator and tail of the documents in prompts.

    The longest repeats around two neighbouring documents overlap in the separator. A form is refused if the order never
    varies in a circle (A before B before C before A), and for lists that grow (a history) or are sorted by a number (a
    log). Other lists whose order means something look like documents: a person decides.

    Keeps at most `most` texts. 300 prompts of 17,000 characters take seconds of processor time.
    """

    def __init__(self, most: int = 1600) -> None:
        self._most = most
        self._digits: list[DigitText] = []
        self._known: set[int] = set()
        self._texts: list[str] = []

    def add(self, texts: Iterable[str]) -> None:
        for raw in texts:
            key = hash(raw)
            if len(raw) <= _SHORTEST or key in self._known or len(self._digits) >= self._most or CONTROL.search(raw):
                continue
            self._known.add(key)
            self._digits.append(DigitText(raw))

    def learn(self) -> LearnedTemplate | str:
        """Return the template, or why there is none."""
        self._texts = [each.text for each in self._digits]
        overlaps = self._overlaps()
        if len(overlaps) < _FEWEST:
            return f"only {len(overlaps)} repeated documents are next to another: give more requests"
        evidence = self._separator(overlaps)
        if isinstance(evidence, str):
            return evidence
        heads, tails = self._edges(evidence)
        backwards = tuple([each[::-1] for each in strings] for strings in heads)
        head = self._constant(backwards[0], backwards[1], evidence.separator[::-1], -1)
        tail = self._constant(tails[0], tails[1], evidence.separator, 1)
        if head is None or tail is None:
            return f"no constant text comes {'before' if head is None else 'after'} the documents"
        return self._checked(LearnedTemplate(head, evidence.separator, tail, evidence))

    def _overlaps(self) -> list[str]:
        """Return the texts where one longest repeat ends and the next has begun."""
        index: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, text in enumerate(self._texts):
            for word in ANCHOR.finditer(text):
                earlier = index[hash(text[word.start() : word.start() + KEY])]
                if len(earlier) < _FEWEST and not (earlier and earlier[-1][0] == number):
                    earlier.append((number, word.start()))
        found = []
        for number, text in enumerate(self._texts):
            last: tuple[int, int] | None = None
            done = 0
            for word in ANCHOR.finditer(text):
                at = word.start()
                if at < done:
                    continue
                others = index[hash(text[at : at + KEY])]
                repeats = [self._repeat(text, at, other, place) for other, place in others if other != number]
                start, end = max(repeats, key=lambda span: span[1] - span[0], default=(0, 0))
                if end - start < _REPEAT:
                    continue
                if last and last[0] > 0 and end < len(text) and 0 < last[1] - start <= _WINDOW:
                    found.append(text[start : last[1]])
                last, done = (start, end), end
        return found

    def _repeat(self, text: str, at: int, number: int, place: int) -> tuple[int, int]:
        """Return begin and end of the text around `at` that is also around the other prompt's `place`."""
        other = self._texts[number]
        return at - agreement(text, at, other, place, backwards=True), at + agreement(text, at, other, place)

    def _separator(self, overlaps: Sequence[str]) -> Evidence | str:
        """Choose the separator with most proven boundaries, the longest of about equals."""
        some = overlaps[:: max(1, len(overlaps) // 70)][:90]
        commons: set[str] = set()
        for one, other in (pair for gap in (1, 2, 5) for pair in zip(some, some[gap:], strict=False)):
            common = _longest_common(one, other)
            commons.add(common)
            commons.update(_longest_common(common, each) for each in some[:: max(1, len(some) // 6)])
        votes = {each: sum(each in overlap for overlap in some) for each in commons if is_visible(each)}
        most = max(votes.values(), default=0)
        # In a fixed order, or equal ones are chosen by the hashes of this process.
        usual = sorted(each for each in votes if votes[each] >= 0.4 * most)
        chosen = sorted(usual, key=lambda each: -votes[each] * min(len(each), 30))[:12]
        proven = {each: len(self._proven_pairs(Evidence(each, self._texts))) for each in chosen}
        top = max(proven.values(), default=0)
        if top < _FEWEST:
            return f"only {top} places are proven to separate documents: give more requests"
        near = [each for each in chosen if proven[each] > 0.9 * top]
        usual_votes = max(votes[each] for each in near)
        separator = max((each for each in near if votes[each] >= 0.85 * usual_votes), key=len)
        return Evidence(self._extended(separator), self._texts)

    def _proven_pairs(self, evidence: Evidence) -> set[tuple[int, int]]:
        """Return the texts around proven boundaries, one boundary for a header."""
        lists = [found for text in self._texts if (found := evidence.boundaries(text))]
        from_first: defaultdict[int, Counter[int]] = defaultdict(Counter)
        from_last: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for boundaries in lists:
            for place, each in enumerate(boundaries):
                from_first[each.before][place] += 1
                from_last[each.after][place - len(boundaries)] += 1

        def is_fixed(at: Counter[int]) -> bool:
            return at.total() > 0.3 * len(lists) and max(at.values()) > 0.9 * at.total()

        pairs: set[tuple[int, int]] = set()
        for boundaries in lists:
            last = -_CLOSE - 1
            for each in boundaries:
                near = each.at - last <= _CLOSE
                if near or not evidence.proves(each) or is_fixed(from_first[each.before]):
                    continue
                if not is_fixed(from_last[each.after]):
                    pairs.add((each.before, each.after))
                    last = each.at
        return pairs

    def _extended(self, separator: str) -> str:
        """Extend by what is before nearly all separators but a prompt's first, and after nearly all but its last."""
        evidence = Evidence(separator, self._texts)
        rows = [(text, _firm(evidence, text)) for text in self._texts]
        for step in (-1, 1):
            more = ""
            length = len(separator)
            edges = [
                (text, at - 1 if step < 0 else at + length)
                for text, ats in rows
                for at in ats[step < 0 : len(ats) - (step > 0)]
            ]
            while len(more) < _SHORTEST and len(edges) >= 10:
                character, count = Counter(text[at] for text, at in edges).most_common(1)[0]
                if count < 0.97 * len(edges) or character in START + END:
                    break
                more += character
                edges = [(text, at + step) for text, at in edges if text[at] == character]
            if step < 0:
                separator = more[::-1] + separator
                rows = [(text, [at - len(more) for at in ats]) for text, ats in rows]
            else:
                separator += more
        return separator.lstrip(".?!。") or separator

    def _edges(self, evidence: Evidence) -> tuple[_Edges, _Edges]:
        """Return the texts before the first and after the last documents, each where the document's edge is known, and
        where only its separator is."""
        heads: _Edges = ([], [])
        tails: _Edges = ([], [])
        length = len(evidence.separator)
        for text in self._texts:
            firm = _firm(evidence, text)
            if not firm:
                continue
            zone = range(max(1, firm[0] - _ZONE), firm[0])
            begin = next((at for at in zone if evidence.begins(hash(text[at : at + CONTEXT]))), None)
            at = firm[0] + length if begin is None else begin
            heads[begin is None].append(text[max(0, at - _EDGE) : at])
            zone = range(min(len(text), firm[-1] + _ZONE) - 1, firm[-1] + length, -1)
            end = next((at for at in zone if evidence.ends(hash(text[max(0, at - CONTEXT) : at]))), None)
            at = firm[-1] if end is None else end
            tails[end is None].append(text[at : at + _EDGE])
        return heads, tails

    def _constant(self, found: list[str], other: list[str], separator: str, step: int) -> str | None:
        """Return the usual beginning of the texts, longer than the separator's, that most messages have once."""
        best, most = None, 0
        for strings, more in ((strings, more) for strings in (found, found + other) for more in (1, 3, 5, 8, 12)):
            groups: defaultdict[str, list[str]] = defaultdict(list)
            for each in strings:
                groups[each[: len(shared_beginning(each, separator)) + more]].append(each)
            sizes = sorted(groups.values(), key=len, reverse=True)
            first, second = sizes[0] if sizes else [], sizes[1] if len(sizes) > 1 else []
            common = shared_beginning(min(first), max(first)) if first else ""
            own = common[len(shared_beginning(common, separator)) :]
            usual = len(first) >= max(4, 0.15 * len(strings), 3 * len(second))
            if not usual or not own or (more == 1 and own[0].isalnum()):
                continue
            constant = common[::step]
            count = sum(text.count(constant) == 1 for text in self._texts)
            if count > most:
                best, most = constant, count
        return best

    def _checked(self, template: LearnedTemplate) -> LearnedTemplate | str:
        seen: list[_Seen] = []
        for digits in self._digits:
            region = template.region(digits.text)
            if not isinstance(region, str) and places(digits.text, template.separator, *region):
                seen.append((digits, *region))
        if len(seen) < _FEWEST - 1:
            return f"the texts before and after the documents fit {len(seen)} messages only"
        wrong = _number(template, seen)
        if wrong is None and not _varies(template, seen):
            wrong = "the order of the documents never varies"
        if wrong is not None:
            return wrong
        results = [template.find(digits.raw) for digits, *_ in seen]
        lists = [tuple(each.documents) for each in results if isinstance(each, Found)]
        if len(lists) < max(3, 0.2 * len(seen)) or results.count(CROSSED) > 0.02 * len(seen):
            reasons = Counter(each for each in results if isinstance(each, str))
            why = reasons.most_common(1)[0][0]
            return f"documents are found in {len(lists)} of {len(seen)} messages: {why}"
        units = [
            digits.text[one + len(template.separator) : other]
            for digits, start, end in seen
            for one, other in pairwise(places(digits.text, template.separator, start, end))
        ]
        if not _are_stable(units, template.is_marked):
            return "documents differ from request to request, or too few repeat: give more requests"
        grown = [each[:-1] in known for known in [set(lists)] for each in known if len(each) > 2]
        if sum(grown) > 0.5 * len(grown):
            return "lists that grow by one: a history"
        short = sum(len(each) + len(template.separator) < 30 for each in units)
        if template.separator.strip() and short > 0.05 * len(units):
            return "pieces too short: the separator is a part of a larger one"
        return template


_CLOSE = 80
_Edges = tuple[list[str], list[str]]
_Seen = tuple[DigitText, int, int]


def _firm(evidence: Evidence, text: str) -> list[int]:
    return [each.at for each in evidence.boundaries(text) if evidence.proves(each)]


def _longest_common(one: str, other: str) -> str:
    found = SequenceMatcher(None, one, other, autojunk=False).find_longest_match()
    return one[found.a : found.a + found.size]


def _number(template: LearnedTemplate, seen: Sequence[_Seen]) -> str | None:
    """Set the kinds of the separator's numbers, or return why they forbid the template."""
    separator = template.separator
    for place, slot in enumerate(template.numbers):
        lists = [
            [digits.number(at + slot) for at in places(digits.text, separator, start, end)]
            for digits, start, end in seen
        ]
        long = [each for each in lists if len(each) > 2]
        firsts = Counter(int(each[0]) for each in long if increments(each))
        offset, count = firsts.most_common(1)[0] if firsts else (0, 0)
        if long and len({number for each in lists for number in each}) == 1:
            template.kinds[place] = lists[0][0]
        elif count >= 0.4 * len(long):
            template.first = offset - (slot >= template.header)
        elif count or template.footer <= slot < template.header or not long:
            return "a number that goes neither by place nor with a document"
        elif sum(each == sorted(each, key=int) for each in long) > 0.9 * len(long):
            return "documents sorted by a number: their order means something"
        else:
            template.kinds[place] = WITH_DOCUMENT
            begin, end = template.cut
            template.cut = (min(begin, slot), end) if slot >= template.header else (begin, max(end, slot + 1))
    begin, end = template.cut
    kinds = zip(template.kinds, template.numbers, strict=True)
    if any(kind == BY_PLACE and (slot > begin or slot < end) for kind, slot in kinds):
        return "a number by place is inside a document's own header"
    template.is_counted = len(seen) > 49 and all(
        template.is_numbered(digits, places(digits.text, separator, start, end), start) for digits, start, end in seen
    )
    return None


def _varies(template: LearnedTemplate, seen: Sequence[_Seen]) -> bool:
    evidence = template.evidence
    orders = []
    for digits, start, end in seen:
        boundaries: list[Boundary] = evidence.boundaries(digits.text, start, end)
        names = [hash(digits.text[start : start + CONTEXT]), *(each.after for each in boundaries)]
        orders.append([name for name in names if evidence.begins(name)])
    return len(_circle(orders)) >= 4


def _circle(orders: Iterable[Sequence[Hashable]]) -> set[Hashable]:
    """Return the documents in circles: all but those that can always come first or last."""
    pairs: set[tuple[Hashable, Hashable]] = set()
    kept = {(one, other) for order in orders for one, other in pairwise(order) if one != other}
    while kept != pairs:
        pairs = kept
        fronts, backs = {one for one, _ in pairs}, {other for _, other in pairs}
        kept = {(one, other) for one, other in pairs if one in backs and other in fronts}
    return {one for one, _ in pairs} & {other for _, other in pairs}


def _are_stable(units: Sequence[str], is_marked: bool) -> bool:
    """Return whether documents with the same beginning or end are the same."""
    long, most = (200, 0.06) if is_marked else (100, 0.03)
    for cut in (slice(None, long), slice(-long, None)):
        wholes: defaultdict[int, list[int]] = defaultdict(list)
        for unit in units:
            if len(unit) > 1.25 * long:
                wholes[hash(unit[cut])].append(hash(unit))
        differ = [len(set(each)) > 1 for each in wholes.values() if len(each) > 1]
        if sum(differ) > max(1, most * len(differ)) or (not is_marked and len(differ) < 40):
            return False
    return True
