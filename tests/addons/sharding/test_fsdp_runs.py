"""Runs with sharded weights: losses, resumes, changes of strategy, saves that fail."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL, differences_of_runs, newest, records, status
from processes import Finished, Launcher
from safetensors.torch import load_file

from phasetrain.models.digest import hash_state

ONE = "MACHINE.threads=1"
SHORT = (*SMALL, ONE, "PHASES.epochs=2")
"""Ten updates, tests after the fifth and the tenth."""
FSDP = "DISTRIBUTED.strategy=fsdp"
PARTS = "RUN.imports=[process_parts, fsdp_parts]"
# No dropout and no batch norm: what a process sees of a batch makes no difference.
MLP = (
    *[word for word in SMALL if not word.startswith("MODEL.")],
    "MODEL.name=mlp",
    "MODEL.hidden=[19,12]",
    ONE,
    "PHASES.epochs=2",
)
WRAP = 'DISTRIBUTED.wrap=["layers.1", ReLU]'


def ok(done: Finished) -> None:
    assert (set(done.codes), done.alive) == ({0}, []), done.outputs


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if record["kind"] == "step"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return newest(folder).state["task"]["model"]


def read_test_records(folder: Path) -> dict[str, Any]:
    return [
        record
        for record in records(folder)
        if record["kind"] == "phase" and record["split"] == "test"
    ][-1]["metrics"]


@pytest.fixture(scope="session")
def unbroken_by_three_ranks(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of three processes under fsdp that met no fault."""
    folder = tmp_path_factory.mktemp("fsdp3") / "run"
    ok(launcher.run(folder, 3, *SHORT, FSDP))
    return folder


