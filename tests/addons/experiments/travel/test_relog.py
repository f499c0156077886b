"""`phasetrain relog` logs what a hook would have logged in the run, bit for bit."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import hooks_for_relog
import pytest
from harness import SMALL, records, train
from raising import raises

import phasetrain
from phasetrain.addons.experiments.options import RelogOptions
from phasetrain.addons.experiments.travel.past_run import open_past_run
from phasetrain.addons.experiments.travel.relog import Relogged, load_hooks, plan_segments, relog
from phasetrain.cli import main
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runs.ledger import FILE as LEDGER
from phasetrain.runs.ledger import PROCESSES_SHIFT, encode_ledger, parse_ledger

FILE = Path(hooks_for_relog.__file__)


def write_hooks(folder: Path, *names: str) -> Path:
    """Return a file with some of the hooks."""
    path = folder / "chosen.py"
    lines = [
        "import sys",
        f"sys.path.append({str(FILE.parent)!r})",
        "import hooks_for_relog as all",
    ]
    lines += [f"{name.lower()} = all.{name}()" for name in names]
    path.write_text("\n".join(lines))
    return path


def read_lines(done: Relogged) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(done.path).read_text().splitlines()]


def select_new(live: Path, known: Path) -> list[dict[str, Any]]:
    """Return the lines of a live run, reduced to what another run of its config has not logged."""
    old = records(known)
    logs = {name for line in old for name in line.get("logs", {})}
    metrics = {name for line in old for name in line.get("metrics", {})}
    lines = []
    for line in records(live):
        if line["kind"] == "step":
            new = {name: value for name, value in line.get("logs", {}).items() if name not in logs}
            entries = {key: line[key] for key in line if key not in ("logs", "loss", "lr")}
            lines += [{**entries, "logs": new}] if new else []
        elif line["kind"] == "phase":
            new = {name: value for name, value in line["metrics"].items() if name not in metrics}
            lines += [{**line, "metrics": new, "directions": {}}] if new else []
        elif line not in old:
            lines.append(line)
    return lines


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that had all hooks from the beginning."""
    folder = tmp_path_factory.mktemp("live")
    kinds = (*hooks_for_relog.STATELESS, *hooks_for_relog.STATEFUL)
    train(folder, hooks={kind.__name__.lower(): kind() for kind in kinds})
    return folder


def choose(lines: list[dict[str, Any]], done: Relogged) -> list[dict[str, Any]]:
    """Return lines with the names of a result only."""
    chosen = []
    for line in lines:
        key = {"step": "logs", "phase": "metrics"}.get(line["kind"])
        if key is None:
            chosen += [line] if line["kind"] in done.names else []
            continue
        values = {name: value for name, value in line[key].items() if name in done.names}
        chosen += [{**line, key: values}] if values else []
    return chosen


@pytest.mark.feature(
    "travel.relog", "numbers of past updates are logged later, bit for bit", "`phasetrain relog`"
)
@pytest.mark.parametrize(
    ("names", "jobs", "kept"),
    [
        (["Norms", "Phases", "Outputs", "Lines", "Draws"], 1, False),
        pytest.param(["Norms", "Outputs", "Phases"], 3, False, marks=pytest.mark.slow),
        pytest.param(["Running"], 3, True, marks=pytest.mark.slow),
        pytest.param(["PerPhase"], 2, True, marks=pytest.mark.slow),
    ],
)
def test_lines_are_those_of_a_live_run(
    past: Path, live: Path, tmp_path: Path, names: list[str], jobs: int, *, kept: bool
) -> None:
    run = tmp_path / "run"
    shutil.copytree(past, run)
    done = relog(str(run), RelogOptions(str(write_hooks(tmp_path, *names)), jobs=jobs))
    assert read_lines(done) == choose(select_new(live, past), done)
    assert (bool(done.kept), done.segments) == (kept, 1 if kept else jobs)
    assert done.updates == (1, 15)
    assert done.checked == 15
    assert done.path == f"{run}-relog/chosen.relog.jsonl"


