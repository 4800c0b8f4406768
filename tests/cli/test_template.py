"""`ragorder template`: how an application joins documents, learned from a log of its requests or by a proxy."""

from __future__ import annotations

import json
import random
import re
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
from support.commands import run_command, write_lines

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx2
from support.http_server import Handler, LocalServer
from support.rings import grid
from support.serve_process import SERVE, ServeProcess, launching

from ragorder.adapters.learning.shadow import ShadowLearner
from ragorder.adapters.proxy.bodies.presets import find_templates
from ragorder.cli import main

WORDS = [
    *("order", "refund", "invoice", "carrier", "label", "engine", "window", "policy", "account", "holder", "return"),
    *("parcel", "battery", "charger", "lamp", "socket", "voltage", "manual", "gasket", "torque", "bolt", "sleeve"),
    *("printer", "toner", "drum", "valve", "pump", "filter", "sensor", "cable", "fuse", "relay"),
]
Write = Callable[[Sequence[str], str], list[dict[str, str]]]


def sentence(draw: random.Random) -> str:
    words = draw.choices(WORDS, k=draw.randint(8, 16))
    words.insert(draw.randrange(8), str(draw.randint(1, 900)))
    return " ".join(words).capitalize() + draw.choice(".?!;:")


def texts(draw: random.Random, count: int = 60) -> list[str]:
    return ["\n".join(sentence(draw) for _ in range(draw.randint(3, 8))) for _ in range(count)]


def retrieved(count: int = 160, seed: int = 0) -> list[tuple[list[str], str]]:
    """Requests for five of the eight documents of a topic, in any order, with a question each."""
    draw = random.Random(seed)
    documents = texts(draw)
    topics = [documents[at : at + 8] for at in range(0, 52, 4)]
    return [(draw.sample(draw.choice(topics), 5), f"Question {at}: {sentence(draw)}") for at in range(count)]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def numbered(documents: Sequence[str], question: str) -> list[dict[str, str]]:
    found = "".join(f"[CONTEXT {n}]:\n{text}\n[END CONTEXT {n}]\n\n" for n, text in enumerate(documents))
    return [{"role": "system", "content": f"You are a helper.\nContext:\n{found}"}, *user(question)]


def xml(documents: Sequence[str], question: str) -> list[dict[str, str]]:
    found = "\n".join(f'<doc index="{n}">\n{text}\n</doc>' for n, text in enumerate(documents, 1))
    return user(f"<docs>\n{found}\n</docs>\n\n{question}")


def fenced(documents: Sequence[str], question: str) -> list[dict[str, str]]:
    found = "\n\n".join(f"DOCUMENT {n}: notes\n```\n{text}\n```" for n, text in enumerate(documents, 1))
    return user(f"{found}\n\nQUERY: {question}")


def tool_result(documents: Sequence[str], question: str) -> list[dict[str, str]]:
    found = "\n---\n".join(f"File: notes, Content: {text}\n" for text in documents)
    return [{"role": "tool", "content": found}, *user(question)]


def with_ids(documents: Sequence[str], question: str) -> list[dict[str, str]]:
    ids = {text: 100 + len(text) * 7 for text in documents}
    found = "\n".join(f"### Source ({ids[text]}) ###\n{text}" for text in documents)
    return user(f"Answer from these notes.\n\n{found}\n\nEND OF NOTES. Question:\n{question}")


def scored(documents: Sequence[str], question: str) -> list[dict[str, str]]:
    draw = random.Random(question)
    found = "\n".join(f"<hit>Relevance: 0.{draw.randint(1000, 9999)}\n{text}\n</hit>" for text in documents)
    return user(f"<hits>\n{found}\n</hits>\n\n{question}")


def plain(documents: Sequence[str], question: str) -> list[dict[str, str]]:
    return user("Use this context, please.\n<<<\n" + "\n".join(documents) + f"\n>>>\nNow answer: {question}")


def log(path: Path, bodies: Sequence[list[dict[str, str]]]) -> Path:
    return write_lines(path, ({"model": "m", "messages": each} for each in bodies))


run = partial(run_command, main, "template")


