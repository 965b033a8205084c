"""Command-line arguments and configuration files to dataclasses, and dataclasses to help text.

`parse` reads `--flag value`, `--flag=value`, nested `--policy.dtype=bfloat16`, bare `--overwrite` for a
true/false flag, JSON for lists and maps, and `--config_path file.yaml|json`, which the flags override.
draccus decodes each value to the declared type of its field. This file decides what draccus gets to see,
since its own command line reads every text as YAML 1.1 first (`1:30` becomes 90, `007` becomes 7) and prints
a list into a field of type `str`: here a field that is declared as text receives the text as typed, and
a value of the wrong kind is an error, never a conversion.

Left out: positional arguments, abbreviated flags, literals and enums of anything but text, fields of type
`Any`, draccus' choice types and its `include` keyword.
Importing this file is cheap (no draccus, no YAML), so that help answers at once.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from pi0_fast.types import UsageError

Config = TypeVar("Config")

CONFIG_PATH = "config_path"
_HELP_WIDTH = 98
_FLAG_WIDTH = 34
_NONE = type(None)
# Far more than any configuration has, and far less than what makes Python give up.
_DEEPEST_NESTING = 50


def option(
    default: Any = MISSING,
    *,
    help: str,
    group: str = "Options",
    aliases: tuple[str, ...] = (),
    shown: str | None = None,
) -> Any:
    """A dataclass field with what the command line says of it.

    Args:
        default: immutable default; a field without one is required.
        help: explanation, one or two sentences.
        group: heading in the help text under which the flag stands.
        aliases: other spellings of the flag (and of the key in a configuration file).
        shown: what the help text prints as the default, where `None` would explain nothing.
    """
    metadata = {"help": help, "group": group, "aliases": aliases, "shown": shown}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Flag:
    """One leaf of a configuration class: `--name`, where `name` is dotted for nested dataclasses."""

    name: str
    kind: Any
    default: Any
    help: str
    group: str
    aliases: tuple[str, ...]
    shown: str | None

    @property
    def is_switch(self) -> bool:
        """Whether the bare flag means true."""
        return bool in _members(self.kind)


# ----------------------------------------------------------------------------------------------------
# The declared types


def _members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type alone: `float | None` -> (float, NoneType)."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def _nested_class(kind: Any) -> type[Any] | None:
    """The dataclass of a field that holds a nested configuration (or None), else None."""
    return next((m for m in _members(kind) if isinstance(m, type) and dataclasses.is_dataclass(m)), None)


def _is_container(kind: Any) -> bool:
    return (typing.get_origin(kind) or kind) in (list, tuple, set, dict)


def type_name(kind: Any) -> str:
    """The declared type as people read it: `list[float] | float` -> 'float or list of float'."""
    members = [m for m in _members(kind) if m is not _NONE]
    if len(members) > 1:
        return " or ".join(type_name(m) for m in sorted(members, key=_is_container))
    (member,) = members
    origin, arguments = typing.get_origin(member), typing.get_args(member)
    if origin is Literal:
        return "|".join(str(a) for a in arguments)
    if origin is dict:
        return f"map of {type_name(arguments[0])} to {type_name(arguments[1])}"
    if origin is not None:
        return f"{origin.__name__} of {type_name(arguments[0])}"
    if issubclass(member, enum.Enum):
        return "|".join(str(e.value) for e in member)
    return str(member.__name__.lower())


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def flags_of(config_class: type[Any], prefix: str = "", base: Any = MISSING) -> dict[str, Flag]:
    """Every flag of a configuration class in the order of its fields, by dotted name.

    Args:
        config_class: a dataclass; fields that are dataclasses (or None) become nested flags.
        prefix: dotted path in front of the names.
        base: instance whose values are the defaults (a nested field's own default), or MISSING.
    """
    hints = typing.get_type_hints(config_class)
    found: dict[str, Flag] = {}
    for field in dataclasses.fields(config_class):
        if not field.init:
            continue
        default = getattr(base, field.name) if dataclasses.is_dataclass(base) else _default(field)
        nested = _nested_class(hints[field.name])
        if nested is not None:
            found |= flags_of(nested, f"{prefix}{field.name}.", default)
            continue
        found[prefix + field.name] = Flag(
            name=prefix + field.name,
            kind=hints[field.name],
            default=default,
            help=field.metadata.get("help", ""),
            group=field.metadata.get("group", prefix.rstrip(".") or "Options"),
            aliases=tuple(prefix + alias for alias in field.metadata.get("aliases", ())),
            shown=field.metadata.get("shown"),
        )
    return found


def _spellings(flags: Mapping[str, Flag]) -> dict[str, Flag]:
    """Every accepted spelling -> its flag."""
    return {spelling: flag for flag in flags.values() for spelling in (flag.name, *flag.aliases)}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to a misspelt one, or None when none is close."""
    from difflib import get_close_matches

    plain = {candidate.replace("-", "_"): candidate for candidate in known}
    close = get_close_matches(name.replace("-", "_"), plain, n=1, cutoff=0.6)
    return plain[close[0]] if close else None


def expanded(name: str, text: str) -> Path:
    """The path that a flag gives, `~` and `~user` replaced; UsageError where there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"--{name} {text!r}: {error} (write ./~ for a name that begins so)") from error


# ----------------------------------------------------------------------------------------------------
# Values


class _Unfit(Exception):
    """A value does not fit the declared type; carries an addition to the message."""


def _from_text(kind: Any, text: str) -> Any:
    """Text as typed -> what the declared type is decoded from: text, None, or the parsed list or map.

    `null` unsets a field that may be None. Only where a list or map is declared is a text in brackets parsed:
    as JSON, or as YAML's flow style ({front: 0}) whose scalars stay text until their own type is known.
    """
    members = _members(kind)
    if _NONE in members and text == "null":
        return None
    if text[:1] in ("[", "{") and any(_is_container(m) for m in members):
        try:
            return _plain(json.loads(text, object_pairs_hook=_unique))
        except json.JSONDecodeError:
            return _plain(_yaml(text))
        except RecursionError as error:
            raise _Unfit(_TOO_DEEP) from error
        except ValueError as error:  # a number of thousands of digits
            raise _Unfit(str(error)) from error
    return text


_TOO_DEEP = f"nested more than {_DEEPEST_NESTING} deep"


def _plain(tree: Any) -> Any:
    """What was read from JSON or YAML, unless it is nested absurdly or has texts that no name or path can hold."""
    pending = [(tree, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > _DEEPEST_NESTING:
            raise _Unfit(_TOO_DEEP)
        if isinstance(value, dict):
            pending += [(item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list):
            pending += [(item, depth + 1) for item in value]
        elif isinstance(value, str):
            wrong = next((c for c in value if c == "\0" or "\ud800" <= c <= "\udfff"), None)
            if wrong is not None:
                raise _Unfit(f"a text holds the character U+{ord(wrong):04X}, which no name and no path may: {value!a}")
    return tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; a repeated key, of which JSON keeps the last in silence, is refused."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(k for i, (k, _) in enumerate(pairs) if k in [other for other, _ in pairs[:i]])
        raise _Unfit(f"the key {repeated!r} stands there twice")
    return found


def _yaml(text: str) -> Any:
    """YAML with every scalar but null left as text, so that the declared types decide, not YAML's guesses."""
    import yaml  # type: ignore[import-untyped]

    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        return None if root is None else _yaml_node(root, set())
    except RecursionError as error:
        raise _Unfit(_TOO_DEEP) from error
    except yaml.YAMLError as error:
        problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise _Unfit(f"not valid YAML or JSON: {' '.join(str(problem or error).split())}{line}") from error


def _yaml_node(node: Any, seen: set[int]) -> Any:
    """The value of a node; a node that is there twice stands for an alias, of which few make a tree of any size."""
    if id(node) in seen:
        raise _Unfit(
            f"YAML aliases (& and *) are not read: write the value of line {node.start_mark.line + 1} out again"
        )
    seen.add(id(node))
    if node.id == "sequence":
        return [_yaml_node(child, seen) for child in node.value]
    if node.id == "mapping":
        return _unique([(_yaml_key(key, seen), _yaml_node(child, seen)) for key, child in node.value])
    plain = node.style is None  # not quoted: YAML's spellings of null count, `root: ~` is not the home directory
    return None if plain and node.value in ("", "~", "null") else node.value


def _yaml_key(node: Any, seen: set[int]) -> str:
    if node.id != "scalar":
        raise _Unfit(f"a key is a {node.id} (line {node.start_mark.line + 1})")
    _yaml_node(node, seen)
    return str(node.value)


def _takes(kind: Any, raw: Any) -> bool:
    """Whether a raw value is of a kind that the declared type may be decoded from.

    draccus alone would turn None into a value of any type, a list into its printed form where text is
    declared, and true into 1.
    """
    members = _members(kind)
    if len(members) > 1:
        return any(_takes(member, raw) for member in members)
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (list, set):
        return isinstance(raw, list) and all(_takes(arguments[0], item) for item in raw)
    if origin is tuple:
        kinds = [arguments[0]] * len(raw) if arguments[1:] == (...,) else arguments
        return isinstance(raw, list) and len(raw) == len(kinds) and all(map(_takes, kinds, raw))
    if origin is dict:
        return isinstance(raw, dict) and all(
            _takes(arguments[0], key) and _takes(arguments[1], value) for key, value in raw.items()
        )
    if origin in (int, float):
        if isinstance(raw, str):  # Python alone would read 1_0 and digits of every script
            return raw.isascii() and "_" not in raw
        return isinstance(raw, (int, float)) and not isinstance(raw, bool)
    if origin is bool:
        return isinstance(raw, bool) or (isinstance(raw, str) and raw.lower() in ("true", "false"))
    if origin is _NONE:
        return raw is None
    if origin is Literal:
        return isinstance(raw, str) and raw in arguments
    return isinstance(raw, str)


def _lower_booleans(kind: Any, raw: Any) -> Any:
    """`True`, as Python users type it, to the `true` that draccus reads."""
    return raw.lower() if bool in _members(kind) and isinstance(raw, str) and _takes(bool, raw) else raw


def _decode(kind: Any, raw: Any) -> Any:
    """A raw value to the declared type, by draccus; `_Unfit` when it does not fit.

    Of a union only the members that may take the value are offered to draccus, which tries them in order and
    would print a list into `str | list[str]`.
    """
    import draccus

    if isinstance(raw, str):
        raw = _lower_booleans(kind, _from_text(kind, raw))
    members = tuple(member for member in _members(kind) if _takes(member, raw))
    if not members:
        raise _Unfit
    if raw is None or typing.get_origin(members[0]) is Literal:  # the latter is unknown to draccus 0.10
        return raw
    try:
        return draccus.decode(Union[members], raw)  # noqa: UP007 - members are known at run time
    except Exception as error:
        # Whatever draccus raises (DecodingError, KeyError for an enum, plain Exception) means the same here:
        # the value is not of the declared type. The message is ours: draccus names neither flag nor file.
        raise _Unfit from error


def _decode_flag(flag: Flag, raw: Any, where: str) -> Any:
    """A raw value to the flag's type; the UsageError names the place, the value and the expected type."""
    try:
        return _decode(flag.kind, raw)
    except _Unfit as error:
        expected = type_name(flag.kind)
        if bool in _members(flag.kind):
            expected += " (true or false)"
        elif any(_is_container(m) for m in _members(flag.kind)):
            expected += " (lists and maps are written as JSON)"
        detail = f"; {error}" if str(error) else ""
        if not isinstance(raw, str) and str in _members(flag.kind):
            detail += "; write it in quotes"
        raise UsageError(f"{where}: expected {expected}, got {_shown_value(raw)}{detail}") from error


def _shown_value(raw: Any) -> str:
    return repr(raw) if isinstance(raw, str) else json.dumps(raw)


# ----------------------------------------------------------------------------------------------------
# Sources: the arguments, the configuration file


def _split(argv: Sequence[str], flags: Mapping[str, Flag], program: str) -> Iterator[tuple[str, str]]:
    """Arguments -> (spelling, text) pairs; a bare true/false flag gets the text 'true'."""
    spellings = _spellings(flags)
    remaining = list(argv)
    while remaining:
        token = remaining.pop(0)
        if not token.startswith("--") or token == "--":
            raise UsageError(f"unexpected argument {token!r}: {program} takes only --flags (see {program} --help)")
        spelling, equals, text = token[2:].partition("=")
        if spelling != CONFIG_PATH and spelling not in spellings:
            raise UsageError(f"unknown flag --{spelling}{_suggestion(spelling, flags, program)}")
        if not equals:
            if remaining and not remaining[0].startswith("--"):
                text = remaining.pop(0)
            elif spelling in spellings and spellings[spelling].is_switch:
                text = "true"
            else:
                raise UsageError(f"--{spelling} needs a value")
        yield spelling, text


def _suggestion(spelling: str, flags: Mapping[str, Flag], program: str) -> str:
    inside = [name for name in flags if name.startswith(spelling + ".")]
    if inside:
        return f": it is a group of flags such as --{inside[0]}"
    close = nearest(spelling, [CONFIG_PATH, *_spellings(flags)])
    return f"; did you mean --{close}?" if close else f" (see {program} --help)"


def _read_file(path: Path) -> dict[str, Any]:
    """A YAML or JSON configuration file as a mapping; UsageError when it is missing or damaged."""
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise UsageError(f"--{CONFIG_PATH}: {path} must end in .yaml, .yml or .json")
    try:
        text = path.read_text(encoding="utf-8")
        tree = _plain(json.loads(text, object_pairs_hook=_unique) if path.suffix == ".json" else _yaml(text))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--{CONFIG_PATH}: cannot read {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: not valid JSON: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{path}: {_TOO_DEEP}") from error
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"{path}: {error}") from error
    except _Unfit as error:
        raise UsageError(f"{path}: {error}") from error
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: expected flag names with their values at the top level")
    return tree


def _flatten(
    tree: Mapping[str, Any], flags: Mapping[str, Flag], path: Path, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The values of a configuration file as (spelling, raw value) pairs, nested names dotted."""
    spellings = _spellings(flags)
    for key, raw in tree.items():
        name = prefix + key
        if name in spellings:
            yield name, raw
        elif any(flag.startswith(name + ".") for flag in flags):
            if not isinstance(raw, dict):
                raise UsageError(f"{path}: {name!r} is a group of values, got {_shown_value(raw)}")
            yield from _flatten(raw, flags, path, name + ".")
        else:
            close = nearest(name, spellings)
            raise UsageError(f"{path}: unknown key {name!r}" + (f"; did you mean {close!r}?" if close else ""))


def _collect(pairs: Iterable[tuple[str, Any]], flags: Mapping[str, Flag], mark: str) -> dict[str, Any]:
    """Decoded values by flag name. One flag twice, under one or two spellings, must say the same twice."""
    spellings = _spellings(flags)
    values: dict[str, Any] = {}
    used: dict[str, str] = {}
    for spelling, raw in pairs:
        flag = spellings[spelling]
        value = _decode_flag(flag, raw, f"{mark}{spelling}")
        if flag.name in values and values[flag.name] != value:
            first = used[flag.name]
            twice = (
                f"{mark}{spelling} is given twice"
                if first == spelling
                else (f"{mark}{first} and {mark}{spelling} are two spellings of one flag, given")
            )
            raise UsageError(
                f"{twice} with different values: {_shown_value(values[flag.name])} and {_shown_value(value)}"
            )
        values[flag.name] = value
        used[flag.name] = spelling
    return values


# ----------------------------------------------------------------------------------------------------
# The configuration


def _build(config_class: type[Any], values: Mapping[str, Any], prefix: str, base: Any, missing: list[str]) -> Any:
    """An instance from decoded values; a nested field's own default keeps what the flags do not change."""
    hints = typing.get_type_hints(config_class)
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        if not field.init:
            continue
        name = prefix + field.name
        default = getattr(base, field.name) if dataclasses.is_dataclass(base) else _default(field)
        nested = _nested_class(hints[field.name])
        if nested is not None and (default is MISSING or any(v.startswith(name + ".") for v in values)):
            chosen[field.name] = _build(nested, values, name + ".", default, missing)
        elif name in values:
            chosen[field.name] = values[name]
        elif default is MISSING:
            missing.append(name)
        else:
            chosen[field.name] = default
    return None if missing else config_class(**chosen)


def parse(config_class: type[Config], argv: Sequence[str], program: str) -> Config:
    """The configuration that a command line describes; its values are decoded but not yet validated.

    Args:
        config_class: a dataclass, nested ones included.
        argv: the arguments behind the name of the program.
        program: what error messages call the program, e.g. `pi0-fast train-tokenizer`.

    Raises:
        UsageError: one line that names the flag (or the file and key), the value and what was expected.
    """
    flags = flags_of(config_class)
    pairs = list(_split(argv, flags, program))
    paths = {text for spelling, text in pairs if spelling == CONFIG_PATH}
    if len(paths) > 1:
        raise UsageError(f"--{CONFIG_PATH} is given twice with different values: {' and '.join(sorted(paths))}")
    values: dict[str, Any] = {}
    for text in paths:
        path = expanded(CONFIG_PATH, text)
        values |= _collect(_flatten(_read_file(path), flags, path), flags, f"{path}: ")
    values |= _collect([(s, t) for s, t in pairs if s != CONFIG_PATH], flags, "--")
    missing: list[str] = []
    config = _build(config_class, values, "", MISSING, missing)
    if missing:
        raise UsageError(f"{' and '.join('--' + name for name in missing)} must be given (see {program} --help)")
    return typing.cast(Config, config)


def given_texts(config_class: type[Any], argv: Sequence[str], program: str) -> dict[str, str]:
    """The flags on a command line with their texts as typed, by name; the last one where one is repeated.

    For a command that must know something before it can parse. Errors as in `parse`, but values are not looked at.
    """
    flags = flags_of(config_class)
    spellings = _spellings(flags)
    return {
        spelling if spelling == CONFIG_PATH else spellings[spelling].name: text
        for spelling, text in _split(argv, flags, program)
    }


def help_text(config_class: type[Any], program: str, summary: str, examples: Sequence[str] = ()) -> str:
    """Usage, examples, and every flag with its type, explanation and default, grouped; at most 100 columns wide.

    Args:
        config_class: whose fields are the flags.
        program: what is typed before the flags.
        summary: what it does.
        examples: whole command lines, in which a line ends in a backslash where the next one belongs to it.
    """
    flags = flags_of(config_class)
    required = [flag for flag in flags.values() if flag.default is MISSING]
    usage = " ".join([f"usage: {program}", *(f"--{f.name} {_simplest(f.kind)}" for f in required), "[flags]"])
    lines = [usage, "", *textwrap.wrap(summary, _HELP_WIDTH)]
    if examples:
        lines += ["", "For example:", *(textwrap.indent(example, "  ") for example in examples)]
    groups: dict[str, list[Flag]] = {}
    for flag in flags.values():
        groups.setdefault(flag.group, []).append(flag)
    for group, members in groups.items():
        lines += ["", f"{group}:"]
        for flag in members:
            lines += _help_entry(f"--{flag.name} {type_name(flag.kind)}", _explanation(flag))
    lines += ["", "General:"]
    lines += _help_entry(
        f"--{CONFIG_PATH} file",
        "YAML or JSON file with the flags as keys (nested ones nested); flags override it.",
    )
    lines += _help_entry("--debug", "Show the traceback when something fails.")
    lines += _help_entry("--help, -h", "Show this text.")
    closing = (
        "Write --flag value or --flag=value; true or false for bool (the bare flag means true); JSON for "
        "lists and maps; null to unset a flag that the configuration file sets."
    )
    lines += ["", *textwrap.wrap(closing, _HELP_WIDTH)]
    return "\n".join(lines) + "\n"


def _simplest(kind: Any) -> str:
    """The first kind of value that a flag takes, for the line of usage."""
    return type_name(kind).partition(" or ")[0].upper()


def _explanation(flag: Flag) -> str:
    known = flag.default is not MISSING
    state = f"(default: {flag.shown or _shown_default(flag.default)})" if known else "(required)"
    spelt = f" Also spelt {', '.join('--' + alias for alias in flag.aliases)}." if flag.aliases else ""
    return f"{flag.help}{spelt} {state}".strip()


def _shown_default(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return str(value.value)
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else str(value)


def _help_entry(head: str, text: str) -> list[str]:
    indent = " " * _FLAG_WIDTH
    lines = textwrap.wrap(text, _HELP_WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(head) + 4 > _FLAG_WIDTH:
        return ["  " + head, *lines]
    return [f"  {head}".ljust(_FLAG_WIDTH) + lines[0].lstrip(), *lines[1:]]
