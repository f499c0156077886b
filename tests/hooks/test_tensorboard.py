"""TensorBoard shows each step once after kills and resumes."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from harness import KillAfter, die, records, train

from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, TensorBoard

pytest.importorskip("tensorboard")

WORDS = ("HOOKS.tensorboard.every_updates=1",)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (update, value) of every scalar as TensorBoard reads it."""
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.parametrize("kills", [(), (9,), (3, 12), (9, 9)])
def test_each_step_shows_once(tmp_path: Path, kills: tuple[int, ...]) -> None:
    for steps in kills:
        die(tmp_path, *WORDS, hooks={"kill": KillAfter(steps)})
    train(tmp_path, *WORDS)
    found = scalars(tmp_path)
    assert found.keys() == {
        "train/step_loss", "optimizer/lr", "train/accuracy", "train/loss", "test/accuracy", "test/loss",
    }  # fmt: skip
    assert [step for step, _ in found["train/step_loss"]] == list(range(1, 16))
    assert [step for step, _ in found["test/accuracy"]] == [5, 10, 15]
    logged = [record["loss"] for record in records(tmp_path) if record["kind"] == "step"]
    assert [value for _, value in found["train/step_loss"]] == pytest.approx(logged)


def test_a_file_shorter_than_the_checkpoint_covers_is_not_filled_up(tmp_path: Path) -> None:
    die(tmp_path, *WORDS, hooks={"kill": KillAfter(9)})
    [file] = (tmp_path / "tensorboard").iterdir()
    with open(file, "r+b") as opened:
        opened.truncate(60)
    train(tmp_path, *WORDS)
    assert file.stat().st_size == 60
    assert [step for step, _ in scalars(tmp_path)["train/step_loss"]][-10:] == list(range(6, 16))


def test_logs_of_a_part(tmp_path: Path) -> None:
    class Norm(HOOKS["metrics"]):  # type: ignore[misc] # any hook will do
        def on_forward(self, run: Any, phase: Any, out: Any) -> None:
            out.logs["norm"] = 2.0

    train(tmp_path, *WORDS, "PHASES.epochs=1", "HOOKS.metrics=null", hooks={"norm": Norm()})
    assert scalars(tmp_path)["train/norm"] == [(step, 2.0) for step in range(1, 6)]


def test_without_tensorboard_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"HOOKS\.tensorboard needs TensorBoard: pip install"):
        train(tmp_path, *WORDS)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="every_updates = 0: expected at least 1"):
        TensorBoard(every_updates=0)