def test_a_range_of_updates_leaves_out_means_of_a_part(
    past: Path, live: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(past, run)
    hooks = str(write_hooks(tmp_path, "Norms", "Phases"))
    done = relog(str(run), RelogOptions(hooks, updates="5:10"))
    lines = choose(select_new(live, past), done)
    expected = [line for line in lines if 5 <= line["updates"] <= 10]
    # The first epoch began before the checkpoint after update 4.
    assert expected[1]["kind"] == "phase"
    expected[1] = {**expected[1], "metrics": {"weights": expected[1]["metrics"]["weights"]}}
    assert read_lines(done) == expected
    assert done.checked == 7  # one more, because tests follow the last


def test_hooks_that_keep_values_run_from_the_start(past: Path, live: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(past, run)
    hooks = str(write_hooks(tmp_path, "Running", "PerPhase"))
    done = relog(str(run), RelogOptions(hooks, updates="9:15"))
    expected = choose(select_new(live, past), done)
    assert read_lines(done) == [line for line in expected if line["updates"] >= 9]
    assert (done.checked, {path.rpartition(".")[2] for path in done.kept} >= {"mean"}) == (15, True)


def test_new_lines_of_the_code_are_logged_without_a_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = [word for word in SMALL if not word.startswith("MODEL")]
    phasetrain.run([*words, "MODEL.name=hooks_for_relog.Net", "PHASES.epochs=1", f"RUN.dir={run}"])
    monkeypatch.setattr(hooks_for_relog.Net, "logs", True)
    done = relog(str(run), RelogOptions(trust=True))
    assert (done.names, done.path) == (("brightness",), f"{run}-relog/code.relog.jsonl")
    assert len(read_lines(done)) == 5 + 2  # updates, and the train and test phase


def test_steps_are_logged_at_an_interval_of_the_command(past: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(past, run)
    hooks = str(write_hooks(tmp_path, "Norms"))
    done = relog(str(run), RelogOptions(hooks, updates="1:9", every=4))
    assert [line["updates"] for line in read_lines(done) if line["kind"] == "step"] == [4, 8]


def test_segments_begin_at_kept_checkpoints(past: Path) -> None:
    with open_past_run(str(past)) as opened:
        segments = plan_segments(opened, 1, 15, 3)
        assert [(one.checkpoint, one.last, one.end) for one in segments] == [
            ("", 4, (0, 4)),
            ("p0000-s00000004", 8, (2, 3)),
            ("p0002-s00000003", 16, None),
        ]
        assert len(plan_segments(opened, 9, 11, 3)) == 1


def test_command_prints_the_file(past: Path, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    shutil.copytree(past, run)
    hooks = str(write_hooks(tmp_path, "Phases"))
    assert main(["relog", str(run), "--hook", hooks, "--updates", "1:5", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["names"], content["lines"], content["omitted"]) == (["weights"], 2, [])


def test_numbers_under_a_name_of_the_run_are_left_out_with_a_warning(
    past: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(past, run)
    done = relog(str(run), RelogOptions(str(write_hooks(tmp_path, "Phases", "Silent"))))
    assert (done.names, done.omitted) == (("weights",), ("loss",))
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.args == ("loss",)


@pytest.mark.parametrize(
    ("names", "options", "error", "code"),
    [
        (["Disturbs"], {}, ChangedError, "relog.differs"),
        ([], {}, ConfigError, "relog.no_hook"),
        (["Silent"], {"updates": "9:10"}, ConfigError, "relog.nothing_new"),
        (["Norms"], {"updates": "9:16"}, ConfigError, "relog.no_such_update"),
        (["Norms"], {"updates": "a:b"}, ConfigError, "relog.no_such_update"),
    ],
)
def test_errors_leave_no_file(
    past: Path,
    tmp_path: Path,
    names: list[str],
    options: dict[str, Any],
    error: type[Exception],
    code: str,
) -> None:
    hooks = str(write_hooks(tmp_path, *names))
    with raises(error, code=code):  # type: ignore[type-var]
        relog(str(past), RelogOptions(hooks, **options))
    assert not Path(f"{past}-relog").exists()


@pytest.mark.slow
def test_error_of_a_hook_is_the_same_in_a_process(past: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^no$"):
        relog(str(past), RelogOptions(str(write_hooks(tmp_path, "Fails")), jobs=2))
    assert not Path(f"{past}-relog").exists()


def test_run_of_several_ranks_is_rejected(past: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    shutil.copytree(past, folder)
    ledger = parse_ledger((folder / LEDGER).read_bytes())
    records = [one._replace(flags=one.flags | 2 << PROCESSES_SHIFT) for one in ledger.values()]
    (folder / LEDGER).write_bytes(encode_ledger(records, ledger.header))
    with raises(ConfigError, code="relog.world_size"):
        relog(str(folder), RelogOptions(str(write_hooks(tmp_path, "Norms"))))


def test_path_that_a_file_of_hooks_adds_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    hooks = tmp_path / "hooks.py"
    hooks.write_text(
        "import sys\nsys.path.insert(0, 'added')\nfrom phasetrain.hooks import Hook\nhook = Hook()\n"
    )
    before = list(sys.path)
    load_hooks(str(hooks))
    assert sys.path == ["added", *before]


def test_missing_file_of_hooks(past: Path) -> None:
    with raises(ConfigError, code="relog.no_file"):
        relog(str(past), RelogOptions("missing.py"))
