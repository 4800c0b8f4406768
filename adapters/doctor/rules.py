"""Rules on a request log: why too little was cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from operator import itemgetter
from typing import NamedTuple

from ragorder.adapters.cloud_orderers import find_rules
from ragorder.adapters.doctor.beginnings import common_length, repeated_parts
from ragorder.adapters.doctor.case import (
    Case,
    Chat,
    ChatTemplate,
    Finding,
    RenderError,
    counted,
    graded,
)
from ragorder.adapters.doctor.forms import fitting_template
from ragorder.adapters.doctor.front import (
    CERTAIN_FIELDS,
    separations,
    with_one_list_order,
    with_one_tools_order,
    without_fields,
)
from ragorder.adapters.doctor.prompts import recognise
from ragorder.adapters.doctor.request_log import LoggedRequest
from ragorder.adapters.doctor.turns import Turn
from ragorder.adapters.http_client import ServerError
from ragorder.adapters.observing.observed import predict_reuse
from ragorder.clouds import CacheRules
from ragorder.orderer import Orderer

_USUAL_STEP, _LEAST_STEP = 128, 16
_LARGE_STEPS = (
    "hybrid models (Mamba, linear attention, sliding windows) resume only at such steps: vLLM has finer ones with "
    "--prefix-match-unit if the model allows it; otherwise move shared text into one longer common prefix"
)
_SMALL_STEPS = "start vLLM with a smaller --block-size, or move shared text into one longer common prefix"
_EARLIER_TURNS = (
    "send earlier turns again byte for byte, with their documents; put new documents into the new message, or "
    "documents for all turns into the system message; drop old turns rarely and many at once"
)
_MINIMUM = (
    "a shorter prompt, or a cache breakpoint before that length, is silently not cached: send more or longer documents "
    "in one request, set breakpoints after the minimum, or use a model with a smaller one"
)
_MOST_CHATS = 4
# Tokens may merge at the boundary of two segments.
_MERGED = 2
_TEMPLATE = (
    "the template drops or adds text in earlier turns, such as their reasoning (<think>): keep it with the model's "
    "option for that (--default-chat-template-kwargs), give vLLM a template that only appends (--chat-template), or "
    "send token ids"
)
_DATED = "the template writes today's date: give it a fixed one (date_string in --default-chat-template-kwargs)"
_NEXT = ({"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And what follows from that?"})
_TOPIC = "if one address has several replicas: give it as URL, and the header of topics as --topic-header"
_TOPIC_IGNORED = (
    "have the balancer choose the replica by this header (docs/replicas.md has the settings, deploy/README.md the "
    "traps), and check that nothing in between drops it"
)
_NEARLY_ALL = 0.9
_LEAST_GAIN = 1.0
_NEW_TEXT = "text that no other request has"
_SHARED_FIRST = "put shared text first, byte for byte the same in all requests, then the documents, then varying text"
_WRITE, _READ = 1.25, 0.1
_WRITES = (
    "set a cache breakpoint only after text that is sent again within its TTL, never after the question; "
    "requests sent at the same time all write: let the first one begin to answer before the others"
)


_FIELDS = {
    "cache_salt": "give requests that may share a cache the same cache_salt, or no salt: one for each tenant, not one "
    "for each user or request",
    "chat_template_kwargs": "send the same chat_template_kwargs in all requests, and what varies (a date) in the "
    "question: the chat template may write them before everything",
    "model": "each model and each LoRA adapter has a cache of its own: send requests with the same documents to one",
    "prompt_cache_key": "give requests that begin alike the same prompt_cache_key: it chooses the machine",
}
_OTHER_FIELD = "send fields of the prompt's head the same in all requests"
_LIST_CHANGES = {"order": "the same lines in another order", "items": "other lines"}
_ONE_LIST = (
    "if their order means nothing, send such lines in one order, sorted in the application, or let ragorder order "
    "them: "
)
_BY_NAME = "`ragorder serve --template memories` finds them here"
_BY_FORM = (
    "`ragorder serve --template FILE`, a file with the lines "
    """form = "- {text}" and between = "\\n", and as tail the text after the list"""
)
_TOOLS = {
    "order": (
        "the same tools in another order",
        "tools come first in a prompt: send them in one order, sorted by name in the application or by `ragorder serve "
        "--stable-tools`",
    ),
    "names": (
        "another set of tools",
        "send the same set of tools in all requests, and allow some of them by tool_choice (allowed_tools), or put "
        "those that vary last",
    ),
    "texts": (
        "the same tools with other texts",
        "keep their descriptions the same: a date or a path belongs into a message",
    ),
}


def _document_order(case: Case) -> Finding:
    check = "order of documents"
    reordered = sum(each.at_repeated for each in case.partings)
    found = f"{reordered:,} of {len(case.beginnings):,} requests have documents of earlier ones in another order"
    if graded(reordered, len(case.beginnings)) == "good":
        return Finding(check, "good", found)
    plain, ordered = (100 * share for share in _reusable(case))
    if ordered < plain + _LEAST_GAIN:
        return Finding(check, "good", f"{found}, which loses nothing")
    advice = (
        "order them with ragorder. With each repeated line as a document and an unlimited cache, "
        f"about {ordered:.0f} % of the prompt tokens could be reused, {plain:.0f} % in the log's order; "
        "`ragorder replay LOG`, of a log with the ids of the documents, shows it by size of the cache"
    )
    return Finding(check, "warning", found, advice)


def _reusable(case: Case) -> tuple[float, float]:
    orderer = Orderer(
        capacity_tokens=None,
        block_size=case.block_size or 16,
        key=itemgetter(0),
        tokens=lambda part: case.tokens(part[1]),
    )
    parts = zip(case.log.requests, repeated_parts(case.log.requests), strict=True)
    _, ordered, plain = predict_reuse(orderer, (([*each.items()], {"scope": request.scope}) for request, each in parts))
    tokens = max(1, sum(map(case.length, case.log.requests)))
    return min(1.0, plain / tokens), min(1.0, ordered / tokens)


def _fields(case: Case) -> Finding:
    check = "request fields"
    sharing = [each for each in separations(case.log.requests) if case.tokens(each[1]) >= _LEAST_STEP]
    kinds: Counter[str] = Counter()
    separated, is_certain = 0, False
    for request, characters, names in sharing:
        reported = request.cached_tokens
        if names and (reported is None or 2 * reported < case.tokens(characters)):
            separated += 1
            kinds.update(names)
            is_certain = is_certain or reported is not None or not CERTAIN_FIELDS.isdisjoint(names)
    found = f"{separated:,} of {len(sharing):,} requests begin like earlier ones that all have other fields"
    verdict = graded(separated, len(sharing))
    if verdict == "good":
        return Finding(check, "good", found)
    found += f": {counted(kinds)}; {case.instead(without_fields(case.log.requests), 'if they were the same')}"
    advice = "; ".join(dict.fromkeys(_FIELDS.get(name, _OTHER_FIELD) for name, _ in kinds.most_common()))
    return Finding(check, verdict if is_certain else "warning", found, advice)


def _lists(case: Case) -> Finding:
    check = "list in the system message"
    kinds = Counter(_LIST_CHANGES[each] for each in case.other_lists.values())
    reordered, changed = kinds[_LIST_CHANGES["order"]], kinds.total()
    found = f"{changed:,} of {len(case.beginnings):,} requests differ from earlier ones in a list there"
    verdict = graded(changed, len(case.beginnings))
    if verdict == "good":
        return Finding(check, "good", found)
    found += f": {counted(kinds)}; {case.instead(with_one_list_order(case.log.requests), 'if the lists were sorted')}"
    return Finding(
        check, verdict if graded(reordered, len(case.beginnings)) == "bad" else "warning", found, _list_advice(case)
    )


def _list_advice(case: Case) -> str:
    try:
        from ragorder.adapters.proxy.bodies.lists import ListTemplate
    except ImportError:
        # Without the proxy's extra no preset can be used.
        return _ONE_LIST + _BY_FORM
    template = ListTemplate()
    lists = [each for each in case.log.requests if case.other_lists.get(each.line) == "order"]
    found = [template.find(each.text[each.tools_end : each.system_end]) is not None for each in lists]
    return _ONE_LIST + (_BY_NAME if 2 * sum(found) > len(found) else _BY_FORM)


def _tools(case: Case) -> Finding:
    check = "tools"
    having = sum(bool(each.tools) for each in case.log.requests)
    if not having:
        return Finding(check, "good", "no request has tools")
    kinds = Counter(_TOOLS[each] for each in case.other_tools.values())
    found = f"{kinds.total():,} of {having:,} requests have tools that no earlier one had so"
    verdict = graded(kinds.total(), having)
    if verdict == "good":
        return Finding(check, "good", found)
    found += f": {counted({change: count for (change, _), count in kinds.items()})}; "
    found += case.instead(with_one_tools_order(case.log.requests), "with all in one order")
    return Finding(check, verdict, found, "; ".join(advice for (_, advice), _ in kinds.most_common()))


def _granularity(case: Case) -> Finding:
    check = "cache granularity"
    sharing = [tokens for _, found in case.beginnings if (tokens := case.tokens(found.characters)) >= _LEAST_STEP]
    if not sharing:
        found = f"no request begins with {_LEAST_STEP} tokens of an earlier one"
        advice = "see the text before the documents: without a common beginning no step can be judged"
        return Finding(check, "unknown", found, advice)
    step, source = case.block_size, "the server's blocks"
    if step is None:
        hits = {each.cached_tokens for each in case.log.requests if each.cached_tokens}
        step, source = gcd(*hits), "all hits are multiples of it"
        if len(hits) > 1 and step < _LEAST_STEP:
            found = f"hits of different lengths: fine enough for {len(sharing):,} requests that share a beginning"
            return Finding(check, "good", found)
        if len(hits) < 2:
            hit = "hits of one length alone are" if hits else "no hit is"
            found = f"{hit} reported of {len(sharing):,} requests that share a beginning"
            advice = "give the server's URL, or its block size with --block-size"
            return Finding(check, "unknown", f"{found}, so the log does not show the steps", advice)
    below = sum(tokens < step for tokens in sharing)
    found = f"steps of {step:,} tokens ({source}): "
    verdict = graded(below, len(sharing))
    if verdict == "good":
        return Finding(check, "good", f"{found}{len(sharing) - below:,} of {len(sharing):,} requests share one")
    found += f"{below:,} of {len(sharing):,} requests share less than one with an earlier request"
    return Finding(check, verdict, found, _LARGE_STEPS if step > _USUAL_STEP else _SMALL_STEPS)


def _history(case: Case) -> Finding:
    check, turns = "earlier turns", case.turns
    if not turns:
        return Finding(check, "good", "no request continues another one of this log")
    kinds: Counter[str] = Counter()
    lost = 0
    for turn in turns:
        if (changed := turn.changed) is not None:
            kinds[_kind(turn, changed)] += 1
            lost += len(turn.before.text) - common_length(turn.before.text, turn.request.text)
    broken = kinds.total()
    found = f"{broken:,} of {len(turns):,} later turns do not begin with the turn before"
    verdict = graded(broken, len(turns), bad=0.2, warning=0.02)
    if verdict == "good":
        return Finding(check, "good", found)
    found += f": {counted(kinds)}; each loses {case.tokens(lost / broken):,} tokens on average; "
    found += case.instead(_continued(case), "if they did")
    return Finding(check, verdict, found, _EARLIER_TURNS)


def _continued(case: Case) -> list[LoggedRequest]:
    """Give each later turn the text of the turn before."""
    before = {id(turn.request): turn.before for turn in case.turns if turn.changed is not None}
    texts: dict[int, str] = {}
    for each in case.log.requests:
        known = before.get(id(each))
        added = each.messages[-2:]
        own = "".join(f"<{role}>\n{text}\n" for role, text in added)
        texts[id(each)] = each.text if known is None else texts.get(id(known), known.text) + own
    return [replace(each, text=texts[id(each)]) for each in case.log.requests]


def _kind(turn: Turn, changed: int) -> str:
    before, after = turn.before.messages, turn.request.messages
    if changed >= len(after):
        return "messages were dropped"
    old, new = before[changed], after[changed]
    if old.role in ("system", "developer", "tools") or new.role in ("system", "developer", "tools"):
        return "the tools changed" if "tools" in (old.role, new.role) else "the system message changed"
    if "documents" in (old.role, new.role):
        return "the documents changed"
    if new in before[changed + 1 :]:
        return "messages were dropped"
    if old.role != new.role:
        return "the roles of messages changed"
    role = old.role if old.role in ("user", "assistant", "tool") else "other"
    if new.text in old.text:
        return f"an earlier {role} message lost its documents or other text"
    return f"an earlier {role} message changed"


def _minimum(case: Case) -> Finding:
    check = "provider's minimum"
    rules = {model: _rules_of(model) for model in {each.model for each in case.log.requests}}
    minima = {model: found.minimum_tokens for model, found in rules.items() if found and found.minimum_tokens}
    if not minima:
        return Finding(check, "good", "no model of the log is known to have one")
    concerned = [each for each in case.log.requests if each.model in minima]
    # A prompt read from a cache was long enough, however it was counted.
    short = [each for each in concerned if not each.cached_tokens and case.length(each) < minima[each.model]]
    few = [
        each
        for each, shared in case.beginnings
        if each.model in minima and not each.cached_tokens and 0 < case.tokens(shared.characters) < minima[each.model]
    ]
    extremes = sorted({min(minima.values()), max(minima.values())})
    found = f"{' to '.join(f'{each:,}' for each in extremes)} tokens: "
    found += f"{len(short):,} of {len(concerned):,} prompts are shorter"
    below = len(set(map(id, [*short, *few])))
    found += f", {below - len(short):,} more share less than that with an earlier one"
    verdict = graded(below, len(concerned))
    return Finding(check, verdict, found, None if verdict == "good" else _MINIMUM)


def _rules_of(model: str) -> CacheRules | None:
    found = find_rules(model)
    return found and found[0]


class _Comparison(NamedTuple):
    """`answer_stays`: whether the next turn repeats the generation prompt."""

    lost_tokens: int
    tokens: int
    answer_stays: bool


def _template(case: Case) -> Finding:
    check = "chat template"
    if case.template is None:
        return Finding(check, "unknown", "not checked", "give the URL of a vLLM server, or --tokenizer")
    pairs = _pairs(case)
    if not pairs:
        return Finding(check, "good", "no chat in this log")
    compared: list[_Comparison] = []
    failures: list[str] = []
    for first, second in pairs:
        try:
            compared.append(_compare(case.template, first, second))
        except RenderError as failure:
            failures.append(str(failure))
    if not compared:
        return Finding(check, "unknown", f"not checked: {failures[0]}", "see the server's log, or give --tokenizer")
    if changed := [each for each in compared if each.lost_tokens > _MERGED]:
        worst = max(changed, key=lambda each: each.lost_tokens)
        found = f"{len(changed)} of {len(compared)} chats lose up to {worst.lost_tokens:,} of {worst.tokens:,} tokens"
        return Finding(check, "bad", f"{found} in the next turn, rendered twice", _TEMPLATE)
    if not all(each.answer_stays for each in compared):
        found = "earlier turns keep their tokens, but the last answer's start differs from its generation prompt"
        return Finding(check, "warning", f"{found}: each turn computes it again", _TEMPLATE)
    if case.template.dated:
        return Finding(check, "warning", "earlier turns keep their tokens until the date changes", _DATED)
    return Finding(check, "good", f"{len(compared)} chats keep their tokens in the next turn, rendered twice")


def _pairs(case: Case) -> list[tuple[Chat, Chat]]:
    pairs: list[tuple[Chat, Chat]] = [
        (turn.before.sent, turn.request.sent)
        for turn in case.turns
        if turn.changed is None and turn.before.sent and turn.request.sent
    ]
    if not pairs:
        chats = [each.sent for each in case.log.requests if each.sent and each.sent[-1].get("role") == "user"]
        pairs = [(chat, [*chat, *_NEXT]) for chat in chats]
    step = max(1, len(pairs) // _MOST_CHATS)
    return pairs[::step][:_MOST_CHATS]


def _compare(template: ChatTemplate, first: Chat, second: Chat) -> _Comparison:
    whole, other = template.render(first, open_end=False), template.render(second, open_end=True)
    asked = template.render(first, open_end=True)
    same = common_length(whole, other)
    return _Comparison(len(whole) - same, len(whole), answer_stays=common_length(asked, other) == len(asked))


def _topic(case: Case) -> Finding:
    check = "topic's replica"
    if case.probe is None:
        return Finding(check, "unknown", "not checked", _TOPIC)
    try:
        cached_tokens = case.probe()
    except ServerError as error:
        return Finding(check, "unknown", str(error), "see the server's log; --timeout allows more time")
    times, header = len(cached_tokens), case.topic_header
    if all(each is None for each in cached_tokens):
        advice = "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
        return Finding(check, "unknown", "answers report no cached tokens", advice)
    hits = sum(1 for each in cached_tokens if each)
    if hits == times:
        return Finding(check, "good", f"{times} requests with the same {header} reused the first one's prefix")
    found = f"{hits} of {times} requests with the same {header} reused the first one's prefix"
    also = "" if hits else "; if there is one replica alone, its prefix cache is off"
    return Finding(check, "bad", found, f"{_TOPIC_IGNORED}{also}")


def _volatile(case: Case) -> Finding:
    check = "text before the documents"
    kinds: Counter[str] = Counter()
    remedies: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for each in case.partings:
        if each.at_repeated:
            continue
        other = each.earlier.text if each.earlier else ""
        known = (recognise(text, each.at) for text in (each.request.text, other))
        kind, remedy = next((found for found in known if found[0]), ("", ""))
        kinds[kind or _NEW_TEXT] += 1
        remedies[remedy or _SHARED_FIRST] += 1
        if each.at < each.request.system_end:
            places["tools" if each.at < each.request.tools_end else "system message"] += 1
    repeating = len(case.partings)
    if not repeating:
        return Finding(check, "good", "no request repeats text of another one after their first difference")
    if kinds[_NEW_TEXT] < _NEARLY_ALL * repeating:
        # A document that only one request has is new text, too; but then some requests have none before the difference.
        kinds.pop(_NEW_TEXT, None)
        remedies.pop(_SHARED_FIRST, None)
    parted = kinds.total()
    found = f"of {repeating:,} requests that repeat text of others, {parted:,} differ from them before it"
    verdict = graded(parted, repeating)
    if verdict == "good":
        return Finding(check, "good", found)
    found += "".join(f", {count:,} in the {place}" for place, count in places.most_common())
    advice = "; ".join(remedy for remedy, _ in remedies.most_common(2))
    return Finding(check, verdict, f"{found}: {counted(kinds)}", advice)


def _writes(case: Case) -> Finding:
    check, written, read = "writes and reads", 0, 0
    on_top = saved = 0.0
    for request in case.log.requests:
        if request.written_tokens is None or request.cached_tokens is None:
            continue
        rules = _rules_of(request.model)
        write_price, read_price = (rules.write, rules.read) if rules else (_WRITE, _READ)
        written += request.written_tokens
        read += request.cached_tokens
        on_top += (write_price - 1) * request.written_tokens
        saved += (1 - read_price) * request.cached_tokens
    if not written:
        return Finding(check, "good", "no answer reports tokens written into a cache at a price")
    found = f"{written:,} tokens written, {read:,} read"
    if saved >= on_top:
        return Finding(check, "good", f"{found}: {saved - on_top:,.0f} input tokens saved, at the plain price")
    found += f": {on_top - saved:,.0f} input tokens, at the plain price, dearer than without a cache"
    return Finding(check, "bad", found, _WRITES)


RULES: Sequence[Callable[[Case], Finding]] = (
    _document_order,
    _fields,
    fitting_template,
    _granularity,
    _history,
    _lists,
    _minimum,
    _template,
    _tools,
    _topic,
    _volatile,
    _writes,
)
"""Findings have counts and kinds, never text of a request."""
