"""Runs that start from weights: once, exactly, on all ranks."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    run_until_killed,
    train,
)
from processes import Launcher
from raising import raises
from safetensors.torch import save_file
from test_processes import ONE

from phasetrain.errors import ChangedError, ConfigError
from phasetrain.models import SmallCNN
from phasetrain.testing import MemoryHandler

STILL = ("OPTIMIZER.lr=0", "PHASES.epochs=1")
PARTS = "RUN.imports=[weight_parts]"


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return SmallCNN(10, width=4).state_dict()


def parameters(state: Mapping[str, torch.Tensor]) -> str:
    """Return the digest that the hook `note_weights` writes."""
    digest = sha256()
    for name, _ in SmallCNN(10, width=4).named_parameters():
        digest.update(state[name].numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(weights(7), tmp_path / "start.safetensors")
    return tmp_path / "start.safetensors"


class TestStart:
    def test_weights_come_from_the_newest_checkpoint_of_a_run(self, tmp_path: Path) -> None:
        train(tmp_path / "first", "PHASES.epochs=1")
        train(tmp_path / "second", f"MODEL.weights={tmp_path}/first", *STILL)
        one, other = (
            newest(tmp_path / name).state["task"]["model"] for name in ("first", "second")
        )
        assert parameters(one) == parameters(other)
        train(tmp_path / "control", *STILL)
        assert parameters(newest(tmp_path / "control").state["task"]["model"]) != parameters(one)

    @pytest.mark.feature(
        "101",
        "pretrained weights from torch, safetensors, phasetrain, VISSL, timm and Hugging Face",
        "`MODEL.weights`",
    )
    def test_resume_needs_no_weights_file(self, tmp_path: Path, path: Path) -> None:
        words = (f"MODEL.weights={path}", "PHASES.epochs=1")
        train(tmp_path / "unbroken", *words)
        run_until_killed(
            tmp_path / "killed", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(3)}
        )
        plan = json.loads((tmp_path / "killed" / "plan.json").read_text())
        assert plan["weights"]["sources"][0]["path"] == str(path)
        path.unlink()
        train(tmp_path / "killed", *words)
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []
        assert json.loads((tmp_path / "killed" / "plan.json").read_text()) == plan

    def test_file_is_needed_until_the_first_save(self, tmp_path: Path, path: Path) -> None:
        words = (f"MODEL.weights={path}",)
        run_until_killed(tmp_path / "killed", *words, hooks={"kill": KillAfter(1)})
        path.unlink()
        with raises(ConfigError, key="MODEL.weights.path"):
            train(tmp_path / "killed", *words)

    def test_file_that_was_changed_before_the_first_save_is_reported(
        self, tmp_path: Path, path: Path
    ) -> None:
        words = (f"MODEL.weights={path}", "PHASES.epochs=1")
        run_until_killed(tmp_path / "killed", *words, hooks={"kill": KillAfter(1)})
        log = tmp_path / "killed" / "log.txt"
        assert "has changed since the last attempt" not in log.read_text()
        save_file(weights(8), path)
        train(tmp_path / "killed", *words)
        assert "has changed since the last attempt" in log.read_text()

    def test_other_start_weights_make_another_run(
        self, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        train(tmp_path / "run", "PHASES.epochs=1", f"MODEL.weights={path}")
        with pytest.raises(ChangedError, match=r"MODEL\.weights: .* null \(forbidden\)"):
            train(tmp_path / "run", "PHASES.epochs=1")
        monkeypatch.chdir(tmp_path)
        from phasetrain.testing.build import resolve_overrides

        folders = {
            resolve_overrides([*SMALL, *words]).config.RUN.dir
            for words in ((), (f"MODEL.weights={path}",))
        }
        assert len(folders) == 2

    def test_plan_lists_loaded_and_reinitialized_weights(self, tmp_path: Path, path: Path) -> None:
        given = f"MODEL.weights={{path: {path}, reinit: ['head.*']}}"
        train(tmp_path / "run", given, "RUN.engine=plan")
        report = json.loads((tmp_path / "run" / "plan.json").read_text())["weights"]
        assert report["reinit"] == ["head.weight", "head.bias"]
        assert report["loaded"]["features.0.weight"] == {"source": 0, "name": "features.0.weight"}
        assert len(report["loaded"]) == 18

    @pytest.mark.addon("experiments")
    def test_replay_needs_start_weights_and_a_test_does_not(
        self, tmp_path: Path, path: Path
    ) -> None:
        words = (f"MODEL.weights={path}", "PHASES.epochs=1")
        train(tmp_path / "run", *words)
        assert train(tmp_path / "run", *words, "RUN.engine=replay", "RUN.step=2").exit_code == 0
        path.unlink()
        assert train(tmp_path / "run", *words, "RUN.engine=test").updates == 5

    @pytest.mark.addon("remote")
    def test_weights_come_from_an_object_store(self, tmp_path: Path, path: Path) -> None:
        MemoryHandler.objects["mem://weights/a.safetensors"] = path.read_bytes()
        try:
            words = (
                "RUN.imports=[phasetrain.testing]",
                "MODEL.weights=mem://weights/a.safetensors",
                *STILL,
            )
            train(tmp_path / "run", *words)
        finally:
            MemoryHandler.objects.clear()
        assert parameters(newest(tmp_path / "run").state["task"]["model"]) == parameters(weights(7))

    @pytest.mark.feature("101")
    def test_all_ranks_get_weights_that_rank_0_reads(
        self, launcher: Launcher, tmp_path: Path, path: Path
    ) -> None:
        words = (
            *SMALL,
            ONE,
            PARTS,
            "HOOKS.note_weights={}",
            "PHASES.epochs=1",
            "PHASES.limit.train=2",
        )
        ordered = (
            "DISTRIBUTED.reduction=ordered",
            "DISTRIBUTED.virtual_shards=4",
        )  # which brings no weights round
        given = f"MODEL.weights={{path: {path}, format: on_main}}"
        done = launcher.run(tmp_path / "run", 4, *words, *ordered, given)
        assert done.codes == [0, 0, 0, 0], done.outputs
        noted = [(tmp_path / f"run-start-{rank}").read_text() for rank in range(4)]
        assert noted == [parameters(weights(7))] * 4

    @pytest.mark.addon("sharding")
    @pytest.mark.slow
    def test_sharded_weights_are_loaded_and_saved(self, launcher: Launcher, tmp_path: Path) -> None:
        fsdp = (*SMALL, ONE, "DISTRIBUTED.strategy=fsdp", "PHASES.epochs=1")
        assert launcher.run(tmp_path / "first", 3, *fsdp).codes == [0, 0, 0]
        words = (*fsdp, "OPTIMIZER.lr=0", f"MODEL.weights={tmp_path}/first")
        assert launcher.run(tmp_path / "second", 3, *words).codes == [0, 0, 0]
        one, other = (
            newest(tmp_path / name).state["task"]["model"] for name in ("first", "second")
        )
        assert parameters(one) == parameters(other)

    def test_read_error_on_rank_0_ends_all_ranks(self, launcher: Launcher, tmp_path: Path) -> None:
        done = launcher.run(tmp_path / "run", 3, *SMALL, ONE, f"MODEL.weights={tmp_path}/absent")
        assert done.codes == [2, 2, 2]
        assert f"{tmp_path}/absent" in done.outputs[0]
