"""From the words of a command line to a command, its flags and its overrides."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from phasetrain.config.addons import Command, explain_missing, import_object
from phasetrain.errors import ConfigError, Problem, nearest
from phasetrain.runtime.clock import Clock

VALUE_FLAGS = ("--config-dir", "--from")
"""Flags that may come before the command and take the next word as their value."""

VERBOSE = "RUN.verbosity=verbose"
"""The override of the flag `-v`."""

TRUST = "run the modules and dotted paths that the config of the folder names"
"""Help of the flag --trust."""

_COMMAND = re.compile(r"[a-z][a-z-]*")


@dataclass(frozen=True)
class Call:
    """One call of a command.

    Attributes:
        command: name of the command.
        flags: parsed flags and arguments.
        clock: measures the attempt, from the start of the process.
        words: the whole command line, without the program.
        owns_process: whether the process ends with this call.
    """

    command: str
    flags: argparse.Namespace
    clock: Clock | None = None
    words: tuple[str, ...] = ()
    owns_process: bool = False

    @property
    def overrides(self) -> list[str]:
        """The overrides among the words, and the override that the flag `-v` means."""
        overrides = list(self.flags.overrides)
        if self.flags.verbose:
            overrides.append(VERBOSE)
        return overrides


def make_parser(command: Command) -> argparse.ArgumentParser:
    """Return the parser of the words behind the name."""
    made = _Parser(
        prog=f"phasetrain {command.name}",
        usage=f"phasetrain {command.name} [flags] {command.synopsis}".rstrip(),
        description=command.help,
        add_help=False,  # argparse's own --help prints and exits, also with --json
        # An abbreviation that works today is ambiguous once a flag with its prefix is added.
        allow_abbrev=False,
    )
    made.add_argument("-h", "--help", action="store_true", help="print this text and exit")
    made.add_argument(
        "--json", action="store_true", help="print one JSON object; all else goes to stderr"
    )
    if command.arguments:
        import_object(command.arguments)(made)
    if command.takes_overrides:
        made.add_argument("-v", "--verbose", action="store_true", help=f"same as {VERBOSE}")
        made.add_argument("--config-dir", metavar="DIR", help="folder with your configs")
        made.add_argument("--cfg", action="store_true", help="print the resolved config and exit")
        made.add_argument(
            "overrides",
            nargs="*",
            metavar="OVERRIDE",
            help="FILE.yaml, experiment=NAME, SECTION=GROUP, SECTION.key=value or ~SECTION.key",
        )
    return made


def own_words(words: Sequence[str]) -> Sequence[str]:
    """Return the words before `--`; what follows is the command line of another program."""
    return words[: words.index("--")] if "--" in words else words


def parse_flags(command: Command, words: Sequence[str]) -> argparse.Namespace:
    """Return the flags of a command and its arguments.

    Raises:
        ConfigError: no such flag, or a missing argument.
    """
    rest = list(words)
    if {"-h", "--help"} & set(own_words(rest)):
        return argparse.Namespace(help=True)  # before the parser misses required arguments
    if "--cfg" in rest[:-1] and rest[rest.index("--cfg") + 1] == "job":
        rest.remove("job")  # Hydra's spelling, `--cfg job`
    parser = make_parser(command)
    behind: list[str] = []
    if parser.get_default("behind") is not None:
        rest, behind = list(own_words(rest)), rest[len(own_words(rest)) + 1 :]
    # intermixed, because flags may come before, between and after overrides
    flags, unknown = parser.parse_known_intermixed_args(rest)
    flags.behind = behind
    if unknown:
        # private: argparse has no public list of its flags
        options = [option for action in parser._actions for option in action.option_strings]
        usage = parser.format_usage()
        advice = _advise_on_flag(command, unknown[0], words, usage)
        raise _unknown("flag", unknown[0], options, advice)
    return flags


def split_command(commands: Sequence[Command], words: Sequence[str]) -> tuple[Command, list[str]]:
    """Return the command named by the first word that is neither a flag nor an override, and the
    other words."""
    rest = list(words)
    by_name = {command.name: command for command in commands}
    index = _place_of_command(rest)
    if index is None:
        return commands[0], rest
    two = " ".join(rest[index : index + 2])
    for name in (two, rest[index]):
        if name in by_name:
            del rest[index : index + len(name.split())]
            return by_name[name], rest
    groups = {command.name.split()[0] for command in commands}
    name = two if rest[index] in groups else rest[index]
    names = [
        command_name for command_name in by_name if command_name.startswith(f"{rest[index]} ")
    ] or list(by_name)
    advice = "Without a command, expected FILE.yaml, experiment=NAME or SECTION.key=value"
    raise _unknown("command", name, names, f"{advice}{explain_missing()}")


def _place_of_command(words: Sequence[str]) -> int | None:
    """Return the index of the word that has the form of a command, or None."""
    skips = False
    for index, word in enumerate(words):
        if skips or (word == "job" and index and words[index - 1] == "--cfg"):
            skips = False
        elif word in VALUE_FLAGS:
            skips = True
        elif _COMMAND.fullmatch(word):
            return index
    return None


def _advise_on_flag(command: Command, flag: str, words: Sequence[str], usage: str) -> str:
    """Return how keys and files are given, if a flag or a word looks like one, and the usage."""
    advice = []
    if command.takes_overrides:
        # Composing a config is slow to import, and only this message needs its keys.
        from phasetrain.config.schema import default_schema
        from phasetrain.config.suggestions import KnownPaths

        keys = default_schema().keys
        name = flag.lstrip("-").partition("=")[0]
        key = KnownPaths(keys).near(name)
        if key in keys and len(name) > 1:
            advice.append(f"A key is set without dashes: {key}=VALUE")
        files = [word for word in words if word.endswith((".yaml", ".yml"))]
        advice += [f"An experiment file is given by its path alone: {file}" for file in files]
    return "\n".join([*advice, usage])


def _unknown(kind: str, given: str, known: Sequence[str], advice: str) -> ConfigError:
    expected = f"one of {', '.join(known)}"
    near = nearest(given, known) or ""
    question = "."
    if near:
        question = f"; did you mean {near}?"
    message = f"{given}: no such {kind}{question} Expected {expected}\n{advice}".rstrip()
    code = f"cli.unknown_{kind}"
    problem = Problem(code, message, given=given, expected=expected, suggestion=near)
    return ConfigError(message, code=code, problems=[problem])


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting, so that `--json` covers usage errors."""

    def error(self, message: str) -> NoReturn:
        message = message.removesuffix(", OVERRIDE")  # argparse counts it among those required
        raise ConfigError(
            f"{self.prog}: {message}\n{self.format_usage().rstrip()}",
            code="cli.usage",
            problems=[Problem("cli.usage", message, expected=self.format_usage().strip())],
        )
