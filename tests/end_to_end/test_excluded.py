"""Frozen weights that checkpoints leave out (CHECKPOINT.exclude): every bit is as without it, and the
folder of the run is enough as long as the weights are there."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    SMALL,
    KillAfter,
    differences,
    newest,
    records,
    run_until_killed,
    save_start_weights,
    status,
    train,
)
from processes import Launcher
from raising import raises
from safetensors.torch import load_file, save_file
from test_processes import ONE

import phasetrain
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook, Run
from phasetrain.testing import assert_exact_resume

FROZEN = ("MODEL.freeze=[features]", "MODEL.dropout=0")
EXCLUDE = "CHECKPOINT.exclude=[features.*]"
SHORT = ("PHASES.epochs=1", "PHASES.limit.train=3", "PHASES.limit.test=1", "HOOKS.report=null")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_start_weights(tmp_path / "start.safetensors")


def words(path: Path) -> tuple[str, ...]:
    return (*FROZEN, *SHORT, f"MODEL.weights={path}")


def flip_bit(path: Path) -> None:
    """Flip the lowest bit of a frozen weight in a file."""
    state = load_file(path)
    state["features.0.weight"].view(torch.int32)[0, 0, 0, 0] ^= 1
    save_file(state, path)


def tensor_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("checkpoints/*/tensors.safetensors"))


@pytest.mark.feature(
    "checkpoint.exclude", "frozen weights left out of checkpoints", "`CHECKPOINT.exclude`"
)
def test_killed_run_resumes_exactly_without_frozen_weights_in_its_checkpoints(
    tmp_path: Path, path: Path
) -> None:
    whole = train(tmp_path / "whole", *words(path))
    excluding = (*words(path), EXCLUDE, "CHECKPOINT.every_updates=1")
    run_until_killed(tmp_path / "run", *excluding, hooks={"kill": KillAfter(2)})
    resumed = train(tmp_path / "run", *excluding)
    assert resumed.digest == whole.digest
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    saved = newest(tmp_path / "run").state["task"]["model"]
    assert sorted(saved) == ["head.bias", "head.weight"]
    full = newest(tmp_path / "whole").state["task"]["model"]
    assert all(torch.equal(saved[name], full[name]) for name in saved)
    again = train(tmp_path / "run", *excluding)
    assert (again.state, again.digest) == ("finished", whole.digest)


def test_checkpoint_of_a_frozen_trunk_is_small(tmp_path: Path) -> None:
    wide = (*FROZEN, *SHORT, "MODEL.width=64", "CHECKPOINT.every_epochs=null")
    train(tmp_path / "whole", *wide)
    train(tmp_path / "run", *wide, EXCLUDE)
    assert tensor_bytes(tmp_path / "run") < 0.2 * tensor_bytes(tmp_path / "whole")


@pytest.mark.slow
def test_weights_from_the_seed_are_built_again() -> None:
    assert_exact_resume([*FROZEN, EXCLUDE, "MODEL.name=small_cnn", "MODEL.width=4"], workers=None)


@pytest.mark.addon("deploy")
def test_folder_is_enough_to_load_export_and_test(tmp_path: Path, path: Path) -> None:
    from phasetrain.addons.deploy.consolidate import consolidate
    from phasetrain.addons.deploy.export import export

    whole = train(tmp_path / "whole", *words(path))
    train(tmp_path / "run", *words(path), EXCLUDE)
    folder = str(tmp_path / "run")
    task: Any = phasetrain.load(folder)
    other: Any = phasetrain.load(tmp_path / "whole")
    assert not differences(task.model.state_dict(), other.model.state_dict())
    export(folder, str(tmp_path / "out.safetensors"))
    exported = load_file(tmp_path / "out.safetensors")
    assert not differences(exported, other.model.state_dict())
    tested = train(tmp_path / "run", *words(path), EXCLUDE, "RUN.engine=test")
    assert tested.digest == whole.digest
    assert tested.last["test/loss"] == whole.last["test/loss"]
    with raises(ConfigError, code="checkpoint.incomplete"):
        consolidate(str(next(tmp_path.glob("run/checkpoints/p*"))), str(tmp_path / "one"))


@pytest.mark.feature("checkpoint.exclude")
def test_weights_file_altered_by_one_bit_is_an_error(tmp_path: Path, path: Path) -> None:
    excluding = (*words(path), EXCLUDE, "CHECKPOINT.every_updates=1")
    run_until_killed(tmp_path / "run", *excluding, hooks={"kill": KillAfter(2)})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    flip_bit(path)
    with raises(ChangedError, code="checkpoint.excluded_differ"):
        train(tmp_path / "run", *excluding)
    with raises(ChangedError, code="checkpoint.excluded_differ"):
        phasetrain.load(tmp_path / "run")
    flip_bit(path)
    assert train(tmp_path / "run", *excluding).state == "finished"


def test_exclusion_may_change_on_a_resume(tmp_path: Path, path: Path) -> None:
    whole = train(tmp_path / "whole", *words(path))
    for name, before, after in (("less", (), (EXCLUDE,)), ("more", (EXCLUDE,), ())):
        first = (*words(path), *before, "CHECKPOINT.every_updates=1")
        run_until_killed(tmp_path / name, *first, hooks={"kill": KillAfter(2)})
        assert train(tmp_path / name, *words(path), *after).digest == whole.digest
    assert "features.0.weight" in newest(tmp_path / "more").state["task"]["model"]
    assert "features.0.weight" not in newest(tmp_path / "less").state["task"]["model"]


class Spoil(Hook):
    """Writes to a frozen weight, as PyTorch notices or behind its back."""

    main_only = False

    def __init__(self, *, hidden: bool) -> None:
        self.hidden = hidden

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        weight = run.task.parts.model.get_parameter("features.0.weight")
        if self.hidden:
            weight = weight.data
        with torch.no_grad():
            weight.add_(1.0)


@pytest.mark.parametrize("hidden", [False, True])
def test_excluded_weight_that_changes_ends_the_run(tmp_path: Path, *, hidden: bool) -> None:
    with raises(ConfigError, code="checkpoint.excluded_changed"):
        train(tmp_path, *FROZEN, *SHORT, EXCLUDE, hooks={"spoil": Spoil(hidden=hidden)})


STAGES = "PHASES.stages=[{epochs: 1}, {epochs: 1, MODEL: {freeze: []}}]"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ((*FROZEN, "CHECKPOINT.exclude=[feature]"), "config.no_match"),
        ((*FROZEN, "CHECKPOINT.exclude=['*']"), "checkpoint.not_excludable"),
        ((EXCLUDE,), "checkpoint.not_excludable"),
        (
            ("MODEL.freeze_updates=[{match: features, for: 1}]", EXCLUDE),
            "checkpoint.not_excludable",
        ),
        (("MODEL.freeze=['features.*.weight']", EXCLUDE), "checkpoint.not_excludable"),
        ((*FROZEN, EXCLUDE, STAGES, "PHASES.epochs=null"), "checkpoint.not_excludable"),
        ((*FROZEN, EXCLUDE, "MODEL.ema={}"), "config.conflict"),
    ],
)
def test_what_may_change_is_rejected_before_the_first_step(
    tmp_path: Path, given: tuple[str, ...], code: str
) -> None:
    with raises(ConfigError, key="CHECKPOINT.exclude", code=code):
        train(tmp_path / "run", *given)
    assert not list(tmp_path.glob("run/checkpoints/*"))


@pytest.mark.slow
def test_ranks_resume_exactly(launcher: Launcher, tmp_path: Path, path: Path) -> None:
    given = (*SMALL, ONE, "MODEL.width=4", *words(path))
    assert launcher.run(tmp_path / "whole", 2, *given).codes == [0, 0]
    run = tmp_path / "run"
    excluding = (*given, EXCLUDE, "CHECKPOINT.every_updates=1", "CHECKPOINT.keep_last=9")
    assert launcher.run(run, 2, *excluding).codes == [0, 0]
    # As if the run had been killed after its first update.
    for one in sorted(run.glob("checkpoints/p*"))[1:]:
        shutil.rmtree(one)
    assert launcher.run(run, 2, *excluding).codes == [0, 0]
    assert status(run)["digest"] == status(tmp_path / "whole")["digest"]


@pytest.mark.addon("sharding")
@pytest.mark.slow
def test_sharded_weights_are_rejected(launcher: Launcher, tmp_path: Path, path: Path) -> None:
    given = (*SMALL, ONE, "MODEL.width=4", *words(path), EXCLUDE)
    sharded = launcher.run(tmp_path / "run", 2, *given, "DISTRIBUTED.strategy=fsdp")
    assert sharded.codes == [2, 2]
