import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor

from phasetrain.addons.sampling.windows import Windows
from phasetrain.app.api import run
from phasetrain.data import DATASETS, WindowedDataset
from phasetrain.data.datasets import TensorSamples
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing.build import build_run


class Empty:
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


def numbers(*values: float) -> TensorSamples:
    return TensorSamples(
        torch.tensor(values)[:, None], torch.zeros(len(values), dtype=torch.int64), classes=2
    )


def test_indices_run_through_the_windows() -> None:
    made = Windows([numbers(1, 2, 3), Empty(), numbers(4)])
    assert isinstance(made, WindowedDataset)
    assert (len(made), made.window_lengths) == (4, (3, 0, 1))
    assert [float(made[index][0]) for index in range(4)] == [1, 2, 3, 4]
    assert made.facts()["classes"] == 2


def test_fingerprint_depends_on_content_and_boundaries() -> None:
    first = Windows([numbers(1, 2), numbers(3)]).fingerprint()
    assert first == Windows([numbers(1, 2), numbers(3)]).fingerprint()
    assert first != Windows([numbers(1, 2), numbers(4)]).fingerprint()
    assert first != Windows([numbers(1), numbers(2, 3)]).fingerprint()


def test_added_windows_continue_the_earlier_ones() -> None:
    before = Windows([numbers(1, 2), numbers(3)]).fingerprint()
    assert Windows([numbers(1, 2), numbers(3), numbers(4)]).continues(before)
    assert not Windows([numbers(0), numbers(1, 2), numbers(3)]).continues(before), (
        "a window was inserted before them"
    )
    assert not Windows([numbers(1, 2)]).continues(before)
    assert not Windows([numbers(1, 2), numbers(3)]).continues("of another version")


def hours(folder: Path, *lengths: int) -> str:
    for hour, length in enumerate(lengths):
        rows = [{"input": [hour + 0.01 * n, 1.0], "target": n % 2} for n in range(length)]
        (folder / f"hour-{hour}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{folder}/hour-*.jsonl"


def test_pattern_gives_one_window_per_file(tmp_path: Path) -> None:
    made = DATASETS.build(
        "windows",
        {
            "pattern": hours(tmp_path, 3, 2),
            "parameter": "files",
            "of": {"dataset": "reading_parts.JsonLines"},
        },
    )
    assert made.window_lengths == (3, 2)
    assert made[3][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"pattern": "nowhere/*", "of": {"dataset": "reading_parts.JsonLines"}},
            "pattern = 'nowhere/\\*':",
        ),
        ({"pattern": "*", "of": {"data": "digits"}}, "of = {'data': 'digits'}:"),
    ],
)
def test_bad_parameters_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], message: str
) -> None:
    (tmp_path / "a").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        DATASETS.build("windows", params)


def words(folder: Path, *more: str) -> list[str]:
    pattern = f"{folder}/hour-*.jsonl"
    split = f"{{dataset: windows, pattern: '{pattern}', parameter: files, of: {{dataset: reading_parts.JsonLines}}, batch_size: 4}}"
    return [
        "experiment=null", "MODEL={name: torch.nn.Linear, in_features: 2, out_features: 2}", "METERS={loss: {}}",
        f"DATA={{TRAIN: {split}, TEST: {split}}}", "DATA.TRAIN.drop_last=false", "PHASES.epochs=1",
        f"RUN.dir={folder}/run", "OPTIMIZER.lr=0.1", *more,
    ]  # fmt: skip


def phases(folder: Path) -> list[tuple[str, int]]:
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [(record["split"], record["epoch"]) for record in records if record["kind"] == "phase"]


def seen(inputs: list[Tensor]) -> list[int]:
    return [int(row[0]) for batch in inputs for row in batch]


@pytest.mark.feature(
    "34", "a window is a phase with its events", "`on_phase_start`, `on_phase_end`"
)
@pytest.mark.feature(
    "26",
    "windows of data, in train and test pairs, with more arriving later",
    "`DATA.*.dataset=windows`, `PHASES.limit.windows`",
)
def test_run_resumes_on_added_windows_and_rejects_changed_ones(tmp_path: Path) -> None:
    hours(tmp_path, 8, 5)
    shown = io.StringIO()
    result = run(words(tmp_path), terminal=Terminal(shown, live=False))
    assert "2 windows, 4 updates" in shown.getvalue()
    assert (result.updates, phases(tmp_path)) == (
        4,
        [("train", 0), ("test", 0), ("train", 1), ("test", 1)],
    )
    hours(tmp_path, 8, 5, 3)
    result = run(words(tmp_path, "RUN.allow=[data]"))
    assert (result.updates, phases(tmp_path)[-2:]) == (5, [("train", 2), ("test", 2)])
    (tmp_path / "hour-0.jsonl").rename(tmp_path / "hour-3.jsonl")
    with raises(ChangedError, code="resume.data_changed", key="DATA.TRAIN"):
        run(words(tmp_path, "RUN.allow=[data]"))


def test_limit_without_windows_is_rejected() -> None:
    with raises(ConfigError, key="PHASES.limit.windows", given="2"):
        build_run(["PHASES.limit.windows=2"])


def test_limit_ends_the_run_after_the_given_windows(tmp_path: Path) -> None:
    hours(tmp_path, 8, 5, 6)
    plan = build_run(words(tmp_path, "PHASES.limit.windows=2")).plan
    planned = [(phase.split, phase.epoch) for phase in plan.phases]
    assert planned == [("train", 0), ("test", 0), ("train", 1), ("test", 1)]
