"""Commands and their options: derived from models, in groups, with counts and sizes; each has help and a test."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner, Result
from pydantic import BaseModel, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from support.commands import MISSING, every_command, invoke, lines, refusal

from ragorder.cli import main
from ragorder.cli.options import Command, build, option, options_from, section
from ragorder.cli.values import Choice, Count, Duration, Rate, Size


class Oven(BaseModel):
    heat: int = Field(180, ge=30, le=300, description="Degrees.")
    mode: Literal["top", "bottom"] = Field("top", description="Which element heats.")
    fan: bool = Field(True, description="Use the fan.")
    timer_s: float | None = Field(
        None, gt=0, description="Seconds; none of tray_bytes.", json_schema_extra={"unset": "no timer"}
    )
    tray_bytes: int = Field(1 << 30, ge=1, description="Size of the tray.")
    spice: str = Field("salt", description="Spice; none: without.", json_schema_extra={"enum": ["salt", "pepper"]})
    recipe_path: Path | None = Field(None, description="Folder of recipes.")

    @model_validator(mode="after")
    def _fits(self) -> Oven:
        if self.timer_s is not None and self.tray_bytes == 1:
            raise ValueError("timer_s and tray_bytes exclude each other")
        return self


class Kitchen(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="KITCHEN_")

    plates: int | None = Field(4, ge=1, description="Plates, or unlimited.")


@click.command(cls=Command)
@section("Oven", options_from(Oven, *Oven.model_fields))
@section("Kitchen", options_from(Kitchen, "plates", plates={"unset": "what the cupboard holds"}))
@option("--plain", is_flag=True, help="Without a heading.")
def bake(plates: Any, plain: bool, **options: Any) -> None:
    """Bake."""
    oven = build(Oven, options)
    click.echo(json.dumps({**oven.model_dump(mode="json"), "given": sorted(oven.model_fields_set), "plates": plates}))


def bake_with(*arguments: str) -> Result:
    return CliRunner().invoke(bake, arguments, env={"COLUMNS": "80"})


def baked(*arguments: str) -> dict[str, Any]:
    done = bake_with(*arguments)
    assert done.exit_code == 0, done.output
    values: dict[str, Any] = json.loads(done.stdout)
    return values


class TestOptionsFromAModel:
    def test_the_model_sees_only_what_was_given(self) -> None:
        assert baked()["given"] == []
        assert baked("--heat", "180", "--no-fan")["given"] == ["fan", "heat"]

    def test_values_have_the_fields_types(self) -> None:
        options = ["--heat", "200", "--mode", "bottom", "--no-fan", "--timer", "1500ms", "--tray-bytes", "2KiB"]
        values = baked(*options, "--spice", "pepper", "--recipe-path", "there", "--plates", "1k")
        expected = {"heat": 200, "mode": "bottom", "fan": False, "timer_s": 1.5, "tray_bytes": 2048, "spice": "pepper"}
        assert {**expected, "recipe_path": "there", "plates": 1000}.items() <= values.items()
        assert baked("--plates", "unlimited")["plates"] == "unlimited"

    def test_help_is_the_fields(self) -> None:
        said = " ".join(bake_with("--help").output.split())
        for part in (
            "--heat N Degrees. [default: 180]",
            "--mode [top|bottom] Which element heats. [default: top]",
            "--fan / --no-fan Use the fan. [default: yes]",
            "--timer TIME Seconds; none of --tray-bytes. [default: no timer]",
            "--tray-bytes SIZE Size of the tray. [default: 1GiB]",
            "--spice [salt|pepper] Spice; none: without. [default: salt]",
            "--recipe-path FOLDER Folder of recipes.",
            "Plates, or unlimited. [env var: KITCHEN_PLATES; default: what the cupboard holds]",
        ):
            assert part in said

    def test_options_stand_under_their_headings(self) -> None:
        said = bake_with("--help").output
        places = [said.index(part) for part in ("Oven:", "--heat", "Kitchen:", "--plates", "Options:", "--plain")]
        assert places == sorted(places)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--heat", "20"], "'--heat': 20 is not in the range 30<=x<=300."),
            (["--heat", "warm"], "'--heat': 'warm' is no whole number"),
            (["--mode", "botom"], "Did you mean 'bottom'?"),
            (["--spice", "peper"], "'peper' is not one of 'salt', 'pepper'. Did you mean 'pepper'?"),
            (["--timer", "1", "--tray-bytes", "1"], "--timer and --tray-bytes exclude each other"),
            (["--timer", "-1"], "--timer"),
            (["--timer", "0s"], "0s is too short: give more than 0s"),
        ],
    )
    def test_errors_name_the_option(self, arguments: list[str], said: str) -> None:
        done = bake_with(*arguments)
        assert done.exit_code == 2
        assert said in " ".join(done.output.split())
        assert "Value error" not in done.output


class TestTypes:
    @pytest.mark.parametrize(
        ("kind", "values"),
        [
            (Count(), {"7": 7, "10k": 10_000, "16K": 16_384, "-3": -3}),
            (Size(), {"1_000_000": 10**6, "500MB": 500 * 10**6, "1.5KiB": 1536}),
            (Size(unit=1 << 20), {"8": 8 << 20, "0.5": 1 << 19, "8KiB": 8192, "1GB": 10**9, "8 gib": 8 << 30}),
            (Rate(), {"0.5": 0.5, "20k": 20_000.0}),
            (Duration(), {"90": 90.0, "90s": 90.0, "1.5m": 90.0, "1 h": 3600.0, "250ms": 0.25}),
            (Duration(unit="ms"), {"60": 0.06}),
        ],
    )
    def test_values(self, kind: Any, values: dict[str, float]) -> None:
        for text, value in values.items():
            assert kind.convert(text, None, None) == pytest.approx(value)

    @pytest.mark.parametrize(
        ("kind", "texts"),
        [
            (Count(1), ("0", "", "x", "1.2.3k", "9" * 400, "9" * 5000)),
            (Size(1), ("0", "", "x", "1.2.3k", "9" * 400 + ".5", "9" * 5000)),
            (Rate(), ("0", "", "x", "1.2.3k", "nan", "inf", "9" * 400)),
            (Duration(), ("", "x", "5y", "-1", "1.2.3s", "nan", "9" * 400, "1" + "0" * 9 + "h")),
        ],
    )
    def test_others_are_refused(self, kind: Any, texts: Sequence[str]) -> None:
        for text in texts:
            with pytest.raises(click.BadParameter):
                kind.convert(text, None, None)

    def test_a_choice_that_is_near_none_gets_the_choices_alone(self) -> None:
        with pytest.raises(click.BadParameter) as caught:
            Choice(["auto", "best"]).convert("zzz", None, None)
        assert "mean" not in caught.value.message


COMMANDS = dict(every_command())
MEMBERS = [*COMMANDS.items()][1:]
LEAVES = [path for path, command in COMMANDS.items() if not isinstance(command, click.Group)]
FOREIGN = {"--kv-transfer-config"}  # vLLM's
# Where the command knows better than its model.
WORKED_OUT = {("serve", "--capacity-tokens"), ("serve", "--block-size")}


def read_as(option: click.Option, value: Any) -> str:
    return str(option.type.convert(value, option, None))


def options_of(path: tuple[str, ...]) -> list[click.Option]:
    return [each for each in COMMANDS[path].params if isinstance(each, click.Option)]


def help_of(path: tuple[str, ...], option: click.Option) -> str:
    """The words of an option as its command's help shows them, with what click adds."""
    record = option.get_help_record(click.Context(COMMANDS[path]))
    return "" if record is None else " ".join(" ".join(record).split())


