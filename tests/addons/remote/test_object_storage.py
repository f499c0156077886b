"""Runs in a store that can neither rename nor append resume exactly after a kill."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from harness import REPORT, REPORT_FILES, SMALL, KillAfter, Killed, SaveEachStep, differences
from raising import raises

from phasetrain.app.api import run
from phasetrain.app.result import RunResult
from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing import MemoryHandler


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    """Return what a finished run has stored below mem://whole."""
    assert train("mem://whole", "CHECKPOINT.keep_last=2").state == "finished"
    return dict(MemoryHandler.objects)


@pytest.fixture(autouse=True)
def stored(objects: dict[str, bytes]) -> Iterator[None]:
    """Let every test begin with that run alone."""
    MemoryHandler.objects.clear()
    MemoryHandler.objects.update(objects)
    yield
    MemoryHandler.objects.clear()


def train(folder: str, *overrides: str, hooks: dict[str, Hook] | None = None) -> RunResult:
    words = [*SMALL, *REPORT, "RUN.imports=[phasetrain.testing]", f"RUN.dir={folder}", *overrides]
    return run(words, hooks=hooks, terminal=Terminal(io.StringIO(), live=False))


def newest(folder: str) -> LoadedCheckpoint:
    loaded = Checkpointer(f"{folder}/checkpoints", open_storage(folder)).load_newest()
    assert loaded is not None
    return loaded


def records(folder: str) -> list[dict[str, Any]]:
    lines = MemoryHandler.objects[f"{folder}/metrics.jsonl"].decode().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key != "time"} for line in lines
    ]


def below(folder: str) -> list[str]:
    return [
        path.removeprefix(f"{folder}/")
        for path in sorted(MemoryHandler.objects)
        if path.startswith(f"{folder}/")
    ]


@pytest.mark.feature(
    "106",
    "object stores without rename; sharded checkpoints",
    "`RUN.dir=PREFIX://...`, `DISTRIBUTED.strategy=fsdp`",
)
@pytest.mark.by_default("6")
@pytest.mark.parametrize("step", [0, 3, 5, 6, 12])
def test_killed_run_resumes_exactly(step: int) -> None:
    with pytest.raises(Killed):
        train("mem://killed", hooks={"save": SaveEachStep(), "kill": KillAfter(step)})
    result = train("mem://killed")
    assert (result.state, result.updates) == ("finished", 15)
    one, other = newest("mem://whole"), newest("mem://killed")
    assert differences(one.state["task"], other.state["task"]) == []
    assert records("mem://whole") == records("mem://killed")
    assert [name for name in below("mem://killed") if ".tmp-" in name or "owner" in name] == []


def test_finished_run_leaves_no_temporary_files() -> None:
    top = {name.partition("/")[0] for name in below("mem://whole")}
    expected = {
        "RUN.md",
        "checkpoints",
        "config.yaml",
        "environment.json",
        "log.txt",
        "metrics.jsonl",
    }
    expected |= REPORT_FILES
    assert top - {"steps.ledger", "git.diff", "phasetrain.diff"} == expected | {
        "overrides.yaml",
        "plan.json",
        "reproduce.sh",
        "status.json",
    }
    assert json.loads(MemoryHandler.objects["mem://whole/status.json"])["state"] == "finished"
    assert train("mem://whole", "CHECKPOINT.keep_last=2").updates == 15


def test_checkpoint_with_a_damaged_object_is_skipped() -> None:
    names = [path for path in MemoryHandler.objects if path.endswith("tensors.safetensors")]
    content = bytearray(MemoryHandler.objects[max(names)])
    content[-1] ^= 1
    MemoryHandler.objects[max(names)] = bytes(content)
    assert f"{newest('mem://whole').path}/tensors.safetensors" == min(names)


def test_unknown_prefix_is_rejected() -> None:
    with raises(ConfigError, key="RUN.dir", suggestion="mem"):
        train("memo://run")


@pytest.mark.addon("observe")
def test_tensorboard_is_rejected_without_local_files() -> None:
    with raises(ConfigError, code="config.conflict"):
        train("mem://run", "HOOKS.tensorboard={}")