@pytest.fixture(scope="session")
def unbroken(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one process that was never interrupted."""
    folder = tmp_path_factory.mktemp("none1") / "run"
    ok(launcher.run(folder, 1, *MLP))
    return folder


@pytest.mark.addon("deploy")
def test_weights_of_two_ranks_have_the_bits_of_ddp_without_fused_kernels(
    launcher: Launcher, tmp_path: Path
) -> None:
    # Torch's fused kernels round the last few entries of a tensor otherwise than the others.
    from phasetrain.addons.deploy.consolidate import consolidate

    words = (*SHORT, "PHASES.epochs=1", "OPTIMIZER.fused=false", "OPTIMIZER.accumulate=2")

    ok(launcher.run(tmp_path / "ddp", 2, *words))
    ok(launcher.run(tmp_path / "fsdp", 2, *words, FSDP))

    assert losses(tmp_path / "fsdp") == losses(tmp_path / "ddp")
    assert status(tmp_path / "fsdp")["digest"] == status(tmp_path / "ddp")["digest"]
    assert hash_state(weights(tmp_path / "fsdp")) == status(tmp_path / "ddp")["digest"]
    assert read_test_records(tmp_path / "fsdp") == read_test_records(tmp_path / "ddp")
    consolidate(newest(tmp_path / "fsdp").path, str(tmp_path / "weights.safetensors"))
    assert (
        hash_state(load_file(tmp_path / "weights.safetensors"))
        == status(tmp_path / "ddp")["digest"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "words"),
    [
        (3, (WRAP, "OPTIMIZER.clip_norm=0.5", "OPTIMIZER.accumulate=2")),
        (
            4,
            (
                "DISTRIBUTED.replicas=2",
                "OPTIMIZER.name=adamw",
                "OPTIMIZER.lr=0.01",
                "DISTRIBUTED.wrap=[Linear]",
            ),
        ),
        (3, (PARTS, "LOSS.name=scaled_cross_entropy", "DISTRIBUTED.reshard_after_forward=false")),
        (4, ("OPTIMIZER.SCHEDULES.lr={name: cosine}", "OPTIMIZER.clip_value=0.01")),
    ],
)
def test_losses_and_weights_equal_those_of_ddp_to_a_millionth(
    launcher: Launcher, tmp_path: Path, size: int, words: tuple[str, ...]
) -> None:
    ok(launcher.run(tmp_path / "fsdp", size, *MLP, FSDP, *words))
    ok(
        launcher.run(
            tmp_path / "ddp",
            size,
            *MLP,
            *(word for word in words if not word.startswith("DISTRIBUTED")),
        )
    )

    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "ddp"), abs=1e-6)
    divided, whole = weights(tmp_path / "fsdp"), weights(tmp_path / "ddp")
    assert divided.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(divided[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "update"), [(0, 7), (1, 8), (2, 3)])
def test_run_is_bit_identical_after_one_rank_is_killed(
    launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path, rank: int, update: int
) -> None:
    folder = tmp_path / "run"
    strike = f"HOOKS.strike={{rank: {rank}, update: {update}}}"
    words = (*SHORT, FSDP, PARTS, strike, "CHECKPOINT.every_updates=2")

    broken = launcher.run(folder, 3, *words)

    assert broken.codes[rank] == -9
    assert [code for at, code in enumerate(broken.codes) if at != rank] == [1, 1]
    assert broken.seconds < 30
    assert broken.alive == []
    ok(launcher.run(folder, 3, *words))
    assert differences_of_runs(unbroken_by_three_ranks, folder) == []
    assert status(folder)["state"] == "finished"


def chain(launcher: Launcher, folder: Path, stages: list[tuple[int, str]]) -> None:
    """Stop a run every second update, and resume it with another strategy each time."""
    for number, (size, strategy) in enumerate(stages):
        last = number == len(stages) - 1
        stop = () if last else (f"HOOKS.strike={{rank: 0, update: {2 * number + 2}, how: term}}",)
        done = launcher.run(folder, size, *MLP, PARTS, f"DISTRIBUTED.strategy={strategy}", *stop)
        assert set(done.codes) == {0 if last else 143}, done.outputs
        layout = newest(folder).manifest.format
        assert layout == (3 if strategy == "fsdp" else 2)


def test_run_resumes_without_fsdp_and_then_with_it(
    launcher: Launcher, unbroken: Path, tmp_path: Path
) -> None:
    chain(launcher, tmp_path / "run", [(2, "fsdp"), (1, "none"), (2, "fsdp")])

    assert losses(tmp_path / "run") == pytest.approx(losses(unbroken), abs=1e-6)
    assert (
        read_test_records(tmp_path / "run")["accuracy"] == read_test_records(unbroken)["accuracy"]
    )
    for name, tensor in weights(unbroken).items():
        torch.testing.assert_close(weights(tmp_path / "run")[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.feature("106")
@pytest.mark.slow
def test_run_resumes_under_every_other_strategy(
    launcher: Launcher, unbroken: Path, tmp_path: Path
) -> None:
    stages = [(2, "fsdp"), (3, "ddp"), (4, "fsdp"), (2, "zero"), (3, "fsdp")]

    chain(launcher, tmp_path / "run", stages)

    assert losses(tmp_path / "run") == pytest.approx(losses(unbroken), abs=1e-6)


@pytest.mark.slow
def test_one_rank_tests_a_checkpoint_of_several(
    launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(unbroken_by_three_ranks, folder, symlinks=True)

    ok(launcher.run(folder, 1, *SHORT, FSDP, "RUN.engine=test"))
    ok(launcher.run(folder, 2, *SHORT, FSDP, "RUN.engine=test", "RUN.checkpoint=latest"))

    found = json.loads((folder / "test-p0004-s00000000.json").read_text())["metrics"]
    assert found["test/accuracy"] == read_test_records(unbroken_by_three_ranks)["accuracy"]


@pytest.mark.slow
def test_full_disk_under_one_rank_is_reported_and_leaves_nothing(
    launcher: Launcher, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    disk = "HOOKS.disk={rank: 2, file: tensors, update: 5, until: 10}"

    done = launcher.run(folder, 3, *SMALL, ONE, FSDP, PARTS, disk)

    ok(done)
    found = status(folder)
    assert (found["state"], found["save_failures"]) == ("finished", 1)
    text = (folder / "log.txt").read_text()
    assert "rank 2 of 3 (errno 28 ENOSPC)" in text
    assert "tensors-00003-of-00003.safetensors" in text
    assert [path.name for path in sorted((folder / "checkpoints").glob("p*"))] == [
        "p0003-s00000000",
        "p0005-s00000000",
        "p0006-s00000000",
    ]


@pytest.mark.slow
def test_full_disk_ends_a_run_with_on_save_error_stop(launcher: Launcher, tmp_path: Path) -> None:
    disk = "HOOKS.disk={rank: 1, file: tensors, update: 10}"

    done = launcher.run(
        tmp_path / "run", 3, *SMALL, ONE, FSDP, PARTS, disk, "CHECKPOINT.on_save_error=stop"
    )

    assert set(done.codes) == {1}
    assert "on rank 1 of 3" in status(tmp_path / "run")["reason"]


@pytest.mark.parametrize(
    ("rank", "name"),
    [(0, "manifest"), pytest.param(1, "tensors", marks=pytest.mark.slow)],
)
def test_all_ranks_end_if_one_is_killed_in_a_save(
    launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path, rank: int, name: str
) -> None:
    folder = tmp_path / "run"
    disk = f"HOOKS.disk={{rank: {rank}, file: {name}, update: 10, how: kill}}"
    words = (*SHORT, FSDP, PARTS)

    broken = launcher.run(folder, 3, *words, disk)

    assert sorted(broken.codes) == [-9, 1, 1]
    assert broken.seconds < 30
    assert newest(folder).manifest.state["updates"] == 5
    ok(launcher.run(folder, 3, *words))
    assert differences_of_runs(unbroken_by_three_ranks, folder) == []


@pytest.mark.slow
def test_rank_stopped_in_a_save_ends_the_others_at_the_timeout(
    launcher: Launcher, tmp_path: Path
) -> None:
    strike = "HOOKS.strike={rank: 1, update: 7, how: stop}"
    words = (
        *SMALL,
        ONE,
        FSDP,
        PARTS,
        strike,
        "DISTRIBUTED.timeout_seconds=6",
        "CHECKPOINT.every_updates=1",
    )
    folder = tmp_path / "run"
    launcher.start(folder, 3, *words)

    done = launcher.wait(25)

    assert [done.codes[0], done.codes[2]] == [1, 1]
    assert max(done.ends[0], done.ends[2]) < 20


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_checkpoint_with_a_damaged_shard_is_skipped_and_never_mixed_with_others(
    launcher: Launcher, unbroken_by_three_ranks: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "run"
    words = (
        *SHORT,
        FSDP,
        PARTS,
        "HOOKS.strike={rank: 0, update: 8, how: term}",
        "CHECKPOINT.every_updates=3",
    )
    assert set(launcher.run(folder, 3, *words).codes) == {143}
    saved = sorted((folder / "checkpoints").glob("p*"))
    shard = "tensors-00002-of-00003.safetensors"
    (saved[-2] / "tensors-00004-of-00004.safetensors").write_bytes((saved[-1] / shard).read_bytes())
    if damage == "missing":
        (saved[-1] / shard).unlink()
    else:
        content = bytearray((saved[-1] / shard).read_bytes())
        content[-1] ^= 1
        (saved[-1] / shard).write_bytes(content)

    ok(launcher.run(folder, 3, *words))

    text = (folder / "log.txt").read_text()
    assert f"checkpoint {saved[-1]} was skipped: {shard}" in text
    assert f"resume  from {saved[-2]} " in text
    assert differences_of_runs(unbroken_by_three_ranks, folder) == []
