"""What the probe records, and that it changes nothing."""

import json
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from phasetrain.addons.audit import probe
from phasetrain.addons.audit.probe import FOLDER, OPTIONS, Probe
from phasetrain.addons.audit.runs import SITE, CannotAuditError, Runner, _find_error, _find_program
from phasetrain.addons.audit.trace import read_trace

WEIGHTS = """
import pickle
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), 4, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(3):
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        pickle.dumps(model[0].weight)  # calls torch.save for its storage, which is no checkpoint
print([value.tolist() for value in model.state_dict().values()], torch.rand(1).item())
"""


def test_the_probe_changes_no_bit(tmp_path: Path) -> None:
    recorded = {FOLDER: str(tmp_path), "PYTHONPATH": str(SITE), OPTIONS: "{}"}
    printed = [
        subprocess.run(
            [sys.executable, "-c", WEIGHTS],
            env={**os.environ, **more},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for more in ({}, recorded)
    ]
    assert printed[0] == printed[1]
    (path,) = tmp_path.glob("trace-*.jsonl")
    trace = read_trace(path)
    assert (len(trace.updates), trace.saves, trace.failure) == (24, [], "")
    # The first iterator is made with the generator as it was, before it draws its seed.
    assert len(trace.generators) == 1
    assert trace.updates[0].generators["torch"] not in trace.generators
    # The first one contains the start of the process with the import of torch.
    assert trace.updates[0].seconds > max(update.seconds for update in trace.updates[1:]) > 0


def test_an_error_of_the_recording_ends_it_and_is_named(tmp_path: Path) -> None:
    recorder = Probe(str(tmp_path), {})
    recorder.record(recorder._on_backward, None)
    recorder.record(recorder._on_backward, "not called")
    recorder.write("save")
    trace = read_trace(Path(recorder.path))
    assert (trace.failure[:14], trace.saves) == ("AttributeError", [])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["ValueError: x"], ["ValueError: x"]),
        (
            [
                "begin",
                "[rank1]: ValueError: x",
                "[rank0]: RuntimeError: Connection closed by peer",
                "E1 failed (exitcode: 1) local_rank: 0",
                "=====",
            ],
            ["begin", "ValueError: x"],
        ),
        (
            ["W1 Sending process 5 closing signal SIGTERM"],
            ["W1 Sending process 5 closing signal SIGTERM"],
        ),
    ],
)
def test_the_error_of_a_rank_is_shown_without_that_of_its_launcher(
    lines: list[str], expected: list[str]
) -> None:
    assert _find_error(lines) == expected


def test_a_rank_waits_until_all_are_to_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    for rank in range(3):
        recorder = Probe(str(tmp_path), {"kill_at": 5})
        monkeypatch.setattr(recorder, "_world_size", lambda: 3)
        monkeypatch.setattr(recorder, "_rank", lambda rank=rank: str(rank))
        monkeypatch.setattr(probe, "PATIENCE", 0.0 if rank < 2 else 60.0)
        monkeypatch.setattr(time, "sleep", waits.append)
        recorder._wait_for_ranks()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "reached-0",
        "reached-1",
        "reached-2",
    ]
    assert waits == []


def test_steps_and_passes_that_train_nothing_are_not_recorded(tmp_path: Path) -> None:
    script = WEIGHTS.replace(
        "for epoch",
        # The step that gives an optimizer its state, one that tabulates a schedule, a dry run.
        "from torch.distributed.checkpoint import state_dict\n"
        "state_dict.get_optimizer_state_dict(model, optimizer)\n"
        "torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).step()\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "optimizer.zero_grad()\nfor epoch",
    )
    environment = {**os.environ, FOLDER: str(tmp_path), "PYTHONPATH": str(SITE), OPTIONS: "{}"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    (path,) = tmp_path.glob("trace-*.jsonl")
    updates = read_trace(path).updates
    assert len(updates) == 24
    assert [len(update.losses) for update in updates[:2]] == [1, 1]


def test_a_checkpoint_of_torch_is_a_file_of_the_run(tmp_path: Path) -> None:
    # torch.save opens a path without Python's `open`, so that no other event names it.
    save = {"kind": "save", "after": 5, "path": "/run/a.pt", "leaves": {}, "place": "", "number": 1}
    tmp_path.joinpath("trace-1.jsonl").write_text(json.dumps(save))
    assert read_trace(tmp_path / "trace-1.jsonl").files == [(5, "/run/a.pt")]


def test_without_workers_a_loader_gets_none_of_their_options() -> None:
    words = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4, "timeout": 9}
    probe._set_workers(words, 0)
    assert words == {"num_workers": 0}
    torch.utils.data.DataLoader(range(3), **words)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # The text of a tensor shows neither its middle nor its last digits.
        ([[torch.zeros(2000)]], [[torch.zeros(2000).index_fill(0, torch.tensor(9), 1.0)]]),
        ([[1, None]], [[2, None]]),
    ],
)
def test_a_digest_sees_what_is_in_lists(first: Any, second: Any) -> None:
    assert probe._digest(first) == probe._digest(first)
    assert probe._digest(first) != probe._digest(second)


