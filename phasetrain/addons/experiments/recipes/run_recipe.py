"""Run a variant of a recipe, all stages of it, in one folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch

from phasetrain.addons.experiments.recipes.first_epoch import FirstEpoch, read_first_epoch
from phasetrain.addons.experiments.recipes.recipe import Variant
from phasetrain.app.result import RunResult
from phasetrain.config.compose.override_text import key_of, quote_value
from phasetrain.config.schema import default_schema
from phasetrain.hooks import Hook
from phasetrain.runs.history import read_history
from phasetrain.runs.view import RunView, read_status
from phasetrain.runtime.machine import limit_cpu_capability

RUNS = "runs/recipes"
"""Folder of the runs of recipes."""

RunWords = Callable[[Sequence[str], Mapping[str, Hook]], RunResult]
"""Runs the words of a command line with further hooks."""


@dataclass(frozen=True)
class Repetition:
    """The results of one run of a variant.

    Attributes:
        seed: its seed.
        folder: folder of the last stage that was run.
        state: state of this stage.
        exit_code: exit code of the process.
        reason: why it ended.
        metrics: last values of the metrics of the last stage.
        digest: SHA-256 of the weights of the last stage.
        first_epoch: the same after the first epoch of the first stage.
        platform: versions, threads and processor, on which bits depend.
        is_changed: whether overrides have changed the recipe.
        is_first_epoch: whether only the first epoch was run.
        seconds: wall time of all attempts of all stages.
    """

    seed: int
    folder: str
    state: str
    exit_code: int
    reason: str
    metrics: Mapping[str, float]
    digest: str
    first_epoch: str
    platform: Mapping[str, Any]
    is_changed: bool
    is_first_epoch: bool
    seconds: float


def choose_folder(variant: Variant, seed: int, *, first_epoch: bool = False) -> str:
    """Return the first folder of this variant and seed in which nothing has finished.

    A run that was stopped or killed is found again, so that the same command resumes it.
    """
    stem = f"{RUNS}/{variant.recipe}-{variant.name}-seed{seed}"
    if first_epoch:
        stem += "-first-epoch"
    # The last stage finishes last, so its state is the state of the whole repetition.
    last = list(variant.stages)[-1]

    def is_free(folder: str) -> bool:
        if first_epoch:
            return not read_first_epoch(stage_folder(folder, next(iter(variant.stages))))
        return read_status(stage_folder(folder, last)).state != "finished"

    return next(filter(is_free, chain([stem], (f"{stem}-{number}" for number in count(2)))))


def stage_folder(folder: str, stage: str) -> str:
    """Return the run folder of a stage; a single stage, whose name is empty, has all of it."""
    return f"{folder}/{stage}".rstrip("/")


def run_variant(
    variant: Variant,
    *,
    seed: int,
    overrides: Sequence[str],
    run: RunWords,
    first_epoch: bool = False,
) -> Repetition:
    """Run the stages of a variant that have not finished, and return the results.

    Args:
        variant: the variant to run.
        seed: RUN.seed of every stage.
        overrides: changes for every stage, and RUN.dir, the folder of all stages.
        run: runs a command line.
        first_epoch: stop after the first epoch of the first stage.
    """
    folder, changes = _split_folder(overrides)
    if not folder:
        folder = choose_folder(variant, seed, first_epoch=first_epoch)
    folders = {stage: stage_folder(folder, stage) for stage in variant.stages}
    seconds = 0.0
    for stage in variant.stages:
        words = [*stage_words(variant, stage, seed, folders), *limit_to_measured(variant), *changes]
        result = run(words, {"first_epoch": FirstEpoch(stops=first_epoch)})
        seconds += sum(read_status(folders[stage]).run_seconds.values())
        # The next stage needs the finished weights of this one.
        if result.state != "finished" or first_epoch:
            break
    start = folders[next(iter(variant.stages))]
    schema = default_schema()
    return Repetition(
        seed=seed,
        folder=folders[stage],
        state=result.state,
        exit_code=result.exit_code,
        reason=result.reason,
        # A run that had finished before measures nothing in this attempt.
        metrics=result.last or read_history(result.folder).last,
        digest=result.digest,
        first_epoch=read_first_epoch(start),
        platform=read_platform(folders[stage]),
        is_changed=any(
            schema.scope(key) == "result" and key not in variant.paths
            for key in map(key_of, changes)
        ),
        is_first_epoch=first_epoch,
        seconds=seconds,
    )


def limit_to_measured(variant: Variant) -> list[str]:
    """Limit this process to AVX2 if the variant was measured with it, and return the override that
    does this in a resume; none if it was not, or if it is too late."""
    if variant.measured is None or variant.measured.platform.get("capability") != "AVX2":
        return []
    limit_cpu_capability("AVX2")
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return []
    return ["MACHINE.cpu_capability=AVX2"]


def last_words(variant: Variant, seed: int, overrides: Sequence[str]) -> list[str]:
    """Return the command line of the last stage of a variant with overrides."""
    folder, changes = _split_folder(overrides)
    folder = folder or choose_folder(variant, seed)
    folders = {stage: stage_folder(folder, stage) for stage in variant.stages}
    return [*stage_words(variant, list(folders)[-1], seed, folders), *changes]


def _split_folder(overrides: Sequence[str]) -> tuple[str, list[str]]:
    """Return the value of RUN.dir, empty if it is not given, and the other overrides."""
    folder = ""
    changes = []
    for word in overrides:
        if key_of(word) == "RUN.dir":
            folder = word.partition("=")[2].rstrip("/")
        else:
            changes.append(word)
    return folder, changes


def stage_words(variant: Variant, stage: str, seed: int, folders: Mapping[str, str]) -> list[str]:
    """Return the command line of a stage.

    Args:
        variant: the variant.
        stage: name of the stage.
        seed: seed of the run.
        folders: stage -> its run folder.
    """
    placeholders = {f"{{{name}}}": quote_value(path) for name, path in folders.items() if name}
    placeholders["{seed}"] = str(seed)
    words = []
    for word in variant.stages[stage]:
        for placeholder, value in placeholders.items():
            word = word.replace(placeholder, value)
        words.append(word)
    if "RUN.seed" not in {key_of(word) for word in words}:
        words.append(f"RUN.seed={seed}")
    return [*words, f"RUN.dir={quote_value(folders[stage])}"]


def read_platform(folder: str) -> dict[str, Any]:
    """Return versions, threads and processor of a run, on which its bits depend."""
    environment = RunView(folder).environment
    content = environment.content
    host = content.get("host") or {}
    switches = content.get("switches") or {}
    return {
        "torch": content.get("torch"),
        "numpy": content.get("numpy"),
        "device": environment.device,
        "threads": environment.threads,
        "cpu": host.get("cpu"),
        "capability": switches.get("cpu_capability"),
        "cores": host.get("usable_cores"),
    }