def owner_of(call: str) -> tuple[str, ...]:
    """The command that is called by some words: its name, and that of its group."""
    words = tuple(takewhile(lambda word: not word.startswith("-"), call.split()))
    return max((words[:count] for count in range(len(words) + 1) if words[:count] in COMMANDS), key=len)


class TestEveryCommand:
    def test_has_help_and_every_option_its_words(self) -> None:
        """A command's line in the list is the first sentence of its help."""
        listed = " ".join(invoke("--help").output.split())
        for path, command in MEMBERS:
            sentence = " ".join((command.help or "").split()).partition(". ")[0].removesuffix(".") + "."
            assert len(path) > 1 or f"{path[0]} {sentence}" in listed, path
            done = invoke(*path, "--help")
            assert (done.exit_code, invoke(*path, "-h").output) == (0, done.output), path
            assert path[-1] in invoke(*path[:-1], "--help").output
            assert command.help and command.get_short_help_str(200)
            assert command.help.split()[0] in done.output
            assert [each.opts for each in options_of(path) if not (each.help and each.opts[0] in done.output)] == []

    def test_has_help_without_the_extras(self, python: Any) -> None:
        script = (
            "import json, sys\n"
            "from click.testing import CliRunner\n"
            "from ragorder.cli import main\n"
            "for path in json.load(sys.stdin):\n"
            "    print(CliRunner().invoke(main, [*path, '--help']).exit_code)\n"
        )
        paths = [*COMMANDS]
        done = python("-c", script, input=json.dumps(paths), blocked=MISSING)
        assert done.stdout.split() == ["0"] * len(paths), done.stderr

    def test_that_is_called_by_itself_first_has_help_in_the_group(self, python: Any) -> None:
        calls = "for args in (serve, ['--help']), (serve, ['-h']), (main, ['serve', '-h']):"
        imports = "from click.testing import CliRunner as R\nfrom ragorder.cli import main\n"
        imports += "from ragorder.cli.serve import serve\n"
        script = f"{imports}{calls}\n    print(R().invoke(*args).exit_code)"
        assert python("-c", script).stdout.split() == ["0", "0", "0"]

    def test_has_options_that_are_used_in_a_file_that_tests_it(self) -> None:
        """One with the same words in several commands is declared once, and used with one of them."""
        files = [path.read_text("utf-8") for path in sorted(Path(__file__).parents[1].rglob("test_*.py"))]
        used: dict[tuple[str, str | None], bool] = {}
        for path, command in MEMBERS:
            called = re.compile(rf'"{path[-1]}"|import [^\n]*\b{getattr(command.callback, "__name__", path[-1])}\b')
            tests = "".join(filter(called.search, files))
            for each in options_of(path):
                for name in (*each.opts, *each.secondary_opts):
                    used[name, each.help] = used.get((name, each.help), False) or f'"{name}"' in tests
        assert len(used) > 100
        assert [name for (name, _), tested in used.items() if not tested] == []

    def test_an_unknown_command_is_a_usage_error(self) -> None:
        assert "No such command 'sort'" in refusal("sort")
        assert "No such command 'ordr'. Did you mean 'order'?" in refusal("ordr")

    def test_python_dash_m_is_the_same_command(self, python: Any) -> None:
        from importlib.metadata import version

        expected = f"ragorder, version {version('ragorder')}\n"
        assert python("-m", "ragorder", "--version").stdout == invoke("--version").output == expected


