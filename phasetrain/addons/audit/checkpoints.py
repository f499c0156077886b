"""Which of the files that a script writes are the checkpoint that its resume reads."""

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from phasetrain.addons.audit.compare import Difference
from phasetrain.addons.audit.runs import Finished
from phasetrain.addons.audit.trace import Save

NUMBER = re.compile(r"\d+")
"""Part of a name that differs between the files of one kind."""


def find_pattern(path: str, folder: Path) -> str:
    """Return the name of a file within the folder of its run, with `#` for each number."""
    return NUMBER.sub("#", _shorten(path, folder))


def _shorten(path: str, folder: Path) -> str:
    for parent in (folder, folder.resolve()):
        if Path(path).is_relative_to(parent):
            return str(Path(path).relative_to(parent))
    return path


def guess_output_patterns(run: Finished) -> set[str]:
    """Return patterns of files that probably are no checkpoint to resume from, such as the best
    weights: they have fewer values than the largest checkpoint, and are written at other times."""
    sizes: dict[str, int] = {}
    times: dict[str, set[int]] = {}
    for save in run.saves:
        if save.path and save.after:
            pattern = find_pattern(save.path, run.folder)
            sizes[pattern] = max(sizes.get(pattern, 0), len(save.leaves))
            times.setdefault(pattern, set()).add(save.after)
    largest = [pattern for pattern, size in sizes.items() if size == max(sizes.values())]
    known = {after for pattern in largest for after in times[pattern]}
    return {pattern for pattern in sizes if pattern not in largest and times[pattern] - known}


def find_read_patterns(killed: Finished, resumed: Finished) -> set[str]:
    """Return patterns of files that a killed run has written and the next process has read before
    its first update."""
    written = {find_pattern(path, killed.folder) for after, path in killed.files if after}
    read = {find_pattern(path, resumed.folder) for trace in resumed.traces for path in trace.reads}
    return written & read


def find_points(run: Finished, patterns: Collection[str], outputs: Collection[str]) -> list[int]:
    """Return after which updates a checkpoint was written, so that one more can be lost.

    Args:
        run: the run that wrote them.
        patterns: of the files that a resume reads; empty if they are not known.
        outputs: patterns of files that are not resumed from.
    """
    chosen = set(patterns) - set(outputs) or set(patterns)
    after = set()
    for number, path in [*run.files, *((save.after, save.path) for save in run.saves)]:
        pattern = find_pattern(path, run.folder)
        if pattern in chosen if chosen else pattern not in outputs:
            after.add(number)
    count = min(len(trace.updates) for trace in run.ranks.values())
    return sorted(point for point in after if 0 < point < count - 1)


def choose_torn_saves(killed: Finished, patterns: Collection[str]) -> dict[str, int]:
    """Return for each kind of file that a resume reads the number of its last save in the first
    rank; for the last file of all if none of them is known."""
    numbers = {
        find_pattern(save.path, killed.folder): number
        for number, save in enumerate(killed.trace.saves, 1)
        if save.path
    }
    read = {pattern: number for pattern, number in numbers.items() if pattern in patterns}
    return read or dict(sorted(numbers.items(), key=lambda item: item[1])[-1:])


def compare_files(
    unbroken: Finished, killed: Finished, resumed: Finished, start: int
) -> list[Difference]:
    """Return a difference for each file that both runs leave with unequal contents because they
    wrote it after other updates, such as the best weights.

    Files that a process writes before its first update are left out. Contents that differ after the
    same update are differences of a checkpoint.

    Args:
        unbroken: the run that was not killed.
        killed: the run that was killed.
        resumed: the process after it.
        start: number of updates of `killed` that count.
    """
    return [
        Difference(
            f"file.{name}",
            min(unequal),
            expected=expected.after,
            actual=actual.after,
        )
        for name, expected, actual, unequal in _pair_files(unbroken, killed, resumed, start)
        if expected.leaves != actual.leaves
    ]


def list_other_writes(
    unbroken: Finished, killed: Finished, resumed: Finished, start: int
) -> dict[str, int]:
    """Return files that were written after other updates and end with equal contents, with the
    first update that only one of the runs wrote them after; see `compare_files`."""
    return {
        name: min(unequal)
        for name, expected, actual, unequal in _pair_files(unbroken, killed, resumed, start)
        if expected.leaves == actual.leaves
    }


def _pair_files(
    unbroken: Finished, killed: Finished, resumed: Finished, start: int
) -> Iterator[tuple[str, Save, Save, set[int]]]:
    """Yield each file that was written after other updates: its name, its last save without and
    with a kill, and the updates after which one of the runs wrote it."""
    before, after = _list_saves(killed, 0), _list_saves(resumed, start)
    count = len(unbroken.trace.updates)
    for name, saves in _list_saves(unbroken, 0).items():
        repeated = [save for save in after.get(name, ()) if save.after <= count]
        final = [*before.get(name, ()), *repeated][-1:]
        unequal = {save.after for save in saves if save.after > start}
        unequal ^= {save.after for save in repeated}
        if final and unequal:
            yield name, saves[-1], final[0], unequal


def _list_saves(run: Finished, start: int) -> dict[str, list[Save]]:
    """Return the saves of each file after an update, with the updates before the process."""
    saves: dict[str, list[Save]] = {}
    for save in run.saves:
        if save.path and save.after:
            name = _shorten(save.path, run.folder)
            saves.setdefault(name, []).append(replace(save, after=save.after + start))
    return saves
