"""The command `phasetrain migrate vissl`: from configs of VISSL to an experiment and a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasetrain.addons.vissl.compose import VisslConfig, read_vissl
from phasetrain.addons.vissl.data import convert_data, read_catalog
from phasetrain.addons.vissl.draft import ExperimentDraft, KeyReport, copy_keys, to_yaml
from phasetrain.addons.vissl.model import convert_model
from phasetrain.addons.vissl.optimizer import convert_optimizer
from phasetrain.addons.vissl.run_keys import convert_run
from phasetrain.errors import ConfigError

ORDER = (
    "RUN",
    "TASK",
    "DATA",
    "MODEL",
    "LOSS",
    "METERS",
    "OPTIMIZER",
    "PHASES",
    "EXTRACT",
    "MACHINE",
    "DISTRIBUTED",
    "LAUNCH",
    "HOOKS",
    "CHECKPOINT",
)
"""Order of sections in an experiment."""


@dataclass(frozen=True)
class Migration:
    """A converted config.

    Attributes:
        experiment: sections of the experiment.
        keys: the result for each key of the files.
        notes: differences and open ends, as sentences.
    """

    experiment: Mapping[str, Any]
    keys: tuple[KeyReport, ...]
    notes: tuple[str, ...]

    @property
    def missing(self) -> tuple[KeyReport, ...]:
        """Keys without counterpart."""
        return tuple(key for key in self.keys if key.status == "missing")

    def list_commands(self, file: str) -> list[str]:
        """Return the commands that follow, for an experiment in a file."""
        weights = self.experiment.get("MODEL", {}).get("weights", {}).get("path")
        commands = []
        if weights:
            out = f"{str(weights).rpartition('/')[2].partition('.')[0] or 'weights'}.pt"
            commands.append(
                f"phasetrain migrate vissl-weights '{weights}' --out {out}   # if it has arrays; "
                f"then MODEL.weights.path={out}"
            )
        if self.experiment.get("RUN", {}).get("engine") == "extract":
            return [*commands, f"phasetrain extract {file}"]
        small = [f"DATA.{split}.batch_size=8" for split in self.experiment["DATA"]]
        return [
            *commands,
            f"phasetrain plan {file}",
            f"phasetrain {file} {' '.join(small)} MACHINE.device=cpu MACHINE.precision=fp32 "
            "PHASES.limit.train=2 RUN.dir=runs/small   # a small run first",
            f"phasetrain {file}",
        ]

    def format_yaml(self, title: str) -> str:
        """Return the experiment as a YAML file.

        Args:
            title: a comment, such as the names of the files.
        """
        lines = ["# @package _global_", f"# Converted from {title} by `phasetrain migrate vissl`."]
        lines += [f"# {note}" for note in self.notes]
        lines += [f"# missing: {key.key}: {key.text}" for key in self.missing]
        return "\n".join([*lines, to_yaml(self.experiment)])

    def format_report(self) -> str:
        """Return the keys grouped by result, and the notes."""
        lines = []
        for status in ("missing", "translated", "renamed", "not needed"):
            rows = [key for key in self.keys if key.status == status]
            lines.append(f"{status}: {len(rows)}")
            lines += [f"  {key.key} = {key.value}: {key.text}" for key in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def convert_vissl(source: VisslConfig, catalog: Mapping[str, Any] | None = None) -> Migration:
    """Return the experiment for a config of VISSL, and the result for each of its keys.

    Args:
        source: the config.
        catalog: VISSL's dataset catalog: name -> split -> paths.
    """
    draft = ExperimentDraft(source)
    convert_data(source, draft, catalog or {})
    # The model after the data, whose image size it needs; the optimizer after the model, whose
    # layers its groups name.
    convert_model(source, draft)
    convert_optimizer(source, draft)
    convert_run(source, draft)
    copy_keys(source, draft)
    sections = {name: draft.experiment[name] for name in ORDER if name in draft.experiment}
    return Migration(sections, tuple(draft.list_keys()), tuple(draft.notes))


def migrate_vissl(
    words: Sequence[str | Path],
    out: str | Path | None = None,
    catalog: str | None = None,
    configs: str | Path | None = None,
) -> Migration:
    """Convert a config of VISSL, and write the experiment to a file.

    Args:
        words: files, or words of VISSL's command line; see `read_vissl`.
        out: file to write, which must not exist; None: no file.
        catalog: path of VISSL's dataset_catalog.json; None: placeholders for its names.
        configs: VISSL's folder `configs`; None: the one in the current folder.

    Raises:
        ConfigError: a file cannot be read, or is not a config of VISSL, or `out` exists.
    """
    migration = convert_vissl(read_vissl(words, configs), read_catalog(catalog))
    if out is not None:
        if Path(out).exists():
            raise ConfigError(
                f"migrate vissl --out {out}: the file exists; expected a new one",
                code="file.exists",
            )
        title = ", ".join(Path(word).name for word in words)
        with Path(out).open("x") as file:
            file.write(migration.format_yaml(title))
    return migration
