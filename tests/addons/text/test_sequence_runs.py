"""Runs of sequence-to-sequence models: batches by length, weights by tokens, decoded error rates,
with kills and other world sizes."""

import json
from pathlib import Path

import pytest
import torch
from harness import newest, records
from processes import Launcher
from raising import raises

from phasetrain.app.api import run
from phasetrain.errors import ConfigError
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.build import build_run

BUCKETS = "DATA.TRAIN.sampler={name: length_bucketed, pool: 2, max_tokens: 64}"
WORDS = (
    "RUN.imports=[sequence_parts]",
    "TASK.name=sequence_to_sequence",
    "DATA.TRAIN={dataset: reversed_tokens, collate: pad, batch_size: 12, transforms: []}",
    "DATA.TRAIN.drop_last=false",
    "DATA.TEST={dataset: reversed_tokens, collate: pad, batch_size: 12}",
    BUCKETS,
    "MODEL.name=double_gru",
    "METERS={loss: {}, accuracy: {}, per: {name: token_error_rate},"
    " wer: {name: sequence_error_rate}}",
    "OPTIMIZER.lr=0.5",
    "PHASES.epochs=2",
    "HOOKS.console=null",
    "HOOKS.metrics.every_updates=1",
    "MACHINE.threads=1",
)


def weights(folder: Path) -> torch.Tensor:
    state = newest(folder).state["task"]["model"]
    return torch.cat([state[name].flatten() for name in sorted(state)])


def measures(folder: Path) -> list[dict[str, float]]:
    return [record["metrics"] for record in records(folder) if record["kind"] == "phase"]


@pytest.mark.feature(
    "sequence_to_sequence",
    "sequence to sequence: token weights, decoding, error rates over several references",
    "`TASK.name=sequence_to_sequence`, `token_error_rate`",
)
@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "more",
    [
        ["MODEL={name: seq2seq_gru, width: 8, dropout: 0.2}"],
        ["MODEL={name: seq2seq_transformer, width: 8, depth: 1, heads: 2}", "TASK.beams=2"],
        ["MODEL={name: seq2seq_gru, width: 8, depth: 2, dropout: 0.2}", "OPTIMIZER.accumulate=3"],
    ],
    ids=["gru", "transformer and beams", "accumulation"],
)
def test_killed_run_resumes_exactly_with_other_workers(more: list[str]) -> None:
    assert_exact_resume([*WORDS, *more])


def test_plan_counts_the_micro_batches_that_a_limit_of_tokens_makes(tmp_path: Path) -> None:
    model = "MODEL={name: seq2seq_gru, width: 8}"
    run([*WORDS, model, "RUN.engine=plan", "RUN.rehearse=false", f"RUN.dir={tmp_path}"])
    found = json.loads((tmp_path / "plan.json").read_text())["processes"]
    assert found["accumulate"] == 1
    assert found["micro_batches"]["most"] > 1
    assert 1 < found["micro_batches"]["mean"] < found["micro_batches"]["most"]


@pytest.fixture(scope="module")
def whole(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequences") / "run"
    assert launcher.run(folder, 1, *WORDS).codes == [0]
    return folder


class TestWorldSize:
    @pytest.mark.feature("sequence_to_sequence")
    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(
        ("size", "words"),
        [
            (2, []),
            (3, []),
            (1, ["OPTIMIZER.accumulate=4"]),
            (2, ["DATA.TRAIN.sampler={name: length_bucketed, pool: 2}"]),
        ],
        ids=str,
    )
    def test_update_and_error_rates_are_those_of_one_rank(
        self, launcher: Launcher, whole: Path, tmp_path: Path, size: int, words: list[str]
    ) -> None:
        folder = tmp_path / "run"
        done = launcher.run(folder, size, *WORDS, *words)
        assert done.codes == [0] * size, done.outputs
        assert float((weights(folder) - weights(whole)).abs().max()) < 1e-12
        for one, other in zip(measures(folder), measures(whole), strict=True):
            assert one == pytest.approx(other, rel=1e-12)
        assert {"per", "wer"} <= measures(folder)[-1].keys()
        assert "per" not in measures(folder)[0]

    @pytest.mark.slow
    def test_weights_by_samples_are_detected(
        self, launcher: Launcher, whole: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        assert launcher.run(folder, 3, *WORDS, "TASK.name=pairs_by_samples").codes == [0, 0, 0]
        assert float((weights(folder) - weights(whole)).abs().max()) > 1e-4

    @pytest.mark.slow
    @pytest.mark.parametrize("phase", [0, 1])
    def test_stopped_run_resumes_on_another_number_of_ranks(
        self, launcher: Launcher, whole: Path, tmp_path: Path, phase: int
    ) -> None:
        """Phase 1 is a test: its error rates are counted by two ranks and then by three."""
        folder = tmp_path / "run"
        imports = "RUN.imports=[sequence_parts, world_parts]"
        halt = f"HOOKS.halt={{phase: {phase}, step: 2, rank: 1}}"
        assert launcher.run(folder, 2, *WORDS, imports, halt).codes == [143, 143]
        assert newest(folder).manifest.state["phase"] == phase
        assert launcher.run(folder, 3, *WORDS, imports).codes == [0, 0, 0]
        assert float((weights(folder) - weights(whole)).abs().max()) < 1e-12
        for one, other in zip(measures(folder), measures(whole), strict=True):
            assert one == pytest.approx(other, rel=1e-12)

    @pytest.mark.slow
    def test_stopped_run_of_two_ranks_has_the_same_bits(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        imports = "RUN.imports=[sequence_parts, world_parts]"
        workers = "DATA.TRAIN.workers=1"
        assert launcher.run(tmp_path / "whole", 2, *WORDS, imports).codes == [0, 0]
        folder = tmp_path / "run"
        halt = "HOOKS.halt={phase: 2, step: 1, rank: 1}"
        assert launcher.run(folder, 2, *WORDS, imports, halt).codes == [143, 143]
        assert launcher.run(folder, 2, *WORDS, imports, workers).codes == [0, 0]
        assert torch.equal(weights(folder), weights(tmp_path / "whole"))
        assert measures(folder) == measures(tmp_path / "whole")


def test_limit_of_tokens_needs_native_reduction() -> None:
    with raises(ConfigError, code="config.conflict"):
        build_run([*WORDS, "DISTRIBUTED.reduction=ordered", "DISTRIBUTED.virtual_shards=2"])


@pytest.mark.slow
def test_model_learns_to_write_backwards(tmp_path: Path) -> None:
    done = run(
        [
            *WORDS,
            "MODEL={name: seq2seq_gru, width: 32}",
            "DATA.TRAIN.samples=640",
            "DATA.TRAIN.batch_size=32",
            "DATA.TRAIN.sampler=shuffled",
            "OPTIMIZER={name: adamw, lr: 0.01}",
            "PHASES.epochs=6",
            "PHASES.test_every.epochs=5",
            "PHASES.test_first=true",
            f"RUN.dir={tmp_path}",
        ]
    )
    assert done.last is not None
    rates = [found["per"] for found in measures(tmp_path) if "per" in found]
    assert rates[0] > 0.8
    assert rates[-1] < 0.5
