"""Audits of several ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from phasetrain.addons.audit.auditor import (
    _overlaps_updates,
    _require_equal_ranks,
    _require_updates,
    audit,
)
from phasetrain.addons.audit.remedies import find_remedy
from phasetrain.addons.audit.runs import CannotAuditError, Finished
from phasetrain.addons.audit.trace import Save, Trace, Update

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

UPDATES = [
    Update(number, (), (), (), (), {}, None, None, {}, "", "train.py:9") for number in range(1, 9)
]


def ran(*ranks: str, world: int) -> Finished:
    """A run in which these ranks made updates, of a process group of `world` ranks."""
    return Finished(0, [Trace(UPDATES, rank=rank, world=world) for rank in ranks], "", Path())


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (ran("0", "1", world=2), ""),
        (ran("0", world=1), ""),
        (ran("0", world=2), "has 2 ranks, and updates were recorded in rank 0."),
        (ran("0", "2", world=4), "has 4 ranks, and updates were recorded in ranks 0, 2."),
        # Two processes of one rank, such as a script that starts another training.
        (ran("0", "0", world=2), "has 2 ranks, and updates were recorded in rank 0."),
    ],
)
def test_ranks_that_are_not_recorded_are_named(run: Finished, words: str) -> None:
    if not words:
        assert _require_updates(run) is run.traces[0]
        return
    with pytest.raises(CannotAuditError, match=words):
        _require_updates(run)


def test_runs_with_other_ranks_are_not_compared() -> None:
    first = ran("0", "1", world=2)
    _require_equal_ranks(first, ran("0", "1", world=2), "resumed")
    with pytest.raises(CannotAuditError, match="ranks 0, 1, and the resumed one in rank 0"):
        _require_equal_ranks(first, ran("0", world=1), "resumed")


@pytest.mark.parametrize(("world", "line"), [(1, "RandomSampler"), (2, "sampler.set_epoch(epoch)")])
def test_the_remedy_for_ranks_names_their_sampler(world: int, line: str) -> None:
    assert line in find_remedy("samples", "", world).splitlines()[0]


def test_checkpoints_of_all_ranks_count() -> None:
    first, second = ran("0", "1", world=2).traces
    save = Save(4, "/run/4/0.pt", {}, "")
    first = replace(first, saves=[save], files=[(2, "/run/2/0.pt"), (4, "/run/4/0.pt")])
    second = replace(second, saves=[replace(save, after=6)], files=[(4, "/run/4/1.pt")])
    run = Finished(0, [first, second], "", Path())
    assert [save.after for save in run.saves] == [4, 6]
    assert [path for _, path in run.files] == ["/run/2/0.pt", "/run/4/1.pt", "/run/4/0.pt"]


@pytest.mark.parametrize(
    ("points", "expected"), [([], False), ([5, 10], False), ([5, 6, 10, 11], True)]
)
def test_a_checkpoint_that_is_written_during_updates_is_seen(
    points: list[int], expected: bool
) -> None:
    assert _overlaps_updates(points) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "named", "counts"),
    [
        ("two ranks: DistributedDataParallel", [], []),
        (
            "two ranks: no set_epoch after a resume",
            [("samples", ["0", "1"])],
            [(64, 7, ""), (32, 3, "0"), (32, 4, "1")],
        ),
        ("two ranks: the generator of rank 1 is not restored", [("generator", ["1"])], []),
    ],
)
def test_faults_of_ranks_are_named(
    name: str,
    named: list[tuple[str, list[str]]],
    counts: list[tuple[int, int, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    scripts = __import__("audit_scripts")
    (script,) = [each for each in [*scripts.CLEAN, *scripts.FAULTS] if each.name == name]
    tmp_path.joinpath("train.py").write_text(script.text)
    verdict = audit(script.command, quick=True)
    (check,) = verdict.checks
    assert [(finding.code, finding.ranks) for finding in check.findings] == named
    assert [(each.total, each.never, each.rank) for each in check.samples] == counts
    assert all(each.twice == each.never for each in check.samples)
    assert verdict.ranks == ["0", "1"]
    assert check.cost is not None
    # Two updates of 4 samples in each rank, after the checkpoint at update 15.
    assert (check.cost.resumed_after, check.cost.updates, check.cost.samples) == (15, 2, 16)


@pytest.mark.slow
def test_a_resume_with_another_number_of_ranks_is_not_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    script = __import__("audit_scripts").CLEAN[1]
    tmp_path.joinpath("train.py").write_text(script.text)
    single = ["1" if word == "2" else word for word in script.command]
    verdict = audit(script.command, resume=single, quick=True)
    assert verdict.exit_code == 2
    assert "resume with as many processes" in verdict.sentence
