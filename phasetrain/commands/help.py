"""What `--help` prints: flags and groups, or the keys and parts of one section."""

from collections.abc import Iterator
from typing import Any

from phasetrain.commands.setup import SLOTS
from phasetrain.config.registry import parameters
from phasetrain.config.schema import default_schema
from phasetrain.config.sources import ConfigFiles
from phasetrain.config.validation import Slot, shown
from phasetrain.errors import ConfigError, did_you_mean


def general_help(usage: str, config_dir: str | None) -> str:
    """Return flags, groups, sections and exit codes."""
    files = ConfigFiles(config_dir)
    groups = "\n".join(
        f"  {group:<12} {', '.join(files.options(group))}" for group in files.groups()
    )
    return f"""usage: {usage}

Trains what the config describes; the same command again goes on where it was stopped.

flags
  -h, --help [SECTION]   this text, or the keys and parts of a section
  --cfg                  print the resolved config and end
  --config-dir DIR       a folder with configs of your own, laid out like these groups
  --from RUN_FOLDER      repeat a run in a new folder, and say whether every bit is the same
  -m, --multirun         one run per combination of values: OPTIMIZER.lr=0.1,0.01

groups (SECTION=GROUP) and experiments
{groups}

sections
  {", ".join(default_schema().sections)}

to start with
  RUN.engine=plan        print what would happen, and end
  RUN.dir=FOLDER         where everything goes; a run in it is gone on with
  PHASES.epochs=N        how long to train

exit codes
  0 done, or finished before   2 config or usage   3 data, plan or a forbidden key changed under a checkpoint
  4 the run folder is in use   5 checkpoints exist and none is valid   128+n after signal n   1 anything else"""


def section_help(section: str) -> str:
    """Return the keys of a section with type, default and meaning, and the parts that can be named
    in it.

    Raises:
        ConfigError: there is no such section.
    """
    schema = default_schema()
    if section not in schema.sections:
        known = ", ".join(schema.sections)
        raise ConfigError(
            f"--help {section}: no such section{did_you_mean(section, schema.sections)} Known: {known}"
        )
    lines = [f"keys of {section}"]
    for path, key in schema.keys.items():
        if path == section or path.startswith(f"{section}."):
            lines += [
                f"  {path} = {shown(key.default)}   ({key.type.text}; on a resume {key.resume})",
                f"      {key.meaning}",
            ]
    for slot in SLOTS:
        if slot.path.partition(".")[0] == section:
            lines += [
                "",
                f"{slot.registry.kind}{'es' if slot.registry.kind.endswith('s') else 's'} ({slot.path})",
                *_parts(slot),
            ]
    return "\n".join(lines)


def _parts(slot: Slot) -> Iterator[str]:
    for name, factory in slot.registry.items():
        takes = [
            _parameter(p) for key, p in parameters(factory).items() if key not in slot.provided
        ]
        yield f"  {name}({', '.join(takes)})"
        summary = (factory.__doc__ or "").strip().partition("\n")[0]
        if summary:
            yield f"      {summary}"


def _parameter(parameter: Any) -> str:
    if parameter.default is parameter.empty:
        return str(parameter.name)
    return f"{parameter.name}={shown(parameter.default)}"
