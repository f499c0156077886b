"""Other numbers of processes: the same samples in the same updates, and tests that count each
sample once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import differences_of_runs, newest, records, status
from processes import Finished, Launcher
from world_parts import read_sample_ids

from phasetrain.runs.ledger import FILE, parse_ledger

# Two epochs of six updates of 24 samples, after each a test of three batches; no dropout and no
# batch norm, whose
# randomness and statistics belong to a process.
WORDS = (
    "RUN.imports=[world_parts]",
    "MACHINE.threads=1",
    "PHASES.epochs=2",
    "PHASES.limit.train=6",
    "PHASES.limit.test=3",
    "DATA.TRAIN.batch_size=24",
    "DATA.TRAIN.transforms=[{name: random_shift, pixels: 1}, {name: noise, std: 0.1}]",
    "DATA.TEST.batch_size=50",
    "MODEL=mlp",
    "METERS.accuracy={}",
    "METERS.seen={}",
    "HOOKS.console=null",
    "HOOKS.metrics.every_updates=1",
    "HOOKS.ids={}",
)
TOLERANCE = 1e-4
"""Largest relative difference of losses, whose sums have another order on another number of
processes."""


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if record["kind"] == "step"]


def measures(folder: Path) -> list[dict[str, Any]]:
    return [
        record["metrics"]
        for record in records(folder)
        if record["kind"] == "phase" and record["split"] == "test"
    ]


def samples(folder: Path) -> list[tuple[int, int, int]]:
    """Return update, samples and the digest of their indices as the ledger has them."""
    return [
        (one.updates, one.samples, one.ids)
        for one in parse_ledger((folder / FILE).read_bytes()).values()
    ]


def attempt(
    launcher: Launcher, folder: Path, size: int, *words: str, halts: bool = False
) -> Finished:
    done = launcher.run(folder, size, *WORDS, *words)
    assert (done.codes, done.alive) == ([143 if halts else 0] * size, []), done.outputs
    return done


@pytest.fixture(scope="module")
def whole(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an unbroken run of one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    attempt(launcher, folder, 1)
    return folder


def same_run(one: Path, other: Path) -> None:
    """See that two runs took the same samples in each step and came to the same end within the
    tolerance."""
    assert read_sample_ids(one) == read_sample_ids(other)
    assert (len(read_sample_ids(one)), len(measures(one)), len(samples(one))) == (12 + 6, 2, 12)
    assert samples(one) == samples(other)
    assert losses(one) == pytest.approx(losses(other), rel=TOLERANCE)
    for first, second in zip(measures(one), measures(other), strict=True):
        assert {name: first[name] for name in ("seen_samples", "seen_most", "seen_sum")} == {
            "seen_samples": 150,
            "seen_most": 1,
            "seen_sum": 150,
        }
        assert first["accuracy"] == pytest.approx(second["accuracy"], abs=1 / 150)
        assert first["loss"] == pytest.approx(second["loss"], rel=TOLERANCE)


# Phases 0 and 2 train, 1 and 3 test; a request to stop of one of several processes is heard a
# step later.
CHAINS = [
    [(2, (0, 2)), (1, (1, 1)), (3, None)],
    [(2, (0, 2)), (1, (1, 1)), (3, (2, 2)), (2, None)],
    [(2, (1, 1)), (4, None)],
    *([(2, (0, 3)), (size, None)] for size in (1, 3, 4)),
    *([(2, (3, 1)), (size, None)] for size in (1, 3)),
]


@pytest.mark.feature(
    "B2",
    "any world size: same samples per update, on request the same bits",
    "`DISTRIBUTED.reduction: ordered`",
)
@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "chain",
    CHAINS,
    ids=lambda chain: "-".join(
        f"{size}{'' if at is None else '@' + '.'.join(map(str, at))}" for size, at in chain
    ),
)
def test_stopped_run_resumes_with_another_world_size(
    launcher: Launcher, whole: Path, tmp_path: Path, chain: list[tuple[int, tuple[int, int] | None]]
) -> None:
    folder = tmp_path / "run"
    for size, at in chain:
        if at is None:
            attempt(launcher, folder, size)
            continue
        phase, step = at
        attempt(
            launcher,
            folder,
            size,
            f"HOOKS.halt={{phase: {phase}, step: {step}, rank: {size - 1}}}",
            halts=True,
        )
        position = newest(folder).manifest.state
        assert position["phase"] == phase
        assert position["step"] == step + (size > 1)
    same_run(whole, folder)
    assert status(folder)["state"] == "finished"


@pytest.mark.slow
def test_other_samples_are_detected(whole: Path, launcher: Launcher, tmp_path: Path) -> None:
    attempt(launcher, tmp_path / "run", 2, "RUN.seed=1")
    with pytest.raises(AssertionError):
        same_run(whole, tmp_path / "run")
    assert [one[:2] for one in samples(whole)] == [one[:2] for one in samples(tmp_path / "run")]
    assert not {one[2] for one in samples(whole)} & {one[2] for one in samples(tmp_path / "run")}


@pytest.mark.slow
def test_early_stop_of_two_ranks_runs_the_last_tests_and_resumes_in_them(
    launcher: Launcher, tmp_path: Path
) -> None:
    words = (
        "DATA.TEST.every=end",
        "DATA.VALID={dataset: digits, subset: {samples: 60}, batch_size: 32}",
        "HOOKS.early_stopping={monitor: valid/accuracy, patience: 1, min_delta: 1}",
        "PHASES.epochs=4",
    )
    attempt(launcher, tmp_path / "whole", 2, *words)
    phases = [one for one in records(tmp_path / "whole") if one["kind"] == "phase"]
    found = [(one["split"], one["epoch"]) for one in phases]
    assert found == [("train", 0), ("valid", 0), ("train", 1), ("valid", 1), ("test", 1)]
    for place, (phase, step) in enumerate([(3, 1), (4, 1), (4, 2)]):
        folder = tmp_path / f"run{place}"
        halt = f"HOOKS.halt={{phase: {phase}, step: {step}, rank: 1}}"
        attempt(launcher, folder, 2, *words, halt, halts=True)
        attempt(launcher, folder, 2, *words)
        assert differences_of_runs(tmp_path / "whole", folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [["DATA.TRAIN.micro_batch_size=4"], ["OPTIMIZER.accumulate=2"]])
def test_micro_batches_follow_the_world_size(
    launcher: Launcher, tmp_path: Path, words: list[str]
) -> None:
    folder = tmp_path / "run"
    halted = "HOOKS.halt={phase: 0, step: 2}"
    first = attempt(launcher, folder, 2, *words, halted, halts=True)
    attempt(launcher, folder, 3, *words)
    assert "RUN.allow" not in "".join(first.outputs)
    alone = tmp_path / "alone"
    attempt(launcher, alone, 1, *words)
    same_run(alone, folder)
    assert len(read_sample_ids(folder)[0, 1]) == 24


# One test split of 450 samples in batches that divide among few, and splits smaller than the number
# of processes.
def split(name: str, count: int, batch_size: int, more: str = "") -> str:
    return (
        f"DATA.{name}={{dataset: synthetic, samples: {count}, input_shape: [1, 8, 8], classes: 10, "
        f"batch_size: {batch_size}{more}}}"
    )


ONLY_TESTS = (
    "RUN.imports=[world_parts]",
    "MACHINE.threads=1",
    "PHASES.epochs=0",
    "PHASES.test_first=true",
    "DATA.TRAIN.batch_size=24",
    "MODEL=mlp",
    "METERS.accuracy={}",
    "METERS.seen={}",
    "HOOKS.console=null",
    "DATA.TEST=null",
    split("EVEN", 450, 32),
    split("ODD", 450, 7, ", workers: 1"),
    split("MICRO", 450, 100, ", micro_batch_size: 20"),
    split("WHOLE", 450, 450),
    split("SINGLE", 45, 1),
    split("FEW", 3, 2),
    split("ONE", 1, 5),
)
COUNTS = {"even": 450, "odd": 450, "micro": 450, "whole": 450, "single": 45, "few": 3, "one": 1}


def phase_metrics(folder: Path) -> dict[str, dict[str, float]]:
    return {
        record["split"]: record["metrics"]
        for record in records(folder)
        if record["kind"] == "phase"
    }


@pytest.fixture(scope="module")
def tested(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tested") / "run"
    assert launcher.run(folder, 1, *ONLY_TESTS).codes == [0]
    return folder


def same_metrics(found: dict[str, dict[str, float]], expected: dict[str, dict[str, float]]) -> None:
    assert found.keys() == COUNTS.keys()
    for name, count in COUNTS.items():
        one = found[name]
        assert (one["seen_samples"], one["seen_most"], one["seen_sum"]) == (count, 1, count)
        assert one["accuracy"] == expected[name]["accuracy"]
        assert one["loss"] == pytest.approx(expected[name]["loss"], rel=1e-6)


@pytest.mark.feature("73", "tests count every sample exactly once", "`DATA.TEST`")
@pytest.mark.by_default(1)
@pytest.mark.parametrize("size", [3, 2, 4])
def test_metrics_count_every_sample_once(
    launcher: Launcher, tested: Path, tmp_path: Path, size: int
) -> None:
    folder = tmp_path / "run"
    assert launcher.run(folder, size, *ONLY_TESTS).codes == [0] * size
    same_metrics(phase_metrics(folder), phase_metrics(tested))


def test_one_process_counts_every_sample_once(tested: Path) -> None:
    same_metrics(phase_metrics(tested), phase_metrics(tested))
    assert phase_metrics(tested)["even"]["accuracy"] == phase_metrics(tested)["odd"]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_checkpoint_test_counts_every_sample_once(
    launcher: Launcher, tested: Path, size: int
) -> None:
    """The batches of training need not divide among its processes."""
    done = launcher.run(tested, size, *ONLY_TESTS, "RUN.engine=test", "DATA.TRAIN.batch_size=25")
    assert done.codes == [0] * size, done.outputs
    [file] = tested.glob("test-*.json")
    found: dict[str, dict[str, float]] = {}
    for name, value in json.loads(file.read_text())["metrics"].items():
        part, _, metric = name.partition("/")
        found.setdefault(part, {})[metric] = value
    file.unlink()
    same_metrics(found, phase_metrics(tested))


# Batches of 12: the third one of an epoch has one sample, so that most processes have none of it.
PARTIAL = (
    *(word for word in WORDS if not word.startswith(("PHASES", "DATA", "METERS"))),
    "PHASES.epochs=2",
    "DATA.TRAIN={dataset: synthetic, samples: 25, input_shape: [1, 8, 8], classes: 10, batch_size: 12}",
    "DATA.TRAIN.drop_last=false",
    "DATA.TEST=null",
)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = newest(folder).state["task"]["model"]
    return model


@pytest.mark.feature("72")
@pytest.mark.by_default("accumulate")
@pytest.mark.parametrize(
    "words",
    [[], ["DATA.TRAIN.micro_batch_size=1"], ["OPTIMIZER.accumulate=2"]],
    ids=["whole", "micro", "accumulate"],
)
def test_update_of_a_short_batch_is_that_of_one_process(
    launcher: Launcher, tmp_path: Path, words: list[str]
) -> None:
    folders = {size: tmp_path / f"run{size}" for size in (1, 3)}
    for size, folder in folders.items():
        assert launcher.run(folder, size, *PARTIAL, *words).codes == [0] * size
        assert [len(ids) for ids in read_sample_ids(folder).values()] == [12, 12, 1, 12, 12, 1]
        assert read_sample_ids(folder) == read_sample_ids(folders[1])
        assert losses(folder) == pytest.approx(losses(folders[1]), rel=TOLERANCE)
        for name, tensor in weights(folders[1]).items():
            torch.testing.assert_close(weights(folder)[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_batch_norm_trains_with_short_batches(launcher: Launcher, tmp_path: Path) -> None:
    """Statistics are those of process 0, so weights are not those of one process; the number of
    passes is."""
    done = launcher.run(tmp_path / "run", 3, *PARTIAL, "MODEL=small_cnn")
    assert done.codes == [0, 0, 0], done.outputs
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())
    assert [len(ids) for ids in read_sample_ids(tmp_path / "run").values()] == [
        12,
        12,
        1,
        12,
        12,
        1,
    ]


@pytest.mark.addon("text")
class TestStreams:
    """Files with 12 or 13 samples each, read by lines in lanes."""

    @pytest.fixture
    def files(self, tmp_path: Path) -> str:
        for shard in range(10):
            samples = [
                {"input": [shard + at / 16, 1.0, at / 16], "target": shard}
                for at in range(12 + shard % 2)
            ]
            (tmp_path / f"{shard}.jsonl").write_text(
                "".join(json.dumps(sample) + "\n" for sample in samples)
            )
        return f"{tmp_path}/*.jsonl"

    def words(self, files: str, log: Path, *more: str) -> list[str]:
        kept = [word for word in WORDS if not word.startswith(("PHASES", "DATA", "METERS.seen"))]
        return [
            *kept,
            "RUN.imports=[world_parts, noted_lines]",
            "PHASES.epochs=2",
            f"DATA.TRAIN={{dataset: noted_lines, files: '{files}', log: '{log}', batch_size: 12}}",
            "DATA.TRAIN.drop_last=false",
            "DATA.TRAIN.sampler={name: lanes, lanes: 6}",
            "DATA.TRAIN.transforms=[]",
            "DATA.TEST=null",
            *more,
        ]

    def noted(self, log: Path) -> dict[str, tuple[int, int]]:
        """Return how many files each process has opened, and how many bytes it has read."""
        lines = {
            file.name: file.read_text().split() for file in sorted(log.parent.glob(f"{log.name}-*"))
        }
        return {
            name: (found.count("open"), sum(int(line) for line in found if line != "open"))
            for name, found in lines.items()
        }

    @pytest.mark.slow
    def test_each_rank_reads_its_shard_only(
        self, launcher: Launcher, files: str, tmp_path: Path
    ) -> None:
        total, read = sum(file.stat().st_size for file in tmp_path.glob("*.jsonl")), {}
        for size in (1, 3):
            folder, log = tmp_path / f"run{size}", tmp_path / f"log{size}"
            assert launcher.run(folder, size, *self.words(files, log)).codes == [0] * size
            read[size] = self.noted(log)
        # What is read before the first step, to see that samples are pure, comes on top: some
        # opens, and 24 samples.
        extra = total * 24 / 125
        assert len(read[3]) == 3
        for size, found in read.items():
            for opened, count in found.values():
                assert 2 * total / size * 0.9 <= count <= 2 * total / size * 1.15 + extra
                assert opened <= 2 * (10 / size + 6 / size + 1) + 27
        one, three = read_sample_ids(tmp_path / "run1"), read_sample_ids(tmp_path / "run3")
        assert one == three
        for phase in (0, 1):
            assert sorted(
                index for at, ids in one.items() if at[0] == phase for index in ids
            ) == list(range(125))

    @pytest.mark.feature(
        "27",
        "streamed shards with exact resume and resharding",
        "`DATA.TRAIN.sampler=lanes`, `DATA.TRAIN.dataset=lines`",
    )
    @pytest.mark.by_default(1)
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_resume_in_the_middle_of_a_pass_is_exact(
        self, launcher: Launcher, files: str, tmp_path: Path, workers: int
    ) -> None:
        words = self.words(files, tmp_path / "log", f"DATA.TRAIN.workers={workers}")
        unbroken, folder = tmp_path / "unbroken", tmp_path / "run"
        assert launcher.run(unbroken, 2, *words).codes == [0] * 2
        assert launcher.run(folder, 2, *words, "HOOKS.halt={phase: 0, step: 4}").codes == [143] * 2
        assert launcher.run(folder, 2, *words).codes == [0] * 2
        assert read_sample_ids(unbroken) == read_sample_ids(folder)
        assert (unbroken / FILE).read_bytes() == (folder / FILE).read_bytes()
        assert all(
            torch.equal(tensor, weights(folder)[name]) for name, tensor in weights(unbroken).items()
        )

    @pytest.mark.feature("27")
    @pytest.mark.slow
    def test_order_is_the_same_with_another_world_size(
        self, launcher: Launcher, files: str, tmp_path: Path
    ) -> None:
        words = self.words(files, tmp_path / "log", "DATA.TRAIN.workers=1")
        unbroken, folder = tmp_path / "unbroken", tmp_path / "run"
        assert launcher.run(unbroken, 1, *words).codes == [0]
        for size, phase, step in ((2, 0, 3), (4, 0, 7), (3, 1, 2)):
            halt = f"HOOKS.halt={{phase: {phase}, step: {step}}}"
            assert launcher.run(folder, size, *words, halt).codes == [143] * size
        assert launcher.run(folder, 1, *words).codes == [0]
        assert read_sample_ids(unbroken) == read_sample_ids(folder)
        assert samples(unbroken) == samples(folder)
        assert losses(unbroken) == pytest.approx(losses(folder), rel=TOLERANCE)

    @pytest.mark.slow
    def test_batch_size_may_not_change_inside_an_epoch(
        self, launcher: Launcher, files: str, tmp_path: Path
    ) -> None:
        words, folder = self.words(files, tmp_path / "log"), tmp_path / "run"
        assert launcher.run(folder, 1, *words, "HOOKS.halt={phase: 0, step: 4}").codes == [143]
        done = launcher.run(
            folder, 1, *words, "DATA.TRAIN.batch_size=24", "RUN.allow=[DATA.TRAIN.batch_size]"
        )
        assert done.codes == [3]
        assert "DATA.TRAIN.batch_size = 24:" in done.outputs[0]
