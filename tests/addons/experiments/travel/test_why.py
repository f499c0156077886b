"""`phasetrain why` proves which sample or setting made the loss rise."""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import records, train
from raising import raises
from test_at import list_files

from phasetrain.addons.experiments.options import WhyOptions
from phasetrain.addons.experiments.travel.forks import (
    Fork,
    Forks,
    Goal,
    SampleScore,
    SampleSearch,
    select_rows,
    with_clipping,
    with_float32,
    with_fresh_optimizer,
    with_learning_rate,
    without_samples,
)
from phasetrain.addons.experiments.travel.past_run import open_past_run
from phasetrain.addons.experiments.travel.spikes import Spike
from phasetrain.addons.experiments.travel.visit import Visit
from phasetrain.addons.experiments.travel.why import explain_spike
from phasetrain.addons.report.page import read_run, render_report
from phasetrain.cli import main
from phasetrain.config.nested import to_json_value
from phasetrain.engine.batch import Batch
from phasetrain.errors import ChangedError, ConfigError, NumericsError
from phasetrain.runs.ledger import FILE, encode_ledger, parse_ledger

WORDS = (
    *("PHASES.epochs=2", "PHASES.limit.train=15", "MODEL=null", "MODEL.name=mlp"),
    "PHASES.test_every.updates=6",
    *("OPTIMIZER.lr=0.02", "CHECKPOINT.every_updates=4", "CHECKPOINT.keep_every.updates=4"),
)
SAMPLE = 872
"""A sample of update 25."""


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("why") / "clean"
    train(folder, *WORDS)
    return folder


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with a sample that has extreme values."""
    folder = tmp_path_factory.mktemp("why") / "poisoned"
    train(folder, *WORDS, *POISON)
    return folder


@pytest.fixture(scope="module")
def visited(clean: Path) -> Iterator[Visit]:
    """Return the clean run before update 24."""
    with open_past_run(str(clean)) as past, Visit(past, 24) as visit:
        yield visit


@pytest.fixture(scope="module")
def jump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run in which the learning rate of an update is a thousand times as large."""
    folder = tmp_path_factory.mktemp("why") / "jump"
    train(folder, *WORDS, "+HOOKS.jump={name: poisoned.Jump, update: 24}")
    return folder


POISON = ("DATA.TRAIN.dataset=poisoned.load_poisoned", f"DATA.TRAIN.sample={SAMPLE}")


def ask(folder: Path, **options: Any) -> dict[str, Any]:
    answer = explain_spike(str(folder), WhyOptions(**{"trust": True, "budget": 1.0, **options}))
    return {**to_json_value(answer), "exit_code": answer.exit_code}


@pytest.mark.feature(
    "travel.why",
    "the sample or the setting that made the loss rise, proven by forks",
    "`phasetrain why`",
)
def test_poisoned_sample_is_found_and_the_fork_has_the_bits_of_a_run_without_it(
    poisoned: Path, tmp_path: Path
) -> None:
    before = list_files(poisoned)
    answer = ask(poisoned)
    assert list_files(poisoned) == before
    assert (answer["cause"], answer["cause_update"], answer["exit_code"]) == ("sample", 25, 0)
    assert answer["goal"]["name"] == "loss"
    assert answer["goal"]["value"] == parse_ledger((poisoned / FILE).read_bytes())[25].loss
    assert answer["answer"].startswith("sample 872 alone, in update 25: without it the loss stays")
    [sample] = answer["samples"]
    assert (sample["id"], sample["place"], sample["updates"]) == (SAMPLE, 7, [25])
    assert sample["image"].startswith("data:image/png;base64,")
    assert sample["stored_image"] != sample["image"]
    assert answer["cost"] == {"replayed": 4, "trained": 5, "updates": 30, "limit": 30}
    without = tmp_path / "without"
    train(without, *WORDS, *POISON, f"DATA.TRAIN.exclude=[{SAMPLE}]")
    ledger = parse_ledger((without / FILE).read_bytes())
    last = answer["forks"][-1]
    assert last["removes"]
    assert [last["value"], *last["after"]] == [ledger[update].loss for update in (25, 26, 27)]


