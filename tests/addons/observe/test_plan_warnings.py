"""Settings that never take effect, and samples of the training in a test."""

from pathlib import Path

import pytest
from harness import SMALL, train

from phasetrain.addons.observe.plan_warnings import list_unused
from phasetrain.testing.build import build_run, resolve_overrides


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), []),
        (
            ("CHECKPOINT.every_updates=16",),
            ["CHECKPOINT.every_updates = 16: the run ends after 15 updates"],
        ),
        (("CHECKPOINT.every_updates=15",), []),
        (
            ("CHECKPOINT.every_epochs=4",),
            ["CHECKPOINT.every_epochs = 4: the run ends after 3 complete epochs"],
        ),
        (("CHECKPOINT.keep_every.updates=99",), ["CHECKPOINT.keep_every.updates = 99"]),
        (("RUN.checkpoint=best",), ["RUN.checkpoint = best: training does not read it"]),
        pytest.param(
            ("RUN.step=5",),
            ["RUN.step = 5: training does not read it"],
            marks=pytest.mark.addon("experiments"),
        ),
        (("RUN.pause_at=16",), ["RUN.pause_at = 16: the run ends after 15 updates"]),
        (
            ("PHASES.test_every.epochs=5",),
            ["PHASES.test_every.epochs = 5: the run ends after 3 epochs"],
        ),
        (
            ("PHASES.test_every.updates=50",),
            ["PHASES.test_every.updates = 50: the run ends after 15 updates"],
        ),
        (
            ("PHASES.limit.train=100",),
            ["PHASES.limit.train = 100: no epoch has more than 60 updates"],
        ),
        (("DATA.TEST=null", "PHASES.test_every.epochs=5"), []),
        (
            ("DATA.TEST=null", "PHASES.train_meters=false"),
            ["METERS: PHASES.train_meters = false and there is no test"],
        ),
        (
            ("CHECKPOINT.every_epochs=null", "CHECKPOINT.at_end=false"),
            ["CHECKPOINT: no rule saves a checkpoint"],
        ),
        (
            (
                "CHECKPOINT.every_epochs=null",
                "CHECKPOINT.at_end=false",
                "CHECKPOINT.every_minutes=5",
            ),
            [],
        ),
        (
            (
                "PHASES.epochs=null",
                "PHASES.stages=[{epochs: 1}, {epochs: 1, PHASES: {limit: {train: 3}}}]",
            ),
            [],
        ),
        (("PHASES.epochs=0",), []),
        (("LAUNCH.gpus=2", "LAUNCH.partition=a"), ["LAUNCH.gpus = 2: ", "LAUNCH.partition = 'a'"]),
        (("LAUNCH.gpus=2", "LAUNCH.cluster=slurm"), []),
        (("LAUNCH.supervise=60",), []),
    ],
)
def test_settings_without_effect_are_listed(words: tuple[str, ...], told: list[str]) -> None:
    overrides = [*SMALL, "RUN.dir=x", *words]
    found = list_unused(resolve_overrides(overrides), build_run(overrides).plan)
    assert len(found) == len(told)
    assert all(line.startswith(start) for line, start in zip(found, told, strict=True)), found


def test_a_run_warns_of_it_and_goes_on(tmp_path: Path) -> None:
    assert train(tmp_path, "PHASES.epochs=1", "CHECKPOINT.every_updates=99").state == "finished"
    assert "CHECKPOINT.every_updates = 99: " in (tmp_path / "log.txt").read_text()
