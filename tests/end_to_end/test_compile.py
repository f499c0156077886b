"""Runs with compiled models, activation checkpointing and compressed gradients end with identical
bits."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    run_until_killed,
    status,
    train,
)
from processes import Launcher
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.testing import differences

ONE = "MACHINE.threads=1"
SHARDED = [pytest.param(name, marks=pytest.mark.addon("sharding")) for name in ("zero", "fsdp")]
AOT = "MACHINE.compile=aot_eager"
AGAIN = "MACHINE.activation_checkpointing=[features]"


def differences_of_tasks(one: Path, other: Path) -> list[str]:
    """Return the differences of models, optimizers and meters of two finished runs."""
    return differences(newest(one).state["task"], newest(other).state["task"], "task")


class TestOneProcess:
    @pytest.mark.feature("28", "torch.compile with exact resume", "`MACHINE.compile`")
    @pytest.mark.parametrize(
        "backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)]
    )
    def test_killed_compiled_run_resumes_exactly(self, tmp_path: Path, backend: str) -> None:
        words = (ONE, f"MACHINE.compile={backend}", "PHASES.epochs=1")
        train(tmp_path / "unbroken", *words)
        run_until_killed(
            tmp_path / "run", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(3)}
        )
        train(tmp_path / "run", *words)
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []

    @pytest.mark.slow
    def test_killed_and_resumed_compiled_at_other_steps(self, tmp_path: Path) -> None:
        words = (ONE, AOT, "OPTIMIZER.accumulate=3", "MACHINE.precision=bf16")
        train(tmp_path / "unbroken", *words)
        train(tmp_path / "other", *words, "RUN.seed=1")
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "other") != []
        for step in (1, 3, 7, 12):
            run_until_killed(
                tmp_path / str(step),
                *words,
                hooks={"save": SaveEachStep(), "kill": KillAfter(step)},
            )
            train(tmp_path / str(step), *words)
            assert differences_of_runs(tmp_path / "unbroken", tmp_path / str(step)) == []

    @pytest.mark.slow
    def test_a_test_is_not_compiled_so_its_batches_may_have_any_size(self, tmp_path: Path) -> None:
        words = (ONE, "PHASES.epochs=1", "PHASES.limit.test=null", "DATA.TEST.batch_size=100")
        compiled = train(tmp_path / "compiled", *words, AOT)
        plain = train(tmp_path / "plain", *words)
        assert compiled.last == plain.last
        assert differences_of_tasks(tmp_path / "plain", tmp_path / "compiled") == []

    @pytest.mark.slow
    def test_activations_computed_again_may_come_and_go_at_a_resume(self, tmp_path: Path) -> None:
        train(tmp_path / "unbroken", ONE)
        run_until_killed(
            tmp_path / "run", ONE, hooks={"save": SaveEachStep(), "kill": KillAfter(3)}
        )
        train(tmp_path / "run", ONE, AGAIN)
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []

    @pytest.mark.skipif(find_spec("tvm") is not None, reason="tvm can compile it")
    def test_compiler_error_is_reported_with_its_key(self, tmp_path: Path) -> None:
        with raises(ConfigError, key="MACHINE.compile"):
            train(tmp_path, ONE, "MACHINE.compile=tvm")

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
    @pytest.mark.filterwarnings(
        "ignore::DeprecationWarning"
    )  # torch's own, where inductor is imported
    def test_killed_and_resumed_with_inductor(self, tmp_path: Path) -> None:
        words = (ONE, "MACHINE.compile=inductor")
        train(tmp_path / "unbroken", *words)
        run_until_killed(
            tmp_path / "run", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(6)}
        )
        train(tmp_path / "run", *words)
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []


def killed_and_resumed(launcher: Launcher, folder: Path, *words: str) -> Path:
    """Kill one of three ranks, resume, compare with an unbroken run, and return its folder."""
    unbroken = launcher.run(folder / "unbroken", 3, *SMALL, ONE, *words)
    assert unbroken.codes == [0, 0, 0], unbroken.outputs
    struck = (
        "RUN.imports=[process_parts]",
        "HOOKS.strike={rank: 1, update: 7}",
        "CHECKPOINT.every_updates=2",
    )
    assert launcher.run(folder / "run", 3, *SMALL, ONE, *words, *struck).codes == [1, -9, 1]
    again = launcher.run(folder / "run", 3, *SMALL, ONE, *words, *struck)
    assert again.codes == [0, 0, 0], again.outputs
    assert differences_of_runs(folder / "unbroken", folder / "run") == []
    assert status(folder / "run")["state"] == "finished"
    return folder / "unbroken"


class TestThreeProcesses:
    @pytest.mark.feature(
        "71",
        "DDP options, compressed gradients, collective checks",
        "`DISTRIBUTED.bucket_cap_mb`, `DISTRIBUTED.communication`, `DISTRIBUTED.debug`",
    )
    @pytest.mark.slow
    def test_killed_and_resumed_with_rounded_gradients(
        self, launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path
    ) -> None:
        unbroken = killed_and_resumed(launcher, tmp_path, "DISTRIBUTED.communication=fp16")
        assert differences_of_tasks(unbroken_by_three_ranks, unbroken) != [], (
            "the choice has not arrived at torch"
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
    def test_killed_compiled_run_resumes_exactly(
        self, launcher: Launcher, tmp_path: Path, strategy: str
    ) -> None:
        killed_and_resumed(launcher, tmp_path, AOT, f"DISTRIBUTED.strategy={strategy}")

    @pytest.mark.slow
    @pytest.mark.parametrize("word", [AGAIN, "MACHINE.compile=eager"])
    def test_bits_are_those_of_a_run_without(
        self, launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path, word: str
    ) -> None:
        done = launcher.run(tmp_path / "run", 3, *SMALL, ONE, word)
        assert done.codes == [0, 0, 0], done.outputs
        assert differences_of_tasks(unbroken_by_three_ranks, tmp_path / "run") == []

    def test_setting_gloo_cannot_do_is_rejected_by_key(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        words = (
            "DISTRIBUTED.communication=bf16",
            "DISTRIBUTED.sync_batch_norm=true",
            "MACHINE.device=cpu",
        )
        done = launcher.run(tmp_path / "run", 2, *SMALL, ONE, *words)
        assert done.codes == [2, 2]
        assert "DISTRIBUTED.communication = 'bf16' and MACHINE.device = 'cpu'" in done.outputs[0]
        assert "DISTRIBUTED.sync_batch_norm = true and MACHINE.device = 'cpu'" in done.outputs[0]


@pytest.mark.feature("66")
@pytest.mark.addon("sharding")
@pytest.mark.slow
def test_under_fsdp_activations_computed_again_leave_the_bits_alone(
    launcher: Launcher, tmp_path: Path
) -> None:
    words = (*SMALL, ONE, "DISTRIBUTED={strategy: fsdp, wrap: [features, head]}", "PHASES.epochs=1")
    digests = []
    for rules in (
        "[]",
        "[features]",
        "[features.0, features.3, head]",
    ):  # none, what is gathered at once, parts of it
        folder = tmp_path / f"run{len(digests)}"
        done = launcher.run(folder, 3, *words, f"MACHINE.activation_checkpointing={rules}")
        assert done.codes == [0, 0, 0], done.outputs
        digests.append(status(folder)["digest"])
    assert len(set(digests)) == 1
    assert digests[0]
