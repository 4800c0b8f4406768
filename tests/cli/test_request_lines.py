"""One format of lines for `ragorder replay`, `order` and `plan`: a file means the same to each of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.commands import invoke, read_lines, write_lines

from ragorder import Settings

pytestmark = pytest.mark.merge

COMMANDS = ("replay", "order", "plan")
CACHES = ("unlimited", "6000")


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    return write_lines(folder / "lines.jsonl", lines)


def log(folder: Path, *, objects: bool = False) -> Path:
    """What an application logs of topical questions: each length is that of its document, whatever its rank."""
    rng = random.Random(7)
    lines = []
    for time in range(200):
        topic = rng.randrange(12)
        numbers = [topic * 8 + each for each in rng.sample(range(8), 5)]
        lengths = [100 + 7 * number for number in numbers]
        documents: list[Any] = [f"d{number}" for number in numbers]
        line = {"time": time, "tenant": f"t{rng.randrange(2)}", "documents": documents, "tokens": lengths}
        line |= {"prefix_tokens": 40, "suffix_tokens": 21, "output_tokens": 11}
        if objects:
            both = zip(documents, line.pop("tokens"), strict=True)
            line["documents"] = [{"id": id, "tokens": tokens} for id, tokens in both]
        lines.append(line)
    return written(folder, *lines)


def run(command: str, path: Path, folder: Path, *options: str) -> Any:
    where = {"replay": (), "order": (), "plan": ("--out", folder / "plan", "--workers", "1")}[command]
    return invoke(command, path, *where, *options)


def ordered(path: Path, *options: str) -> list[dict[str, Any]]:
    done = run("order", path, path.parent, *options)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def planned(path: Path, folder: Path, *options: str) -> list[dict[str, Any]]:
    done = run("plan", path, folder, *options)
    assert done.exit_code == 0, done.output
    shards = sorted((folder / "plan").glob("shard-*.jsonl"))
    return [line for shard in shards for line in read_lines(shard)]


def replayed(path: Path, cache: str, *options: str) -> int:
    """The cached tokens that a replay reports of ragorder's order."""
    done = invoke("replay", path, "--no-sweep", "--capacity-tokens", cache, "-o", "-", *options)
    assert done.exit_code == 0, done.output
    runs = json.loads(done.stdout.splitlines()[-1])["facts"]["runs"]
    return next(each["cached_tokens"] for each in runs if each["policy"] == "earned")


