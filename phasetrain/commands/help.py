"""Texts of `--help`: flags and groups, or the keys and parts of one section."""

import inspect
from collections.abc import Iterator

from phasetrain.commands.setup import SLOTS
from phasetrain.config.compose.sources import ConfigFiles, find_config_dir
from phasetrain.config.problems import format_value
from phasetrain.config.registry import parameters
from phasetrain.config.schema import default_schema
from phasetrain.config.validation import Slot
from phasetrain.errors import ConfigError, did_you_mean


def general_help(usage: str, config_dir: str | None) -> str:
    """Return flags, groups, sections and exit codes."""
    files = ConfigFiles(find_config_dir(config_dir))
    groups = "\n".join(
        f"  {group:<12} {', '.join(files.options(group))}" for group in files.groups()
    )
    return f"""usage: {usage}

Trains the configured experiment. Run the same command again to resume an interrupted run.

flags
  -h, --help [SECTION]   this text, or the keys and parts of a section
  --cfg                  print the resolved config and exit
  --config-dir DIR       a folder with your configs, in one sub-folder per group below;
                         by default ./configs or ./conf
  --from RUN_FOLDER      repeat a run in a new folder and check that it is bit-identical
  -m, --multirun         one run per combination of values: OPTIMIZER.lr=0.1,0.01

groups (SECTION=GROUP) and experiments (experiment=NAME, or a file: phasetrain FILE.yaml)
{groups}

sections
  {", ".join(default_schema().sections)}

getting started
  phasetrain plan        print the plan, and exit
  RUN.dir=FOLDER         run folder; a run in it is resumed
  PHASES.epochs=N        length of the training

exit codes
  0      success, or the run had already finished
  2      error in the config or in the command line
  3      the data, the plan or a forbidden key has changed since the checkpoint
  4      another process uses the run folder
  5      there are checkpoints, but none is valid
  6      repeated attempts made no progress
  128+n  after signal n
  1      any other error"""


def section_help(section: str) -> str:
    """Return the keys of a section with type, default and meaning, and the parts that it can name.

    Raises:
        ConfigError: there is no such section.
    """
    schema = default_schema()
    if section not in schema.sections:
        known = ", ".join(schema.sections)
        raise ConfigError(
            f"--help {section}: no such section{did_you_mean(section, schema.sections) or '.'} "
            f"Known: {known}",
            code="config.unknown_section",
        )
    lines = [f"keys of {section}"]
    for path, key in schema.keys.items():
        if path == section or path.startswith(f"{section}."):
            lines += [
                f"  {path} = {format_value(key.default)}   "
                f"({key.type.text}; {key.resume} on resume)",
                f"      {key.meaning}",
            ]
    for slot in SLOTS:
        if slot.path.partition(".")[0] == section:
            plural = "es" if slot.registry.kind.endswith("s") else "s"
            lines += ["", f"{slot.registry.kind}{plural} ({slot.path})"]
            for name, key in slot.own_keys.items():
                lines += [
                    f"  {name} = {format_value(key.default)}   ({key.type.text})",
                    f"      {key.meaning}",
                ]
            lines += _list_parts(slot)
    return "\n".join(lines)


def _list_parts(slot: Slot) -> Iterator[str]:
    for name, factory in slot.registry.items():
        takes = [
            _format_parameter(p)
            for key, p in parameters(factory).items()
            if key not in slot.provided
        ]
        yield f"  {name}({', '.join(takes)})"
        summary = " ".join((factory.__doc__ or "").partition("\n\n")[0].split())
        if summary:
            yield f"      {summary}"


def _format_parameter(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={format_value(parameter.default)}"
