"""Runs of tasks beyond one output and one target: several heads, losses of the model's own, a
teacher."""

import json
from pathlib import Path

import pytest
import torch
from harness import newest, records
from processes import Launcher
from raising import raises

from phasetrain.app.api import run
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.build import build_run

QUIET = ("HOOKS.console=null", "HOOKS.metrics.every_updates=1", "MACHINE.threads=1")
HEADS = (
    "RUN.imports=[task_parts]",
    "DATA.TRAIN.dataset=marked",
    "DATA.TEST.dataset=marked",
    "MODEL.name=trunk_heads",
    "MODEL.trunk={name: small_cnn, width: 4, dropout: 0.2, cut: head}",
    "MODEL.heads={digit: {name: mlp, hidden: []}, odd: {name: mlp, hidden: [8], classes: 1},"
    " probe: {name: mlp, hidden: [], from: features.2, pool: 4, detach: true}}",
    "LOSS.name=weighted_sum",
    "LOSS.losses={digit: {name: cross_entropy, output: digit, target: digit},"
    " odd: {name: BCEWithLogitsLoss, weight: 0.5, output: odd, target: odd},"
    " probe: {name: cross_entropy, output: probe, target: digit}}",
    "METERS={accuracy: null, loss: {}, digit: {name: accuracy, output: digit, target: digit},"
    " probe: {name: accuracy, output: probe, target: digit}, odd: {name: loss, of: loss_odd}}",
    "PHASES.epochs=1",
    "PHASES.limit.train=6",
    *QUIET,
)


def steps(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if record["kind"] == "step"]


def measures(folder: Path) -> list[dict[str, float]]:
    return [record["metrics"] for record in records(folder) if record["kind"] == "phase"]


@pytest.mark.addon("vision")
class TestSeveralHeads:
    @pytest.mark.feature(
        "70",
        "trunk and heads; losses and meters per output",
        "`MODEL.name=trunk_heads`, `METERS.*.output`, `METERS.*.target`",
    )
    def test_losses_and_meters_of_each_output(self, tmp_path: Path) -> None:
        done = run([*HEADS, f"RUN.dir={tmp_path}"])
        assert done.last is not None
        assert {
            f"{split}/{name}"
            for split in ("train", "test")
            for name in ("digit", "probe", "odd", "loss", "loss_digit", "loss_probe")
        } == set(done.last)
        logged = [record for record in records(tmp_path) if record["kind"] == "step"]
        assert [list(one["logs"]) for one in logged] == [
            ["loss_digit", "loss_odd", "loss_probe"]
        ] * 6
        for one in logged:
            parts = one["logs"]
            expected = parts["loss_digit"] + 0.5 * parts["loss_odd"] + parts["loss_probe"]
            assert one["loss"] == pytest.approx(expected, rel=1e-6)
        facts = json.loads((tmp_path / "plan.json").read_text())["facts"]
        assert facts["MODEL.heads.digit.classes"] == 10
        assert not any("make_" in key for key in facts)

    @pytest.mark.slow
    def test_resumes_are_bit_identical(self) -> None:
        assert_exact_resume(HEADS, steps=[2], workers=None)

    @pytest.mark.slow
    @pytest.mark.addon("observe")
    def test_metrics_of_three_ranks_are_those_of_one(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        words = (*HEADS, "DATA.TRAIN.batch_size=24", "DISTRIBUTED.debug=true")
        done = launcher.run(tmp_path / "run", 3, *words)
        assert done.codes == [0, 0, 0], done.outputs
        alone = run([*words, "RUN.engine=test", f"RUN.dir={tmp_path / 'run'}"])
        assert alone.last is not None
        assert alone.last == pytest.approx(
            {f"test/{name}": value for name, value in measures(tmp_path / "run")[-1].items()},
            rel=1e-5,
        )

    @pytest.mark.parametrize(
        ("word", "suggestion"),
        [
            ("METERS.digit.outptu=digit", "METERS.digit.output"),
            ("LOSS.losses.odd.wieght=2", "LOSS.losses.odd.weight"),
            ("MODEL.heads.odd.fromm=features.2", "MODEL.heads.odd.from"),
            ("MODEL.heads.odd.name=mpl", "mlp"),
        ],
    )
    def test_misspelt_key_is_rejected_with_a_suggestion(self, word: str, suggestion: str) -> None:
        key, _, _ = word.partition("=")
        with raises(ConfigError, key=key, suggestion=suggestion):
            build_run([*HEADS, word])

    @pytest.mark.parametrize(
        ("word", "key", "code"),
        [
            ("LOSS.losses.odd.weight=a", "LOSS.losses.odd.weight", "config.wrong_type"),
            ("LOSS={name: cross_entropy, losses: null}", "LOSS.losses", "config.unknown_parameter"),
            ("MODEL.trunk.cut=hed", "MODEL", "config.rejected_by_part"),
        ],
    )
    def test_value_of_a_head_is_checked(self, word: str, key: str, code: str) -> None:
        with raises(ConfigError, key=key, code=code):
            build_run([*HEADS, word])

    @pytest.mark.parametrize(
        ("word", "key", "suggestion"),
        [
            ("METERS.digit.output=null", "METERS.digit", ""),
            ("METERS.digit.output=dgit", "METERS.digit", "digit"),
            ("LOSS.losses.odd.target=od", "LOSS", "odd"),
        ],
    )
    def test_name_of_an_output_is_checked_before_training(
        self, tmp_path: Path, word: str, key: str, suggestion: str
    ) -> None:
        with raises(ConfigError, key=key, suggestion=suggestion):
            run([*HEADS, word, "RUN.engine=plan", f"RUN.dir={tmp_path}"])


class TestOwnLosses:
    WORDS = (
        "RUN.imports=[task_parts]",
        "MODEL.name=own_loss",
        "LOSS={name: from_model, with_target: true}",
        "METERS={loss: null, accuracy: {output: scores}, size: {name: loss, of: loss_size}}",
        "PHASES.epochs=1",
        "PHASES.limit.train=4",
        *QUIET,
    )

    @pytest.mark.feature(
        "41",
        "losses from the model; named, weighted and summed losses",
        "`LOSS.name=from_model`, `LOSS.name=weighted_sum`, `LOSS.losses`",
    )
    def test_losses_of_the_model_are_summed_and_logged(self, tmp_path: Path) -> None:
        done = run([*self.WORDS, f"RUN.dir={tmp_path}"])
        assert done.last is not None
        names = ("accuracy", "size", "loss_class")
        assert set(done.last) == {
            f"{split}/{name}" for split in ("train", "test") for name in names
        }
        for one in records(tmp_path):
            if one["kind"] == "step":
                assert one["loss"] == pytest.approx(sum(one["logs"].values()), rel=1e-6)


class TestScheduledLoss:
    WORDS = (
        "RUN.imports=[task_parts]",
        "LOSS={name: rising}",
        "METERS={loss: {}, accuracy: null}",
        "PHASES.epochs=2",
        "PHASES.limit={train: 2, test: 2}",
        *QUIET,
    )

    @pytest.mark.feature(
        "loss.advance", "a loss that changes with the progress of the training", "`advance`"
    )
    def test_loss_gets_the_position_of_each_update_and_the_end_in_tests(
        self, tmp_path: Path
    ) -> None:
        run([*self.WORDS, f"RUN.dir={tmp_path}"])
        logged = [one["logs"] for one in records(tmp_path) if one["kind"] == "step"]
        trained = [one for one in logged if one["loss_weight"] < 1]
        assert [one["loss_weight"] for one in trained] == [0.0, 0.25, 0.5, 0.75]
        assert [one["loss_updates"] for one in trained] == [0, 1, 2, 3]
        tests = measures(tmp_path)[1::2]
        assert [(one["loss_weight"], one["loss_updates"]) for one in tests] == [(1, 4), (1, 4)]
        tested = run([*self.WORDS, "RUN.engine=test", f"RUN.dir={tmp_path}"])
        assert tested.last is not None
        assert tested.last["test/loss"] == tests[-1]["loss"]

    @pytest.mark.feature("loss.advance")
    def test_resume_is_bit_identical(self) -> None:
        assert_exact_resume(self.WORDS, workers=None)


class TestNoTargets:
    WORDS = (
        "experiment=digits",
        "RUN.imports=[task_parts]",
        "DATA.TEST.dataset=unmarked",
        "PHASES.epochs=1",
        *QUIET,
    )

    def test_test_without_targets_is_rejected_before_training(self, tmp_path: Path) -> None:
        with raises(ConfigError, key="DATA.TEST"):
            run([*self.WORDS, f"RUN.dir={tmp_path}"])
        assert not (tmp_path / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    run(
        [
            "MODEL={name: small_cnn, width: 8}",
            "PHASES.epochs=1",
            "PHASES.limit.train=8",
            *QUIET,
            f"RUN.dir={folder}",
        ]
    )
    return folder


@pytest.mark.addon("vision")
class TestDistillation:
    def words(self, teacher: Path) -> list[str]:
        return [
            "TASK={name: distillation, temperature: 2, soft_share: 0.75}",
            f"TASK.teacher={{name: small_cnn, width: 8, weights: {teacher}}}",
            "MODEL={name: mlp, hidden: [16], dropout: 0.2}",
            "METERS={accuracy: {}, loss: {}}",
            "PHASES.epochs=1",
            "PHASES.limit.train=4",
            *QUIET,
        ]

    def test_loss_is_weighted_and_teacher_is_not_saved(self, tmp_path: Path, teacher: Path) -> None:
        run([*self.words(teacher), f"RUN.dir={tmp_path}"])
        for one in records(tmp_path):
            if one["kind"] == "step":
                parts = one["logs"]
                assert one["loss"] == pytest.approx(
                    0.75 * parts["loss_soft"] + 0.25 * parts["loss_hard"], rel=1e-6
                )
        state = newest(tmp_path).state["task"]
        assert list(state["teacher"]) == ["digest"]
        assert len(state["teacher"]["digest"]) == 64
        assert all(name.startswith("layers.") for name in state["model"])

    @pytest.mark.feature("distillation", "distillation", "`TASK.name=distillation`")
    def test_resume_is_bit_identical(self, teacher: Path) -> None:
        assert_exact_resume(self.words(teacher), steps=[2], workers=None)

    @pytest.mark.slow
    def test_two_ranks_learn_as_one(
        self, launcher: Launcher, tmp_path: Path, teacher: Path
    ) -> None:
        words = (
            *self.words(teacher),
            "MODEL.dropout=0",
            "DATA.TRAIN.transforms=[]",
            "DATA.TRAIN.batch_size=32",
        )
        for size in (1, 2):
            done = launcher.run(tmp_path / f"on-{size}", size, *words)
            assert done.codes == [0] * size, done.outputs
        assert steps(tmp_path / "on-2") == pytest.approx(steps(tmp_path / "on-1"), rel=1e-4)

    def test_changed_teacher_is_rejected(self, tmp_path: Path, teacher: Path) -> None:
        (tmp_path / "teacher").mkdir()
        torch.save(newest(teacher).state["task"]["model"], tmp_path / "teacher/weights.pt")
        words = self.words(tmp_path / "teacher/weights.pt")
        run([*words, f"RUN.dir={tmp_path / 'run'}"])
        changed = {
            name: one * 1.01
            for name, one in newest(teacher).state["task"]["model"].items()
            if "num_" not in name
        }
        torch.save(changed, tmp_path / "teacher/weights.pt")
        with pytest.raises(ChangedError, match=r"TASK\.teacher\.weights "):
            run(
                [
                    *words,
                    "PHASES.epochs=2",
                    "RUN.allow=[PHASES.epochs]",
                    f"RUN.dir={tmp_path / 'run'}",
                ]
            )
        (tmp_path / "teacher/weights.pt").unlink()
        tested = run([*words, "RUN.engine=test", f"RUN.dir={tmp_path / 'run'}"])
        assert tested.last is not None
        assert tested.last["test/accuracy"] > 0

    @pytest.mark.parametrize(
        ("word", "message"),
        [
            (
                "TASK.teacher.weights=null",
                r"TASK\.teacher\.weights",
            ),
            ("TASK.teacher={name: smal_cnn}", r"TASK\.teacher\.name = 'smal_cnn'"),
            ("TASK.teacher.widht=8", r"TASK\.teacher\.width\b"),
            ("TASK.teacher.width=4", r"TASK\.teacher\.weights"),
            ("TASK.soft_share=2", r"TASK\.soft_share = 2: .* \[0, 1\]"),
            ("TASK.temperature=0", "temperature = 0: "),
            (
                "MODEL.classes=11",
                r"TASK\.teacher \(SmallCNN\): .*\(64, 10\).*\(64, 11\)",
            ),
        ],
    )
    def test_teacher_that_does_not_fit_is_rejected(
        self, tmp_path: Path, teacher: Path, word: str, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            run([*self.words(teacher), word, "RUN.engine=plan", f"RUN.dir={tmp_path}"])
