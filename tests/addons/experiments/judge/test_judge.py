"""From contenders to verdicts, with runs that take no time."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_runs import FakeRuns, cached_facts
from omegaconf import OmegaConf
from raising import raises

from phasetrain.addons.experiments.judge.bits import compare_bits
from phasetrain.addons.experiments.judge.contenders import parse_contenders
from phasetrain.addons.experiments.judge.facts import Order
from phasetrain.addons.experiments.judge.judge import JudgeOptions, judge
from phasetrain.addons.experiments.judge.judgement import UNDECIDED_CODE, WORSE_CODE, Judgement
from phasetrain.addons.experiments.judge.processes import WorkingFolder
from phasetrain.addons.experiments.judge.trained_runs import TrainedRun
from phasetrain.errors import ConfigError, PhasetrainError
from phasetrain.runs.view import RunView

WORSE = "digits OPTIMIZER.lr=0.5"
CLOSE = "digits OPTIMIZER.lr=0.11"
WORKERS = "digits DATA.TRAIN.workers=1"


def judge_quietly(runs: FakeRuns, *words: str, **settings: Any) -> Judgement:
    return judge(words, JudgeOptions(**{"short": 4} | settings), launch=runs, say=lambda line: None)


def verdicts(found: Judgement) -> list[str]:
    return [str(trial.verdict) for trial in found.trials]


def finish_run(runs: FakeRuns, folder: str, *words: str) -> None:
    """Write a finished run that judge has not made, with the config of some words."""
    runs.write_run(Path(folder), dict(word.split("=", 1) for word in words))
    config = cached_facts(Order(("experiment=digits", *words))).config
    Path(folder, "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(dict(config))))


class TestIdentical:
    @pytest.mark.feature(
        "judge",
        "a change is proved harmless by a short run, or judged better, worse or no different by "
        "paired seeds and a sequential test with a stated error rate; runs, configs, revisions",
        "`phasetrain judge`",
    )
    def test_short_runs_prove_as_many_updates_as_they_have(self, runs: FakeRuns) -> None:
        found = judge_quietly(runs, "digits", WORKERS)
        (trial,) = found.trials
        assert verdicts(found) == ["identical"]
        assert trial.bits is not None
        assert (trial.bits.updates, trial.is_whole, trial.pairs) == (4, False, [])
        assert found.exit_code == 0
        assert [words[-1] for words in runs.launched] == ["RUN.verbosity=quiet"] * 2
        assert all("RUN.pause_at=4" in words for words in runs.launched)
        assert "identical for 4 updates with seed 0" in found.text
        assert "--full" in found.text

    def test_full_compares_whole_runs(self, runs: FakeRuns) -> None:
        found = judge_quietly(runs, "digits", WORKERS, is_full=True)
        (trial,) = found.trials
        assert trial.bits is not None
        assert (verdicts(found), trial.bits.updates, trial.is_whole) == (["identical"], 10, True)
        assert len(runs.launched) == 4

    def test_config_that_may_act_later_is_compared_in_whole_runs(self, runs: FakeRuns) -> None:
        found = judge_quietly(runs, "digits", "digits PHASES.epochs=2", most_pairs=1)
        (trial,) = found.trials
        assert trial.changes == ["PHASES.epochs"]
        assert trial.bits is not None
        assert (trial.bits.update, trial.is_whole) == (9, True)
        assert verdicts(found) == ["undecided"]

    def test_negative_control_another_learning_rate_differs_in_its_first_update(
        self, runs: FakeRuns
    ) -> None:
        (trial,) = judge_quietly(runs, "digits", CLOSE, most_pairs=1).trials
        assert trial.bits is not None
        assert (trial.bits.update, trial.bits.component) == (1, "lr")
        assert not trial.is_identical

    def test_identical_whole_runs_of_other_keys_are_identical(self, runs: FakeRuns) -> None:
        found = judge_quietly(runs, "digits", "digits OPTIMIZER.nesterov=false", short=0)
        assert (verdicts(found), found.trials[0].is_whole) == (["identical"], True)

    def test_metric_that_only_one_measures_is_named_and_does_not_count(
        self, runs: FakeRuns
    ) -> None:
        found = judge_quietly(runs, "digits", "digits METERS.loss=null", short=0)
        assert (verdicts(found), found.exit_code) == (["identical"], 0)
        assert found.trials[0].bits is not None
        assert found.trials[0].bits.unshared == ("test/loss",)
        assert "test/loss" in found.text

    def test_other_value_of_a_metric_that_both_measure_counts(
        self, runs: FakeRuns, tmp_path: Path
    ) -> None:
        runs.write_run(tmp_path / "a", {})
        runs.write_run(tmp_path / "b", {"METERS.loss": "null"})
        path = tmp_path / "b" / "metrics.jsonl"
        path.write_text(path.read_text().replace('"size": 1.0', '"size": 1.5'))
        views = [RunView(tmp_path / name) for name in ("a", "b")]
        bits = compare_bits(*(TrainedRun(view, 0) for view in views))
        assert (bits.component, bits.unshared) == ("metrics", ())


class TestPairs:
    @pytest.mark.feature("judge")
    def test_worse_candidate(self, runs: FakeRuns) -> None:
        found = judge_quietly(runs, "digits", WORSE)
        (trial,) = found.trials
        assert verdicts(found) == ["worse"]
        assert [pair.baseline.seed for pair in trial.pairs] == [0, 1, 2]
        assert trial.pairs[0].difference == pytest.approx(-0.16, abs=0.01)
        assert found.exit_code == WORSE_CODE
        assert found.updates == 2 * 4 + 6 * 10

    def test_better_by_a_metric_of_which_smaller_values_are_better(self, runs: FakeRuns) -> None:
        lower = "digits OPTIMIZER.lr=0.05"
        found = judge_quietly(runs, "digits", lower, metric="-test/loss")
        assert verdicts(found) == ["better"]
        assert found.trials[0].pairs[0].difference == pytest.approx(-0.05)
        assert "mean difference -0.05" in found.text

    def test_direction_is_found_by_the_name_of_the_metric(self, runs: FakeRuns) -> None:
        found = judge_quietly(runs, "digits", "digits OPTIMIZER.lr=0.05", metric="test/loss")
        assert verdicts(found) == ["better"]

    def test_no_difference_larger_than_d(self, runs: FakeRuns) -> None:
        found = judge_quietly(runs, "digits", CLOSE, margin=0.05)
        assert verdicts(found) == ["no difference larger than d"]
        assert found.exit_code == 0
        assert "no difference larger than 0.05 after 3 pairs" in found.text

    def test_undecided_at_the_cap_continues_with_a_larger_one(self, runs: FakeRuns) -> None:
        found = judge_quietly(runs, "digits", WORSE, most_pairs=2)
        assert (verdicts(found), found.exit_code) == (["undecided"], UNDECIDED_CODE)
        before = len(runs.launched)
        assert verdicts(judge_quietly(runs, "digits", WORSE)) == ["worse"]
        assert len(runs.launched) - before == 2

    def test_same_call_again_trains_nothing(self, runs: FakeRuns) -> None:
        before = judge_quietly(runs, "digits", WORSE)
        count = len(runs.launched)
        again = judge_quietly(runs, "digits", WORSE)
        assert len(runs.launched) == count
        assert again.to_json() == before.to_json() | {"runs_trained": 0}

    def test_failed_run_is_named_and_the_same_call_continues(self, runs: FakeRuns) -> None:
        runs.left = 3
        with raises(PhasetrainError, code="judge.run_failed") as caught:
            judge_quietly(runs, "digits", WORSE)
        assert "out of memory" in str(caught.value)
        runs.left = None
        assert verdicts(judge_quietly(runs, "digits", WORSE)) == ["worse"]
        assert len(runs.launched) == 2 + 6

    def test_baseline_is_trained_once_for_all_candidates(self, runs: FakeRuns) -> None:
        found = judge_quietly(runs, "digits", WORSE, CLOSE, most_pairs=4)
        assert verdicts(found) == ["worse", "undecided"]
        assert found.rule.error_rate == 0.025
        assert [len(trial.pairs) for trial in found.trials] == [4, 4]
        assert found.exit_code == WORSE_CODE
        count = len(runs.launched)
        judge_quietly(runs, "digits", "digits OPTIMIZER.lr=0.4")
        new = runs.launched[count:]
        assert all("OPTIMIZER.lr=0.4" in words for words in new)

    def test_json_holds_the_evidence(self, runs: FakeRuns) -> None:
        content = judge_quietly(runs, "digits", WORSE).to_json()
        assert json.loads(json.dumps(content)) == content
        (candidate,) = content["candidates"]
        assert (content["metric"], content["direction"]) == ("test/accuracy", "larger")
        assert candidate["verdict"] == "worse"
        assert candidate["bits"]["component"] == "lr"
        assert candidate["score"]["count"] == 3
        assert [pair["seed"] for pair in candidate["pairs"]] == [0, 1, 2]


class TestContenders:
    def test_words_for_one_and_for_all(self) -> None:
        transforms = "DATA.TRAIN.transforms=[{name: noise, std: 0.1}]"
        words = ["digits", "experiment=wide MODEL.width=4", "a.yaml 'RUN.note=a b'", transforms]
        found = parse_contenders([*words, "~HOOKS.report"], WorkingFolder())
        shared = (transforms, "~HOOKS.report")
        # Own words come last, where they win.
        assert [one.words for one in found] == [
            ("experiment=digits", *shared),
            ("experiment=wide", *shared, "MODEL.width=4"),
            ("a.yaml", *shared, "RUN.note=a b"),
        ]


class TestFinishedRuns:
    def test_run_with_the_config_and_seed_is_used(self, runs: FakeRuns) -> None:
        finish_run(runs, "runs/mine", "RUN.seed=1")
        found = judge_quietly(runs, "digits", WORSE, short=0)
        folders = [pair.baseline.folder for pair in found.trials[0].pairs]
        assert folders[1] == "runs/mine"
        assert "; reused: 1 finished run" in found.text

    @pytest.mark.parametrize("word", ["OPTIMIZER.lr=0.2", "DATA.TRAIN.batch_size=32"])
    def test_run_with_another_config_is_not_used(self, runs: FakeRuns, word: str) -> None:
        finish_run(runs, "runs/mine", "RUN.seed=1", word)
        found = judge_quietly(runs, "digits", WORSE, short=0)
        assert not any(pair.baseline.is_found for pair in found.trials[0].pairs)

    def test_run_of_another_version_is_not_used(self, runs: FakeRuns) -> None:
        finish_run(runs, "runs/mine", "RUN.seed=1")
        Path("runs/mine/environment.json").write_text('{"torch": "1.0"}')
        found = judge_quietly(runs, "digits", WORSE, short=0)
        assert not any(pair.baseline.is_found for pair in found.trials[0].pairs)

    def test_run_folder_gives_its_config_and_its_result(self, runs: FakeRuns) -> None:
        finish_run(runs, "mine", "RUN.seed=3")
        found = judge_quietly(runs, "mine", "mine OPTIMIZER.lr=0.5", short=0)
        assert verdicts(found) == ["worse"]
        assert found.trials[0].pairs[0].baseline.folder == "mine"
        assert [pair.baseline.seed for pair in found.trials[0].pairs] == [3, 4, 5]
        assert runs.launched[0][:2] == ["rerun", "mine"]


class TestRejected:
    @pytest.mark.parametrize(
        ("words", "settings", "code"),
        [
            (["digits"], {}, "cli.usage"),
            (["digits", "digits"], {}, "judge.named_twice"),
            (["digits", "digits RUN.seed=1"], {}, "judge.own_key"),
            (["digits", "digits2"], {}, "config.unknown_file"),
            (["digits", "runs/none"], {}, "run.not_found"),
            (["digits", WORSE], {"error_rate": 0}, "cli.usage"),
            (["digits", WORSE], {"margin": -1}, "cli.usage"),
            (["digits", WORSE], {"most_pairs": 0}, "cli.usage"),
            (["digits", WORSE], {"metric": "valid/accuracy"}, "judge.no_metric"),
            (["digits", "digits CHECKPOINT.best.monitor=-test/loss"], {}, "judge.other_metric"),
        ],
    )
    def test_before_anything_is_trained(
        self, runs: FakeRuns, words: list[str], settings: dict[str, Any], code: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            judge_quietly(runs, *words, **settings)
        assert code in [problem.code for problem in caught.value.problems]
        assert runs.launched == []
        assert not Path("runs").exists()

    @pytest.mark.parametrize(
        ("file", "content", "code"),
        [
            ("status.json", {"state": "failed"}, "judge.unfinished"),
            ("environment.json", {"torch": "1.0"}, "judge.other_version"),
        ],
    )
    def test_run_folder_that_cannot_be_compared(
        self, runs: FakeRuns, file: str, content: dict[str, str], code: str
    ) -> None:
        finish_run(runs, "mine")
        Path("mine", file).write_text(json.dumps(content))
        with raises(ConfigError, code=code):
            judge_quietly(runs, "mine", WORSE)
        assert runs.launched == []
        judge_quietly(runs, "mine", WORSE, is_fresh=True, most_pairs=1)
        assert runs.launched[0][:2] == ["rerun", "mine"]

    def test_metric_that_no_run_has(self, runs: FakeRuns) -> None:
        with raises(ConfigError, code="judge.no_metric", suggestion="test/accuracy"):
            judge_quietly(runs, "digits", WORSE, metric="test/acuracy")

    def test_metric_that_a_finished_run_has_not_measured(self, runs: FakeRuns) -> None:
        finish_run(runs, "mine")
        with raises(ConfigError, code="judge.no_metric", suggestion="test/accuracy"):
            judge_quietly(runs, "mine", WORSE, metric="test/acuracy")
        assert runs.launched == []

    def test_metric_without_a_direction(self, runs: FakeRuns) -> None:
        with raises(ConfigError, code="judge.no_direction"):
            judge_quietly(runs, "digits", WORSE, metric="test/size")

    def test_other_test_data(self, runs: FakeRuns, monkeypatch: pytest.MonkeyPatch) -> None:
        prints = iter(["aa", "bb"])
        monkeypatch.setattr(
            "phasetrain.addons.experiments.judge.judge.read_promise",
            lambda folder: {"data": {"TEST": next(prints), "TRAIN": "0"}},
        )
        with raises(ConfigError, code="judge.other_data"):
            judge_quietly(runs, "digits", WORSE)
        assert len(runs.launched) == 2  # the short ones

    def test_value_that_is_not_finite(self, runs: FakeRuns) -> None:
        runs.noise = float("nan")
        with raises(ConfigError, code="judge.not_finite"):
            judge_quietly(runs, "digits", WORSE, metric="test/accuracy")
