"""JSON lines read into pydantic models: places, messages, and what a file may be."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from ragorder.common.jsonl import JSONLines, JSONLinesError, decode, decode_toml

pytestmark = pytest.mark.merge


class Part(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1)
    size: int | None = Field(None, ge=0, le=1_000_000)


class Order(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str | int
    parts: list[str | Part]
    rush: bool = False


GOOD = b'{"id": 1, "parts": ["a", {"name": "b", "size": 3}]}'


def read(data: bytes, **options: Any) -> list[tuple[int, Order]]:
    return list(JSONLines(io.BytesIO(data), **options).read(Order))


def refused(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    with pytest.raises(JSONLinesError) as caught:
        read(GOOD + b"\n\n" + data, example="{}")
    assert caught.value.__suppress_context__
    message = str(caught.value)
    assert message.startswith("<stdin>:3: ")
    return message.removeprefix("<stdin>:3: ")


class TestLines:
    @pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
    def test_come_from_paths_and_open_files_plain_or_packed(
        self, tmp_path: Path, pack: Callable[[bytes], bytes]
    ) -> None:
        path = tmp_path / "orders"
        data = b"\xef\xbb\xbf" + GOOD + b"\n"
        path.write_bytes(pack(data))
        for source in (path, str(path)):
            assert len(list(JSONLines(source))) == 1
        with path.open("rb") as file:
            lines = JSONLines(file)
            assert lines.name == str(path)
            assert len(list(lines)) == 1
            assert not file.closed

    def test_announce_how_far_they_are_read(self, tmp_path: Path) -> None:
        path = tmp_path / "orders"
        path.write_bytes((GOOD + b"\n") * 2_000)
        steps: list[int] = []
        announced = []

        def progress(description: str, count: int) -> Any:
            announced.append((description, count))
            return lambda: steps.append(1)

        assert len(list(JSONLines(path, progress=progress))) == 2_000
        assert announced == [("reading orders", len(steps))]


class TestObjects:
    DATA = b'{"id": 1}\n[1]\n{"id": 2, "k": 0}\n{"id": 3}\n\n{"id'

    def test_are_read_past_lines_that_are_none(self) -> None:
        skipped: list[Exception] = []
        found = list(JSONLines(io.BytesIO(self.DATA)).objects(skipped.append))
        assert found == [(1, {"id": 1}), (3, {"id": 2, "k": 0}), (4, {"id": 3})]
        assert [type(each) for each in skipped] == [JSONLinesError] * 2
        assert str(skipped[0]) == "<stdin>:2: must be an object, not a list"
        assert str(skipped[1]).startswith("<stdin>:6: not JSON (column 2: ")
        # Of those without certain bytes none is decoded.
        assert list(JSONLines(io.BytesIO(self.DATA)).objects(containing=b'"k"')) == [(3, {"id": 2, "k": 0})]


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (b"oops", "not JSON (column 1: Expecting value): a line looks like {}"),
            (b'{"id": "\xff"}', "not UTF-8: a line looks like {}"),
            (b"[" * 100_000, "nested too deeply: a line looks like {}"),
            (b'{"id": NaN}', "a number in it cannot be read (NaN, infinite or too many digits): a line looks like {}"),
            (
                b'{"id": -Infinity}',
                "a number in it cannot be read (NaN, infinite or too many digits): a line looks like {}",
            ),
            ([1], "must be an object, not a list: a line looks like {}"),
            ({"parts": []}, '"id" is missing: add it'),
            ({"id": True, "parts": []}, '"id" must be a string or an integer, not a boolean'),
            ({"id": 1, "parts": "a"}, '"parts" must be a list, not a string'),
            ({"id": 1, "parts": ["a", None]}, '"parts[1]" must be a string or an object, not null'),
            ({"id": 1, "parts": [{}]}, '"parts[0].name" is missing: add it'),
            ({"id": 1, "parts": [{"name": ""}]}, '"parts[0].name" must not be empty'),
            (
                {"id": 1, "parts": [{"name": "a", "size": 1.5}]},
                '"parts[0].size" must be an integer, not a decimal number',
            ),
            ({"id": 1, "parts": [{"name": "a", "size": -1}]}, '"parts[0].size" must be at least 0'),
            ({"id": 1, "parts": [{"name": "a", "size": 10**30}]}, '"parts[0].size" must be at most 1,000,000'),
            ({"id": 1, "parts": [*["a"] * 10, 3, {}]}, '"parts[10]" must be a string or an object, not an integer'),
            ({"id": 1, "parts": [], "rush": 1}, '"rush" must be true or false, not an integer'),
        ],
    )
    def test_is_named_with_its_place(self, value: Any, said: str) -> None:
        assert refused(value).startswith(said)

    def test_a_line_that_is_too_long(self) -> None:
        with pytest.raises(JSONLinesError, match="<stdin>:2: longer than 1 MiB"):
            read(GOOD + b"\n" + b" " * (1 << 21), max_line_bytes=1 << 20)

    @pytest.mark.parametrize(("kind", "pack"), [("gzip", gzip.compress), ("xz", lzma.compress)])
    def test_damaged_packed_data(self, kind: str, pack: Callable[[bytes], bytes]) -> None:
        data = pack(b"".join(b"%d" % number + GOOD for number in range(1_000)))
        with pytest.raises(JSONLinesError, match=f"damaged {kind} data"):
            read(data[:-20])

    def test_a_missing_file_in_the_callers_own_error(self) -> None:
        with pytest.raises(KeyError, match="/nowhere: No such file or directory: name a file"):
            list(JSONLines("/nowhere", error=KeyError))

    def test_one_value_of_several_lines(self) -> None:
        with pytest.raises(ValueError, match=r"not JSON \(line 2, column 4: "):
            decode(b"[1,\n 2 3]")


class TestTOML:
    def test_is_read(self) -> None:
        assert decode_toml('[a]\nb = "ä"\n'.encode()) == {"a": {"b": "ä"}}

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (b"hunter2", "not TOML (end of document)"),
            (b"[hunter2]\n[hunter2]", "not TOML (line 2, column 9)"),
            (b"a = 1\nhunter2 hunter2", "not TOML (line 2, column"),
            (b"a = " + b"[" * 100_000, "nested too deeply"),
            (b"a = " + b"9" * 10_000, "a date or a number in it cannot be read"),
            (b"a = 'hunter2\xff'", "not UTF-8"),
        ],
        ids=lambda part: part[:20],
    )
    def test_that_cannot_be_read_is_not_quoted(self, data: bytes, said: str) -> None:
        with pytest.raises(ValueError, match=re.escape(said)) as caught:
            decode_toml(data)
        assert "hunter2" not in str(caught.value)
