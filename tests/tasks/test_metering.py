"""Numbers that steps log have their mean in the metrics of a phase, exactly across resumes."""

import warnings
from pathlib import Path

import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, records, run_until_killed, train
from raising import raises
from torch import Tensor

from phasetrain.distributed import World
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters import Meter
from phasetrain.tasks.metering import LogMeans, update_meters

TERMS = ("LOSS.name=task_parts.Terms", "PHASES.epochs=1")


def step(weight: float, **logs: float) -> StepOutput:
    tensors = {name: torch.tensor(value) for name, value in logs.items()}
    return StepOutput(torch.zeros(()), weight, int(weight), logs=tensors)


@pytest.mark.parametrize(
    ("split", "advice"),
    [("train", "in train; set METERS.ranks.splits=[TEST]"), ("test", "in test")],
)
def test_meter_of_a_task_without_output_is_told_so(split: str, advice: str) -> None:
    class Ranks(Meter):
        def update(self, out: StepOutput) -> None:
            out.output["ranks"].sum()

        def compute(self) -> Tensor:
            return torch.zeros(())

    with raises(ConfigError, code="config.misfit", key="METERS.ranks") as caught:
        update_meters({"ranks": Ranks()}, {}, step(1), split)
    assert str(caught.value).endswith(f"; the task returned no output {advice}")


def test_mean_is_weighted_and_covers_the_steps_that_logged() -> None:
    means = LogMeans()
    for out in (step(1, a=1.0), step(3, a=2.0, b=4.0), step(0, a=float("nan"))):
        means.add(out)
    assert means.compute(World()) == {"a": 1.75, "b": 4.0}
    assert means.compute(World(), without={"a"}) == {"b": 4.0}
    means.reset()
    assert means.compute(World()) == {}


def test_state_of_ranks_is_restored_and_merged() -> None:
    one, other = LogMeans(), LogMeans()
    one.add(step(1, a=1.0))
    other.add(step(3, a=2.0, b=4.0))
    again = LogMeans()
    again.load_state_dict(other.state_dict())
    assert again.compute(World()) == other.compute(World())
    again.merge_rank_states([one.state_dict(), other.state_dict()], is_main=True)
    assert again.compute(World()) == {"a": 1.75, "b": 4.0}
    again.merge_rank_states([one.state_dict()], is_main=False)
    assert again.compute(World()) == {}


@pytest.mark.feature("log.means")
@pytest.mark.parametrize("merges", [False, True])
def test_sums_continue_on_the_device_of_the_steps(*, merges: bool) -> None:
    # A sum on the CPU takes a tensor of the device `meta`, but stays on the CPU; it takes none of a
    # GPU.
    means, again = LogMeans(), LogMeans()
    means.add(step(1, a=1.0))
    if merges:
        again.merge_rank_states([means.state_dict()], is_main=True)
    else:
        again.load_state_dict(means.state_dict())
    again.add(StepOutput(torch.zeros(()), 3.0, 3, logs={"a": torch.ones((), device="meta")}))
    assert again._totals["a"].device.type == "meta"
    again.add(step(4, a=4.0))
    assert again._totals["a"].device.type == "meta"


@pytest.mark.feature(
    "log.means",
    "logged terms have their means in the metrics of a phase",
    "`LoggingLoss`, `StepOutput.logs`",
)
def test_terms_of_a_loss_are_phase_metrics_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = train(tmp_path, *TERMS)
    steps = [one["logs"]["loss_ce"] for one in records(tmp_path) if one["kind"] == "step"]
    assert result.last["train/loss_ce"] == pytest.approx(sum(steps) / len(steps), rel=1e-6)
    assert {"train/loss_size", "test/loss_ce"} <= result.last.keys()


def test_meter_of_a_term_replaces_its_mean(tmp_path: Path) -> None:
    result = train(tmp_path, *TERMS, "METERS.entropy={name: loss, of: loss_ce}")
    assert "train/entropy" in result.last
    assert "train/loss_ce" not in result.last


@pytest.mark.feature("log.means")
def test_killed_run_has_the_same_means(tmp_path: Path) -> None:
    train(tmp_path / "unbroken", *TERMS)
    run_until_killed(tmp_path / "run", *TERMS, hooks={"save": SaveEachStep(), "kill": KillAfter(3)})
    train(tmp_path / "run", *TERMS)
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []
