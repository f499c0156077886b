"""The task `gan`: it learns and resumes, what it generates in tests depends on the samples alone, and
mistakes are named."""

import io
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from gan_parts import SHORT, make_words
from harness import KillAfter, Killed, SaveEachStep, differences_of_runs, newest, records
from raising import raises

from phasetrain.app.api import run
from phasetrain.config.compose.composed import compose
from phasetrain.engine.batch import Batch, GeneratedOutput
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.models import SmallCNN
from phasetrain.models.digest import hash_state
from phasetrain.runs.records import PREDICTIONS
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing.build import build_run


def train(folder: Path, hooks: Mapping[str, Hook] | None = None) -> Path:
    """Train for three epochs of five updates, until a hook kills the run; return its folder."""
    given = [*make_words(folder.parent), *SHORT, f"RUN.dir={folder}"]
    with suppress(Killed):
        run(given, hooks=hooks, terminal=Terminal(io.StringIO(), live=False))
    return folder


@pytest.mark.feature(
    "gan",
    "GAN with a numeric criterion: Fréchet distance by a trained classifier, equal images in "
    "each test and on any number of ranks, shown in the report",
    "`TASK.name=gan`, `METERS.x.name=frechet_distance`, `experiment=gan`",
)
def test_generator_learns_and_a_killed_run_resumes_exactly(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    found = [line for line in records(whole) if line.get("split") == "test"]
    distances = [line["metrics"]["frechet"] for line in found if line["kind"] == "phase"]
    assert len(distances) == 3
    assert distances[2] < distances[0]
    assert '"prediction"' in (whole / PREDICTIONS).read_text()
    hooks = {"save": SaveEachStep(), "kill": KillAfter(13)}  # in the middle of the second test
    train(tmp_path / "run", hooks)
    assert newest(tmp_path / "run").manifest.state["updates"] == 10
    train(tmp_path / "run")
    assert differences_of_runs(whole, tmp_path / "run") == []


def test_generator_learns_in_every_second_update(tmp_path: Path) -> None:
    class Watching(Hook):
        def on_step(self, run: Any, phase: Any, out: Any) -> None:
            if phase.is_train:
                model = run.task.model
                for name, network in (("generator", model.generator), ("critic", model.critic)):
                    digests[name].append(hash_state(dict(network.named_parameters())))

    digests: dict[str, list[str]] = {"generator": [], "critic": []}
    words = [*make_words(tmp_path), *SHORT, "TASK.generator_every=2", "PHASES.epochs=1"]
    run([*words, f"RUN.dir={tmp_path / 'run'}"], hooks={"watching": Watching()})
    changes = {name: [seen.index(digest) for digest in seen] for name, seen in digests.items()}
    assert changes == {"generator": [0, 1, 1, 3, 3], "critic": [0, 1, 2, 3, 4]}


def test_weights_of_the_judge_experiment_fit_the_judge() -> None:
    """The two stages of the recipe `gan`, which nothing else compares without Fashion-MNIST."""
    trained = compose(["experiment=gan_judge"]).config["MODEL"]
    judge = compose(["experiment=gan"]).config["TASK"]["judge"]
    chosen = ("width", "grid")
    shapes = [
        {
            name: tensor.shape
            for name, tensor in SmallCNN(10, **{key: one[key] for key in chosen if key in one})
            .state_dict()
            .items()
        }
        for one in (trained, judge)
    ]
    assert (trained["name"], judge["name"]) == ("small_cnn", "small_cnn")
    assert shapes[0] == shapes[1]


@pytest.mark.feature("gan")
def test_generated_images_depend_on_the_samples_alone(tmp_path: Path) -> None:
    task: Any = build_run(make_words(tmp_path)).task
    task.model.eval()
    torch.manual_seed(0)
    inputs, labels, ids = torch.rand(4, 1, 8, 8), torch.arange(4), torch.tensor([7, 3, 11, 5])
    whole = task.forward(Batch(inputs, labels, ids, 4))
    order = torch.tensor([2, 0])
    mask = torch.tensor([False, True])
    part = task.forward(Batch(inputs[order], labels[order], ids[:1], 1, mask))
    assert isinstance(whole, GeneratedOutput)
    torch.testing.assert_close(part.images[1], whole.images[0])
    torch.testing.assert_close(part.features[1], whole.features[0])
    assert whole.features.shape == whole.real_features.shape == (4, 8)
    assert whole.output.shape == (4, 10)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("MODEL={name: mlp}", {"code": "config.misfit", "key": "MODEL"}),
        (
            "OPTIMIZER.others.critic=null",
            {"code": "config.missing_part", "key": "OPTIMIZER.others"},
        ),
        ("TASK.layer=haed", {"code": "config.no_match", "key": "TASK.layer", "given": "'haed'"}),
        ("TASK.judge.weights=null", {"key": "TASK.judge.weights"}),
        ("TASK.generator_every=0", {"key": "TASK.generator_every"}),
        ("MACHINE.compile=eager", {"key": "MACHINE.compile", "code": "config.conflict"}),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: str, problem: dict[str, str]) -> None:
    given = make_words(tmp_path)
    if change.startswith("MODEL="):
        given = [word for word in given if not word.startswith(("MODEL", "OPTIMIZER.others"))]
    with raises(ConfigError, **problem):
        build_run([*given, change])
