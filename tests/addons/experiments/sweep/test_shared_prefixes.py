"""Runs of a sweep that share their first updates end as runs from scratch, also after kills."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from harness import SMALL, KillAfter, Killed, differences_of_runs, status, train
from raising import raises

from phasetrain.addons.experiments.sweep import Results, sweep
from phasetrain.addons.experiments.sweep.jobs import Job
from phasetrain.addons.experiments.sweep.shared_prefixes import SharedPrefixes
from phasetrain.errors import ConfigError

LR = "OPTIMIZER.SCHEDULES.lr"
FIXED = (*SMALL, "MODEL.width=2", "PHASES.epochs=2", "RUN.reuse_prefix=true")
GRID = [
    [f"{LR}={{name: multistep, milestones: [{at} updates], factor: {factor}}}"]
    for at, factor in [(7, 0.1), (7, 0.2), (4, 0.1), (9, 0.1)]
]


class Study:
    """A sweep whose runs are trained in this process.

    Attributes:
        updates: number of updates that were trained.
    """

    def __init__(
        self, folder: Path, grid: Sequence[Sequence[str]] = GRID, kill_after: int = 0
    ) -> None:
        self.job = Job(("none",), FIXED, str(folder), "one")
        self.shared = SharedPrefixes(self.job, grid, None, self.launch)
        self.kill_after = kill_after
        self.updates = 0

    def run(self) -> int:
        """Run all that have not finished."""
        places = [
            place
            for place, branch in enumerate(self.shared.tree.branches)
            if not (self.path(place) / "status.json").exists()
            or status(self.path(place))["state"] != "finished"
        ]
        return self.shared.run(places)

    def path(self, place: int) -> Path:
        """Return the folder of a run."""
        return Path(self.job.folder, self.shared.tree.branches[place].name)

    def launch(self, runs: Sequence[tuple[int, Sequence[str]]], pauses: Mapping[str, int]) -> int:
        """Train runs one after the other."""
        for _, swept in runs:
            folder = Path(self.job.make_record(swept).folder)
            words = [*FIXED[len(SMALL) :], *swept, "CHECKPOINT.every_epochs=null"]
            if folder.name in pauses:
                words.append(f"RUN.pause_at={pauses[folder.name]}")
            hooks = {}
            if self.kill_after:
                self.kill_after -= 1
                if not self.kill_after:
                    hooks["kill"] = KillAfter(1)
            before = 0
            if (folder / "status.json").exists():
                before = status(folder)["updates"]
            done = train(folder, *words, hooks=hooks)
            self.updates += done.updates - max(before, status(folder)["resumed_at"])
        return 0


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the folders of the runs of the grid, each trained from scratch."""
    root = tmp_path_factory.mktemp("separate")
    for place, words in enumerate(GRID):
        train(root / str(place), *FIXED[len(SMALL) : -1], *words)
    return [root / str(place) for place in range(len(GRID))]


def differences(study: Study, separate: Sequence[Path]) -> list[str]:
    """Return how the runs of a study differ from those from scratch."""
    return [
        line
        for place, folder in enumerate(separate)
        for line in differences_of_runs(folder, study.path(place))
    ]


@pytest.mark.feature(
    "sweep.shared_prefixes",
    "sweeps train shared first updates once, with the bits of runs from scratch",
    "`RUN.reuse_prefix`, `phasetrain sweep --plan`",
)
def test_shared_updates_are_trained_once(separate: list[Path], tmp_path: Path) -> None:
    study = Study(tmp_path)
    assert [(one.parent, one.fork) for one in study.shared.tree.branches] == [
        (None, 0),
        (0, 7),
        (0, 4),
        (0, 7),
    ]
    assert study.run() == 0
    assert study.updates == study.shared.tree.shared_updates == 10 + 3 + 6 + 3
    assert differences(study, separate) == []
    assert differences_of_runs(separate[0], separate[1]) != []  # negative control


@pytest.mark.feature("sweep.shared_prefixes")
@pytest.mark.by_default(1)
@pytest.mark.parametrize("kill_after", [2, 3, 1, 4, 5])
def test_killed_sweep_ends_with_the_same_tree(
    separate: list[Path], tmp_path: Path, kill_after: int
) -> None:
    with pytest.raises(Killed):
        Study(tmp_path, kill_after=kill_after).run()
    again = Study(tmp_path)
    assert again.run() == 0
    assert differences(again, separate) == []


def test_failed_prefix_costs_only_time(separate: list[Path], tmp_path: Path) -> None:
    study = Study(tmp_path)
    launch = study.launch
    calls = itertools.count()

    def fail_first(runs: Sequence[tuple[int, Sequence[str]]], pauses: Mapping[str, int]) -> int:
        # The first launch ends without a checkpoint, as if its process had crashed.
        return launch(runs, pauses) if next(calls) else 0

    study.shared.launch = fail_first
    assert study.run() == 0
    assert differences_of_runs(separate[2], study.path(2)) == []
    assert not study.path(0).exists()


@pytest.mark.addon("report")
def test_tree_says_what_it_saves_and_why(tmp_path: Path) -> None:
    from phasetrain.addons.experiments.fork.draw_tree import draw_tree

    tree = Study(tmp_path).shared.tree
    assert (tree.separate_updates, tree.shared_updates) == (40, 22)
    lines = tree.format_lines()
    assert [line.split("  O")[0] for line in lines] == [
        "0 to 10",
        "  4 to 10",
        "  7 to 10",
        "  7 to 10",
    ]
    assert "its value in update 5 differs" in lines[1]
    assert tree.format_lines(2)[2:] == ["and 2 more runs, see prefixes.json"]
    assert draw_tree(tree, {}).count('class="line') == 4


def test_plan_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "OPTIMIZER.lr=0.1,0.2", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert sweep(words, check=lambda _: None, command=["false"], plan_only=True) == 0
    assert capsys.readouterr().out.startswith("shared prefixes: none, the 2 runs differ")
    assert not (tmp_path / "sweep").exists()
    with raises(ConfigError, code="sweep.not_planned"):
        sweep([*words, "hydra/sweeper=optuna"], check=lambda _: None, plan_only=True)


def test_runs_that_submit_themselves_are_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, code="sweep.reuse_prefix"):
        Study(tmp_path, [["LAUNCH.cluster=local"]])


@pytest.mark.addon("report")
def test_tree_is_in_the_folder(tmp_path: Path) -> None:
    from phasetrain.addons.experiments.sweep.page import render_sweep

    study = Study(tmp_path)
    study.shared.write()
    written = json.loads((tmp_path / "prefixes.json").read_text())
    assert (written["shared_updates"], written["runs"][2]["fork"]) == (22, 4)
    assert "22 updates instead of 40" in render_sweep(Results.read(str(tmp_path)))
    (tmp_path / "prefixes.json").write_text('{"runs": [{"other": 1}]}')
    assert "updates instead of" not in render_sweep(Results.read(str(tmp_path)))
