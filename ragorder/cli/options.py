"""Command options, from the command line, the environment or a file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import ValidationError

from ragorder.cli.values import Choice, Count, Duration, Size
from ragorder.common.counts import BYTE_UNITS
from ragorder.common.jsonl import decode_toml

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from ragorder.orderer import Orderer

M = TypeVar("M")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_LEAST_QUOTED = 4


class Option(click.Option):
    """click's option with a heading for the help.

    - `unset`: what the help shows as the default if there is none
    - `field`: the model's field that it sets
    - `variable`: the field's environment variable, read by the model, not click
    - `is_own_variable`: whether the variable that click reads is for this command only
    """

    def __init__(
        self,
        *args: Any,
        help: str = "",
        unset: str = "",
        field: FieldInfo | None = None,
        variable: str | None = None,
        **attributes: Any,
    ) -> None:
        facts = [f"env var: {variable}"] if variable else []
        facts += [f"default: {unset}"] if unset else []
        attributes["help"] = f"{help} [{'; '.join(facts)}]" if facts else help
        super().__init__(*args, **attributes)
        self.heading: str | None = None
        self.field = field
        self.variable = variable
        self.is_own_variable = False


class Command(click.Command):
    """click's command, with headings and examples in its help. Errors quote no secret, nor values of a file or the
    environment.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.examples = examples
        # The group's settings are not enough: click keeps the help option of the first call, which may be of this
        # command without its group.
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

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line in "\n".join(self.examples).splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


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
    """click's group, whose help shows the commands' descriptions uncut."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(limit=1000)) for name, each in commands if each])


def option(*declarations: str, **attributes: Any) -> Decorator:
    return click.option(*declarations, cls=Option, **attributes)


def api_key(*others: str, first: Sequence[str] = ()) -> Decorator:
    """Return the option --api-key, else read from the variables `first`, RAGORDER_API_KEY, then `others`."""
    return option(
        "--api-key",
        metavar="KEY",
        envvar=[*first, "RAGORDER_API_KEY", *others],
        show_envvar=True,
        help="The server's API key. Set it in the environment: other users of this machine can see the command line.",
    )


def kv_events(*, environment: bool = False) -> Decorator:
    def address(flag: str, metavar: str, help: str, **attributes: Any) -> Decorator:
        variable = f"RAGORDER_{flag[2:].replace('-', '_').upper()}" if environment else None
        return option(flag, metavar=metavar, envvar=variable, show_envvar=environment, help=help, **attributes)

    return together(
        address("--events-endpoint", "ENDPOINT", "Where the server publishes KV events, such as tcp://HOST:5557."),
        address("--replay-endpoint", "ENDPOINT", "Where the server replays lost KV events, such as tcp://HOST:5657."),
        address("--events-topic", "TOPIC", "Topic of the KV events.", unset="any"),
    )


def events_address(
    endpoint: str | None, replay_endpoint: str | None, topic: str | None
) -> tuple[str, str | None, str] | None:
    if not endpoint and (replay_endpoint or topic):
        raise click.UsageError("--replay-endpoint and --events-topic require --events-endpoint")
    return (endpoint, replay_endpoint, topic or "") if endpoint else None


def together(*options: Decorator) -> Decorator:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


def section(heading: str, *options: Decorator) -> Decorator:
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
    """Return a decorator that adds an option for each named field of a pydantic model or dataclass.

    It has the field's type, bounds, choices (a Literal, or "enum" in its `json_schema_extra`), help and environment
    variable. Without it the value is None, so the model applies its default, which the help shows ("unset" of
    `json_schema_extra` for None). NAME_s becomes a duration --NAME. A switch has its opposite (--no-NAME), unless
    `is_flag` is set. `changes` maps fields to attributes of click's option; `flag` is another name for it.
    """
    return together(*(_option_of(model, name, **changes.get(name, {})) for name in names))


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None and value != ()}


def _fields_of(model: type[Any]) -> Mapping[str, FieldInfo]:
    # Models have `model_fields` in all versions of pydantic; dataclasses have only `__pydantic_fields__`.
    fields: Mapping[str, FieldInfo] = getattr(model, "model_fields", None) or getattr(model, "__pydantic_fields__", {})
    return fields


def _option_of(
    model: type[Any],
    name: str,
    *,
    flag: str | None = None,
    unset: str | None = None,
    help: str | None = None,
    **attributes: Any,
) -> Decorator:
    field = _fields_of(model)[name]
    text = in_options(help or field.description or "", model).removesuffix(".")
    kind, metavar = _type_of(name, field)
    prefix = getattr(model, "model_config", {}).get("env_prefix")
    switch = attributes.get("is_flag", False)
    if unset is None:
        unset = in_options(str(_extra(field).get("unset", "")), model)
        unset = unset or ("" if switch else _shown(attributes.get("type", kind), field))
    flags = flag or spelling(name)
    if kind is bool and not switch:
        flags = f"{flags}/{flags.replace('--', '--no-', 1)}"
    settled = {"metavar": metavar, "type": kind, "required": field.is_required()} | attributes
    variable = f"{prefix}{name.upper()}" if prefix else None
    return option(flags, name, default=None, help=f"{text}.", unset=unset, field=field, variable=variable, **settled)


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
        # If None is allowed and is not the default, the command line needs a word for it.
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
    """Return whether an option was given in the command line, the command's file or its own variable."""
    source = context.get_parameter_source(name)
    if source is ParameterSource.ENVIRONMENT:
        params = [each for each in context.command.params if each.name == name]
        return any(isinstance(each, Option) and each.is_own_variable for each in params)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


