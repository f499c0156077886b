"""The first update at which two runs may differ, from their configs alone."""

import functools

import pytest
from harness import SMALL

from phasetrain.addons.experiments.fork.compared_run import ComparedRun
from phasetrain.addons.experiments.fork.first_difference import RunDifference, find_first_difference
from phasetrain.app.setup import resolve_config

OBSERVE = pytest.mark.addon("observe")
LR = "OPTIMIZER.SCHEDULES.lr="
FLAT = f"{LR}constant"
STAGES = "PHASES.stages=[{epochs: 1}, {epochs: 2%s}]"


@functools.cache
def open_run(*words: str) -> ComparedRun:
    """Return a run of three epochs of five updates, or what the words change it to."""
    length = ("PHASES.epochs=null",) if any("stages" in word for word in words) else ()
    return ComparedRun.open(resolve_config([*SMALL, *length, *words]))


def compare(one: tuple[str, ...], other: tuple[str, ...]) -> RunDifference:
    """Return the difference of two runs, which does not depend on their order."""
    found = find_first_difference(open_run(*one), open_run(*other))
    assert find_first_difference(open_run(*other), open_run(*one)).updates == found.updates
    return found


@pytest.mark.by_default(3)
@pytest.mark.parametrize(
    "word",
    [
        "RUN.pause_at=3",
        "CHECKPOINT.every_updates=1",
        "DATA.TRAIN.workers=1",
        pytest.param("HOOKS.profiler={}", marks=OBSERVE),
        "HOOKS.report=null",
        "LAUNCH.minutes=5",
        "PHASES.extend=stretch",
    ],
)
def test_keys_that_change_no_bit_are_shared_to_the_end(word: str) -> None:
    assert compare((), (word,)) == RunDifference(15)


@pytest.mark.feature("fork.first_difference")
@pytest.mark.by_default(5)
@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("RUN.seed=1", "RUN.seed"),
        ("OPTIMIZER.lr=0.2", "OPTIMIZER.lr"),
        ("MODEL.width=8", "MODEL.width"),
        ("DATA.TRAIN.batch_size=12", "DATA.TRAIN.batch_size"),
        ("MACHINE.threads=2", "MACHINE.threads"),
        ("LAUNCH.processes=2", "DATA.TRAIN.micro_batch_size"),
        ("CHECKPOINT.best.monitor=test/accuracy", "CHECKPOINT.best.monitor"),
        ("HOOKS.metrics.every_updates=2", "HOOKS.metrics.every_updates"),
        pytest.param("HOOKS.csv={}", "HOOKS.csv", marks=OBSERVE),
        ("HOOKS.early_stopping={monitor: test/accuracy}", "HOOKS.early_stopping"),
        ("RUN.resume=must", "RUN.resume"),
        pytest.param("HOOKS.mlflow={}", "HOOKS.mlflow", marks=OBSERVE),
        ("METERS.accuracy.splits=[TEST]", "METERS.accuracy.splits"),
        ("PHASES.train_meters=false", "PHASES.train_meters"),
        ("RUN.imports=[math]", "RUN.imports"),
        ("PHASES.overfit=2", "PHASES.overfit"),
        ("MODEL.ema={decay: 0.9}", "MODEL.ema"),
    ],
)
def test_unknown_or_early_keys_share_nothing(word: str, key: str) -> None:
    found = compare((), (word,))
    assert (found.updates, found.key.startswith(key)) == (0, True)


@pytest.mark.feature(
    "fork.first_difference",
    "the first update at which two configs can differ, never too late",
    "`phasetrain.addons.experiments.fork.first_difference`",
)
@pytest.mark.by_default(5)
@pytest.mark.parametrize(
    ("one", "other", "updates"),
    [
        (
            "{name: multistep, milestones: [5 updates]}",
            "{name: multistep, milestones: [9 updates]}",
            5,
        ),
        ("{name: multistep, milestones: [9 updates]}", "constant", 9),
        ("{name: wsd, decay: 0.2}", "{name: wsd, decay: 0.2, shape: cosine}", 13),
        ("{name: wsd, decay: 0.2}", "{name: wsd, decay: 0.4}", 10),
        ("cosine", "linear", 0),
        (
            "{name: composite, parts: [{name: constant, length: 0.6}, {name: constant, length: 0.4}]}",
            "{name: composite, parts: [{name: constant, length: 0.6}, {name: linear, length: 0.4}]}",
            10,
        ),
        (
            "{name: multistep, milestones: [3 updates], every: epoch}",
            "{name: multistep, milestones: [4 updates], factor: 0.2, every: epoch}",
            5,
        ),
    ],
)
def test_schedules_are_compared_by_their_values(one: str, other: str, updates: int) -> None:
    found = compare((f"{LR}{one}",), (f"{LR}{other}",))
    assert (found.updates, found.key) == (updates, "OPTIMIZER.SCHEDULES.lr")


