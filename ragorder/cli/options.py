"""Options of the commands: derived from pydantic models, in groups, with counts and sizes as people write them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import ValidationError

from ragorder.counts import BYTE_UNITS, parse_count, parse_size

if TYPE_CHECKING:
    from click import Choice as ClickChoice
    from click import ParamType
    from pydantic.fields import FieldInfo

    from ragorder.orderer import Orderer

    _Choice = ClickChoice[str]
else:
    _Choice = click.Choice

    class ParamType(click.ParamType):
        """click's base class, subscripted for type checkers only: at run time it is generic from click 8.4 on."""

        def __class_getitem__(cls, value: Any) -> type:
            return cls


__all__ = [
    "Choice",
    "Command",
    "CommandGroup",
    "Count",
    "Decorator",
    "Duration",
    "Model",
    "Option",
    "ParamType",
    "ProfileSource",
    "Rate",
    "Size",
    "api_key",
    "build",
    "build_orderer",
    "events_address",
    "given",
    "in_options",
    "is_given",
    "kv_events",
    "option",
    "options_from",
    "section",
    "spelling",
    "together",
]

M = TypeVar("M")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_LEAST_QUOTED = 4
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Choice(_Choice):
    """click's choice, which suggests the nearest name for a misspelt one."""

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
        return seconds


class ProfileSource(ParamType[Any]):
    """Prefill times: auto, none, or the path of an existing file."""

    name = "auto|none|FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("auto", "none"):
            return value
        return click.Path(path_type=Path, dir_okay=False, exists=True).convert(value, param, ctx)


class Model(ParamType[Any]):
    """A model's folder, or its name on the Hub; smollm2 is converted from its package. `path`: make it a Path;
    `exists`: of a folder that exists."""

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