class TestHelpOfEveryCommand:
    @pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
    def test_fits_a_narrow_terminal_and_is_not_cut(self, path: tuple[str, ...]) -> None:
        said = CliRunner().invoke(main, [*path, "--help"], terminal_width=80).output
        assert [line for line in said.splitlines() if len(line) > 80] == []
        assert "..." not in re.sub(r"SUITE\.\.\.|\[SUITE\|GROUP]\.\.\.|\[ARGS]\.\.\.|,\.\.\.", "", said)

    @pytest.mark.parametrize("path", LEAVES, ids=" ".join)
    def test_ends_with_examples_that_can_be_typed(self, path: tuple[str, ...]) -> None:
        command = COMMANDS[path]
        assert isinstance(command, Command) and command.examples
        said = CliRunner().invoke(main, [*path, "--help"], terminal_width=80).output
        assert said.rstrip().endswith(command.examples[-1].splitlines()[-1].strip())
        known = {name for each in options_of(path) for name in (*each.opts, *each.secondary_opts)}
        for example in command.examples:
            program, *words = shlex.split(example.replace("\\\n", " "))
            assert (program, tuple(words[: len(path)])) == ("ragorder", path)
            assert {word for word in words if re.match("--?[a-z]", word)} <= known

    def test_has_at_most_45_options(self) -> None:
        assert [path for path in COMMANDS if len(options_of(path)) > 45] == []

    @pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
    def test_names_the_default_that_an_option_has(self, path: tuple[str, ...]) -> None:
        for each in options_of(path):
            field = getattr(each, "field", None)
            real = each.default if field is None else field.get_default()
            said = re.findall(r"default: (.*?)[;\]]", help_of(path, each))[-1:]
            if real in (None, (), False) or not said or repr(real).endswith("UNSET"):
                continue
            if isinstance(real, bool):
                assert said[0] in ("yes", each.opts[0][2:]), each.opts
            elif (*path, each.opts[0]) not in WORKED_OUT:
                real = ",".join(map(str, real)) if isinstance(real, tuple) and not each.multiple else real
                wanted = [*real] if each.multiple else [real]
                given = said[0].split(",") if each.multiple else said
                assert [read_as(each, text.strip()) for text in given] == [read_as(each, one) for one in wanted]

    def test_lists_each_choice(self) -> None:
        for path in COMMANDS:
            for each in options_of(path):
                if isinstance(each.type, click.Choice):
                    assert [name for name in each.type.choices if name not in help_of(path, each)] == [], path

    @pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
    def test_names_options_that_there_are_as_they_are_typed(self, path: tuple[str, ...]) -> None:
        """What has an underscore is a name in JSON, in quotes, or a part of a value (+keep_first=1). Options of another
        command stand with its name: `ragorder replay --json`."""
        said = [COMMANDS[path].help or "", *(str(each.help) for each in options_of(path))]
        for text in said:
            unquoted = re.sub(r'"[^"\n]*"', "", text.partition("\b")[0])
            assert re.findall(r"(?<![\w.+/])[a-z]+(?:_[a-z0-9]+)+\b(?!\.json)", unquoted) == []
        together = " ".join(said)
        calls = re.findall(r"`ragorder ([^`]*)`", together)
        for command, text in [(path, re.sub(r"`[^`]*`", "", together)), *((owner_of(call), call) for call in calls)]:
            known = {name for each in options_of(command) for name in (*each.opts, *each.secondary_opts)}
            wanted = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*\b", text)) - known - {"--help", *FOREIGN}
            assert wanted == set(), command