def build(model: type[M], options: Mapping[str, Any]) -> M:
    try:
        return model(**given(options))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        raise click.UsageError("; ".join(_in_options(each["loc"], each["msg"], model) for each in problems)) from None


def build_orderer(options: Mapping[str, Any]) -> Orderer:
    from ragorder.orderer import Orderer
    from ragorder.settings import Settings

    settings = build(Settings, options)
    try:
        return Orderer(settings)
    except ValueError as error:
        raise click.UsageError(in_options(str(error), Settings)) from None


def in_options(message: str, model: type[Any]) -> str:
    def option_of(found: re.Match[str]) -> str:
        return _spelling_of(found[0], model) if found[0] in _fields_of(model) else found[0]

    # A field's name of one word is not replaced: in a message it may be an ordinary word.
    return re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", option_of, message)


def _in_options(location: tuple[int | str, ...], message: str, model: type[Any]) -> str:
    message = in_options(message.removeprefix("Value error, "), model)
    return ": ".join([*(_spelling_of(str(part), model) for part in location[:1]), message])


def _spelling_of(name: str, model: type[Any]) -> str:
    context = click.get_current_context(silent=True)
    prefix = getattr(model, "model_config", {}).get("env_prefix")
    command = context.command if context is not None else None
    if prefix and isinstance(command, Command) and all(each.name != name for each in command.params):
        return f"{prefix}{name.upper()}"
    return spelling(name)


def with_environment(prefix: str) -> Callable[[click.Command], click.Command]:
    def decorate(command: click.Command) -> click.Command:
        for param in command.params:
            if isinstance(param, Option) and param.envvar is None and param.variable is None:
                param.envvar = f"{prefix}_{_names(param)[0].upper()}"
                param.is_own_variable = True
        return command

    return decorate


def config_option() -> Decorator:
    def read(context: click.Context, param: click.Parameter, path: Path | None) -> None:
        if path is not None:
            context.default_map = {**(context.default_map or {}), **_read(context.command, path)}

    return option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=read,
        help='Read options from this TOML file, such as read-timeout = "60s" or upstream = ["http://HOST:8000"].',
    )


def _read(command: click.Command, path: Path) -> dict[str, Any]:
    try:
        values = decode_toml(path.read_bytes())
    except OSError as error:
        raise click.UsageError(f"--config: {path}: {error.strerror}") from None
    except ValueError as error:
        raise click.UsageError(f"--config: {path}: {error}") from None
    known = {name: param for param in command.params if isinstance(param, Option) for name in _names(param)}
    found = {}
    for place, (name, value) in enumerate(values.items(), 1):
        param = known.get(name.replace("-", "_"))
        if param is None or param.is_eager:
            near = get_close_matches(name.replace("-", "_"), known, n=1)
            meant = f": did you mean {near[0].replace('_', '-')}?" if near else ""
            # The error does not show the name: someone may have pasted an API key there.
            raise click.UsageError(f"--config: {path}: the name of its entry {place} is no option{meant}")
        # An environment variable that the model reads has priority over the file, like those that click reads.
        if param.name is not None and (param.variable is None or param.variable not in os.environ):
            found[param.name] = _as_given(param, value, f"--config: {path}: {name}")
    return found


def _as_given(param: Option, value: Any, where: str) -> Any:
    if param.is_bool_flag:
        if not isinstance(value, bool):
            raise click.UsageError(f"{where}: write true or false")
        return value
    values = value if isinstance(value, list) and param.multiple else [value]
    if any(isinstance(each, bool) or not isinstance(each, str | int | float) for each in values):
        kinds = "a text or a number, or a list of them" if param.multiple else "a text or a number"
        raise click.UsageError(f"{where}: write {kinds}")
    texts = list(map(str, values))
    return texts if param.multiple else texts[0]


def _names(param: Option) -> list[str]:
    return [each[2:].replace("-", "_") for each in param.opts if each.startswith("--")]
