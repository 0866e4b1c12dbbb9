"""Commands and their options: each command is a dataclass of options and a function of it."""

import difflib
import re
import sys
from argparse import ArgumentError, ArgumentTypeError
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentParser

from mcvae.runs.config import trusted_networks
from mcvae.runs.method import said_by

__all__ = ["COMMANDS", "build_parser", "parse"]

_HERE = "train evaluate encode reconstruct score sample compare report methods demo reproduce sweep"
COMMANDS = {name: f"mcvae.cli.{name}" for name in _HERE.split()}
"""Commands, each a module with a dataclass `Options` and a function `run(options)`."""
_WITH_FILES = ("train", "sweep")
"""Commands that read options from a YAML file, too."""


def parse(arguments: Sequence[str]) -> tuple[str, Callable[[Any], None], Any]:
    """Return the command's name, its function and its options. Print an error and exit if the arguments are wrong."""
    given = list(arguments)
    if given[:1] == ["train"]:
        given = expand(given)
    name = given[0] if given else ""
    parser = build_parser([name] if name in COMMANDS else [*COMMANDS])
    if name in COMMANDS:
        _check_options(name, parser, given[1:])
    elif name and not name.startswith("-"):
        _refuse("mcvae", f"unknown command {name!r}; known: {', '.join(COMMANDS)}.", name, [*COMMANDS])
    try:
        parsed = parser.parse_args(given)
        values = parser.instantiate(parsed)[parsed.command].as_dict()
    except (ArgumentError, ArgumentTypeError, RecursionError, TypeError, AttributeError, ValueError, OSError) as error:
        _refuse(f"mcvae {name}".strip(), _reason(error, name))
    module = import_module(COMMANDS[parsed.command])
    values.pop("config", None)
    if "model" in values:
        _check_networks(name, values["model"], given)
    return f"mcvae {parsed.command}", module.run, module.Options(**values)


def build_parser(commands: Sequence[str] | None = None) -> Any:
    """Build the parser of the given commands, or of all."""
    from importlib.metadata import version

    parser = ArgumentParser(
        prog="mcvae",
        description="Monte Carlo variational auto-encoders.",
        version=version("mcvae"),
        exit_on_error=False,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--threads", metavar="N", help="threads of torch, for every command, also after its name")
    subcommands = parser.add_subcommands(required=True, dest="command")
    for name in commands or COMMANDS:
        module = import_module(COMMANDS[name])
        summary = (module.run.__doc__ or "").splitlines()[0]
        command = ArgumentParser(description=module.run.__doc__, exit_on_error=False)
        if name in _WITH_FILES:
            command.add_argument("--config", action="config", help="YAML file of these options")
        unnamed = {field.name: field for field in fields(module.Options) if "positional" in field.metadata}
        for field in unnamed.values():
            number: Any = {} if field.type is str else {"nargs": "+"}
            command.add_argument(field.name, type=str, help=field.metadata["positional"], **number)
        command.add_class_arguments(module.Options, skip=set(unnamed))
        subcommands.add_subcommand(name, command, help=summary)
    return parser


def expand(arguments: Sequence[str]) -> list[str]:
    """Expand shorthands: --data mnist means --data.name=mnist, and --method iwae-50 its name and settings.

    >>> expand(["--data", "mnist", "--method=l-mcvae-sigmoid-k5"])[1:]
    ['--method.name=l-mcvae', '--method.schedule=sigmoid', '--method.num_steps=5']
    """
    expanded, rest = list[str](), list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        following = value if equals else rest[0] if rest else ""
        is_file = following.endswith((".yaml", ".yml", ".json", "}"))
        if name not in ("--data", "--method") or following[:1] in ("", "-") or is_file:
            expanded.append(argument)
            continue
        if not equals:
            rest.pop(0)
        said: dict[str, Any] = {"name": following}
        if name == "--method":
            with suppress(ValueError):  # the command says what is wrong with it
                said = said_by(following)
        expanded += [f"{name}.{key}={text}" for key, text in said.items()]
    return expanded


def _check_options(name: str, parser: Any, arguments: Sequence[str]) -> None:
    """Exit with a suggestion if the command does not have an option."""
    command = parser._subcommands_action._name_parser_map[name]
    known = {text for action in command._actions for text in action.option_strings} | {"--help", "-h"}
    open_ended = tuple(f"--{field}." for field in ("trainer", "settings", "vary", "evaluation"))
    for argument in arguments:
        option = argument.partition("=")[0]
        is_option = option.startswith("--") and len(option) > 2
        allowed = option in known or (option.startswith(open_ended) and f"{option.partition('.')[0]}" in known)
        if is_option and not allowed and option.rstrip("+") not in known:
            _refuse(f"mcvae {name}", f"unknown option {option}.", option, sorted(known))


def _check_networks(name: str, model: Any, arguments: Sequence[str]) -> None:
    """Exit if a file names code to import: it may be the configuration of somebody else's run."""
    words = {word for argument in arguments for word in argument.partition("=")[::2]} | trusted_networks()
    for option in ("encoder", "decoder"):
        network = getattr(model, option)
        if network is not None and network not in words:
            reason = f"a file names the network {network}, and nothing that a file names is imported."
            _refuse(f"mcvae {name}", f"{reason} If you trust it, write --model.{option} {network}.")


def _reason(error: Exception, command: str) -> str:
    """The parser's error in one line, with what a value may be in words."""
    text = " ".join(str(error).split())
    text = re.sub(r"Does not validate against .*?Subtypes: (\[.*?\]) Errors:.*? Given value: ?", _wanted, text)
    text = re.sub(r"Expected an? (\S.*?)\. Got value: ?", _wanted, text)
    text = re.sub(r"<class '(\w+)'>|typing\.", r"\1", text).replace(f" {command}.", " ").replace("Parser key ", "")
    if isinstance(error, RecursionError):
        text = "they refer to themselves"
    return f"these options cannot be read: {text.removesuffix('.')[:400]}."


def _wanted(types: re.Match[str]) -> str:
    kinds = re.findall(r"Literal\[([^\]]*)\]|class '(\w+)'", types[1])
    words = [
        ("one of " * ("," in values) + values).replace("'", "") if values else _WORDS.get(kind, kind)
        for values, kind in kinds
    ]
    return f"expected {' or '.join(word for word in words if word != 'NoneType') or 'another value'}, got "


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a word",
    "list": "a list such as [a,b]",
    "dict": "settings such as '{a: 1}'",
}


def _refuse(who: str, reason: str, word: str = "", known: Sequence[str] = ()) -> None:
    """Print an error and exit; suggest the known word that is closest to a mistyped one, if there is one."""
    close = difflib.get_close_matches(word, known, n=1) if word else []
    hint = f" Did you mean {close[0]}?" if close else f" See {who} --help."
    print(f"{who}: error: {reason}{hint}", file=sys.stderr)
    raise SystemExit(2)