def test_answer_and_commands_are_in_the_report(poisoned: Path) -> None:
    answer = ask(poisoned)
    assert Path(answer["path"]) == poisoned.with_name("poisoned-why") / "loss-25.why.json"
    assert json.loads(Path(answer["path"]).read_text())["cause"] == "sample"
    page = render_report([read_run(str(poisoned))])
    assert '<a href="#spike-25">' in page
    assert f"phasetrain why {poisoned} --update 25\nphasetrain at {poisoned} 25" in page
    assert answer["answer"] in page
    assert answer["samples"][0]["image"] in page


def test_learning_rate_that_jumps_is_the_cause(jump: Path, clean: Path) -> None:
    answer = ask(jump)
    assert (answer["cause"], answer["cause_update"]) == ("learning_rate", 24)
    # Almost the loss of the run without the hook: the schedule moves a little in an update.
    expected = parse_ledger((clean / FILE).read_bytes())[25].loss
    assert answer["forks"][0]["value"] == pytest.approx(expected, rel=1e-3)


def test_large_gradient_is_no_sample_but_clipping_removes_it(tmp_path: Path) -> None:
    folder = tmp_path / "burst"
    hook = "+HOOKS.burst={name: poisoned.Burst, update: 24}"
    train(folder, *WORDS, hook, "OPTIMIZER.clip_norm=1e9")  # it measures the norm
    answer = ask(folder)
    assert (answer["cause"], answer["cause_update"]) == ("clip", 24)
    assert [fork["removes"] for fork in answer["forks"]] == [True] + 4 * [False] + [True]
    # The batch of the spike is usual one update earlier; half the learning rate is not enough.
    assert answer["forks"][0]["change"] == "with the samples of update 25"
    assert answer["forks"][4]["change"] == "with half the learning rate"


@pytest.mark.parametrize(
    ("apply", "is_equal"),
    [
        (partial(with_learning_rate, 1.0), True),
        (partial(with_learning_rate, 0.5), False),
        (partial(with_clipping, 1e9), True),
        (partial(with_clipping, 1e-3), False),
        (with_float32, True),  # as it is
        (with_fresh_optimizer, False),
        (partial(without_samples, []), True),
        (partial(without_samples, [3]), False),
    ],
)
def test_changes_that_change_nothing_have_the_bits_of_the_run(
    visited: Visit, apply: Any, is_equal: bool
) -> None:
    ledger = visited.past.ledger
    assert ledger is not None
    forks = Forks(visited, Goal("loss", 25, 25, Spike(25, 25, 9.0, 1.0, 5.0, 5.0)), 9)
    fork = forks.fork(24, "changed", apply)
    assert fork is not None
    assert (fork.value == ledger[25].loss) is is_equal
    assert fork.value == pytest.approx(ledger[25].loss, abs=0.1)
    assert len(fork.after) == 2


def test_jump_of_a_metric_is_explained(jump: Path) -> None:
    answer = ask(jump, metric="test/loss", budget=2.0)
    assert (answer["cause"], answer["cause_update"]) == ("learning_rate", 24)
    assert (answer["goal"]["name"], answer["goal"]["update"]) == ("test/loss", 24)
    tests = [line for line in records(jump) if (line["kind"], line["split"]) == ("phase", "test")]
    losses = {line["updates"]: line["metrics"]["loss"] for line in tests}
    assert answer["goal"]["value"] == losses[24]
    assert answer["forks"][0]["value"] == pytest.approx(losses[18], abs=0.1)


def test_loss_that_is_not_finite_and_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "ended"
    with pytest.raises(NumericsError):
        train(folder, *WORDS, *POISON, "DATA.TRAIN.factor=1.0e+39")
    answer = ask(folder)
    assert (answer["cause"], answer["goal"]["update"], answer["goal"]["value"]) == (
        *("sample", 25),
        None,
    )
    assert [sample["id"] for sample in answer["samples"]] == [SAMPLE]


