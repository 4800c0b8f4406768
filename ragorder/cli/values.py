"""Values of options: counts, sizes, durations, texts, models, files."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from ragorder.common.counts import parse_count, parse_size

if TYPE_CHECKING:
    from click import Choice as ClickChoice
    from click import ParamType as ParamType

    _Choice = ClickChoice[str]
else:
    _Choice = click.Choice

    class ParamType(click.ParamType):
        """click's base class, which is generic at run time only from click 8.4 on."""

        def __class_getitem__(cls, value: Any) -> type:
            return cls


_LONGEST_S = 1e9
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


class Choice(_Choice):
    """click's choice, with a suggestion for a misspelt name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = get_close_matches(str(value), self.choices, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            self.fail(error.message.rstrip(".") + "." + meant, param, ctx)


class Count(ParamType[Any]):
    """A whole number: 100000, 10k (10,000) or 10K (10,240); or one of `words`."""

    name = "integer"

    def __init__(self, least: int | None = None, most: int | None = None, words: Collection[str] = ()) -> None:
        self._least = least
        self._most = most
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, int) or value in self._words:
            return value
        try:
            number = int(value) if re.fullmatch(r"-[0-9]+", value.strip()) else parse_count(value)
        except ValueError:
            words = "".join(f", or {word}" for word in self._words)
            hint = f"write 100000, 25.6k or 16K (k is 1,000, K 1,024){words}"
            self.fail(f"{value!r} is no whole number: {hint}", param, ctx)
        if (self._least is not None and number < self._least) or (self._most is not None and number > self._most):
            least = "" if self._least is None else f"{self._least}<="
            bounds = f"x>={self._least}" if self._most is None else f"{least}x<={self._most}"
            self.fail(f"{number} is not in the range {bounds}.", param, ctx)
        return number


class Size(ParamType[int]):
    """Bytes: 8GiB, 500MB, or a number of `unit` bytes."""

    name = "size"

    def __init__(self, least: int | None = None, unit: int = 1) -> None:
        self._least = least
        self._unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            size = parse_size(value, self._unit)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if self._least is not None and size < self._least:
            self.fail(f"{value} is less than {self._least} bytes", param, ctx)
        return size


class Duration(ParamType[float]):
    """Seconds: 90, 90s, 5m, 1.5h or 250ms; a plain number is in `unit`."""

    name = "duration"

    def __init__(self, least: float = 0.0, *, above: bool = False, unit: str = "s") -> None:
        self._least = least
        self._above = above
        self._unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not isinstance(value, str):
            return float(value)
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+) ?([a-z]*)", value.strip())
        unit = _SECONDS.get(found[2] or self._unit) if found else None
        if found is None or unit is None:
            self.fail(f"{value!r} is no duration: write 90, 90s, 5m, 1h or 250ms", param, ctx)
        seconds = float(found[1]) * unit
        if seconds < self._least or (self._above and seconds == self._least):
            self.fail(
                f"{value} is too short: give {'more than' if self._above else 'at least'} {self._least:g}s", param, ctx
            )
        if seconds > _LONGEST_S:
            self.fail(f"{value} is too long: give at most {_LONGEST_S:.0f}s", param, ctx)
        return seconds


class ProfileSource(ParamType[Any]):
    """Prefill times: auto, none, or the path of an existing file."""

    name = "auto|none|FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("auto", "none"):
            return value
        return click.Path(path_type=Path, dir_okay=False, exists=True).convert(value, param, ctx)


class Model(ParamType[Any]):
    """A model's folder or Hub name; smollm2 is converted from its package."""

    name = "FOLDER|smollm2"

    def __init__(self, path: bool = True, *, exists: bool = False) -> None:
        self._type = click.Path(path_type=Path if path else str, exists=exists, file_okay=not exists)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ragorder.kernels.smollm2 import SMOLLM2, smollm2

        if value == SMOLLM2:
            try:
                value = smollm2(lambda text: click.echo(text, err=True))
            except (ImportError, OSError, ValueError) as error:
                self.fail(str(error), param, ctx)
        return self._type.convert(value, param, ctx)


def load_tokenizer(name: str) -> Any:
    from ragorder.adapters.openai import tokenizer

    try:
        return tokenizer.load_tokenizer(name)
    except (ImportError, OSError, ValueError) as error:
        raise click.ClickException(f"--tokenizer: {error}") from None


class Rate(click.FloatRange):
    """A number above 0: 0.5, 20000 or 20k."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and re.fullmatch(r"[0-9._]+ ?[kmgKMG]", value.strip()):
            value = Count().convert(value, param, ctx)
        rate = super().convert(value, param, ctx)
        if not 0 < rate < inf:  # NaN passes every range
            self.fail(f"{value} is no number above 0: it must be finite", param, ctx)
        return rate


class Text(ParamType[str]):
    """A text with the escapes \\n, \\t and \\\\, or @ and the name of a file with the text."""

    name = "TEXT|@FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value.startswith("@"):
            return re.sub(r"\\([nt\\])", lambda escape: _ESCAPES[escape[1]], value)
        try:
            return Path(value[1:]).read_text("utf-8")
        except OSError as error:
            self.fail(f"{value[1:]}: {error.strerror}", param, ctx)
        except UnicodeDecodeError:
            self.fail(f"{value[1:]}: it is not UTF-8", param, ctx)


class StreamFile(click.File):
    """click's file, which refuses a closed standard stream."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> IO[Any]:
        name, stream = ("input", sys.stdin) if "r" in self.mode else ("output", sys.stdout)
        if value == "-" and stream is None:
            self.fail(f"standard {name} is closed: name a file", param, ctx)
        return super().convert(value, param, ctx)
