"""`ragorder doctor` and two prompts: how much they share, and what in them changes with every request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faulty_server import BLOCK, SYSTEM, FaultyServer, chat, findings, verdicts
from support.rings import length

pytest.importorskip("httpx2")
pytest.importorskip("prometheus_client")


@pytest.fixture
def fake() -> Iterator[FaultyServer]:
    with FaultyServer() as server:
        yield server


VOLATILE = {
    "a date": ["Today is 2026-11-20.", "Today is 2026-11-21."],
    "a date ": ["Date: 20 November 2026", "Date: 3 December 2026"],
    "a date  ": ["Nov 20, 2026", "Nov 21, 2026"],
    "a date   ": ["On 11/20/2026:", "On 12/20/2026:"],
    "a day of the week": ["Today is Monday.", "Today is Tuesday."],
    "a clock time": ["It is 14:03:59 now.", "It is 14:04:01 now."],
    "a UUID": ["id 123e4567-e89b-12d3-a456-426614174000", "id 123e4567-e89b-12d3-a456-426614174001"],
    "an id": ["trace 9f86d081884c7d65", "trace 9f86d081884c7d66"],
    "a time stamp": ["now=1795265429", "now=1795265430"],
    "a user, session or request": ["User: Alice\n", "User: Bob\n"],
    "a number in a document's header": ["Document [3]: text", "Document [1]: text"],
    "a number in a document's header ": ["[12] text", "[4] text"],
    "a retrieval score": ["[doc-a] (score: 0.91)", "[doc-a] (score: 0.88)"],
}
BRIEF = "Be brief.\n[paris]\n…", "Be brief.\n[rome]\n…"
ALICE_AND_BOB = chat(f"{SYSTEM}You help Alice.", "[d1]\ntext"), chat(f"{SYSTEM}You help Bob.", "[d1]\ntext")
FOR_ALICE_AND_BOB = f"{SYSTEM}For Alice.\n[d1]\n…", f"{SYSTEM}For Bob.\n[d1]\n…"
DAYS = f"{SYSTEM}[d1]\n2026-11-20 saw rain", f"{SYSTEM}[d1]\n2026-11-21 saw snow"
PROMPTS: dict[str, Any] = {
    # Samples, the document marker, verdicts, and words of findings or advice.
    "a date at the beginning": (
        tuple(f"2026-11-{day}\n{SYSTEM}\nDocuments:\n[d1]\ntext" for day in (20, 21)),
        None,
        {"shared prefix": "bad", "volatile text": "bad"},
        ["share 9 tokens, 0 whole blocks of 16", "into the question"],
    ),
    "less than a block": (BRIEF, None, {"shared prefix": "warning"}, ["--document-marker"]),
    "less than a block before documents": (BRIEF, "[", {"shared prefix": "good"}, []),
    "inside the system prompt": (ALICE_AND_BOB, None, {"shared prefix": "warning"}, ["inside the system prompt"]),
    "inside documents in the system prompt": (ALICE_AND_BOB, "You help", {"shared prefix": "good"}, []),
    "one system prompt is longer": (
        (chat(SYSTEM, "[d1]"), chat(f"{SYSTEM}More.", "[d1]")),
        None,
        {},
        ["inside the system prompt"],
    ),
    "after the system prompt": (
        (chat(SYSTEM, "[paris]\n…"), chat(SYSTEM, "[rome]\n…")),
        None,
        {"shared prefix": "good", "volatile text": "good"},
        [],
    ),
    "before the documents": (FOR_ALICE_AND_BOB, None, {"shared prefix": "good"}, []),
    "before the documents, with a marker": (FOR_ALICE_AND_BOB, "[d", {"shared prefix": "bad"}, []),
    "where the documents begin": (
        (f"{SYSTEM}\n[paris]\nParis is…", f"{SYSTEM}\n[rome]\nRome was…"),
        None,
        {"shared prefix": "good", "volatile text": "good"},
        [f"share {len(SYSTEM) + 2} tokens, {(len(SYSTEM) + 2) // BLOCK} whole blocks"],
    ),
    "a date in the system prompt": (
        tuple(chat(f"{SYSTEM}It is 2026-11-{day}.", "[d1]") for day in (20, 21)),
        None,
        {"shared prefix": "bad", "volatile text": "bad"},
        [],
    ),
    "dates somewhere": (DAYS, None, {"volatile text": "warning"}, []),
    "dates of documents": (DAYS, "[d", {"volatile text": "good"}, []),
    "documents with their rank": (
        (f"{SYSTEM}\n[3] text", f"{SYSTEM}\n[1] text"),
        "[",
        {"volatile text": "warning"},
        ["document_template"],
    ),
    "no document marker": ((f"{SYSTEM}[d1]", f"{SYSTEM}[d2]"), "<doc", {"document marker": "unknown"}, []),
    "the same": ((SYSTEM, SYSTEM), None, {"shared prefix": "unknown"}, []),
}


class TestTwoPrompts:
    @pytest.mark.parametrize("name", PROMPTS)
    def test_are_judged_by_where_they_part(self, fake: FaultyServer, name: str) -> None:
        samples, marker, verdicts, said = PROMPTS[name]
        found = findings(fake, samples=samples, document_marker=marker)
        assert {check: found[check].verdict for check in verdicts} == verdicts
        words = " ".join(f"{each.found} {each.advice}" for each in found.values())
        assert [text for text in said if text not in words] == []
        sent = [{"model": "fake", "prompt" if isinstance(each, str) else "messages": each} for each in samples]
        assert fake.bodies("/tokenize") == sent or name == "the same"

    @pytest.mark.parametrize("kind", VOLATILE)
    def test_that_part_over_what_changes_with_every_request(self, fake: FaultyServer, kind: str) -> None:
        first, second = VOLATILE[kind]
        found = findings(fake, samples=(f"{first} Be brief.", f"{second} Be brief."))
        assert kind.strip() in found["volatile text"].found
        assert found["volatile text"].verdict in ("bad", "warning")

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("[paris]\ntext", "[rome]\ntext"),
            ("User: who built it?\n", "User: what is it?\n"),
            ("In 1889 it was", "In 1925 it was"),
            ("of 12 towers", "of 300 towers"),
            ("Monuments", "Moonlight"),
            ("decade", "facade"),
            ("[eiffel-1]", "[eiffel-2]"),
        ],
    )
    def test_that_part_over_ordinary_text(self, fake: FaultyServer, one: str, other: str) -> None:
        assert verdicts(fake, samples=(f"{SYSTEM}\n{one}", f"{SYSTEM}\n{other}"))["volatile text"] == "good"

    @pytest.mark.parametrize("tokens", [None, [1, 2], {"tokens": 7}])
    def test_that_the_server_does_not_tokenise(self, fake: FaultyServer, tokens: Any) -> None:
        fake.tokenizes = False
        if tokens is not None:
            fake.raw["/tokenize"] = json.dumps(tokens).encode()
        found = findings(fake, samples=("x" * 400 + "1", "x" * 400 + "2"))["shared prefix"]
        assert "share 100 tokens (estimated" in found.found

    def test_with_contents_in_parts_for_a_server_whose_blocks_are_unknown(self, fake: FaultyServer) -> None:
        fake.metrics, fake.tokenizes = None, False
        prompts = [[{"role": "user", "content": [{"type": "text", "text": f"{SYSTEM}{end}"}, 7]}] for end in "ab"]
        found = findings(fake, samples=(prompts[0], prompts[1]))["shared prefix"].found
        assert "share" in found and "blocks of 16 (assumed)" in found

    def test_are_quoted_with_forty_characters_each(self, fake: FaultyServer) -> None:
        found = findings(fake, samples=("a" * 100 + "b" * 100, "a" * 100 + "c" * 100))["volatile text"].found
        for char in "bc":
            assert f'"{"a" * 14}{char * 26}"' in found

    def test_are_quoted_without_control_characters(self, fake: FaultyServer) -> None:
        fake.tokenizes = False

        @settings(max_examples=length(30, 10))
        @given(st.text(), st.text(min_size=1), st.text(min_size=1))
        def quote(head: str, one: str, other: str) -> None:
            found = findings(fake, samples=(head + one, head + other))
            if one != other:
                assert found["volatile text"].found.isprintable()
                assert len(found["volatile text"].found) < 2 * 40 + 120

        quote()
