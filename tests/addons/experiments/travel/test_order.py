"""`phasetrain order` lists which update has which samples."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import train

from phasetrain.addons.experiments.travel.past_run import open_past_run
from phasetrain.addons.experiments.travel.visit import Visit
from phasetrain.cli import main
from phasetrain.data.samplers.source import SampleSource
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.runs.ledger import FILE, encode_ledger, parse_ledger


class RecordIds(Hook):
    """Records the samples of each update, as the task gets them."""

    observe_only = True

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        if phase.is_train:
            self.ids.setdefault(run.state.updates + 1, []).extend(batch.ids.tolist())


def ask(folder: Path, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert main(["order", str(folder), *words, "--trust", "--json"]) == code
    return json.loads(capsys.readouterr().out)


def list_dicts(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]


@pytest.mark.feature(
    "travel.order", "which update has which samples, past and future", "`phasetrain order`"
)
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("DATA.TRAIN.sampler=sequential", "OPTIMIZER.accumulate=2"),
        ("DATA.TRAIN.exclude=[3,17,1400]", "PHASES.test_every.updates=2"),
        ("DATA.TRAIN.subset={samples: 100}", "PHASES.limit.train=null", "PHASES.updates=9"),
    ],
)
def test_rows_are_the_samples_of_the_updates(
    tmp_path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = RecordIds()
    if any(word.startswith("PHASES.updates") for word in words):
        words = (*words, "PHASES.epochs=null")
    train(tmp_path, *words, hooks={"seen": seen})
    last = max(seen.ids)
    content = ask(tmp_path, capsys, "--between", "1", str(last))
    rows = list_dicts(content)
    listed: dict[int, list[int]] = {}
    for row in rows:
        if not row["excluded"]:
            listed.setdefault(row["update"], []).append(row["sample"])
    assert listed == seen.ids
    assert (content["checked"], content["wrong"]) == (last, None)
    sample = seen.ids[2][3]
    by_sample = list_dicts(ask(tmp_path, capsys, "--sample", str(sample)))
    assert by_sample == [row for row in rows if row["sample"] == sample]


def test_one_update_has_the_places_of_its_batch(
    past: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list_dicts(ask(past, capsys, "--update", "7"))
    assert [row["place"] for row in rows] == list(range(24))
    assert [row["position"] for row in rows] == list(range(24, 48))
    assert {row["epoch"] for row in rows} == {1}
    assert {row["past"] for row in rows} == {1}
    assert len({row["seed"] for row in rows}) == 24
    with open_past_run(str(past)) as opened, Visit(opened, 7) as visit:
        assert visit.batches[0].ids.tolist() == [row["sample"] for row in rows]


def test_future_of_a_run_that_was_paused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "RUN.pause_at=8")
    content = ask(tmp_path, capsys, "--between", "8", "9")
    assert [row["past"] for row in list_dicts(content)] == [1] * 24 + [0] * 24
    assert content["checked"] == 1
    seen = RecordIds()
    train(tmp_path, hooks={"seen": seen})
    assert [row["sample"] for row in list_dicts(content)][24:] == seen.ids[9]


@pytest.mark.addon("sampling")
def test_mixture_names_its_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(
        tmp_path,
        "DATA.TRAIN.dataset=mixed",
        "DATA.TRAIN.datasets={a: {dataset: digits}, b: {dataset: digits}}",
    )
    rows = list_dicts(ask(tmp_path, capsys, "--update", "1"))
    assert {row["source"] for row in rows} == {"a", "b"}
    assert {row["sample"] < 1442 for row in rows if row["source"] == "a"} == {True}


def test_query_joins_samples_and_updates(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = parse_ledger((past / FILE).read_bytes())
    worst = max(recorded.values(), key=lambda record: record.loss)
    content = ask(
        past,
        capsys,
        "--sql",
        'select "update", count(*) as n, max(loss) from samples join updates using ("update") '
        "group by 1 order by loss desc limit 1",
    )
    assert content["columns"] == ["update", "n", "max(loss)"]
    assert content["rows"] == [[worst.updates, 24, worst.loss]]


def test_rows_are_written_to_files(
    past: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = ask(past, capsys, "--update", "3", "--out", f"{tmp_path}/three.csv")
    with (tmp_path / "three.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == content["columns"]
    assert [int(row[4]) for row in rows[1:]] == [row[4] for row in content["rows"]]
    assert (
        main(["order", str(past), "--update", "3", "--trust", "--out", f"{tmp_path}/all.csv"]) == 0
    )
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_parquet_has_the_same_rows(
    past: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    content = ask(past, capsys, "--update", "3", "--out", f"{tmp_path}/three.parquet")
    table = parquet.read_table(tmp_path / "three.parquet")
    assert table.column_names == content["columns"]
    assert table.column("sample").to_pylist() == [row[4] for row in content["rows"]]


def test_other_samples_than_in_the_ledger_are_exit_code_1(
    past: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "forged"
    shutil.copytree(past, folder)
    ledger = parse_ledger((folder / FILE).read_bytes())
    records = [
        record._replace(ids=1) if number == 6 else record for number, record in ledger.items()
    ]
    (folder / FILE).write_bytes(encode_ledger(records, ledger.header))
    assert ask(folder, capsys, "--update", "6", code=1)["wrong"] == 6
    assert ask(folder, capsys, "--update", "5")["wrong"] is None
    content = ask(folder, capsys, "--between", "5", "9", code=1)
    assert (content["checked"], content["wrong"]) == (2, 6)  # it stops there


class MoveOn(Hook):
    """Lets the training move on to the second half of the dataset after the first epoch."""

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        run.task.parts.dataset_of("train").first = 720 if phase.epoch else 0


class MoveOnBySamples(Hook):
    """The same, by the samples in use."""

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        run.task.parts.samples_of("train").dataset.first = 720 if phase.epoch else 0


def sample_half(source: SampleSource) -> Any:
    """Return an order of the half of the samples that a hook has chosen."""

    def order(length: int, seed: int) -> Any:
        first = getattr(source.dataset, "first", 0)
        return first + np.random.default_rng(seed).permutation(720).astype(np.int64)

    order.samples = lambda length: 720  # type: ignore[attr-defined]
    return order


@pytest.mark.parametrize("hook", ["MoveOn", "MoveOnBySamples"])
def test_order_that_a_hook_changes_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hook: str
) -> None:
    words = (
        f"HOOKS.move={{name: {__name__}.{hook}}}",
        f"DATA.TRAIN.sampler={__name__}.sample_half",
    )
    train(tmp_path, *words, "RUN.pause_at=5")
    assert len(ask(tmp_path, capsys, "--update", "5")["rows"]) == 24
    content = ask(tmp_path, capsys, "--between", "5", "6", code=1)
    assert (content["checked"], content["wrong"]) == (1, None)
    assert "HOOKS.move" in content["verdict"]
    train(tmp_path, *words)
    content = ask(tmp_path, capsys, "--between", "5", "6", code=1)
    assert (content["wrong"], content["rows"]) == (6, [])
    # The first epoch does not have this sample, whatever the second one has.
    assert ask(tmp_path, capsys, "--sample", "1400", code=1)["wrong"] == 10


def test_range_ends_with_the_run(past: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list_dicts(ask(past, capsys, "--between", "15", "1000"))
    assert {row["update"] for row in rows} == {15}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--between", "16", "20"], "order.no_such_update"),
        (["--update", "16"], "order.no_such_update"),
        (["--between", "3", "2"], "order.no_such_update"),
        (["--sample", "1442"], "order.no_such_sample"),
        (["--sql", "drop table samples"], "order.invalid_query"),
        (["--sql", "attach 'other.db' as other"], "order.invalid_query"),
        (["--sql", "vacuum into 'other.db'"], "order.invalid_query"),
        (["--sql", "select nothing from samples"], "order.invalid_query"),
        (["--update", "1", "--out", "rows.txt"], "order.format"),
        (["--update", "1", "--out", "missing/rows.csv"], "order.cannot_write"),
        (["--update", "1", "--sample", "1"], "cli.usage"),
        ([], "cli.usage"),
    ],
)
def test_wrong_questions(
    past: Path, words: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = ask(past, capsys, *words, code=2)
    assert [error["code"] for error in content["errors"]] == [code]


def test_custom_loader_has_no_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader = ("DATA.TRAIN.loader=torch.utils.data.DataLoader", "DATA.TRAIN.fast_forward=true")
    train(tmp_path, *loader, "DATA.TRAIN.transforms=[]")
    content = ask(tmp_path, capsys, "--update", "1", code=2)
    assert [error["code"] for error in content["errors"]] == ["order.no_ids"]