class TestTheSameFile:
    @pytest.mark.parametrize("objects", [False, True], ids=["parallel lengths", "objects"])
    @pytest.mark.parametrize("cache", CACHES)
    def test_is_predicted_to_hit_as_much_as_it_hits_in_a_replay(
        self, tmp_path: Path, cache: str, objects: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Like the simulated engine of a replay.
        monkeypatch.setattr(Settings, "partial_blocks_first", False)
        path = log(tmp_path, objects=objects)
        answers = ordered(path, "--capacity-tokens", cache)
        assert sum(answer["cached_tokens"] for answer in answers) == replayed(path, cache) > 0

    def test_a_replay_agrees_where_lengths_come_from_options(self, tmp_path: Path) -> None:
        lines = [{"time": time, "documents": [f"d{time * each % 7}" for each in range(1, 4)]} for time in range(60)]
        path = written(tmp_path, *lines)
        lengths = ("--document-tokens", "90", "--prefix-tokens", "30")
        answers = ordered(path, "--capacity-tokens", "unlimited", *lengths)
        assert sum(answer["cached_tokens"] for answer in answers) == replayed(path, "unlimited", *lengths) > 0

    def test_is_the_same_written_with_parallel_lengths_or_with_objects(self, tmp_path: Path) -> None:
        (tmp_path / "one").mkdir()
        (tmp_path / "other").mkdir()
        one, other = log(tmp_path / "one"), log(tmp_path / "other", objects=True)
        for orders in ((ordered(one), ordered(other)), (planned(one, tmp_path / "one"), planned(other, tmp_path))):
            lines = [[{name: line[name] for name in line if name != "tokens"} for line in each] for each in orders]
            assert lines[0] == lines[1]


class TestTokens:
    def test_tokens_stay_with_their_documents(self, tmp_path: Path) -> None:
        path = log(tmp_path)
        for orders in (ordered(path), ordered(path, "--batch"), planned(path, tmp_path)):
            assert any(answer["permutation"] != sorted(answer["permutation"]) for answer in orders)
            for answer in orders:
                assert answer["tokens"] == [100 + 7 * int(id[1:]) for id in answer["documents"]]

    def test_may_be_one_number_for_all(self, tmp_path: Path) -> None:
        path = written(tmp_path, *[{"documents": ["a", "b"], "tokens": 64}] * 2)
        assert [(each["tokens"], each["cached_tokens"]) for each in ordered(path)] == [(64, 0), (64, 128)]
        assert [(each["tokens"], each["cached_tokens"]) for each in planned(path, tmp_path)] == [(64, 0), (64, 128)]

    def test_another_length_makes_another_document(self, tmp_path: Path) -> None:
        path = written(tmp_path, *({"documents": ["a"], "tokens": [length]} for length in (64, 80, 64)))
        assert [each["cached_tokens"] for each in ordered(path)] == [0, 0, 64]
        assert sorted(each["cached_tokens"] for each in planned(path, tmp_path)) == [0, 0, 64]


class TestTenants:
    def test_tenants_share_nothing(self, tmp_path: Path) -> None:
        both = [{"time": 1, "tenant": name, "documents": ["x", "y"], "tokens": [300, 300]} for name in "aba"]
        path = written(tmp_path, *both)
        for options in ((), ("--batch",)):
            assert sorted(each["cached_tokens"] for each in ordered(path, *options)) == [0, 0, 592]
        assert [(each["tenant"], each["cached_tokens"]) for each in planned(path, tmp_path)] in (
            [("a", 0), ("a", 600), ("b", 0)],
            [("b", 0), ("a", 0), ("a", 600)],
        )

    def test_prefixes_of_other_lengths_share_nothing(self, tmp_path: Path) -> None:
        both = [{"documents": ["x", "y"], "tokens": 320, "prefix_tokens": length} for length in (64, 128, 64)]
        path = written(tmp_path, *both)
        for options in ((), ("--batch",)):
            assert sorted(each["cached_tokens"] for each in ordered(path, *options)) == [0, 0, 704]
        assert sorted(each["cached_tokens"] for each in planned(path, tmp_path)) == [0, 0, 640]


class TestIds:
    def test_integers_stay_integers_and_differ_from_strings(self, tmp_path: Path) -> None:
        path = written(tmp_path, {"documents": [7, "8"]}, {"documents": ["7", 8]}, {"documents": ["8", {"id": 7}]})
        for orders in (ordered(path), planned(path, tmp_path)):
            by_index = {answer["index"]: answer for answer in orders}
            assert [by_index[index]["documents"] for index in range(3)] == [[7, "8"], ["7", 8], [7, "8"]]
            assert by_index[1]["cached_tokens"] == 0


class TestFields:
    def test_fields_are_repeated_as_they_came(self, tmp_path: Path) -> None:
        line = {"time": "2025-01-31T12:00:00Z", "tenant": "a", "documents": ["x"], "prompt_tokens": 900, "user": [1]}
        line |= {"id": 7, "query": "Größe? 🙂 \ud800", "nested": {"a": [1, None, 1.5]}}
        # The answer's own fields win.
        own = {"index": 0, "permutation": [0], "prefix_documents": 0, "cached_tokens": 0}
        path = written(tmp_path, line | {"index": 9, "permutation": "x", "cached_tokens": -1})
        for (answer,) in (ordered(path), planned(path, tmp_path)):
            assert answer == line | own

    @pytest.mark.parametrize("command", ["order", "plan"])
    def test_unread_fields_are_warned_of(self, tmp_path: Path, command: str) -> None:
        line = {"id": "q1", "query": "Why?", "documents": ["x", "y"]}
        assert "Warning" not in run(command, written(tmp_path, line), tmp_path / "one").stderr
        line |= {"token": [1, 2], "scope": "a", "scores": [0.5, 0.25]}
        said = run(command, written(tmp_path, line, line), tmp_path / "two").stderr
        assert (
            "Warning: fields that were repeated but not read: token (2 lines; was tokens meant?), scope (2 lines; was "
            "tenant meant?), scores (2 lines), which stays in retrieval order" in said
        )

    @pytest.mark.parametrize("command", COMMANDS)
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"tokens": [1]}, '"tokens" has 1 entries and "documents" has 2: give one for each'),
            ({"documents": ["x", {"id": "y", "tokens": 5}], "tokens": [1, 2]}, 'in "tokens" or in the documents, not'),
            ({"prompt_tokens": 5, "suffix_tokens": 5}, "exclude each other: leave one of them out"),
            ({"tokens": 100, "prompt_tokens": 200}, '"prompt_tokens" must be more than prefix and documents together'),
            ({"time": "noon"}, '"time" is not an ISO 8601 date and time'),
            ({"tenant": 5}, '"tenant" must be a string, not an integer'),
            ({"tokens": [1, "2"]}, '"tokens[1]" must be an integer, not a string'),
        ],
        ids=lambda part: next(iter(part)) if isinstance(part, dict) else "",
    )
    def test_fields_that_contradict_each_other_are_refused(
        self, tmp_path: Path, command: str, wrong: dict[str, Any], said: str
    ) -> None:
        line = {"time": 1, "documents": ["x", "y"]}
        path = written(tmp_path, line, line | wrong)
        done = run(command, path, tmp_path)
        assert done.exit_code == 1
        assert f"{path}:2: " in " ".join(done.stderr.split()) and said in " ".join(done.stderr.split())