class TestAnApplicationWithMarks:
    @pytest.mark.parametrize(
        "write", grid([numbered, xml, fenced, tool_result, with_ids], 3), ids=lambda write: write.__name__
    )
    def test_its_file_arranges_prompts_as_the_application_writes_them(self, write: Write, tmp_path: Path) -> None:
        requests = retrieved()
        file = tmp_path / "app.toml"
        done = run(log(tmp_path / "log.jsonl", [write(*each) for each in requests]), "--out", file)
        assert done.exit_code == 0, done.output
        assert "documents in 160 of 160 requests" in done.output
        assert f"--template {file}" in done.output
        (template,) = find_templates(str(file))
        for documents, question in retrieved(20, seed=1):
            for order in list(permutations(range(5)))[::29]:
                wanted = write([documents[rank] for rank in order], question)
                for message, other in zip(write(documents, question), wanted, strict=True):
                    found = template.find(message["content"])
                    if found is not None:
                        parts = [template.split(each) for each in found.documents]
                        placed = [parts[rank].with_id(parts[place].id) for place, rank in enumerate(order)]
                        moved = placed if template.shows_number else [found.documents[rank] for rank in order]
                        assert "".join(found.pieces_with(moved)) == other["content"]

    def test_examples_are_shown_with_a_predicted_saving(self, tmp_path: Path) -> None:
        done = run(log(tmp_path / "log.jsonl", [xml(*each) for each in retrieved()]))
        assert "saving: " in done.output and "example 3" in done.output
        assert "cites as [2]" in done.output and "looks the same" in done.output
        assert "changes from request to request" not in done.output

    def test_a_score_before_the_text_is_said_with_its_line_and_saves_nothing(self, tmp_path: Path) -> None:
        done = run(log(tmp_path / "log.jsonl", [scored(*each) for each in retrieved()]))
        assert "Relevance: 0." in done.output and "nothing after it is cached" in done.output
        saving = re.search(r"saving: ([\d.]+) %", done.output)
        assert saving is not None and float(saving[1]) < 1


class TestWhatIsNotToBeUsed:
    def test_a_plain_separator_is_reported_and_not_written(self, tmp_path: Path) -> None:
        file = tmp_path / "app.toml"
        done = run(log(tmp_path / "log.jsonl", [plain(*each) for each in retrieved()]), "-o", file)
        assert done.exit_code == 1
        assert "too plain" in done.output or "no template" in done.output
        assert not file.exists()

    def test_marks_that_documents_contain_are_reported_and_not_written(self, tmp_path: Path) -> None:
        """No number says which of them is a document's own."""
        file, known = tmp_path / "app.toml", retrieved()
        popular = {text for documents, _ in known for text in documents if len(text) % 10 == 3}
        quoted = {text: text.replace("\n", "\n\n### Source (5) ###\n", 1) for text in popular}
        bodies = [with_ids([quoted.get(text, text) for text in documents], question) for documents, question in known]
        done = run(log(tmp_path / "log.jsonl", bodies), "-o", file)
        assert done.exit_code == 1 and "contain the text around documents" in done.output
        assert not file.exists()

    @pytest.mark.parametrize("kind", ["history", "glossary", "unique"])
    def test_what_is_no_list_of_documents_has_no_template(self, kind: str, tmp_path: Path) -> None:
        draw = random.Random(2)
        known = texts(draw)
        if kind == "history":
            lists = [known[:end] for _ in range(4) for end in range(2, 40)]
        elif kind == "glossary":
            lists = [sorted(draw.sample(known, 6), key=known.index) for _ in range(160)]
        else:
            lists = [texts(draw, 5) for _ in range(160)]
        bodies = [xml(each, f"Question {at}: {sentence(draw)}") for at, each in enumerate(lists)]
        done = run(log(tmp_path / "log.jsonl", bodies))
        assert done.exit_code == 1
        assert "no template in" in done.output


class Answers(Handler):
    """An engine that keeps the bodies that it gets."""

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))  # type: ignore[attr-defined]
        self.answer(200, json.dumps({"usage": {"prompt_tokens": 400, "completion_tokens": 1}}))

    def do_GET(self) -> None:
        self.answer(404)


class TestAProxyInShadowMode:
    def test_suggests_a_template_for_the_prompts_that_it_forwards(self, tmp_path: Path) -> None:
        engine = LocalServer(Answers)
        sent: list[bytes] = []
        engine.bodies = []  # type: ignore[attr-defined]
        file, sizes = tmp_path / "app.toml", ("--capacity-tokens", "100000", "--block-size", "16")
        with engine, launching(ServeProcess, *SERVE, "--port", "0") as launch:
            proxy = launch("--upstream", engine.base_url, "--shadow", *sizes)
            too_early = run("--from", proxy.url, "-o", file)
            assert too_early.exit_code == 1 and "no template was learned" in too_early.output
            with httpx2.Client(base_url=proxy.url, timeout=60) as client:
                for documents, question in retrieved(4000):
                    body = json.dumps({"model": "m", "messages": xml(documents, question)}).encode()
                    sent.append(body)
                    headers = {"content-type": "application/json"}
                    assert client.post("/v1/chat/completions", content=body, headers=headers).status_code == 200
                    if len(sent) % 20 == 0 and client.get("/ragorder/template").status_code == 200:
                        break
            done = run("--from", proxy.url, "-o", file)
            assert done.exit_code == 0, done.output
            assert f"--template {file}" in done.output and "look the same" in done.output
            shown = run_command(main, "stats", proxy.url, "--json")
            assert 0.05 < json.loads(shown.stdout)["recognised"]["learned"] < 1
            shown = run_command(main, "stats", proxy.url)
            assert "ragorder template --from URL" in " ".join(shown.stdout.split())
            said = proxy.stop()
        assert engine.bodies == sent  # type: ignore[attr-defined]
        assert "a form of documents was found" in said and "ragorder template --from URL" in said
        assert not any(document.splitlines()[0] in said for documents, _ in retrieved(50) for document in documents)
        (template,) = find_templates(str(file))
        documents, question = retrieved(1, seed=1)[0]
        run_of = template.find(xml(documents, question)[0]["content"])
        assert run_of is not None and [template.split(each).rest.strip() for each in run_of.documents] == [
            f'<doc index="">\n{each}\n</doc>' for each in documents
        ]


