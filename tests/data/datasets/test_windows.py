import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phasetrain.commands.api import run
from phasetrain.data import DATASETS, WindowedDataset
from phasetrain.data.datasets import TensorSamples
from phasetrain.data.datasets.windows import Windows
from phasetrain.errors import ChangedError, ConfigError
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


def test_one_after_the_other() -> None:
    made = Windows([numbers(1, 2, 3), Empty(), numbers(4)])
    assert isinstance(made, WindowedDataset)
    assert (len(made), made.window_lengths) == (4, (3, 0, 1))
    assert [float(made[index][0]) for index in range(4)] == [1, 2, 3, 4]
    assert made.facts()["classes"] == 2


def test_another_content_or_another_cut_has_another_fingerprint() -> None:
    first = Windows([numbers(1, 2), numbers(3)]).fingerprint()
    assert first == Windows([numbers(1, 2), numbers(3)]).fingerprint()
    assert first != Windows([numbers(1, 2), numbers(4)]).fingerprint()
    assert first != Windows([numbers(1), numbers(2, 3)]).fingerprint()


def test_more_windows_continue_those_that_were_there() -> None:
    before = Windows([numbers(1, 2), numbers(3)]).fingerprint()
    assert Windows([numbers(1, 2), numbers(3), numbers(4)]).continues(before)
    assert not Windows([numbers(0), numbers(1, 2), numbers(3)]).continues(before), (
        "one has come before them"
    )
    assert not Windows([numbers(1, 2)]).continues(before)
    assert not Windows([numbers(1, 2), numbers(3)]).continues("of another version")


def hours(folder: Path, *lengths: int) -> str:
    for hour, length in enumerate(lengths):
        rows = [{"input": [hour + 0.01 * n, 1.0], "target": n % 2} for n in range(length)]
        (folder / f"hour-{hour}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{folder}/hour-*.jsonl"


def test_by_a_pattern(tmp_path: Path) -> None:
    made = DATASETS.build(
        "windows",
        {"pattern": hours(tmp_path, 3, 2), "parameter": "files", "of": {"dataset": "lines"}},
    )
    assert made.window_lengths == (3, 2)
    assert made[3][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"pattern": "nowhere/*", "of": {"dataset": "lines"}}, "nothing matches"),
        ({"pattern": "*", "of": {"data": "lines"}}, "expected a mapping with `dataset`"),
    ],
)
def test_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], message: str
) -> None:
    (tmp_path / "a").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        DATASETS.build("windows", params)


def words(folder: Path, *more: str) -> list[str]:
    pattern = f"{folder}/hour-*.jsonl"
    split = f"{{dataset: windows, pattern: '{pattern}', parameter: files, of: {{dataset: lines}}, batch_size: 4}}"
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


def test_a_run_goes_over_window_after_window_and_on_when_more_have_come(tmp_path: Path) -> None:
    hours(tmp_path, 8, 5)
    result = run(words(tmp_path))
    assert (result.updates, phases(tmp_path)) == (
        4,
        [("train", 0), ("test", 0), ("train", 1), ("test", 1)],
    )
    hours(tmp_path, 8, 5, 3)
    result = run(words(tmp_path, "RUN.allow=[data]"))
    assert (result.updates, phases(tmp_path)[-2:]) == (5, [("train", 2), ("test", 2)])


def test_a_window_that_comes_before_those_that_are_done_is_refused(tmp_path: Path) -> None:
    hours(tmp_path, 8, 5)
    run(words(tmp_path))
    (tmp_path / "hour-0.jsonl").rename(tmp_path / "hour-2.jsonl")
    with pytest.raises(
        ChangedError, match="windows that were there before are gone or have changed"
    ):
        run(words(tmp_path, "RUN.allow=[data]"))


def test_a_limit_where_there_are_no_windows() -> None:
    with pytest.raises(ConfigError, match=r"limit.windows = 2:"):
        build_run(["PHASES.limit.windows=2"])


def test_a_limit_on_windows(tmp_path: Path) -> None:
    hours(tmp_path, 8, 5, 6)
    run(words(tmp_path, "PHASES.limit.windows=2"))
    assert phases(tmp_path) == [("train", 0), ("test", 0), ("train", 1), ("test", 1)]
