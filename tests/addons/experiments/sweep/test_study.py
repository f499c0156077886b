"""Optuna's trials; runs are played by a function, which writes what a run leaves behind."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from raising import raises

from phasetrain.addons.experiments.sweep.jobs import Job
from phasetrain.addons.experiments.sweep.override_text import SweepOverrides
from phasetrain.addons.experiments.sweep.study import StudySettings, Trials, make_distribution
from phasetrain.errors import ConfigError

optuna = pytest.importorskip("optuna")

SPACE = (
    "OPTIMIZER.lr=tag(log,interval(0.001,1))",
    "MODEL.width=8,16",
    "A.n=range(1,9,2)",
    "hydra/sweeper=optuna",
)


class Killed(BaseException):
    """What SIGKILL is to a process."""


class Player:
    """Runs what it is given; is killed before run number `killed`, and fails runs with a width in
    `bad`."""

    def __init__(self, job: Job, killed: int | None = None, bad: Sequence[str] = ()) -> None:
        self.job, self.killed, self.bad, self.runs = job, killed, bad, list[list[str]]()

    def __call__(self, runs: Sequence[tuple[int, Sequence[str]]]) -> int:
        for _, words in runs:
            if self.killed is not None and len(self.runs) == self.killed:
                raise Killed
            self.runs.append(list(words))
            self._run(words)
        return 0

    def _run(self, words: Sequence[str]) -> None:
        record = self.job.make_record(words)
        fails = any(word in self.bad for word in words)
        replace(record, exit_code=int(fails)).write(self.job.folder)
        if fails:
            return
        values = dict(word.split("=") for word in words)
        loss = (
            (float(values["OPTIMIZER.lr"]) - 0.1) ** 2
            + int(values["MODEL.width"]) / 100
            + int(values["A.n"]) / 1000
            + int(values.get("RUN.seed", 0)) / 10
        )
        folder = Path(record.folder)
        folder.mkdir(exist_ok=True)
        (folder / "status.json").write_text('{"state": "finished"}')
        line = {
            "kind": "phase",
            "split": "test",
            "epoch": 0,
            "updates": 4,
            "metrics": {"loss": loss},
        }
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def trials(
    folder: Path, *words: str, player: Callable[[Job], Player] = Player
) -> tuple[Trials, Player]:
    folder.mkdir(exist_ok=True)
    job = Job(command=(), fixed=("LOSS=mse",), folder=str(folder), sweep="x", monitor="-test/loss")
    launch = player(job)
    return Trials(SweepOverrides.read([*SPACE, *words]), job, launch), launch


def read_trials(folder: Path) -> list[tuple[dict[str, object], float | None, str]]:
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    study = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))
    return [(one.params, one.value, one.state.name) for one in study.get_trials()]


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp"])
def test_values_lie_in_their_ranges(tmp_path: Path, sampler: str) -> None:
    made, player = trials(
        tmp_path / "a", "hydra.sweeper.n_trials=8", f"hydra.sweeper.sampler={sampler}"
    )
    assert made.run() == 0
    assert len(player.runs) == len({" ".join(run) for run in player.runs}) == 8
    for run in player.runs:
        lr, width, n = (word.partition("=")[2] for word in run)
        assert 0.001 <= float(lr) <= 1
        assert width in ("8", "16")
        assert n in ("1", "3", "5", "7")
    assert {state for _, _, state in read_trials(tmp_path / "a")} == {"COMPLETE"}


@pytest.mark.slow
def test_tpe_finds_better_values_than_it_began_with(tmp_path: Path) -> None:
    made, _ = trials(tmp_path / "a", "hydra.sweeper.n_trials=40")
    made.run()
    above = [
        value - 0.081 for _, value, _ in read_trials(tmp_path / "a")
    ]  # the least loss that can be
    assert sum(above[30:]) < 0.6 * sum(above[:10])  # ten random ones come first


@pytest.mark.by_default("5-3")
@pytest.mark.parametrize("n_jobs", [1, 3])
@pytest.mark.parametrize("killed", [0, 5, 12])
def test_a_killed_sweep_ends_with_the_trials_of_an_unbroken_one(
    tmp_path: Path, n_jobs: int, killed: int
) -> None:
    words = ("hydra.sweeper.n_trials=14", f"hydra.sweeper.n_jobs={n_jobs}", "hydra.sweeper.seed=3")
    trials(tmp_path / "whole", *words)[0].run()
    first, _ = trials(tmp_path / "broken", *words, player=lambda job: Player(job, killed))
    with pytest.raises(Killed):
        first.run()
    trials(tmp_path / "broken", *words)[0].run()
    assert read_trials(tmp_path / "broken") == read_trials(tmp_path / "whole")
    other = ("hydra.sweeper.n_trials=14", f"hydra.sweeper.n_jobs={n_jobs}", "hydra.sweeper.seed=4")
    trials(tmp_path / "other", *other)[0].run()
    assert read_trials(tmp_path / "other") != read_trials(tmp_path / "whole")


def test_value_of_a_trial_is_the_mean_over_its_seeds(tmp_path: Path) -> None:
    words = ("hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=2", "RUN.seed=seeds(3)")
    made, player = trials(tmp_path / "seeds", *words)
    assert made.run() == 0
    assert [run[-1] for run in player.runs] == ["RUN.seed=0", "RUN.seed=1", "RUN.seed=2"] * 2
    trials(tmp_path / "one", *words[:2])[0].run()
    found = read_trials(tmp_path / "seeds")
    assert [set(params) for params, _, _ in found] == [{"OPTIMIZER.lr", "MODEL.width", "A.n"}] * 2
    # the seeds 0, 1 and 2 add 0.1 on average
    for (params, value, _), (alone, value_alone, _) in zip(
        found, read_trials(tmp_path / "one"), strict=True
    ):
        assert params == alone
        assert value_alone is not None
        assert value == pytest.approx(value_alone + 0.1)


def test_trial_with_a_failed_seed_fails_and_is_repeated(tmp_path: Path) -> None:
    words = ("hydra.sweeper.n_trials=1", "RUN.seed=0,1")
    trials(tmp_path / "a", *words, player=lambda job: Player(job, bad=["RUN.seed=1"]))[0].run()
    assert [state for _, _, state in read_trials(tmp_path / "a")] == ["FAIL"]
    trials(tmp_path / "a", *words)[0].run()
    assert [state for _, _, state in read_trials(tmp_path / "a")] == ["FAIL", "COMPLETE"]


def test_sweep_of_seeds_alone_leaves_a_sampler_nothing_to_choose(tmp_path: Path) -> None:
    with raises(ConfigError, code="sweep.nothing_swept"):
        Trials(
            SweepOverrides.read(["hydra/sweeper=optuna", "RUN.seed=seeds(3)"]),
            Job((), (), str(tmp_path), "x", "-test/loss"),
            lambda runs: 0,
        )


def test_the_same_command_again_runs_nothing_and_more_trials_go_on(tmp_path: Path) -> None:
    trials(tmp_path / "a", "hydra.sweeper.n_trials=4")[0].run()
    again, player = trials(tmp_path / "a", "hydra.sweeper.n_trials=4")
    assert again.run() == 0
    assert player.runs == []
    more, player = trials(tmp_path / "a", "hydra.sweeper.n_trials=6")
    more.run()
    assert len(player.runs) == 2
    trials(tmp_path / "six", "hydra.sweeper.n_trials=6")[0].run()
    assert read_trials(tmp_path / "a") == read_trials(tmp_path / "six")


def test_failed_runs_do_not_stop_the_others_and_are_tried_once_more_next_time(
    tmp_path: Path,
) -> None:
    words = ("hydra.sweeper.n_trials=10",)
    first, player = trials(
        tmp_path / "a", *words, player=lambda job: Player(job, bad=["MODEL.width=8"])
    )
    assert first.run() == 0
    failed = [run for run in player.runs if "MODEL.width=8" in run]
    assert len(player.runs) == 10
    assert failed
    assert [state for _, _, state in read_trials(tmp_path / "a")].count("FAIL") == len(failed)
    again, player = trials(tmp_path / "a", *words)
    again.run()
    assert player.runs == failed
    third, player = trials(tmp_path / "a", *words)
    third.run()
    assert player.runs == []


def test_a_launcher_that_cannot_launch_ends_it(tmp_path: Path) -> None:
    made, _ = trials(tmp_path / "a")
    made.launch = lambda runs: 1
    assert made.run() == 1
    assert [state for _, _, state in read_trials(tmp_path / "a")] == ["RUNNING"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a=interval(0.5,2)", optuna.distributions.FloatDistribution(0.5, 2)),
        ("a=tag(log,interval(1e-4,1))", optuna.distributions.FloatDistribution(1e-4, 1, log=True)),
        ("a=int(interval(1,8))", optuna.distributions.IntDistribution(1, 8)),
        ("a=tag(log,int(interval(1,8)))", optuna.distributions.IntDistribution(1, 8, log=True)),
        ("a=range(1,10,4)", optuna.distributions.IntDistribution(1, 9, step=4)),
        ("a=range(0.0,1.0,0.25)", optuna.distributions.FloatDistribution(0.0, 0.75, step=0.25)),
        ("a=1,2,x", optuna.distributions.CategoricalDistribution(["1", "2", "x"])),
        ("a=choice(true,b)", optuna.distributions.CategoricalDistribution(["True", "b"])),
    ],
)
def test_what_a_word_lets_optuna_choose_from(word: str, expected: object) -> None:
    assert make_distribution(SweepOverrides.read([word]).swept[0]) == expected


@pytest.mark.parametrize(
    ("words", "given", "suggestion"),
    [
        (["hydra.sweeper.n_trial=3"], "hydra.sweeper.n_trial=3: ", "n_trials"),
        (["hydra.sweeper.n_trials=0"], "hydra.sweeper.n_trials = 0: ", ""),
        (["hydra.sweeper.n_trials=many"], "hydra.sweeper.n_trials=many: ", ""),
        (["hydra.sweeper.sampler=tp"], "hydra.sweeper.sampler = 'tp': ", "tpe"),
    ],
)
def test_invalid_settings_are_rejected(words: list[str], given: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StudySettings.read(SweepOverrides.read(["hydra/sweeper=optuna", *words]).sweeper_words)
    assert str(caught.value).startswith(given)
    assert caught.value.problems[0].suggestion == suggestion


def test_settings_are_read_from_the_overrides() -> None:
    words = [
        "hydra.sweeper.n_trials=7",
        "hydra.sweeper.monitor=-test/loss",
        "hydra.sweeper.options.multivariate=true",
    ]
    found = StudySettings.read(SweepOverrides.read(words).sweeper_words)
    assert found == StudySettings(n_trials=7, monitor="-test/loss", options={"multivariate": True})


def test_what_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Trials(
            SweepOverrides.read(["hydra/sweeper=optuna"]),
            Job((), (), str(tmp_path), "x", "-test/loss"),
            lambda runs: 0,
        )
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.monitor"):
        Trials(SweepOverrides.read(SPACE), Job((), (), str(tmp_path), "x"), lambda runs: 0)
    with pytest.raises(ConfigError, match=r"hydra.sweeper.options = .*no_such"):
        trials(tmp_path / "a", "hydra.sweeper.options.no_such=1")[0].run()
    trials(tmp_path / "b", "hydra.sweeper.n_trials=1")[0].run()
    with pytest.raises(ConfigError, match="'-test/loss'"):
        trials(tmp_path / "b", "hydra.sweeper.monitor=test/accuracy")[0].run()
    with pytest.raises(ConfigError, match=r"A\.more"):
        trials(tmp_path / "b", "A.more=1,2")[0].run()
    with pytest.raises(ConfigError, match=r"a=interval\(2,1\)"):
        make_distribution(SweepOverrides.read(["a=interval(2,1)"]).swept[0])


def test_a_journal_whose_last_line_is_torn_goes_on(tmp_path: Path) -> None:
    words = ("hydra.sweeper.n_trials=5",)
    trials(tmp_path / "whole", *words)[0].run()
    trials(tmp_path / "torn", "hydra.sweeper.n_trials=3")[0].run()
    path = tmp_path / "torn/study.journal"
    path.write_bytes(path.read_bytes()[:-20])
    made, player = trials(tmp_path / "torn", *words)
    assert made.run() == 0
    assert len(player.runs) == 3  # the last one was not told, and is asked for its result again
    assert read_trials(tmp_path / "torn") == read_trials(tmp_path / "whole")


@pytest.mark.parametrize("content", ["garbage\n", '{"op_code": 99}\n', "\x00\n"])
def test_a_journal_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/study.journal").write_text(content)
    with pytest.raises(ConfigError, match=r"study\.journal"):
        trials(tmp_path / "a")[0].run()


def test_a_run_that_is_in_use_elsewhere_leaves_its_trial_open(tmp_path: Path) -> None:
    made, _ = trials(tmp_path / "a", "hydra.sweeper.n_trials=3")

    def in_use(runs: Sequence[tuple[int, Sequence[str]]]) -> int:
        for _, words in runs:
            replace(made.job.make_record(words), exit_code=4).write(made.job.folder)
        return 0

    made.launch = in_use
    assert made.run() == 4
    assert [state for _, _, state in read_trials(tmp_path / "a")] == ["RUNNING"]
