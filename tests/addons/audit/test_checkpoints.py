"""Which files are the checkpoint that a resume reads: literal records of runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phasetrain.addons.audit.auditor import Audit, Options, _Auditor
from phasetrain.addons.audit.checkpoints import (
    choose_torn_saves,
    compare_files,
    find_points,
    find_read_patterns,
    guess_output_patterns,
    list_other_writes,
)
from phasetrain.addons.audit.runs import Finished, Runner
from phasetrain.addons.audit.text import format_audit
from phasetrain.addons.audit.trace import Save, Trace, Update, read_trace
from phasetrain.addons.audit.verdict import Check, make_findings

UPDATE = Update(1, (), (), (), (), {}, None, None, {}, "", "")

FULL, WEIGHTS = {"model.w": 1, "optimizer.m": 2, "step": 3}, {"w": 1}

BEST = [(23, "best.pt"), (46, "best.pt"), (92, "best.pt")]
CHECKPOINTS = [(40, "out/ckpt_40.pt"), (80, "out/ckpt_80.pt")]


def finish(
    files: Sequence[tuple[int, str]] = (),
    sizes: Sequence[dict[str, int]] = (),
    reads: Sequence[str] = (),
) -> Finished:
    """A run of 100 updates that writes these files, in `/run`."""
    saves = [
        Save(after, f"/run/{name}", leaves, "")
        for (after, name), leaves in zip(files, sizes, strict=False)
    ]
    paths = [(after, f"/run/{name}") for after, name in files]
    read = [f"/run/{name}" for name in reads]
    return Finished(0, [Trace([UPDATE] * 100, saves, files=paths, reads=read)], "", Path("/run"))


BOTH = sorted([*BEST, *CHECKPOINTS])
BOTH_SIZES = [FULL if "ckpt" in name else WEIGHTS for _, name in BOTH]


@pytest.mark.parametrize(
    ("sizes", "reads", "guess", "points", "torn"),
    [
        # Fewer values, at other times: a file of results.
        (BOTH_SIZES, [], {"best.pt"}, [40, 80], {"best.pt": 5}),
        (BOTH_SIZES, ["out/ckpt_80.pt"], {"best.pt"}, [40, 80], {"out/ckpt_#.pt": 4}),
        # Only the read tells them apart.
        ([FULL] * 5, [], set(), [23, 40, 46, 80, 92], {"best.pt": 5}),
        ([FULL] * 5, ["out/ckpt_80.pt"], set(), [40, 80], {"out/ckpt_#.pt": 4}),
        # The best value is read from its file, which is no reason to count it.
        (
            BOTH_SIZES,
            ["best.pt", "out/ckpt_80.pt"],
            {"best.pt"},
            [40, 80],
            {"best.pt": 5, "out/ckpt_#.pt": 4},
        ),
        (BOTH_SIZES, ["best.pt"], {"best.pt"}, [23, 46, 92], {"best.pt": 5}),
        # A file that the script has not written, such as pretrained weights.
        (BOTH_SIZES, ["resnet.pt"], {"best.pt"}, [40, 80], {"best.pt": 5}),
        # Written without torch.save: nothing is known of its content.
        ([], [], set(), [23, 40, 46, 80, 92], {}),
        ([], ["out/ckpt_80.pt"], set(), [40, 80], {}),
    ],
)
def test_the_files_that_a_resume_reads_are_the_checkpoint(
    sizes: list[dict[str, int]],
    reads: list[str],
    guess: set[str],
    points: list[int],
    torn: dict[str, int],
) -> None:
    run = finish(BOTH, sizes)
    assert guess_output_patterns(run) == guess
    patterns = find_read_patterns(run, finish(reads=reads))
    assert find_points(run, patterns, guess) == points
    assert choose_torn_saves(run, patterns) == torn


def test_files_of_one_checkpoint_are_written_together() -> None:
    files = [(40, "40/model.pt"), (40, "40/optimizer.pt"), (80, "80/model.pt")]
    assert guess_output_patterns(finish(files, [WEIGHTS, FULL, WEIGHTS])) == {"#/model.pt"}
    assert guess_output_patterns(finish(files[:2], [WEIGHTS, FULL])) == set()


def test_a_checkpoint_has_the_name_that_it_is_renamed_to(tmp_path: Path) -> None:
    events = [
        {"kind": "read", "after": 0, "path": "/run/a.pt"},
        {"kind": "save", "after": 5, "path": "/run/a.pt.tmp", "leaves": {}, "place": ""},
        {"kind": "file", "after": 5, "path": "/run/a.pt", "source": "/run/a.pt.tmp"},
        {"kind": "load", "after": 9, "path": "/run/best.pt", "place": ""},
    ]
    path = tmp_path / "trace-1.jsonl"
    path.write_text("\n".join(map(json.dumps, events)))
    trace = read_trace(path)
    assert [save.path for save in trace.saves] == ["/run/a.pt"]
    assert (trace.files, trace.reads) == ([(5, "/run/a.pt")], ["/run/a.pt"])


@pytest.mark.parametrize(
    ("killed", "resumed", "expected", "others"),
    [
        # (update, digest of the weights); the run without a kill wrote 23: 1, 46: 2 and 92: 3.
        ([(23, 1)], [(6, 2), (52, 3)], [], {}),
        ([(23, 1), (46, 2)], [(6, 2), (52, 3)], [], {}),
        # The best value is 0 again: also written after update 69.
        ([(23, 1)], [(6, 2), (29, 9), (52, 3)], [], {"best.pt": 69}),
        ([(23, 1)], [(6, 2), (29, 9), (52, 3), (55, 8)], [("file.best.pt", 69, 92, 95)], {}),
        ([(23, 1)], [(6, 2)], [("file.best.pt", 92, 92, 46)], {}),
        # As it is written at the start of every process.
        ([(0, 0), (23, 1)], [(0, 4), (6, 2), (52, 3)], [], {}),
        # Other weights after the same update are a difference of the checkpoint.
        ([(23, 1)], [(6, 2), (52, 9)], [], {}),
        # Beyond the end of the run without a kill.
        ([(23, 1)], [(6, 2), (52, 3), (61, 7)], [], {}),
    ],
)
def test_a_file_that_is_written_after_other_updates_is_compared_at_the_end(
    killed: list[tuple[int, int]],
    resumed: list[tuple[int, int]],
    expected: list[tuple[str, int, int, int]],
    others: dict[str, int],
) -> None:
    unbroken, before, after = (
        finish([(number, "best.pt") for number, _ in saves], [{"w": value} for _, value in saves])
        for saves in ([(23, 1), (46, 2), (92, 3)], killed, resumed)
    )
    found = compare_files(unbroken, before, after, 40)
    assert [(one.part, one.update, one.expected, one.actual) for one in found] == expected
    assert list_other_writes(unbroken, before, after, 40) == others
    findings, effects = make_findings(found, [], after.ranks, unbroken.ranks)
    assert [(one.code, one.part) for one in findings] == [("file", one.part) for one in found]
    assert effects == []


class LiteralRunner(Runner):
    """Returns records of runs of 100 updates, instead of running a command.

    Args:
        scratch: folder that the runs would have.
        sizes: values of the files that a run writes.
        reads: names of the files that a resume reads, of which the first one has the weights.
    """

    def __init__(self, scratch: Path, sizes: list[dict[str, int]], reads: list[str]) -> None:
        super().__init__(["train", "{run}"], scratch, 1.0)
        self.sizes, self.reads = sizes, reads
        self.kills: list[int] = []

    def new_folder(self, name: str, like: Path | None = None) -> Path:
        return Path("/run")

    def run(
        self, folder: Path, options: Mapping[str, int], command: Sequence[str] | None = None
    ) -> Finished:
        last = options.get("kill_at", 100)
        if "kill_at" in options:
            self.kills.append(last)
        files = [file for file in BOTH if file[0] <= last]
        run = finish(files, self.sizes)
        begin = 0
        if self.kills and last == 100:
            written = [after for after, name in BOTH if name in self.reads]
            begin = max((after for after in written if after <= self.kills[-1]), default=0)
            run = finish(reads=self.reads)
        digests: Any = [{"weights": number, "buffers": {}} for number in range(101)]
        updates = [
            replace(UPDATE, number=number - begin, state=digests[number])
            for number in range(begin + 1, last + 1)
        ]
        updates[0] = replace(updates[0], before=digests[begin])
        return replace(run, traces=[replace(run.trace, updates=updates)])


@pytest.mark.parametrize(
    ("sizes", "reads", "kills"),
    [
        (BOTH_SIZES, ["out/ckpt_40.pt", "out/ckpt_80.pt"], [89]),
        # Half way between 46 and 80; then between 80 and the end, or between 46 and 92.
        ([FULL] * 5, ["out/ckpt_40.pt", "out/ckpt_80.pt"], [63, 89]),
        ([FULL] * 5, ["best.pt"], [63, 69]),
        ([FULL] * 5, [], [63]),
    ],
)
def test_a_kill_that_other_files_decided_about_is_repeated(
    sizes: list[dict[str, int]], reads: list[str], kills: list[int], tmp_path: Path
) -> None:
    runner = LiteralRunner(tmp_path, sizes, reads)
    found = _Auditor(runner, Options(resume=["again"], quick=True), lambda _: None).audit()
    assert runner.kills == kills
    assert found.exit_code == (0 if reads else 1)


def test_a_torn_file_is_named() -> None:
    checks = [Check("torn_save", 0, "Exact.", file="out/ckpt_#.pt")]
    text = format_audit(Audit(0, "Exact.", checks))
    assert text.splitlines()[2] == "after a kill while out/ckpt_#.pt was written: exact"
