"""What a run is going to do is known before a sample is read."""

import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, train
from raising import raises

from phasetrain.app.api import run
from phasetrain.app.preflight.preview import ROWS, preview
from phasetrain.app.setup import resolve_config
from phasetrain.data import SampleError
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.runtime.terminal import Terminal

UNREADABLE = """
import torch

class Unreadable:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        raise AssertionError("a sample was read")

    def facts(self):
        return {"classes": 3, "input_shape": (5,)}

    def fingerprint(self):
        return "unreadable"
"""


def planned(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    stream = io.StringIO()
    setup = resolve_config(
        [*SMALL, "RUN.rehearse=auto", f"RUN.dir={folder}", *words],
        terminal=Terminal(stream, live=False),
    )
    return preview(setup), stream.getvalue()


@dataclass(frozen=True)
class Plan:
    """A run folder, the content of its plan, and what was printed."""

    folder: Path
    content: dict[str, Any]
    text: str


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return a plan with a rehearsal, which takes longer than all else."""
    folder = tmp_path_factory.mktemp("rehearsed") / "run"
    words = ("PHASES.epochs=1", "PHASES.limit.test=null", "OPTIMIZER.momentum=0.9")
    return Plan(folder, *planned(folder, *words))


def test_plan_file_is_all_that_is_written(rehearsed: Plan) -> None:
    assert json.loads((rehearsed.folder / "plan.json").read_text()) == rehearsed.content
    assert [path.name for path in rehearsed.folder.iterdir()] == ["plan.json"]


def test_plan_file_has_phases_and_checkpoints(tmp_path: Path) -> None:
    words = ("PHASES.epochs=2", "OPTIMIZER.SCHEDULES={lr: {name: linear}}", "RUN.rehearse=false")
    content, _ = planned(tmp_path, *words)
    assert {key: content[key] for key in ("name", "updates", "epochs", "samples")} == {
        "name": "digits", "updates": 10, "epochs": 2, "samples": 240,
    }  # fmt: skip
    assert [phase.pop("lr") for phase in content["phases"]] == [
        0.1,
        None,
        pytest.approx(0.05),
        None,
    ]
    assert content["phases"][2:] == [
        {
            "index": 2, "split": "train", "epoch": 1, "first": 0, "steps": 5, "offset": 0, "end": 120, "batch_size": 24,
            "stage": 0, "samples": 120, "updates_before": 5,
        },
        {
            "index": 3, "split": "test", "epoch": 1, "first": 0, "steps": 2, "offset": 0, "end": 64, "batch_size": 32,
            "stage": 0, "samples": 64, "updates_before": 10,
        },
    ]  # fmt: skip
    assert content["model"] == {"name": "small_cnn", "parameters": 1030, "trained": 1030}
    assert content["checkpoints"]["at"] == [[5, "epoch"], [10, "epoch"], [10, "end"]]
    assert content["facts"]["MODEL.classes"] == 10
    assert ["PHASES.epochs", 2, "command line"] in content["differs"]


def test_no_sample_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unreadable_of_a_test.py").write_text(UNREADABLE)
    monkeypatch.syspath_prepend(tmp_path)
    words = [
        "DATA.TRAIN.dataset=unreadable_of_a_test.Unreadable", "DATA.TEST.dataset=unreadable_of_a_test.Unreadable",
        "DATA.TRAIN.transforms=[]", "MODEL=null", "MODEL.name=mlp", "PHASES.epochs=1", "DATA.TRAIN.batch_size=8",
        "RUN.rehearse=false",
    ]  # fmt: skip
    result = run(
        [*words, "RUN.engine=plan", f"RUN.dir={tmp_path / 'run'}"],
        terminal=Terminal(io.StringIO(), live=False),
    )
    assert (result.state, result.folder) == ("planned", str(tmp_path / "run"))
    content = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (content["updates"], content["facts"]["MODEL.classes"]) == (5, 3)
    assert (content["rehearsal"], content["inspection"], content["modules"][0]["output"]) == (
        None,
        None,
        None,
    )
    with raises(SampleError, key="DATA.TRAIN"):  # nothing else keeps it from reading
        run(
            [*words[:-1], "RUN.engine=plan", f"RUN.dir={tmp_path / 'run'}"],
            terminal=Terminal(io.StringIO(), live=False),
        )


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "words",
    [
        (
            "CHECKPOINT.every_epochs=null",
            "CHECKPOINT.every_updates=5",
            "PHASES.test_every.updates=4",
        ),
        (),
        ("CHECKPOINT.every_updates=4",),
        ("CHECKPOINT.every_epochs=2", "CHECKPOINT.at_end=false"),
        ("CHECKPOINT.every_updates=4", "CHECKPOINT.keep_every={updates: 3, epochs: 1}"),
    ],
)
def test_the_run_saves_where_the_plan_says(tmp_path: Path, words: tuple[str, ...]) -> None:
    seen: list[int] = []

    class Watch(Hook):
        def on_save(self, run: Any) -> None:
            seen.append(run.state.updates)

    content, _ = planned(tmp_path / "plan", *words)
    train(tmp_path / "run", *words, hooks={"watch": Watch()})
    assert seen == [at for at, _ in content["checkpoints"]["at"]]


@pytest.mark.by_default("adamw")
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_planned_size_of_a_checkpoint_is_within_30_percent(tmp_path: Path, name: str) -> None:
    words = ("OPTIMIZER={name: " + name + "}", "MODEL.width=64")
    content, _ = planned(tmp_path / name, *words)
    train(tmp_path / name, *words, "PHASES.epochs=1", "PHASES.limit.train=1")
    size = sum(file.stat().st_size for file in (tmp_path / name).glob("checkpoints/p0002*/*"))
    assert 0.7 < content["checkpoints"]["bytes_each"] / size < 1.1
    guessed, _ = planned(tmp_path / f"guessed-{name}", *words, "RUN.rehearse=false")
    assert 0.7 < guessed["checkpoints"]["bytes_each"] / size < 1.1


@pytest.mark.addon("observe")
def test_plan_is_printed(tmp_path: Path) -> None:
    _, text = planned(
        tmp_path, "PHASES.epochs=1", "RUN.rehearse=false", "CHECKPOINT.every_updates=9"
    )
    text = re.sub(r"; [\d.,]+ [GM]iB are free", "; room is free", text)
    text = re.sub(r"\n\d+ values differ", "\nMany values differ", text)
    # what only fills in a null is in plan.json
    assert "null -> " not in text
    assert "features.2" not in text  # an activation function
    # First what the config does not say; what the user has set comes last, if it is short.
    assert text.startswith("plan    5 updates, 120 samples, 1 epoch\nmemory  about 12,544 bytes")
    assert (
        "\ndisk    2 checkpoints of about 8,424 bytes each, the newest 3 are kept; room is free\n"
        "warning CHECKPOINT.every_updates = 9: the run ends after 5 updates, so it never takes effect\n"
        in text
    )
    assert text.endswith(
        "1 epoch, 5 updates, 120 samples\n"
        "phase  split  epoch  steps  samples  updates before  lr at start\n"
        "-----  -----  -----  -----  -------  --------------  -----------\n"
        "0      train      1      5      120               0            0\n"
        "1      test       1      2       64               5\n"
        "Many values differ from the defaults (phasetrain plan -v lists them, with the file that "
        "sets each)\n"
        f"written to {tmp_path}/plan.json\n"
    )


def test_a_long_plan_is_shortened(tmp_path: Path) -> None:
    content, text = planned(tmp_path, "PHASES.epochs=50", "RUN.rehearse=false")
    table = text[text.index("phase  split") :].splitlines()[2 : 3 + ROWS]
    assert (len(content["phases"]), len(table)) == (100, ROWS + 1)
    assert table[ROWS // 2].split() == ["..."] * 7
    assert table[-1].split()[:3] == ["99", "test", "50"]


@pytest.mark.addon("observe")
@pytest.mark.feature(
    "11", "limits; plan; rehearsal", "`PHASES.limit`, `phasetrain plan`, `RUN.rehearse`"
)
def test_plan_describes_data_model_and_memory(rehearsed: Plan) -> None:
    content = rehearsed.content
    assert content["data"]["train"] == {
        "dataset": "digits", "samples": 1442, "batch_size": 24, "micro_batch_size": 24, "drop_last": True, "left_out": 0,
        "workers": 0,
        "sampler": "shuffled", "transforms": ["random_shift", "noise"], "batch_transforms": [],
        "facts": {"classes": 10, "class_names": [*"0123456789"], "channels": 1, "input_shape": [1, 8, 8]},
    }  # fmt: skip
    assert content["processes"] == {
        "processes": 1, "strategy": "ddp", "batch_size": 24, "micro_batch_size": 24, "accumulate": 1,
        "micro_batches": None,
    }  # fmt: skip
    assert content["modules"][0] == {
        "name": "", "kind": "SmallCNN", "parameters": 1030, "trained": 1030, "output": "(N, 10)", "output_bytes": 960,
        # of convolutions at 8x8, 4x4, 2x2 places, and a layer
        "flops": 2 * (36 * 64 + 288 * 16 + 576 * 4 + 80),
    }  # fmt: skip
    assert (content["memory"]["gradients"], content["memory"]["optimizer"]) == (4120, 4120)
    assert "features.3 Conv2d 288 all (N, 8, 4, 4) 12,288 bytes 9.22 k" in " ".join(
        rehearsed.text.split()
    )


def test_the_rehearsal_is_in_the_plan(rehearsed: Plan) -> None:
    content, text = rehearsed.content, rehearsed.text
    assert content["rehearsal"].keys() == {"kinds", "checkpoint_bytes", "time"}
    assert content["rehearsal"]["kinds"] == [
        {"name": "train", "samples": 24, "metrics": ["accuracy", "loss"]},
        {"name": "test", "samples": 32, "metrics": ["accuracy", "loss"]},
        {"name": "test, last batch of 3", "samples": 3, "metrics": ["accuracy", "loss"]},
    ]
    assert content["checkpoints"]["bytes_each"] == content["rehearsal"]["checkpoint_bytes"]
    assert re.search(r"rehearsed in .* s: train; test; test, last batch of 3", text)
    assert content["rehearsal"]["time"]["load"].keys() == {"others", "threads", "cores"}
    assert "the run will take about" in text.splitlines()[0]


def test_verbose_plan_lists_all_values_with_their_source(tmp_path: Path) -> None:
    stream = io.StringIO()
    setup = resolve_config(
        [*SMALL, f"RUN.dir={tmp_path}", "RUN.rehearse=false", "PHASES.epochs=3"],
        terminal=Terminal(stream, live=False, verbosity="verbose"),
    )
    content = preview(setup)
    text = stream.getvalue()
    rows = text[text.index("values that differ from the defaults") :].splitlines()[3:-1]
    assert ["PHASES.epochs", "3", "command", "line"] in [row.split() for row in rows]
    assert len(rows) == len(content["differs"])


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    words = [
        "METERS.top={name: accuracy, topk: 0}", "HOOKS.early_stopping={monitor: test/acuracy, patience: 0}",
        "MODEL.freeze=[hed]", "OPTIMIZER.groups=[{match: nobody, lr_scale: 2.0}]",
    ]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, *words)
    told = str(caught.value)
    assert len(caught.value.problems) == 5
    for key in (
        "METERS.top",
        "HOOKS.early_stopping (",
        "HOOKS.early_stopping.monitor",
        "[hed]",
        "OPTIMIZER.groups",
    ):
        assert key in told
    assert not (tmp_path / "plan.json").exists()
