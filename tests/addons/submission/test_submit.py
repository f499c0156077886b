"""A run submits itself: what is checked before, what SLURM is asked for, and what a task of the job
does."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from raising import raises

from phasetrain.addons.submission import submit
from phasetrain.addons.submission.submit import Training, job_environment, job_overrides
from phasetrain.app.setup import resolve_config
from phasetrain.cli import main
from phasetrain.cli.main import format_error, record_failure
from phasetrain.errors import ConfigError, PeerError

submitit = pytest.importorskip("submitit")

SBATCH = """#!/bin/sh
cp "$1" "$0.script"
{ending}
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return the function that puts an sbatch before all others; it returns where the script that
    it gets is kept."""

    def put(ending: str = "echo Submitted batch job 4711") -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, text in (("sbatch", SBATCH.format(ending=ending)), ("srun", "#!/bin/sh\n")):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder / "sbatch.script"

    return put


class TestSubmission:
    def test_a_job_is_not_supervised(self, sbatch: Callable[..., Path]) -> None:
        script = sbatch()
        words = ["LAUNCH.cluster=slurm", "LAUNCH.supervise=true", "RUN.dir=out"]
        with raises(ConfigError, key="LAUNCH.supervise"):
            submit.submit(resolve_config(words))
        assert not script.exists()

    def test_slurm_is_asked_for_what_the_section_says(
        self, sbatch: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script = sbatch()
        asked = (
            "LAUNCH={cluster: slurm, nodes: 2, processes: 4, cpus: 6, gpus: 4, memory: 64, partition: big, account: us,"
            " qos: high, minutes: 240, lead_seconds: 300, parameters: {constraint: a100, setup: [module load cuda]}}"
        )
        assert main([asked, "RUN.dir=out", "RUN.name=digits", "PHASES.epochs=2"]) == 0
        lines = script.read_text().splitlines()
        for line in (
            "--job-name=digits",
            "--nodes=2",
            "--ntasks-per-node=4",
            "--cpus-per-task=6",
            "--gpus-per-node=4",
            "--mem=64GB",
            "--partition=big",
            "--account=us",
            "--qos=high",
            "--time=240",
            "--signal=USR2@300",
            "--constraint=a100",
            "--open-mode=append",
        ):
            assert f"#SBATCH {line}" in lines
        assert lines.index("module load cuda") < next(
            n for n, line in enumerate(lines) if line.startswith("srun ")
        )
        told = [line[9:] for line in capsys.readouterr().out.splitlines()]
        assert told == [
            "submitted as job 4711 (slurm, 2 x 4 processes, 240 minutes)",
            f"output: tail -F {tmp_path}/out/launch/4711_0_log.out",
            "state of the run: out/status.json",
            "state of the job: squeue -j 4711; to stop it: scancel 4711",
        ]
        assert sorted(path.name for path in Path("out").iterdir()) == ["launch"]
        job = submitit.core.utils.DelayedSubmission.load(tmp_path / "out/launch/4711_submitted.pkl")
        assert job.function.words == ("RUN.dir=out", "RUN.name=digits", "PHASES.epochs=2")
        assert job._timeout_countdown == 3

    def test_job_rejected_by_the_cluster_is_reported(
        self, sbatch: Callable[..., Path], capsys: pytest.CaptureFixture[str]
    ) -> None:
        sbatch("echo invalid partition specified >&2; exit 1")
        assert main(["LAUNCH.cluster=slurm", "RUN.dir=out"]) == 1
        told = capsys.readouterr().err
        assert "LAUNCH.cluster = 'slurm'" in told
        assert "invalid partition specified" in told

    def test_invalid_config_is_rejected_before_submission(
        self, sbatch: Callable[..., Path], capsys: pytest.CaptureFixture[str]
    ) -> None:
        script = sbatch()
        few = [
            "LAUNCH={cluster: local, nodes: 2, minutes: 1, lead_seconds: 60}",
            "OPTIMIZER.accumulate=7",
        ]
        assert main(few) == 2
        told = capsys.readouterr().err
        assert told.startswith("3 problems in the config:")
        assert "LAUNCH.lead_seconds = 60 and LAUNCH.minutes = 1" in told
        assert "LAUNCH.cluster = 'local' and LAUNCH.nodes = 2" in told
        assert main(["LAUNCH.cluster=slurm", "LAUNCH.processes=5"]) == 2
        assert "1 x 64 samples" in capsys.readouterr().err
        assert main(["LAUNCH.cluster=slurm", "LAUNCH.partion=big"]) == 2
        assert "LAUNCH.partition" in capsys.readouterr().err
        assert main(["LAUNCH.cluster=slurm", "LAUNCH.parameters.constrain=a100"]) == 2
        assert "'constrain'" in capsys.readouterr().err
        assert not script.exists()

    @pytest.mark.parametrize(
        "variables", [{"WORLD_SIZE": "1", "RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "2"}]
    )
    def test_submission_by_several_processes_is_rejected(
        self,
        variables: dict[str, str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        for key, value in variables.items():
            monkeypatch.setenv(key, value)
        assert main(["LAUNCH.cluster=local"]) == 2
        assert "torchrun" in capsys.readouterr().err

    def test_missing_slurm_is_rejected(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PATH", str(Path.cwd()))
        assert main(["LAUNCH.cluster=slurm"]) == 2
        assert "LAUNCH.cluster=local" in capsys.readouterr().err

    def test_missing_submitit_is_rejected(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "submitit", None)
        assert main(["LAUNCH.cluster=slurm"]) == 2
        assert "pip install 'phasetrain[cluster]'" in capsys.readouterr().err

    def test_logs_need_a_file_system(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["LAUNCH.cluster=local", "RUN.dir=s3://bucket/run"]) == 2
        assert "LAUNCH.folder = null and RUN.dir = 's3://bucket/run'" in capsys.readouterr().err

    @pytest.mark.parametrize("word", ["LAUNCH.cluster=debug", "RUN.engine=plan"])
    def test_plan_and_debug_run_locally(
        self, word: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        short = ["PHASES.epochs=1", "PHASES.limit.train=1", "PHASES.limit.test=1"]
        assert (
            main(["LAUNCH.cluster=slurm", "LAUNCH.processes=7", *short, word, "RUN.dir=out"]) == 0
        )
        out = capsys.readouterr().out
        assert "submitted as job" not in out
        assert ("LAUNCH.cluster = debug: " in out) == (word == "LAUNCH.cluster=debug")
        assert Path("out/plan.json").exists()


class TestWords:
    def test_the_section_stays_here(self) -> None:
        given = [
            "LAUNCH.cluster=slurm",
            "+LAUNCH.nodes=2",
            "~LAUNCH.qos",
            "PHASES.epochs=2",
            "RUN.dir=out",
        ]
        assert job_overrides(resolve_config(given)) == ["PHASES.epochs=2", "RUN.dir=out"]

    def test_the_folder_is_that_of_the_submission(self) -> None:
        setup = resolve_config(["LAUNCH.cluster=local", "PHASES.epochs=2"])
        assert job_overrides(setup) == ["PHASES.epochs=2", f"RUN.dir={setup.config.RUN.dir}"]
        assert setup.config.RUN.dir == resolve_config(["PHASES.epochs=2"]).config.RUN.dir

    def test_a_file_that_asks_for_a_cluster_does_not_submit_again(self) -> None:
        Path("my/experiment").mkdir(parents=True)
        Path("my/experiment/far.yaml").write_text(
            "PHASES: {epochs: 1}\nDATA: {TRAIN: {dataset: digits}}\n"
            "LAUNCH: {cluster: slurm, nodes: 2}\n"
        )
        given = ["experiment=far", "RUN.dir=out"]
        assert job_overrides(resolve_config(given, config_dir="my")) == [
            *given,
            "LAUNCH.cluster=null",
        ]


class TestFolders:
    """Commands on a folder that submit themselves."""

    SHORT = ("PHASES.epochs=1", "PHASES.limit.train=1", "PHASES.limit.test=1", "RUN.dir=out")

    def words_of_job(self) -> tuple[str, ...]:
        job = submitit.core.utils.DelayedSubmission.load(Path("out/launch/4711_submitted.pkl"))
        words: tuple[str, ...] = job.function.words
        return words

    def test_resume_is_the_command_of_the_job(self, sbatch: Callable[..., Path]) -> None:
        sbatch()
        main([*self.SHORT])
        changes = ["PHASES.epochs=2", "RUN.allow=[PHASES.epochs]"]
        assert main(["resume", "out", *changes, "LAUNCH.cluster=slurm", "LAUNCH.minutes=9"]) == 0
        assert self.words_of_job() == ("resume", "out", *changes, "LAUNCH.cluster=null")
        assert main([*self.words_of_job()]) == 0
        state = json.loads(Path("out/status.json").read_text())
        assert (state["state"], state["updates"], state["attempt"]) == ("finished", 2, 2)

    def test_restart_keeps_the_folder_before_the_job_starts(
        self, sbatch: Callable[..., Path]
    ) -> None:
        sbatch()
        main([*self.SHORT])
        assert main(["--restart", *self.SHORT, "LAUNCH.cluster=slurm"]) == 0
        assert Path("out.1/status.json").exists()
        assert [path.name for path in Path("out").iterdir()] == ["launch"]
        assert self.words_of_job() == (*self.SHORT, "RUN.resume=auto")
        for _ in range(2):  # a requeued job does not start over
            assert main([*self.words_of_job()]) == 0
        assert sorted(path.name for path in Path().glob("out*")) == ["out", "out.1"]


def job_of(monkeypatch: pytest.MonkeyPatch, **variables: str) -> submitit.JobEnvironment:
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    return submitit.JobEnvironment()


class TestEnvironment:
    SLURM = {
        "SUBMITIT_EXECUTOR": "slurm",
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": "8",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "gpu[007-008]",
        "SLURM_NODEID": "1",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_CPUS_PER_TASK": "6",
    }

    def test_of_slurm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = {
            "HOME": "/home/me",
            "RANK": "3",
            "MASTER_PORT": "1",
            "TORCHELASTIC_RUN_ID": "x",
            **self.SLURM,
        }
        found = job_environment(job_of(monkeypatch, **self.SLURM), before)
        assert {key: value for key, value in found.items() if key not in self.SLURM} == {
            "HOME": "/home/me",
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "gpu007",
            "MASTER_PORT": "22977",
            "OMP_NUM_THREADS": "6",
        }

    def test_of_a_local_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        variables = {
            "JOB_ID": "321",
            "NTASKS": "3",
            "JOB_NUM_NODES": "1",
            "NODEID": "0",
            "GLOBALID": "2",
            "LOCALID": "2",
        }
        local = {f"SUBMITIT_LOCAL_{key}": value for key, value in variables.items()}
        found = job_environment(
            job_of(monkeypatch, SUBMITIT_EXECUTOR="local", **local), {"OMP_NUM_THREADS": "4"}
        )
        assert found == {
            "RANK": "2",
            "WORLD_SIZE": "3",
            "LOCAL_RANK": "2",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "12247",
            "OMP_NUM_THREADS": "4",
        }

    def test_one_process_is_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        job = job_of(
            monkeypatch,
            SUBMITIT_EXECUTOR="local",
            SUBMITIT_LOCAL_NTASKS="1",
            SUBMITIT_LOCAL_JOB_ID="321",
        )
        assert job_environment(job, {"A": "b", "WORLD_SIZE": "1"}) == {"A": "b"}


class TestTraining:
    """Of a task: the program that it starts is a small one here."""

    STOPS = (
        "import pathlib, signal, sys, time\n"
        "def stop(*_):\n"
        "    time.sleep(0.3)\n"  # saving
        "    pathlib.Path('saved').write_text('')\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "pathlib.Path('ready').write_text('')\n"
        "time.sleep(60)\n"
    )

    @pytest.fixture(autouse=True)
    def _a_task(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(submit, "SECOND_SIGNAL_SECONDS", 0.0)
        for key, value in {"EXECUTOR": "local", "LOCAL_NTASKS": "2", "LOCAL_JOB_ID": "321"}.items():
            monkeypatch.setenv(f"SUBMITIT_{key}", value)

    def training(self, program: str) -> Training:
        Path("program.py").write_text(program)
        return Training(("a", "b"), (sys.executable, "program.py"))

    def signalled(self, action: Callable[[], object]) -> threading.Thread:
        def wait() -> None:
            while not Path("ready").exists():
                threading.Event().wait(0.02)
            action()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def test_words_and_environment_arrive(self) -> None:
        one = self.training(
            "import os, sys; open('out', 'w').write(f'{sys.argv[1:]} {os.environ[\"WORLD_SIZE\"]}')"
        )
        assert one() == 0
        assert Path("out").read_text() == "['a', 'b'] 2"

    @pytest.mark.parametrize(
        ("ending", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)]
    )
    def test_exit_codes_are_those_of_the_run(self, ending: str, code: int) -> None:
        with pytest.raises(SystemExit) as ended:
            self.training(f"import os, sys; {ending}")()
        assert ended.value.code == code

    def test_a_sigterm_is_passed_on(self) -> None:
        thread = self.signalled(lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit) as ended:
            self.training(self.STOPS)()
        thread.join()
        assert ended.value.code == 143
        assert Path("saved").exists()

    def test_of_several_processes_only_the_main_one_ends_with_the_code_of_the_signal(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SUBMITIT_LOCAL_GLOBALID", "1")
        thread = self.signalled(lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert self.training(self.STOPS)() == 143
        thread.join()

    def test_a_checkpoint_waits_until_the_run_has_saved(self) -> None:
        one, found = self.training(self.STOPS), []

        def preempted(*_: object) -> None:
            found.extend([one.checkpoint(), Path("saved").exists()])

        before = signal.signal(
            signal.SIGUSR2, preempted
        )  # as submitit does, while the task waits for its process
        try:
            thread = self.signalled(lambda: os.kill(os.getpid(), signal.SIGUSR2))
            with pytest.raises(SystemExit):
                one()
            thread.join()
        finally:
            signal.signal(signal.SIGUSR2, before)
        delayed, saved = found
        assert saved
        assert (delayed.function.words, delayed.function.command) == (one.words, one.command)

    def test_a_checkpoint_before_the_start(self) -> None:
        assert self.training("").checkpoint().function.words == ("a", "b")


class TestWhatAProcessTells:
    OF_TORCHRUN = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    OF_SRUN = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "7"}

    @pytest.mark.parametrize(
        ("rank", "environment"),
        [
            (0, {}),
            (0, {**OF_TORCHRUN, "RANK": "0"}),
            (2, {**OF_TORCHRUN, "RANK": "2"}),
            (0, {**OF_SRUN, "SLURM_PROCID": "0"}),
            (2, {**OF_SRUN, "SLURM_PROCID": "2"}),
        ],
    )
    def test_the_main_one_tells_of_others(self, rank: int, environment: dict[str, str]) -> None:
        own, other = ConfigError("LOSS.name"), PeerError("rank 1 of 3 failed first: OSError")
        own.add_note("a note")
        if rank == 0:
            assert format_error(own, environment) == "LOSS.name\na note\n"
            assert format_error(other, environment) == "rank 1 of 3 failed first: OSError\n"
        else:
            assert format_error(own, environment) == "rank 2 of 3: LOSS.name\na note\n"
            assert format_error(other, environment) == ""

    def test_where_the_place_itself_is_wrong(self) -> None:
        assert (
            format_error(ConfigError("WORLD_SIZE = 2"), {"WORLD_SIZE": "2"}) == "WORLD_SIZE = 2\n"
        )

    def test_the_file_for_torchrun_is_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(Path.cwd() / "error.json"))
        record_failure(ConfigError("LOSS.name"))
        assert os.environ["TORCHELASTIC_ERROR_FILE"] == str(Path.cwd() / "error.json")
        assert (
            json.loads(Path("error.json").read_text())["message"]["message"]
            == "ConfigError: LOSS.name"
        )
        assert [path.name for path in Path.cwd().iterdir()] == ["error.json"]
