"""Rules of `ragorder doctor --requests` on what a log alone shows: a log that breaks each, and one that does not."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_command
from support.request_logs import (
    NAMES,
    SYSTEM,
    Examine,
    Lines,
    asked,
    chat,
    conversations,
    counted,
    document,
    examined,
    of_cloud,
    served,
    shares,
    texts_of,
)

from ragorder.cli import main

doctor = partial(run_command, main, "doctor")


@pytest.fixture
def examine(tmp_path: Path) -> Examine:
    return partial(examined, tmp_path)


class TestGranularity:
    def short(self, step: int = 784) -> Lines:
        """Requests that share a system prompt alone, on a model that resumes after so many tokens."""
        return served((chat([name], "?") for name in NAMES[:20]), step=step)

    @pytest.mark.parametrize(
        ("step", "verdict", "said"),
        [
            # A hybrid model, a block that is a bit too large, and one that fits.
            (784, "bad", ["steps of 784 tokens", "19 of 19 requests", "--prefix-match-unit"]),
            (64, "bad", ["--block-size"]),
            (16, "good", []),
        ],
    )
    def test_steps_fit_what_requests_share(self, examine: Examine, step: int, verdict: str, said: list[str]) -> None:
        found = examine(self.short(step), block_size=step)["cache granularity"]
        assert found.verdict == verdict
        assert [words for words in said if words not in f"{found.found} {found.advice}"] == []

    def test_are_unknown_without_hits_and_by_hits_of_one_length(self, examine: Examine) -> None:
        found = examine(self.short())["cache granularity"]
        assert found.verdict == "unknown"
        assert "--block-size" in str(found.advice)
        again = chat(NAMES[:30], "?")
        bodies = [again, again, *({name: line[name] for name in line if name != "usage"} for line in self.short())]
        lines = served(bodies, step=784)
        assert len({line["usage"]["prompt_tokens_details"]["cached_tokens"] for line in lines} - {0}) == 1
        found = examine(lines)["cache granularity"]
        assert found.verdict == "unknown"
        assert found.found.startswith("hits of one length alone are reported")

    def test_are_read_from_hits_that_are_all_multiples(self, examine: Examine) -> None:
        long = [chat(NAMES[: 10 * many], "?") for many in (1, 1, 2, 2, 4, 4)]
        lines = served([*long, *(chat([name], "?") for name in NAMES[10:30])], step=300)
        found = examine(lines)["cache granularity"]
        assert found.found.startswith("steps of 300 tokens (all hits are multiples of it)")
        assert found.verdict == "bad"


class TestMinimum:
    @pytest.mark.parametrize(
        ("model", "documents", "read", "verdict", "says"),
        [
            # Prompts below it are never kept, unless they were read: then they were long enough.
            ("claude-haiku-4-5", 4, 0, "bad", "4,096 tokens: 10 of 10 prompts are shorter"),
            ("claude-haiku-4-5", 4, 300, "good", "4,096 tokens: 0 of 10 prompts are shorter"),
            ("claude-opus-5-5", 8, 0, "good", "512 tokens: 0 of 10 prompts are shorter"),
            # An engine of one's own has none, with any model.
            ("qwen", 8, 0, "good", "no model of the log is known to have one"),
            ("cerebras/Cerebras-GPT-6.7B", 2, 0, "good", "no model of the log is known to have one"),
            ("deepseek-ai/DeepSeek-V3", 2, 0, "good", "no model of the log is known to have one"),
        ],
    )
    def test_by_model(self, examine: Examine, model: str, documents: int, read: int, verdict: str, says: str) -> None:
        bodies = [chat(NAMES[:documents], f"number {number}?", model=model) for number in range(10)]
        found = examine([of_cloud(body, read=read, written=0) for body in bodies])["provider's minimum"]
        assert (found.verdict, found.found[: len(says)]) == (verdict, says)

    def test_beginnings_below_it_are_bad(self, examine: Examine) -> None:
        bodies = [
            chat([NAMES[0], *(f"own {number} {place}" for place in range(30))], "?", model="claude-haiku-4-5")
            for number in range(10)
        ]
        found = examine([of_cloud(body, read=0, written=0) for body in bodies])["provider's minimum"]
        assert "0 of 10 prompts are shorter, 9 more share less" in found.found
        assert found.verdict == "bad"


class TestTextBeforeTheDocuments:
    def with_head(self, head: Callable[[int], str]) -> Lines:
        return served(chat(NAMES[:4], f"number {number}?", system=f"{head(number)}\n{SYSTEM}") for number in range(20))

    @pytest.mark.parametrize(
        ("head", "kind"),
        [
            (lambda number: f"Today is 2026-11-{number % 28 + 1:02} 10:{number:02}.", "a date"),
            (lambda number: f"It is {number + 2:02}:15.", "a clock time"),
            (lambda number: f"User: alice{number}", "a user, session or request"),
            (lambda number: f"Trace {number:08x}-0000-4000-8000-00000000000{number % 10}", "a UUID"),
        ],
    )
    def test_what_varies_is_named(self, examine: Examine, head: Callable[[int], str], kind: str) -> None:
        found = examine(self.with_head(head), block_size=16)["text before the documents"]
        assert found.verdict == "bad"
        assert "19 of them" in found.found or "19 requests" in found.found
        assert f"{kind} (" in found.found
        assert "in the system message" in found.found
        assert "after the documents" in str(found.advice)

    def test_text_without_a_known_pattern_is_named_too(self, examine: Examine) -> None:
        found = examine(self.with_head(lambda number: f"Dear {'abcdefghijklmnopqrst'[number]}nna,"), block_size=16)
        assert "text that no other request has (19)" in found["text before the documents"].found

    def rotated(self, question: str) -> Lines:
        return served(
            chat([*NAMES[number % 5 : 5], *NAMES[: number % 5]], question.format(number)) for number in range(20)
        )

    def test_another_order_is_advised_about_with_its_saving(self, examine: Examine) -> None:
        found = examine(self.rotated("number {}?"), block_size=16)
        assert found["text before the documents"].verdict == "good"
        order = found["order of documents"]
        assert order.verdict == "warning"
        assert "of 19 requests have documents of earlier ones in another order" in order.found
        assert "order them" in str(order.advice) and "ragorder replay LOG" in str(order.advice)
        # The same five documents in any order: all of them could be reused.
        ordered, plain = map(int, re.findall(r"(\d+) % (?:of the prompt|in the log's order)", str(order.advice)))
        assert 50 < ordered <= 100
        assert plain < ordered - 10

    def test_another_order_of_the_documents_field_is_named(self, examine: Examine) -> None:
        draw = random.Random(4)
        texts = [{"text": document(name).replace("\n", " ")} for name in NAMES[:8]]
        lines = [counted(asked(number, documents=draw.sample(texts, 5)), 800, 100) for number in range(20)]
        found = examine(lines)
        assert "have documents of earlier ones in another order" in found["order of documents"].found
        assert found["order of documents"].verdict == "warning"
        assert "too small" not in str(found["requests"].advice)

    def test_another_order_is_no_fault_of_the_cache(self, examine: Examine) -> None:
        lines = self.rotated("the same?")
        for line in lines:
            line["usage"]["prompt_tokens_details"]["cached_tokens"] = 16
        found = examine(lines, block_size=16)
        assert found["order of documents"].verdict == "warning"
        assert found["requests"].verdict == "bad"
        assert found["requests"].advice == "see the findings below"

    def test_a_document_that_one_request_alone_has_is_no_volatile_text(self, examine: Examine) -> None:
        lines = served(
            chat([f"own-{number}" if number % 3 == 0 else NAMES[number % 4], *NAMES[4:8]], "?") for number in range(30)
        )
        assert examine(lines, block_size=16)["text before the documents"].verdict == "good"


TOOLS = [
    {"type": "function", "function": {"name": f"tool_{number}", "description": document(f"tool-{number}", 2)}}
    for number in range(12)
]
FACTS = [document(f"fact-{number}", 1).split("\n")[1] for number in range(12)]


def remembering(number: int, facts: Sequence[str], mark: str = "- ", heading: str = "[User Memory]") -> dict[str, Any]:
    """A question after a list in the system message."""
    memory = "".join(f"{mark}{fact}\n" for fact in facts)
    system = f"{heading}\n{memory}\n{document('manual')}"
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": f"q {number}"}]}


class TestListsBeforeTheQuestion:
    def drawn(self, items: Sequence[Any], count: int = 12, lists: int = 20) -> list[list[Any]]:
        draw = random.Random(3)
        return [draw.sample(items, count) for _ in range(lists)]

    @pytest.mark.parametrize("mark", ["- ", "* ", ""])
    def test_in_another_order_are_named(self, examine: Examine, tmp_path: Path, mark: str) -> None:
        bodies = [remembering(number, facts, mark) for number, facts in enumerate(self.drawn(FACTS))]
        found = examine([counted(body, 700, 32) for body in bodies])
        each = found["list in the system message"]
        assert each.verdict == "bad"
        assert each.found.startswith("19 of 19 requests") and "the same lines in another order (19)" in each.found
        assert shares(each.found)[0] == 4.6 and shares(each.found)[1] > 80
        assert "if their order means nothing" in str(each.advice)
        assert found["order of documents"].verdict == found["text before the documents"].verdict == "good"
        assert (found["requests"].verdict, found["requests"].advice) == ("warning", "see the findings below")
        assert doctor("--requests", tmp_path / "requests.jsonl").exit_code == 1

    def test_of_items_with_several_lines_are_named(self, examine: Examine) -> None:
        skills = [f"name: skill {place}\n  about: {fact}" for place, fact in enumerate(FACTS)]
        bodies = [remembering(number, drawn) for number, drawn in enumerate(self.drawn(skills))]
        found = examine([counted(body, 900, 32) for body in bodies])["list in the system message"]
        assert found.verdict == "bad" and "the same lines in another order (19)" in found.found

    @pytest.mark.parametrize("heading", ["[User Memory]", "What is known"], ids=["a preset", "a file"])
    def test_are_ordered_by_the_template_that_is_advised(self, examine: Examine, tmp_path: Path, heading: str) -> None:
        pytest.importorskip("msgspec")
        from ragorder.adapters.proxy.bodies.presets import find_templates

        bodies = [remembering(number, facts, heading=heading) for number, facts in enumerate(self.drawn(FACTS))]
        advice = str(examine([counted(body, 700, 32) for body in bodies])["list in the system message"].advice)
        if heading == "[User Memory]":
            assert "--template memories" in advice and "FILE" not in advice
            template = find_templates("memories")[0]
        else:
            lines = re.findall(r'(?:form|between) = "[^"]*"', advice)
            tail = f"\n\n{document('manual')[:20]}"
            (tmp_path / "list.toml").write_text("\n".join([*lines, f"tail = {json.dumps(tail)}"]), "utf-8")
            (template,) = find_templates(str(tmp_path / "list.toml"))
        run = template.find(bodies[0]["messages"][0]["content"])
        assert run is not None and run.documents == [f"- {fact}" for fact in self.drawn(FACTS)[0]]

    def test_of_other_lines_are_a_warning(self, examine: Examine) -> None:
        bodies = [remembering(number, facts) for number, facts in enumerate(self.drawn(FACTS, 6))]
        each = examine([counted(body, 500, 32) for body in bodies])["list in the system message"]
        assert each.verdict == "warning" and "other lines (" in each.found

    def test_in_one_order_are_good(self, examine: Examine) -> None:
        found = examine([counted(remembering(number, FACTS), 700, 640) for number in range(20)])
        assert {each.verdict for each in found.values()} == {"good", "unknown"}

    def test_in_which_a_date_changes_are_not_lists_in_another_order(self, examine: Examine) -> None:
        dated = [remembering(day, [*FACTS[:3], f"Today is 2026-11-{day + 1:02}.", *FACTS[3:]]) for day in range(20)]
        found = examine([counted(body, 700, 32) for body in dated])
        assert found["list in the system message"].verdict == "good"
        assert "a date (19)" in found["text before the documents"].found

    @pytest.mark.parametrize("field", ["tools", "functions"])
    def test_tools_in_another_order_are_named(self, examine: Examine, tmp_path: Path, field: str) -> None:
        bodies = [asked(number, **{field: tools}) for number, tools in enumerate(self.drawn(TOOLS))]
        found = examine([counted(body, 1200, 64) for body in bodies])
        each = found["tools"]
        assert each.verdict == "bad" and each.found.startswith("19 of 20 requests")
        assert "the same tools in another order (19)" in each.found
        assert shares(each.found)[0] == 5.3 and shares(each.found)[1] > 90
        assert "--stable-tools" in str(each.advice)
        assert found["text before the documents"].verdict == found["order of documents"].verdict == "good"
        assert found["requests"].verdict == "warning"
        assert doctor("--requests", tmp_path / "requests.jsonl").exit_code == 1

    def test_another_set_of_tools_is_told_apart(self, examine: Examine) -> None:
        bodies = [asked(number, tools=tools) for number, tools in enumerate(self.drawn(TOOLS, 6))]
        each = examine([counted(body, 700, 64) for body in bodies])["tools"]
        assert each.verdict == "bad" and "another set of tools (19)" in each.found
        assert "tool_choice" in str(each.advice) and "--stable-tools" not in str(each.advice)

    def test_a_tool_that_tells_the_date_is_text_that_changes(self, examine: Examine) -> None:
        dated = [{"name": "now", "description": f"Today is 2026-11-{day + 1:02}. {FACTS[0]}"} for day in range(20)]
        found = examine([counted(asked(day, tools=[tool]), 300, 16) for day, tool in enumerate(dated)])
        assert "the same tools with other texts (19)" in found["tools"].found
        assert "19 in the tools: a date (19)" in found["text before the documents"].found

    def test_the_same_tools_are_good(self, examine: Examine) -> None:
        lines = [counted(asked(number, tools=TOOLS[: 6 + number % 2]), 700, 640) for number in range(40)]
        assert examine(lines)["tools"].verdict == "good"


class TestForm:
    """Five of the eight documents of a topic, in any order."""

    def written(self, write: Callable[[Sequence[str]], str], requests: int = 120) -> Lines:
        draw = random.Random(5)
        texts = [document(name).partition("\n")[2].strip() for name in NAMES]
        topics = [texts[start : start + 8] for start in range(0, 36, 4)]
        lists = [draw.sample(draw.choice(topics), 5) for _ in range(requests)]
        questions = [f"{document(f'question {number}', 1)}?" for number in range(requests)]
        return [
            {"messages": [{"role": "system", "content": write(texts)}, {"role": "user", "content": question}]}
            for texts, question in zip(lists, questions, strict=True)
        ]

    def anythingllm(self, texts: Sequence[str]) -> str:
        found = "".join(f"[CONTEXT {n}]:\n{text}\n[END CONTEXT {n}]\n\n" for n, text in enumerate(texts))
        return f"Help.\nContext:\n{found}"

    def webpages(self, texts: Sequence[str]) -> str:
        return "\n".join(f"[webpage {n} begin]{text}[webpage {n} end]" for n, text in enumerate(texts, 1))

    def own(self, texts: Sequence[str]) -> str:
        found = "\n".join(f'<hit rank="{n}">\n{text}\n</hit>' for n, text in enumerate(texts, 1))
        return f"<hits>\n{found}\n</hits>\n\nUse them."

    @pytest.mark.parametrize(
        ("form", "application", "says"),
        [
            ("anythingllm", "in the form of AnythingLLM", "`ragorder serve --template anythingllm` would save about"),
            ("webpages", "search results", "numbers that answers cite then mean places"),
            ("own", "in one form that can be learned", "`ragorder template LOG -o app.toml`"),
        ],
    )
    def test_a_fitting_template_has_a_saving(self, examine: Examine, form: str, application: str, says: str) -> None:
        found = examine(self.written(getattr(self, form)))["documents' form"]
        assert found.verdict == "warning"
        assert found.found.startswith("120 of 120 requests have documents") and application in found.found
        assert says in str(found.advice)
        assert 10 < int(re.findall(r"about (\d+) % of the prefill", str(found.advice))[0]) <= 100

    def test_a_score_before_each_text_leaves_nothing_to_save(self, examine: Examine) -> None:
        draw = random.Random(6)

        def librechat(texts: Sequence[str]) -> str:
            return "\n---\n".join(
                f"File: a.pdf\nRelevance: 0.{draw.randint(1000, 9999)}\nContent: {text}\n" for text in texts
            )

        found = examine(self.written(librechat))["documents' form"]
        assert found.verdict == "good" and "score" in found.found

    def test_a_plain_separator_has_no_template(self, examine: Examine) -> None:
        found = examine(self.written("\n".join))["documents' form"]
        assert found.verdict == "good" and "template" not in str(found.advice)


def with_the_bare_question(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*history[:-1], {"role": "user", "content": history[-1]["content"].rpartition("Question: ")[2]}]


def with_another_system_message(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": f"{SYSTEM}\n{document(f'turn {len(history)}')}"}, *history[1:]]


class TestEarlierTurns:
    def test_that_are_sent_again_are_good(self, examine: Examine) -> None:
        found = examine(conversations(list), block_size=16)["earlier turns"]
        assert found.verdict == "good"
        assert found.found.startswith("0 of 16 later turns")

    @pytest.mark.parametrize(
        ("replays", "said"),
        [
            (with_the_bare_question, "an earlier user message lost its documents or other text (16)"),
            (with_another_system_message, "the system message changed (16)"),
            (lambda history: [history[0], *history[-1:]], "messages were dropped"),
        ],
        ids=["bare", "system", "dropped"],
    )
    def test_that_change_are_named(self, examine: Examine, replays: Any, said: str) -> None:
        found = examine(conversations(replays), block_size=16)["earlier turns"]
        assert found.verdict == "bad" and said in found.found
        assert found.found.startswith("8 of" if said == "messages were dropped" else "16 of 16 later turns")
        assert "send earlier turns again" in str(found.advice)

    def test_the_loss_is_told_in_tokens(self, examine: Examine) -> None:
        def broken(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{"role": "system", "content": f"{len(history)} {SYSTEM}"}, *history[1:]]

        found = examine(conversations(broken), block_size=16)["earlier turns"]
        loses = int(found.found.rpartition("each loses ")[2].split()[0].replace(",", ""))
        lengths = [len(texts_of(line)) // 4 for line in conversations(broken)]
        assert min(lengths) < loses < max(lengths)

    @pytest.mark.parametrize("is_replaced", [True, False], ids=["in the system message", "with the bare question"])
    @pytest.mark.parametrize("form", ["{0}{1}", "{0}问题：{1}", "{1}\n{0}", "{0}\n{1}\n回答："])
    def test_of_short_questions_are_found(self, examine: Examine, is_replaced: bool, form: str) -> None:
        """Chinese questions of eight characters, each of another conversation and turn."""
        lines = []
        for topic, conversation in zip("订退发电充票", range(6), strict=True):
            history: list[dict[str, Any]] = []
            for turn, noun in enumerate("单款票"):
                question = {"role": "user", "content": f"{topic}{noun}怎么办理呢？"}
                context = "".join(f"<doc>{document(f'{conversation} {turn} {place}', 2)}</doc>" for place in range(3))
                sent = question
                if not is_replaced:
                    sent = {"role": "user", "content": form.format(context, question["content"])}
                system = {"role": "system", "content": SYSTEM + context * is_replaced}
                lines.append(counted({"messages": [system, *history, sent]}, 500, 32))
                answer = document(f"answer {conversation} {turn}", 1)
                history += [question, {"role": "assistant", "content": answer}]
        found = examine(lines)["earlier turns"]
        assert found.verdict == "bad" and found.found.startswith("12 of 12 later turns")
        kind = "the system message changed" if is_replaced else "an earlier user message lost its documents"
        assert kind in found.found
        assert shares(found.found)[0] == 6.4 and shares(found.found)[1] > 30

    @pytest.mark.parametrize("question", ["hi", "继续", "why is that?"])
    def test_of_other_users_who_ask_the_same_are_not_mistaken_for_them(self, examine: Examine, question: str) -> None:
        """Each user has a system message, and the log has no first turns of those who come back."""
        asks = {"role": "user", "content": question}
        lines = []
        for number in range(20):
            system = {"role": "system", "content": f"{SYSTEM} The user is {document(f'user {number}', 1)}"}
            messages = [system, asks]
            if number % 2:
                messages += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": f"and {number}?"}]
            lines.append({"messages": messages})
        assert examine(lines)["earlier turns"].found == "no request continues another one of this log"


class TestWrites:
    # A write costs a quarter on top, a read saves 95 % with this model.
    @pytest.mark.parametrize(
        ("read", "verdict", "says"),
        [
            (0, "bad", "0 read: 1,000 input tokens, at the plain price, dearer than without a cache"),
            (26, "bad", "1,040 read: 12 input tokens, at the plain price, dearer than without a cache"),
            (27, "good", "1,080 read: 26 input tokens saved, at the plain price"),
        ],
    )
    def test_the_break_even_is_the_models(self, examine: Examine, read: int, verdict: str, says: str) -> None:
        lines = [of_cloud(chat([name], "?", model="claude-opus-5-5"), read=read, written=100) for name in NAMES]
        found = examine(lines)["writes and reads"]
        assert (found.verdict, found.found) == (verdict, f"4,000 tokens written, {says}")

    def test_of_answers_that_do_not_say_what_they_read_count_nothing(self, examine: Examine) -> None:
        lines = [of_cloud(chat([name], "?", model="claude-opus-5-5"), read=27, written=100) for name in NAMES]
        silent = of_cloud(chat(["a"], "?", model="claude-opus-5-5"), read=0, written=100_000)
        del silent["response"]["usage"]["cache_read_input_tokens"]
        assert examine([*lines, silent])["writes and reads"].verdict == "good"