def test_rows_of_large_samples_are_told_apart() -> None:
    images = torch.arange(2 * 3 * 64 * 64).reshape(2, 3, 64, 64)
    rows = probe._row_digests([images])
    assert len(set(rows)) == 2
    assert probe._row_digests([images + 1])[0] not in rows
    assert probe._row_digests([images.flip(0)]) == rows[::-1]


def test_the_newest_batch_with_the_memory_of_the_input_is_trained(tmp_path: Path) -> None:
    recorder = Probe(str(tmp_path), {})
    batch = torch.ones(2)
    # The first two were skipped and freed, and the third one has the memory of the first.
    addresses = [batch.data_ptr(), 1, batch.data_ptr(), 2]
    recorder.batches = deque({"index": n, "pointers": {at}} for n, at in enumerate(addresses))
    recorder._match((batch,), {})
    assert [entry["index"] for entry in recorder.used] == [2]
    assert [entry["index"] for entry in recorder.batches] == [3]


@pytest.mark.parametrize(("is_kept", "losses"), [(False, []), (True, [[1, 0.5]])])
def test_passes_whose_gradients_are_dropped_are_forgotten_in_every_update(
    is_kept: bool, losses: list[Any], tmp_path: Path
) -> None:
    recorder = Probe(str(tmp_path), {})
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1) if is_kept else None
    recorder.optimizers = [torch.optim.SGD([weight])]
    recorder.updates, recorder.losses = 7, [[1, 0.5]]
    recorder.used, recorder.batches = [{"index": 1}, {"index": 2}], deque([{"index": 3}])
    recorder._forget_passes()
    assert recorder.losses == losses
    read_ahead = [entry["index"] for entry in recorder.batches]
    assert read_ahead == ([3] if is_kept else [1, 2, 3])


def test_the_stride_follows_the_usual_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Probe(str(tmp_path), {})
    # Steps of 20 ms and 4 ms of digests, of which one waits for the processor: 0.2 / 0.03 = 6.7
    ends = iter([0.0, 0.024, 0.048, 9.0, 9.024, 9.048, 9.072, 9.096])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ends))
    for number in range(1, probe.MEASURED + 1):
        recorder.updates = number
        recorder._own = recorder._digests = 0.004
        recorder._choose_stride()
    assert recorder.every == 7


def test_a_process_in_a_session_of_its_own_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    sleep = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {sleep!r}], start_new_session=True)\n"
        "while not os.path.exists('pid') or not open('pid').read(): time.sleep(0.1)\n"
    )
    runner = Runner([sys.executable, "-c", code], tmp_path, 60)
    folder = runner.new_folder("run")
    assert runner.run(folder, {}).exit_code == 0
    child = Path("/proc", folder.joinpath("pid").read_text())
    state = child.joinpath("stat").read_text().split()[2] if child.exists() else "Z"
    assert state == "Z"


def test_a_command_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    runner = Runner(["no-such-command"], tmp_path, 60)
    with pytest.raises(CannotAuditError, match=r"no-such-command.*copy of the working folder"):
        runner.run(runner.new_folder("run"), {})


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("../bin/python", "{base}/bin/python"),
        (".venv/bin/python", "{base}/here/.venv/bin/python"),  # is not copied
        ("./train.sh", "./train.sh"),
        ("../bin/missing", "../bin/missing"),
        ("python", "python"),
        ("/bin/sh", "/bin/sh"),
    ],
)
def test_a_program_outside_of_the_copied_folder_is_found(
    program: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bin", "here/.venv/bin"):
        tmp_path.joinpath(name).mkdir(parents=True)
        tmp_path.joinpath(name, "python").symlink_to(sys.executable)
    tmp_path.joinpath("here/train.sh").touch()
    monkeypatch.chdir(tmp_path / "here")
    folder = Runner([program], tmp_path / "scratch", 60).new_folder("run")
    assert _find_program(program, folder) == expected.format(base=tmp_path)
