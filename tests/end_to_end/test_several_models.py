"""The examples of docs/several-models.md resume exactly: several networks with an optimizer each, a
policy with its value, losses with learned weights, gradients that are combined. So does the task
`gan` on several ranks."""

import io
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gan_parts
import pytest
import torch
from harness import KillAfter, Killed, SaveEachStep, differences_of_runs, newest, records
from processes import Launcher
from raising import raises

from phasetrain.app.api import run
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.runtime.terminal import Terminal

PAGE = Path(__file__).parents[2] / "docs" / "several-models.md"
FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<text>.*?)```", re.DOTALL)

SMALL = (
    "PHASES.epochs=2",
    "PHASES.limit.train=4",
    "PHASES.limit.test=1",
    "DATA.TRAIN.batch_size=24",
    "DATA.TEST.batch_size=32",
    "HOOKS.metrics.every_updates=1",
    "HOOKS.console=null",
    "RUN.rehearse=false",
    "MACHINE.threads=1",
)
MLP = "mlp, hidden: [8], cut: layers.3"
HALF = ("MACHINE.precision=bf16", "OPTIMIZER.accumulate=2")
EXAMPLES = {
    "gan": ("experiment=my_gan", "RUN.imports=[my_gan, process_parts]"),
    "bandit": ("experiment=my_bandit", "RUN.imports=[my_bandit, process_parts]"),
    "heads": ("experiment=my_two_heads", "RUN.imports=[process_parts]"),
    "surgery": (
        "experiment=my_two_heads",
        "RUN.imports=[my_surgery, process_parts]",
        "TASK.name=my_surgery",
        "LOSS.losses.digit.weight=1",
        "LOSS.losses.odd.weight=1",
    ),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of the page, its configs as experiments."""
    (tmp_path / "experiment").mkdir()
    for found in FILE.finditer(PAGE.read_text()):
        folder = "experiment" if found["name"].endswith(".yaml") else "."
        (tmp_path / folder / found["name"]).write_text(found["text"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def train(place: Path, name: str, *words: str, hooks: Mapping[str, Hook] | None = None) -> Path:
    """Run an example in this process, until a hook kills it; return its folder."""
    try:
        run(
            [*words[:1], *SMALL, *words[1:], f"RUN.dir={place / name}"],
            config_dir=place,
            hooks=hooks,
            terminal=Terminal(io.StringIO(), live=False),
        )
    except Killed:
        assert hooks is not None
    return place / name


def launch(launcher: Launcher, folder: Path, size: int, *words: str) -> list[int]:
    """Run an example on several ranks and return their exit codes."""
    config = f"--config-dir={folder.parent}"
    ended = launcher.run(folder, size, words[0], config, *SMALL, *words[1:])
    assert not any(ended.codes) or -9 in ended.codes, ended.outputs
    return ended.codes


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = newest(folder).state["task"]["model"]
    return state


def largest_difference(one: Path, other: Path) -> float:
    first, second = weights(one), weights(other)
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


@pytest.mark.feature(
    "several_models",
    "several networks with their own optimizer, schedule, clipping and scaler, on several "
    "ranks: GAN, actor and critic",
    "`Task.separate_updaters`, `OPTIMIZER.others.LABEL.clip_norm`",
)
@pytest.mark.by_default("gan", "surgery")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.addon("vision")] if name == "surgery" else [])
        for name in EXAMPLES
    ],
)
def test_killed_run_resumes_exactly_with_autocast_and_accumulation(place: Path, name: str) -> None:
    words = (*EXAMPLES[name], *HALF)
    whole = train(place, "whole", *words)
    hooks = {"save": SaveEachStep(), "kill": KillAfter(6)}
    train(place, "run", *words, hooks=hooks)
    assert newest(place / "run").manifest.state["updates"] in (4, 5)
    train(place, "run", *words)
    assert differences_of_runs(whole, place / "run") == []


@pytest.mark.feature("several_models")
def test_optimizer_that_a_checkpoint_leaves_out_is_noticed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(place, "whole", *EXAMPLES["gan"])
    task_class = sys.modules["my_gan"].Gan
    stateful = task_class.stateful

    def forget(task: Any) -> dict[str, Any]:
        return {name: part for name, part in stateful(task).items() if name != "updater.critic"}

    monkeypatch.setattr(task_class, "stateful", forget)
    with raises(ConfigError, key="TASK.name", code="task.missing_state"):
        train(place, "run", *EXAMPLES["gan"])


def test_each_network_has_its_schedule_and_the_average_follows_one_of_them(place: Path) -> None:
    folder = train(place, "run", *EXAMPLES["gan"])
    state = newest(folder).state["task"]
    assert {"updater", "updater.critic", "ema"} <= state.keys()
    same = {name: torch.equal(state["ema"][name], one) for name, one in state["model"].items()}
    assert same == {name: name.startswith("critic") for name in same}
    assert state["updater.critic"]["optimizer"][0]["step"] == 8
    assert state["updater"]["optimizer"][0]["step"] == 4


class TestSeveralRanks:
    @pytest.mark.parametrize(
        ("name", "size"),
        [
            pytest.param(name, size, marks=[] if (name, size) == ("gan", 2) else pytest.mark.slow)
            for name in EXAMPLES
            for size in (2, 3)
        ],
    )
    def test_killed_run_resumes_exactly(
        self, launcher: Launcher, place: Path, name: str, size: int
    ) -> None:
        words = (*EXAMPLES[name], *HALF)
        assert launch(launcher, place / "whole", size, *words) == [0] * size
        killed = (*words, "HOOKS.strike={rank: 1, update: 5}", "CHECKPOINT.every_updates=2")
        assert launch(launcher, place / "run", size, *killed)[1] == -9
        assert launch(launcher, place / "run", size, *killed) == [0] * size
        assert differences_of_runs(place / "whole", place / "run") == []

    @pytest.mark.feature("several_models")
    @pytest.mark.slow
    @pytest.mark.parametrize("name", EXAMPLES)
    def test_two_ranks_have_the_bits_of_one_with_ordered_reduction(
        self, launcher: Launcher, place: Path, name: str
    ) -> None:
        words = (*EXAMPLES[name], "DISTRIBUTED.reduction=ordered", "DATA.TRAIN.batch_size=32")
        for size in (1, 2):
            assert launch(launcher, place / f"{size}", size, *words) == [0] * size
        assert largest_difference(place / "1", place / "2") == 0.0
        one, other = (
            [line["loss"] for line in records(place / f"{size}") if line["kind"] == "step"]
            for size in (1, 2)
        )
        assert len(one) == 8
        assert one == other

    @pytest.mark.feature(
        "several_passes",
        "several gradient passes in a step on several ranks; gradients of several losses are "
        "combined",
        "`Task.several_passes`, `updater.gradients.take`, `put`",
    )
    @pytest.mark.parametrize(
        ("name", "size"),
        [
            pytest.param("surgery", 3, marks=pytest.mark.addon("vision")),
            pytest.param("heads", 3, marks=pytest.mark.slow),
            pytest.param("surgery", 2, marks=[pytest.mark.addon("vision"), pytest.mark.slow]),
        ],
    )
    def test_ranks_train_as_one(
        self, launcher: Launcher, place: Path, name: str, size: int
    ) -> None:
        config = place / "experiment" / "my_two_heads.yaml"
        # No batch norm: what a sample contributes does not depend on the rank that it falls to.
        plain = config.read_text().replace("small_cnn, width: 4, cut: head", MLP)
        assert MLP in plain
        config.write_text(plain)
        words = (*EXAMPLES[name], "DATA.TRAIN.transforms=[]", "OPTIMIZER.lr=0.05")
        for number in (1, size):
            assert launch(launcher, place / f"{number}", number, *words) == [0] * number
        assert 0 < largest_difference(place / "1", place / f"{size}") < 1e-5

    @pytest.mark.feature("gan")
    @pytest.mark.addon("vision")
    @pytest.mark.slow
    @pytest.mark.parametrize("size", [2, 3])
    def test_task_gan_killed_in_training_and_in_a_test_resumes_exactly(
        self, launcher: Launcher, tmp_path: Path, size: int
    ) -> None:
        words = [*gan_parts.make_words(tmp_path), *gan_parts.SHORT, "RUN.imports=[process_parts]"]
        words += ["TASK.generator_every=2", "MODEL.ema={decay: 0.9, match: [generator.*]}"]
        words += ["PHASES.limit.test=6"]
        assert launcher.run(tmp_path / "whole", size, *words).codes == [0] * size
        killed = [*words, "CHECKPOINT.every_updates=2"]
        killed += ["HOOKS.save={name: phasetrain.testing.SaveEachStep}"]
        killed += ["HOOKS.strike={rank: 1, update: 7}"]
        killed += ["HOOKS.again={name: strike, rank: 0, update: 10, split: test, after: 6}"]
        struck = launcher.run(tmp_path / "run", size, *killed)
        assert struck.codes[1] == -9, struck.outputs
        again = launcher.run(tmp_path / "run", size, *killed)
        assert again.codes[0] == -9, again.outputs
        position = newest(tmp_path / "run").manifest.state
        # Each epoch has two tests, of the weights and of their average.
        assert (position["phase"], position["updates"]) == (4, 10)
        assert position["step"] >= 1
        ended = launcher.run(tmp_path / "run", size, *killed)
        assert ended.codes == [0] * size, ended.outputs
        assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []

    @pytest.mark.addon("sharding")
    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["zero", "sharded_ddp", "fsdp"])
    def test_sharding_strategies_are_rejected(
        self, launcher: Launcher, place: Path, strategy: str
    ) -> None:
        words = (*EXAMPLES["surgery"], f"DISTRIBUTED.strategy={strategy}")
        ended = launcher.run(
            place / "run", 2, words[0], f"--config-dir={place}", *SMALL, *words[1:]
        )
        assert ended.codes == [2, 2]
        assert "TASK.name = 'my_surgery'" in ended.outputs[0]
