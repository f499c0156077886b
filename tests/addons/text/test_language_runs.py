"""Runs of language models, also on several ranks: the update weighs tokens, and a resume is exact."""

from pathlib import Path

import pytest
import torch
from harness import newest, records
from processes import Launcher

from phasetrain.app.api import run
from phasetrain.testing import assert_exact_resume

QUIET = ("HOOKS.console=null", "HOOKS.metrics.every_updates=1", "MACHINE.threads=1")
UNIGRAM = 23.48
"""Perplexity of the last two chapters by the frequencies of bytes in the first ten."""

TOKENS = (
    "RUN.imports=[token_parts]",
    "TASK.name=language_model",
    "DATA.TRAIN.dataset=uneven_tokens",
    "DATA.TRAIN.transforms=[]",
    "DATA.TRAIN.batch_size=12",
    "DATA.TRAIN.drop_last=false",
    "DATA.TEST={dataset: uneven_tokens, batch_size: 12}",
    "MODEL.name=double_transformer",
    "METERS={loss: {}, perplexity: {}, accuracy: {}}",
    "OPTIMIZER.lr=0.5",
    "PHASES.epochs=2",
    *QUIET,
)


def weights(folder: Path) -> torch.Tensor:
    state = newest(folder).state["task"]["model"]
    return torch.cat([state[name].flatten() for name in sorted(state)])


def steps(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if record["kind"] == "step"]


def measures(folder: Path) -> list[dict[str, float]]:
    return [record["metrics"] for record in records(folder) if record["kind"] == "phase"]


@pytest.fixture(scope="module")
def whole(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "run"
    assert launcher.run(folder, 1, *TOKENS).codes == [0]
    assert len(steps(folder)) == 6
    return folder


class TestTokensOverProcesses:
    @pytest.mark.feature(
        "62", "loss normalized by tokens over micro-batches and ranks", "`TASK.name=language_model`"
    )
    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(
        ("size", "words"),
        [
            (1, ["OPTIMIZER.accumulate=4"]),
            (2, ["DATA.TRAIN.micro_batch_size=2"]),
            (3, []),
            (2, ["DISTRIBUTED.reduction=ordered", "DISTRIBUTED.virtual_shards=4"]),
        ],
        ids=str,
    )
    def test_the_update_is_that_of_all_tokens_of_a_step(
        self, launcher: Launcher, whole: Path, tmp_path: Path, size: int, words: list[str]
    ) -> None:
        folder = tmp_path / "run"
        done = launcher.run(folder, size, *TOKENS, *words)
        assert done.codes == [0] * size, done.outputs
        assert float((weights(folder) - weights(whole)).abs().max()) < 1e-12
        assert steps(folder) == pytest.approx(steps(whole), rel=1e-12)
        for one, other in zip(measures(folder), measures(whole), strict=True):
            assert one == pytest.approx(other, rel=1e-12)

    @pytest.mark.feature("62")
    @pytest.mark.slow
    def test_mean_of_per_rank_means_is_detected(
        self, launcher: Launcher, whole: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        assert launcher.run(folder, 3, *TOKENS, "TASK.name=by_samples").codes == [0, 0, 0]
        assert float((weights(folder) - weights(whole)).abs().max()) > 1e-3


class TestTextTiny:
    @pytest.mark.feature("language_model")
    @pytest.mark.slow
    def test_it_learns_more_than_frequencies_in_one_epoch(self, tmp_path: Path) -> None:
        done = run(
            [
                "experiment=text_tiny",
                *QUIET,
                "PHASES.epochs=1",
                "OPTIMIZER.lr=2e-3",
                f"RUN.dir={tmp_path}",
            ]
        )
        assert done.last is not None
        assert done.last["test/perplexity"] < 0.9 * UNIGRAM
        first = next(record["loss"] for record in records(tmp_path) if record["kind"] == "step")
        assert first == pytest.approx(5.55, abs=0.1)  # ln 257: all bytes are alike to it

    @pytest.mark.feature(
        "language_model", "language model", "`TASK.name=language_model`, `experiment=text_tiny`"
    )
    def test_resume_is_bit_identical(self) -> None:
        words = (
            "experiment=text_tiny",
            "MODEL={width: 16, depth: 1, heads: 2, dropout: 0.1}",
            "DATA.TRAIN={context: 16, batch_size: 16}",
            "DATA.TEST.context=16",
            "OPTIMIZER.accumulate=2",
        )
        assert_exact_resume([*words, *QUIET], steps=[3], workers=None)

    @pytest.mark.slow
    def test_whole_experiment_reaches_its_metric(self, tmp_path: Path) -> None:
        done = run(["experiment=text_tiny", f"RUN.dir={tmp_path}"])
        assert done.last is not None
        assert done.last["test/perplexity"] < 7
        assert done.last["test/accuracy"] > 0.45