class Clock:
    """Processor time: each learning takes so much."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self._cost_s = cost_s
        self.calls = 0

    @property
    def learned(self) -> int:
        return self.calls // 2

    def __call__(self) -> float:
        self.calls += 1
        return self._cost_s * (self.calls // 2)


def learn(learner: ShadowLearner, clock: Clock, times: int, write: Write, tenant: str | None = None) -> None:
    """Give the learner requests until it has learned so often."""
    before = clock.learned
    requests = retrieved(200)
    for number in range(1 << 20):
        if clock.learned >= before + times:
            break
        documents, question = requests[number % 200]
        learner.add(tenant, [each["content"] for each in write(documents, f"{number} {question}")])
        # A learning ends, and is not repeated with requests that are the same.
        while clock.calls % 2:
            time.sleep(0.005)


def unlike(documents: Sequence[str], question: str) -> list[dict[str, str]]:
    return user(f"Nothing here is a list. {question} " * 20)


class TestAShadowLearner:
    def learner(self, cost_s: float = 0.0) -> tuple[ShadowLearner, Clock, list[int]]:
        clock, heard = Clock(cost_s), list[int]()
        return ShadowLearner(100_000, lambda *counts: heard.append(counts[-1]), lambda _: None, clock), clock, heard

    def test_gives_a_form_once_two_windows_agree_and_drops_it_when_prompts_no_longer_have_it(self) -> None:
        learner, clock, learned = self.learner()
        learn(learner, clock, 1, xml)
        assert learner.file() is None and learned == []
        learn(learner, clock, 1, xml)
        assert '<doc index=\\"{n}\\">' in str(learner.file())
        assert len(learned) == 1 and learned[0] >= 90
        learn(learner, clock, 2, unlike)
        assert learner.file() is not None
        learn(learner, clock, 1, unlike)
        assert learner.file() is None
        learn(learner, clock, 2, numbered)
        assert "CONTEXT {n}" in str(learner.file())

    def test_gives_no_form_that_saves_nothing(self) -> None:
        learner, clock, _ = self.learner()
        learn(learner, clock, 3, scored)
        assert learner.file() is None

    def test_never_shows_what_one_tenant_alone_has(self) -> None:
        learner, clock, _ = self.learner()
        learn(learner, clock, 3, xml, tenant="a")
        assert learner.file() is None
        learn(learner, clock, 1, xml, tenant="b")
        assert learner.file() is not None

    def test_takes_a_millisecond_of_processor_time_a_request(self) -> None:
        learner, clock, _ = self.learner(cost_s=2.0)
        learn(learner, clock, 1, unlike)
        for _ in range(1800):
            learner.add(None, ["a text " * 40])
        assert clock.learned == 1
        learn(learner, clock, 1, unlike)

    def test_keeps_a_bounded_number_of_characters(self) -> None:
        learner, *_ = self.learner()
        tracemalloc.start()
        try:
            for number in range(600):
                learner.add(f"tenant {number % 20}", [f"{number} " + "x" * 50_000])
            assert tracemalloc.get_traced_memory()[0] < 8_000_000
        finally:
            tracemalloc.stop()


class TestBadInput:
    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("nonsense", "log.jsonl:1"),
            ('{"documents": ["a"]}', 'has none of "messages", "prompt" and "input"'),
            ('{"messages": []}', "no template in 1 requests"),
        ],
    )
    def test_bad_lines_are_named(self, line: str, words: str, tmp_path: Path) -> None:
        path = tmp_path / "log.jsonl"
        path.write_text(line + "\n", "utf-8")
        done = run(path)
        assert done.exit_code == 1 and words in done.output

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], "give REQUESTS, a log, or --from URL"),
            (["LOG", "--from", "http://127.0.0.1:9"], "give REQUESTS, a log, or --from URL"),
            (["--from", "http://127.0.0.1:9", "--capacity-tokens", "9"], "--capacity-tokens is of a log"),
            (["--from", "nowhere at all"], "is not the URL of a server"),
        ],
    )
    def test_sources_that_conflict_are_refused(self, arguments: list[str], words: str, tmp_path: Path) -> None:
        path = log(tmp_path / "log.jsonl", [user("?")])
        done = run(*(path if each == "LOG" else each for each in arguments))
        assert done.exit_code != 0 and words in done.output