class Rate(click.FloatRange):
    """A number above 0: 0.5, 20000 or 20k."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and re.fullmatch(r"[0-9._]+ ?[kmgKMG]", value.strip()):
            value = Count().convert(value, param, ctx)
        return super().convert(value, param, ctx)


class Option(click.Option):
    """click's option, with a heading in the help.

    `field` is that of its model, if it is of one, and `variable` that model's environment variable, which the option
    itself does not read; an `is_own_variable` of click's is of this command alone, while others may be set for other
    programs.
    """

    def __init__(
        self, *args: Any, field: FieldInfo | None = None, variable: str | None = None, **attributes: Any
    ) -> None:
        super().__init__(*args, **attributes)
        self.heading: str | None = None
        self.field = field
        self.variable = variable
        self.is_own_variable = False


class Command(click.Command):
    """click's command, whose options stand under the headings of their sections. Its errors quote no value of a file
    or the environment, and no secret: a terminal or a log that shows them has other readers."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        # Its own, not only the group's: click remembers the help option of the first call, which may be a direct one.
        self.context_settings = {"help_option_names": ["-h", "--help"], **self.context_settings}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _unquoted(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _unquoted(ctx):
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                sections.setdefault(getattr(param, "heading", None) or "Options", []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


@contextmanager
def _unquoted(context: click.Context) -> Iterator[None]:
    try:
        yield
    except click.ClickException as error:
        said = error.message
        for value, place in _hidden(context):
            whole = rf"|(?<![\w-]){re.escape(value)}(?![\w-])" if len(value) >= _LEAST_QUOTED else ""
            said = re.sub(f"{re.escape(repr(value))}{whole}", place.replace("\\", ""), said)
        vars(error)["message"] = said
        raise


def _hidden(context: click.Context) -> Iterator[tuple[str, str]]:
    """Values that an error must not show, the longest first, and the words in their place. Names to choose from are
    no secrets."""
    found: dict[str, str] = {}
    for param in context.command.params:
        known = getattr(param.type, "choices", ())
        given = (context.default_map or {}).get(param.name or "")
        in_file = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        variables = [param.envvar] if isinstance(param.envvar, str) else [*(param.envvar or ())]
        variables += [param.variable] if isinstance(param, Option) and param.variable else []
        places = dict.fromkeys(in_file, "the value in the file of --config")
        places |= {os.environ[name]: f"the value of {name}" for name in variables if name in os.environ}
        secret = context.params.get(param.name or "")
        if isinstance(secret, str) and param.name and param.name.endswith(("key", "secret")):
            places.setdefault(secret, f"the value of {param.opts[0]}")
        found |= {value: place for value, place in places.items() if value and value not in known}
    yield from sorted(found.items(), key=lambda each: -len(each[0]))


class CommandGroup(click.Group):
    """click's group, whose list of commands is not cut."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(limit=1000)) for name, each in commands if each])


def option(*declarations: str, **attributes: Any) -> Decorator:
    """`click.option` with an `Option`."""
    return click.option(*declarations, cls=Option, **attributes)


def api_key(*variables: str) -> Decorator:
    """--api-key of a server, from RAGORDER_API_KEY or the first of `variables` that is set."""
    return option(
        "--api-key",
        metavar="KEY",
        envvar=["RAGORDER_API_KEY", *variables],
        show_envvar=True,
        help="The server's key; other users of this machine can see it unless it comes from the environment.",
    )


def kv_events(*, environment: bool = False) -> Decorator:
    """--events-endpoint, --replay-endpoint and --events-topic; see `events_address`."""

    def address(flag: str, metavar: str, help: str) -> Decorator:
        variable = f"RAGORDER_{flag[2:].replace('-', '_').upper()}" if environment else None
        return option(flag, metavar=metavar, envvar=variable, show_envvar=environment, help=help)

    return together(
        address("--events-endpoint", "ENDPOINT", "Where the server publishes KV events, such as tcp://HOST:5557."),
        address("--replay-endpoint", "ENDPOINT", "Where it replays them, such as tcp://HOST:5657."),
        address("--events-topic", "TOPIC", "Their topic. [default: any]"),
    )


def events_address(
    endpoint: str | None, replay_endpoint: str | None, topic: str | None
) -> tuple[str, str | None, str] | None:
    """The three options together. Raises click.UsageError if only the first is missing."""
    if not endpoint and (replay_endpoint or topic):
        raise click.UsageError("--replay-endpoint and --events-topic require --events-endpoint")
    return (endpoint, replay_endpoint, topic or "") if endpoint else None


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


def section(heading: str, *options: Decorator) -> Decorator:
    """Options under a heading of the help."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        before = len(_params(command))
        command = together(*options)(command)
        for param in _params(command)[before:]:
            if getattr(param, "heading", None) is None:
                param.heading = heading
        return command

    return decorate


def _params(command: Callable[..., Any]) -> list[Any]:
    params: list[Any] = getattr(command, "__click_params__", [])
    return params


def options_from(model: type[Any], /, *names: str, **changes: Mapping[str, Any]) -> Decorator:
    """An option for each named field of a pydantic model or dataclass, with the field's type, bounds, choices, help and
    environment variable.

    An option that is not given is None, so that the model applies its own default. The help shows that default: the
    field's, what "unset" in its `json_schema_extra` says of None, or the text `default` in `changes`, which holds
    attributes of click's option by field, and another spelling as `flag`. Choices come from a Literal or from "enum" in
    `json_schema_extra`. Other fields that a description names are shown as options. A sequence is a repeatable option,
    and a field that ends in `_s` a duration, spelt without it. A switch has its opposite (--no-NAME) unless `changes`
    say `is_flag`.
    """
    return together(*(_option_of(model, name, **changes.get(name, {})) for name in names))


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given: neither None nor an empty repeatable one."""
    return {name: value for name, value in options.items() if value is not None and value != ()}


def _fields_of(model: type[Any]) -> Mapping[str, FieldInfo]:
    # Models have the one in all versions of pydantic, its dataclasses only the other.
    fields: Mapping[str, FieldInfo] = getattr(model, "model_fields", None) or getattr(model, "__pydantic_fields__", {})
    return fields


def _option_of(
    model: type[Any],
    name: str,
    *,
    flag: str | None = None,
    default: str | None = None,
    help: str | None = None,
    **attributes: Any,
) -> Decorator:
    field = _fields_of(model)[name]
    text = in_options(help or field.description or "", model).removesuffix(".")
    unset = in_options(str(_extra(field).get("unset", "")), model)
    kind, metavar = _type_of(name, field)
    prefix = getattr(model, "model_config", {}).get("env_prefix")
    variable = f"{prefix}{name.upper()}" if prefix else None
    facts = [f"env var: {variable}"] if variable else []
    switch = attributes.get("is_flag", False)
    if shown := default or unset or ("" if switch else _shown(attributes.get("type", kind), field)):
        facts.append(f"default: {shown}")
    extra = f" [{'; '.join(facts)}]" if facts else ""
    settled = {"metavar": metavar, "type": kind, "required": field.is_required()} | attributes
    flags = flag or spelling(name)
    if kind is bool and not switch:
        flags = f"{flags}/{flags.replace('--', '--no-', 1)}"
    return option(flags, name, default=None, help=f"{text}.{extra}", field=field, variable=variable, **settled)


def _extra(field: FieldInfo) -> Mapping[str, Any]:
    extra = field.json_schema_extra
    return extra if isinstance(extra, Mapping) else {}


def _type_of(name: str, field: FieldInfo) -> tuple[Any, str | None]:
    annotation = field.annotation
    choices = [str(each) for each in get_args(annotation)] if get_origin(annotation) is Literal else []
    choices += map(str, _extra(field).get("enum", ()))
    if choices:
        return Choice(choices), None
    kinds = [each for each in get_args(annotation) if each is not NoneType] or [annotation]
    least, above, most = (
        next((getattr(bound, end) for bound in field.metadata if hasattr(bound, end)), None)
        for end in ("ge", "gt", "le")
    )
    if kinds == [bool]:
        return bool, None
    if kinds == [int]:
        if name.endswith("_bytes"):
            return Size(least), "SIZE"
        # A number that is set unless None is given needs a word for None.
        optional = NoneType in get_args(annotation) and field.default is not None
        return Count(least, most, ("unlimited", "none") if optional else ()), "TOKENS" if "tokens" in name else "N"
    if kinds == [float]:
        if name.endswith("_s"):
            return Duration(least or above or 0.0, above=above is not None), "TIME"
        return click.FloatRange(least if above is None else above, most, min_open=above is not None), "X"
    if kinds == [Path]:
        return click.Path(path_type=Path, file_okay=False), "FOLDER"
    return str, "TEXT"


def _shown(kind: Any, field: FieldInfo) -> str:
    default = field.get_default()
    if field.is_required() or default is None:
        return ""
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(kind, Size):
        size, unit = max((size, unit) for unit, size in BYTE_UNITS.items() if default % size == 0)
        return f"{default // size}{unit}"
    return f"{default:g}s" if isinstance(kind, Duration) else str(default)


def spelling(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


def is_given(context: click.Context, name: str) -> bool:
    """Whether an option was given to this command, and not to all programs, as a variable without its name may be."""
    source = context.get_parameter_source(name)
    if source is ParameterSource.ENVIRONMENT:
        params = [each for each in context.command.params if each.name == name]
        return any(isinstance(each, Option) and each.is_own_variable for each in params)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


def build(model: type[M], options: Mapping[str, Any]) -> M:
    """The model of the options that were given. Raises click.UsageError in the words of the options."""
    try:
        return model(**given(options))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        raise click.UsageError("; ".join(_in_options(each["loc"], each["msg"], model) for each in problems)) from None


def build_orderer(options: Mapping[str, Any]) -> Orderer:
    """An orderer with the settings that were given. Raises click.UsageError, also for a policy or a profile that the
    settings leave to the orderer to check."""
    from ragorder.orderer import Orderer
    from ragorder.settings import Settings

    settings = build(Settings, options)
    try:
        return Orderer(settings)
    except ValueError as error:
        raise click.UsageError(in_options(str(error), Settings)) from None


def in_options(message: str, model: type[Any]) -> str:
    """A message with options in the place of the model's fields."""

    def option_of(found: re.Match[str]) -> str:
        return spelling(found[0]) if found[0] in _fields_of(model) else found[0]

    # Fields of one word are ordinary words, too.
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", option_of, message)


def _in_options(location: tuple[int | str, ...], message: str, model: type[Any]) -> str:
    message = in_options(message.removeprefix("Value error, "), model)
    return ": ".join([*(spelling(str(part)) for part in location[:1]), message])