@pytest.mark.parametrize(("schedule", "updates"), [("constant", 10), ("cosine", 1)])
def test_schedule_of_a_group_depends_on_the_length_of_the_run(schedule: str, updates: int) -> None:
    rule = f"OPTIMIZER.groups=[{{match: 'head.*', SCHEDULES: {{lr: {schedule}}}}}]"
    shorter = compare((FLAT, rule), (FLAT, rule, "PHASES.epochs=2"))
    assert shorter.updates == updates


def test_runs_share_the_updates_before_the_first_excluded_sample() -> None:
    base = open_run()
    first = base.train_sampler.find_pass(base.plan.phases[0])[0:120]
    late, unused = (
        int(first[3 * 24 + 5]),
        int(base.train_sampler.find_pass(base.plan.phases[0])[130]),
    )
    assert compare((), (f"DATA.TRAIN.exclude=[{late}]",)).updates == 3
    one, both = f"DATA.TRAIN.exclude=[{first[0]}]", f"DATA.TRAIN.exclude=[{first[0]}, {late}]"
    assert compare((one,), (both,)).updates == 3
    assert compare((), (one,)) == RunDifference(0, "DATA.TRAIN.exclude", f"null or [{first[0]}]")
    assert compare((), (f"DATA.TRAIN.exclude=[{unused}]",)).updates >= 5


def test_runs_share_the_updates_before_a_stage_that_continues() -> None:
    stages = "PHASES.stages=[{updates: 7}, {updates: 8, continues: true, OPTIMIZER: {lr: 0.3}}]"
    assert compare((), (stages,)).updates in (6, 7)


def test_longer_run_shares_the_whole_short_one_if_its_schedule_allows() -> None:
    assert compare((FLAT,), (FLAT, "PHASES.epochs=5")).updates == 15
    assert compare((), ("PHASES.epochs=5",)).updates == 1  # cosine over the length of the run


@pytest.mark.by_default(4)
@pytest.mark.parametrize(
    ("word", "updates"),
    [
        ("DATA.TEST.batch_size=16", 4),  # the test after update 5 is another one
        ("DATA.TEST.transforms=[{name: noise, std: 0.1}]", 4),
        ("DATA.TEST.every.epochs=2", 4),
        ("PHASES.limit.test=1", 4),
        ("PHASES.test_every.updates=3", 2),
        ("PHASES.test_every.updates=7", 6),
        ("PHASES.test_first=true", 0),
        ("DATA.VALID={dataset: digits, split: test, every: end}", 14),
    ],
)
def test_tests_that_differ_end_the_shared_part_before_them(word: str, updates: int) -> None:
    assert compare((FLAT,), (FLAT, word)).updates == updates


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("first", "second", "updates"),
    [
        (", OPTIMIZER: {lr: 0.1}", ", OPTIMIZER: {lr: 0.01}", 5),
        ("", ", DATA: {TRAIN: {transforms: []}}", 5),
        ("", ", LOSS: {label_smoothing: 0.1}", 5),
        ("", ", MODEL: {freeze: [features]}", 0),
    ],
)
def test_stages_are_shared_up_to_the_one_that_differs(
    first: str, second: str, updates: int
) -> None:
    found = compare((FLAT, STAGES % first), (FLAT, STAGES % second))
    assert (found.updates, found.key) == (updates, "PHASES.stages")


def test_weight_averages_differ_shortly_before_their_start() -> None:
    words = [f"MODEL.swa={{start: {start}, every: 1 updates}}" for start in (0.4, 0.8)]
    assert compare((FLAT, words[0]), (FLAT, words[1])).updates == 5


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "word",
    [
        "MODEL.freeze_updates=[{match: head, for: 2 epochs}]",
        "MODEL.swa={start: 0.5}",
        f"{LR}{{name: torch.StepLR, step_size: 3}}",
    ],
)
def test_part_that_may_depend_on_the_length_shares_nothing_with_a_longer_run(word: str) -> None:
    assert compare((FLAT, word), (FLAT, word, "PHASES.epochs=5")).updates == 0
    assert compare((FLAT, word), (FLAT, word, "CHECKPOINT.keep_last=5")).updates == 15


def test_order_of_keys_counts() -> None:
    losses = ["a: {name: cross_entropy}, b: {name: cross_entropy}"]
    losses.append("b: {name: cross_entropy}, a: {name: cross_entropy}")
    words = [f"LOSS={{name: weighted_sum, losses: {{{one}}}}}" for one in losses]
    assert compare((words[0],), (words[1],)).updates == 0