def test_clean_run_has_no_spike_and_no_file(clean: Path) -> None:
    for options in ({}, {"update": 25}):
        answer = ask(clean, **options)
        assert (answer["goal"], answer["cause"], answer["exit_code"]) == (None, None, 0)
        assert answer["spikes"] == []
    assert not clean.with_name("clean-why").exists()


def test_command_prints_the_answer(poisoned: Path, capsys: Any) -> None:
    words = ["why", str(poisoned), "--update", "25", "--budget", "0.5", "--trust"]
    assert main(words) == 0
    assert "sample 872 alone, in update 25" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"update": 31}, "why.no_such_update"),
        ({"update": 0}, "why.no_such_update"),
        ({"update": 3}, "why.no_such_update"),
        ({"metric": "test/los"}, "judge.no_metric"),
        ({"budget": 0.1}, "why.budget"),
    ],
)
def test_errors(poisoned: Path, options: dict[str, Any], code: str) -> None:
    with raises(ConfigError, code=code):
        ask(poisoned, **options)


def test_run_without_a_ledger_or_with_another_one(poisoned: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(poisoned, other)
    records = list(parse_ledger((other / FILE).read_bytes()).values())
    records[23] = records[23]._replace(weights=1)
    (other / FILE).write_bytes(encode_ledger(records))
    with raises(ChangedError, code="why.differs"):
        ask(other)
    (other / FILE).unlink()
    with raises(ConfigError, code="why.no_ledger"):
        ask(other)


def test_rows_of_a_batch_with_padding() -> None:
    batch = Batch(
        {"x": torch.arange(6).view(3, 2)},
        torch.tensor([5, 6, 7]),
        torch.tensor([40, 42]),
        2,
        torch.tensor([True, False, True]),
    )
    chosen = select_rows(batch, [2])
    assert chosen.input["x"].tolist() == [[4, 5]]
    assert (chosen.target.tolist(), chosen.ids.tolist(), chosen.size) == ([7], [42], 1)
    assert chosen.mask is not None
    assert chosen.mask.tolist() == [True]


class StubForks:
    """Forks of an update with known culprits: the spike is gone without any of them."""

    goal = Goal("loss", 9, 9, Spike(9, 9, 8.0, 1.0, 1.5, 2.0))

    def __init__(self, culprits: Sequence[int], samples: int = 16) -> None:
        self.culprits = set(culprits)
        self.samples = samples
        self.trained = 0

    def measure(self, update: int) -> list[SampleScore]:
        """Return samples; the last one has the highest loss."""
        return [SampleScore(place, 100 + place, place, math.nan) for place in range(self.samples)]

    def fork(self, update: int, change: str, apply: Any, *, further: bool) -> Fork:
        """Train without the samples of `apply`."""
        self.trained += 1
        return Fork(update, change, 1.0, (), self.culprits <= set(apply.args[0]))


@pytest.mark.parametrize(
    ("update", "culprits", "ids", "forks"),
    [
        (9, [15], [115], 1),
        (9, [14], [114], 5),
        (9, [8], [108], 6),
        (9, [0], [100], 7),  # of the half with the lowest losses
        (9, [15, 14], [115, 114], 5),
        (9, [0, 15], None, 3),  # no half has both
        (8, [0], [100], 2),  # with a control, because it acts later
        (8, [], None, 2),  # negative control: any change at all removes it
    ],
)
def test_groups_are_narrowed_to_the_smallest(
    update: int, culprits: list[int], ids: list[int] | None, forks: int
) -> None:
    stub = StubForks(culprits)
    found = SampleSearch(stub, update).find()  # type: ignore[arg-type]
    assert ids == (None if found is None else [score.id for score in found.samples])
    assert stub.trained == forks