class TestImports:
    """A command loads what it needs."""

    @pytest.mark.parametrize(
        ("arguments", "absent"),
        [
            (("--help",), ("ragorder.eval", "rich", "ragorder.adapters", "ragorder.kernels", *MISSING)),
            (("order",), ("ragorder.eval", "rich", "ragorder.adapters", "ragorder.kernels", *MISSING)),
            (("serve", "--help"), ("ragorder.eval", "rich", "numpy", "torch", "httpx2", "starlette")),
            (("engine", "--help"), ("ragorder.eval", "rich", "numpy", "torch", "httpx2", "starlette")),
            (("route", "--help"), ("ragorder.eval", "rich", "numpy", "torch", "httpx2", "ragorder.kernels")),
            (("tiers", "config", "--host-bytes", "1GiB"), ("ragorder.eval", "numpy", "torch", "vllm")),
            (("stats", "--help"), ("ragorder.eval", "numpy", "httpx2")),
            (("doctor", "--help"), ("ragorder.eval", "numpy", "httpx2")),
        ],
        ids=" ".join,
    )
    def test_no_more_than_it_needs(self, python: Any, arguments: tuple[str, ...], absent: tuple[str, ...]) -> None:
        script = (
            "import sys\nfrom ragorder.cli import main\n"
            "main(prog_name='ragorder', standalone_mode=False)\n"
            "print(*sys.modules, sep='\\n', file=sys.stderr)"
        )
        done = python("-c", script, *arguments, input=lines({"documents": ["a", "b"]}))
        assert done.returncode == 0, done.stderr
        loaded = done.stderr.splitlines()
        assert "ragorder.cli.main" in loaded
        assert [name for name in loaded if name.startswith(absent)] == []
