"""A pruned sweep of real trainings, in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from harness import SMALL, KillAfter, differences_of_runs, run_until_killed, status, train

from phasetrain.addons.experiments.sweep.jobs import Job
from phasetrain.addons.experiments.sweep.override_text import hash_overrides
from phasetrain.addons.experiments.sweep.prune.pruned_sweep import PrunedSweep
from phasetrain.addons.experiments.sweep.prune.settings import PruneSettings
from phasetrain.addons.experiments.sweep.prune.trial_plan import plan_trial

TWO = ("PHASES.epochs=2", "PHASES.limit.test=1", "MODEL.width=2")


@pytest.mark.feature("sweep.prune")
def test_promoted_and_resumed_runs_have_the_bits_of_unpaused_ones(tmp_path: Path) -> None:
    job = Job(command=(), fixed=(*SMALL, *TWO), folder=str(tmp_path), sweep="x")
    ends: list[int | None] = []

    def launch(runs: Sequence[tuple[int, Sequence[str]]], pauses: Mapping[str, int]) -> int:
        for _, words in runs:
            record = job.make_record(words)
            folder = Path(record.folder)
            at = pauses.get(folder.name)
            pause = [] if at is None else [f"RUN.pause_at={at}"]
            ends.append(at)
            if len(ends) == 2:  # the second run is killed after three updates
                run_until_killed(folder, *TWO, *words, *pause, hooks={"kill": KillAfter(3)})
                replace(record, exit_code=137).write(job.folder)
            else:
                train(folder, *TWO, *words, *pause)
                replace(record, exit_code=0).write(job.folder)
        return 0

    settings = PruneSettings("halving", 2, 1, "epochs")
    make_plan = partial(plan_trial, config_dir=None)
    sweep = PrunedSweep(job, settings, "test/accuracy", make_plan, launch, lambda line: None)
    grid = [["OPTIMIZER.lr=0.1"], ["OPTIMIZER.lr=1e-9"]]
    sweep.prepare(grid, 2)
    assert sweep.run_grid(grid) == 0
    assert ends == [5, 5, 5, None]  # two epochs of five updates, and the killed run again
    states = {}
    for words in grid:
        folder = tmp_path / hash_overrides([*job.fixed, *words])
        states[str(status(folder)["state"])] = folder
        whole = tmp_path / f"whole-{folder.name}"
        train(whole, *TWO, *words)
        if status(folder)["state"] == "paused":
            assert differences_of_runs(whole, folder)
            train(folder, *TWO, *words)
        assert differences_of_runs(whole, folder) == []
    assert sorted(states) == ["finished", "paused"]
