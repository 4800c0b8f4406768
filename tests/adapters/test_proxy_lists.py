"""Lists of memories and skills: sent in one order, and left alone where their order may mean something."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette")

from support.bodies import Bodies
from support.rings import length
from support.sent_requests import user

from ragorder.adapters.proxy.bodies.presets import find_templates

FACTS = [f"The user has told about subject {letter * 4}, and would be reminded of it." for letter in "abcdefghijkl"]


def bodies() -> Bodies:
    return Bodies(None, templates=find_templates("memories"))


def system(content: Any, role: str = "system") -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": role, "content": content}, user("Which?")]}).encode()


def listed(
    entries: Sequence[str], heading: str = "[User Memory]", after: str = "\n\nBe brief.", mark: str = "- "
) -> str:
    return f"You help.\n\n{heading}\n" + "\n".join(f"{mark}{each}" for each in entries) + after


HEADINGS = [
    "[User Memory]",
    "User Memories:",
    "## Available skills",
    "**Preferences:**",
    "**User preferences**",
    "<memory_context>",
    "Here are some relevant memories about the user:",
    "<available_skills>\n",
    "历史记忆：",
]


class TestOrdered:
    @pytest.mark.parametrize("heading", HEADINGS)
    @pytest.mark.parametrize("after", ["\n\nBe brief.", "", "\n</memory_context>\nBe brief.", "\n## Rules\nBe brief."])
    def test_any_order_is_sent_as_the_first_one(self, heading: str, after: str) -> None:
        reads, draw = bodies(), random.Random(3)
        for entries in (FACTS, *(draw.sample(FACTS, len(FACTS)) for _ in range(4))):
            body = reads.ordered(system(listed(entries, heading, after)))
            assert json.loads(body) == json.loads(system(listed(FACTS, heading, after)))

    @given(data=st.data())
    @settings(max_examples=length(60, 20), deadline=None)
    def test_as_the_application_would_have_written_it(self, data: st.DataObject) -> None:
        """Entries of several lines, with other bullets, in lists with and without empty lines."""
        mark, gap = data.draw(st.sampled_from("-*•")), data.draw(st.sampled_from(["\n", "\n\n", "\r\n"]))
        lines = st.sampled_from(["a fact", "1. a step", "- an inner one", "# none", "Skills:", "[1]"])
        inner = [data.draw(st.lists(lines, max_size=2)) for _ in range(5)]
        entries = [
            f"{mark} {fact}" + "".join(f"\n  {line}" for line in more)
            for fact, more in zip(FACTS[:5], inner, strict=True)
        ]
        reads = bodies()
        for _ in range(3):
            own = data.draw(st.permutations(entries))
            sent = json.loads(reads.ordered(system(f"Skills:\n{gap.join(own)}\n\nBe brief.")))
            content = sent["messages"][0]["content"]
            ours = content.removeprefix("Skills:\n").removesuffix("\n\nBe brief.")
            assert ours == gap.join(sorted(entries, key=ours.index)) and len(ours) == len(gap.join(entries))

    @pytest.mark.parametrize("name", ["skill", "memory"])
    def test_elements(self, name: str) -> None:
        reads = bodies()
        contents = ["".join(f"<{name}>\n{fact}\n</{name}>\n" for fact in FACTS[:4][::way]) for way in (1, -1)]
        first, second = (reads.ordered(system(f"<available>\n{content}</available>")) for content in contents)
        assert json.loads(second) == json.loads(first)

    def test_in_a_message_of_several_parts(self) -> None:
        reads = bodies()
        parts = [
            [{"type": "text", "text": text} for text in ("You help.", listed(FACTS[:4][::way]))] for way in (1, -1)
        ]
        first, second = (reads.ordered(system(each, "developer")) for each in parts)
        assert json.loads(second) == json.loads(first)


class TestLeftAlone:
    @pytest.mark.parametrize(
        "content",
        [
            listed(FACTS, mark="1. "),
            "Skills:\n" + "\n".join(f"{number}. {fact}" for number, fact in enumerate(FACTS, 1)),
            listed(FACTS, "Most relevant memories:"),
            listed(FACTS, "Recent memories:"),
            listed(FACTS, "Skills, in order of priority:"),
            listed(FACTS, "Steps:"),
            listed(FACTS, "Options:"),
            listed(FACTS, "Your memory is limited."),
            listed([f"2026-08-{day:02}: {fact}" for day, fact in enumerate(FACTS, 1)]),
            listed([f"[{99 - day}] {fact}" for day, fact in enumerate(FACTS, 1)]),
            listed(FACTS, after="\nwhich goes on here, or does not."),
            listed(FACTS, after="\n\n- and one more, of this list or another"),
            listed(FACTS[:1]),
            listed([]),
            "Memories:" * 3,
        ],
        ids=lambda content: content[11:60],
    )
    def test_where_the_order_may_mean_something_or_the_end_is_unclear(self, content: str) -> None:
        assert all(each.find(content) is None for each in find_templates("memories"))

    @pytest.mark.parametrize("role", ["user", "assistant", "tool"])
    def test_outside_instructions(self, role: str) -> None:
        reads = bodies()
        elements = "".join(f"<skill>{fact}</skill>" for fact in FACTS)
        for content in (listed(FACTS), listed(FACTS[::-1]), elements):
            body = system(content, role)
            assert reads.ordered(body) is body

    def test_a_hostile_text_takes_no_longer(self) -> None:
        """As JSON's: a second would be a hundred times too long."""
        for text in ("Memories:\n" * 50_000, "Skills:\n- a\n" * 50_000, "skills" + "- a\n" * 100_000):
            for template in find_templates("memories"):
                template.find(text)
