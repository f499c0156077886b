"""Rules of sections RUN, PHASES, CHECKPOINT and LAUNCH, and of keys that name splits of DATA."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from phasetrain.config.changes import trajectory_digest
from phasetrain.config.compose.composed import default_run_name
from phasetrain.config.rules.draft import ConfigDraft
from phasetrain.config.schema import Schema, is_split
from phasetrain.config.stages import LENGTHS
from phasetrain.errors import ConfigError, did_you_mean

# One path component, which needs no quotes in a shell.
_NAME = re.compile(r"[\w.+-]+")


def derive_length(draft: ConfigDraft, *, trains: bool) -> None:
    """Keep one of PHASES.epochs, updates, samples and stages, as set in the highest layer.

    Args:
        draft: the config.
        trains: whether the engine trains; without training data it then tests at once.
    """
    phases = draft.config["PHASES"]
    ranks = {
        key: draft.rank_of(f"PHASES.{key}")
        for key in (*LENGTHS, "stages")
        if phases[key] is not None and phases[key] != []
    }
    if not ranks:
        engine = draft.config["RUN"]["engine"]
        # A test builds the plan of the run for the facts in it, if there is training data.
        if engine != "extract" and (engine != "test" or draft.get("DATA.TRAIN.dataset")):
            draft.reject(
                "PHASES",
                "PHASES: one of epochs, updates, samples must be set, as in PHASES.epochs=10",
                "config.missing_value",
            )
        return
    highest = [key for key, rank in ranks.items() if rank == max(ranks.values())]
    winner = f"PHASES.{highest[0]}"
    if len(highest) > 1:
        both = " and ".join(f"PHASES.{key} = {phases[key]}" for key in highest)
        draft.reject(winner, f"{both} are both set ({draft.layer_of(winner)}); keep one of them")
        return
    reason = f"{winner} = {phases[highest[0]]} ({draft.layer_of(winner)})"
    only_tests = trains and not phases[highest[0]] and not draft.get("DATA.TRAIN.dataset")
    if only_tests and not phases["test_first"]:
        draft.set("PHASES.test_first", value=True, why="without DATA.TRAIN the run only tests")
    for key in ranks.keys() - set(highest):
        path = f"PHASES.{key}"
        unset: list[Any] | None = [] if key == "stages" else None
        draft.set(path, unset, f"{reason} takes precedence over {draft.layer_of(path)}")


def derive_monitor(draft: ConfigDraft, first_metric: Callable[[], str]) -> None:
    """Replace CHECKPOINT.best.monitor = auto, and null with load_best, by the first metric of the
    validation split, else of the first test split."""
    section = draft.config["CHECKPOINT"]
    path = "CHECKPOINT.best.monitor"
    monitor = section["best"]["monitor"]
    if monitor != "auto" and not (monitor is None and section["load_best"]):
        return
    try:
        chosen = first_metric()
        split = chosen.lstrip("-").partition("/")[0]
        draft.set(path, chosen, f"the first metric of split {split}")
    except ConfigError as error:
        asked = f"{path} = 'auto'" if monitor else "CHECKPOINT.load_best = true"
        draft.reject(path, f"{asked}: {error}", error.code)


def derive_folder(draft: ConfigDraft, schema: Schema) -> None:
    """Set RUN.name to the name of the experiment, and RUN.dir to runs/{name}-{digest}."""
    run = draft.config["RUN"]
    if run["name"] is None:
        draft.set("RUN.name", default_run_name(draft.experiment), "name of the experiment")
    elif _NAME.fullmatch(run["name"]) is None:
        draft.reject(
            "RUN.name",
            f"RUN.name = {run['name']!r} ({draft.layer_of('RUN.name')}): it becomes part of a "
            "folder's name; use letters, digits and . _ + - only",
            "config.wrong_value",
        )
    if run["dir"] is not None and run["dir"].startswith("~"):
        # Quoted, or in a file: no shell has replaced it.
        draft.set("RUN.dir", str(Path(run["dir"]).expanduser()), "~ is the home folder")
    if run["dir"] is not None and run["dir"].startswith("file://"):
        path = run["dir"].removeprefix("file://localhost").removeprefix("file://")
        draft.set("RUN.dir", path, "file:// is this machine")
    if run["dir"] is None:
        digest = trajectory_digest(draft.config, schema)
        folder = f"runs/{run['name']}-{digest}"
        draft.set("RUN.dir", folder, "RUN.name and the digest of the keys that affect the run")


def check_launch(draft: ConfigDraft) -> None:
    """Reject a warning that comes after the time limit, and a local job with several nodes."""
    launch = draft.config["LAUNCH"]
    limit = 60 * launch["minutes"]
    if launch["lead_seconds"] >= limit:
        draft.reject(
            "LAUNCH.lead_seconds",
            f"LAUNCH.lead_seconds = {launch['lead_seconds']} and LAUNCH.minutes = "
            f"{launch['minutes']}: the run is asked to stop this long before the time limit; set "
            f"LAUNCH.lead_seconds below {limit}",
        )
    if launch["cluster"] == "local" and launch["nodes"] > 1:
        draft.reject(
            "LAUNCH.nodes",
            f"LAUNCH.cluster = 'local' and LAUNCH.nodes = {launch['nodes']}: a local job runs on "
            "this machine only; set LAUNCH.nodes=1, and LAUNCH.processes to the number of "
            "processes",
        )


def check_splits(draft: ConfigDraft) -> None:
    """Reject names of splits that DATA does not have, and a split for which no loss is left."""
    splits = [name for name in draft.config["DATA"] if is_split(name)]
    for path, names in _list_selections(draft):
        if not names:
            draft.reject(
                path,
                f"{path} = []: expected at least one of {', '.join(splits)}; leave it out for all",
            )
        for name in names:
            if name not in splits:
                near = did_you_mean(name, splits) or ";"
                draft.reject(
                    path,
                    f"{path} = {name!r}: DATA has no such split{near} it has {', '.join(splits)}",
                    "config.unknown_split",
                )
    _check_loss_of_each_split(draft, splits)


def _list_selections(draft: ConfigDraft) -> Iterator[tuple[str, list[str]]]:
    sections: dict[str, Any] = {"METERS": draft.config["METERS"]}
    sections["LOSS.losses"] = _list_losses(draft)
    for path, entries in sections.items():
        for label, entry in entries.items():
            if isinstance(entry, Mapping) and entry.get("splits") is not None:
                yield f"{path}.{label}.splits", entry["splits"]


def _list_losses(draft: ConfigDraft) -> Mapping[str, Any]:
    section = draft.config["LOSS"]
    losses = section.get("losses")
    if section["name"] == "weighted_sum" and isinstance(losses, Mapping):
        return losses
    return {}


def _check_loss_of_each_split(draft: ConfigDraft, splits: list[str]) -> None:
    losses = _list_losses(draft).values()
    for split in splits if losses else ():
        selected = [(loss or {}).get("splits") for loss in losses]
        if all(names is not None and split not in names for names in selected):
            draft.reject(
                "LOSS.losses",
                f"LOSS.losses: DATA.{split} has no loss, because `splits` of every entry leaves it "
                f"out; add {split} to the `splits` of one of them",
            )
