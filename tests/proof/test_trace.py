"""A trace has a digest of all that a step reads and leaves, and nothing that differs between equal
runs."""

from pathlib import Path

from phasetrain.hooks.trace import TraceHook
from phasetrain.proof.trace import Trace
from phasetrain.testing.kills import run_quietly

WORDS = [
    "PHASES.epochs=1",
    "PHASES.limit.train=2",
    "PHASES.limit.test=1",
    "DATA.TRAIN.batch_size=24",
]
WORDS += [
    "MODEL.name=mlp",
    "OPTIMIZER.accumulate=2",
    "HOOKS.patient={name: planted_parts.PatientHook}",
]


def trace(folder: Path, *words: str) -> Trace:
    recorded = Trace()
    run_quietly([*WORDS, *words, f"RUN.dir={folder}"], {"trace": TraceHook(recorded)})
    return recorded


def test_every_step_and_phase_is_recorded(tmp_path: Path) -> None:
    steps = trace(tmp_path).steps
    assert list(steps) == [(0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    named = list(steps[0, 1])
    assert named[:4] == ["batch.0.ids", "batch.0.input", "batch.0.target", "batch.0.mask"]
    assert named[4:8] == ["batch.1.ids", "batch.1.input", "batch.1.target", "batch.1.mask"]
    assert named[8:12] == ["output.0.0", "output.1.0", "loss", "generator.0.cpu"]
    assert named[12] == "gradient.0.layers.1.weight"
    assert {"loss", "state.meter.accuracy.correct", "hooks.patient.steps"} <= set(named)
    assert not any(name.startswith("hooks.metrics") for name in named)
    assert "metrics.accuracy" in steps[2, 0]


def test_equal_runs_have_equal_traces_and_others_have_not(tmp_path: Path) -> None:
    one, same, other = (
        trace(tmp_path / "1"),
        trace(tmp_path / "2"),
        trace(tmp_path / "3", "RUN.seed=1"),
    )
    assert one.steps == same.steps
    assert one.steps[0, 1]["batch.0.ids"] != other.steps[0, 1]["batch.0.ids"]
