"""Iterables of unknown length: where a resume begins, and what is said about it."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, SaveEachStep, newest, run_until_killed, train
from processes import Launcher
from raising import raises
from stream_parts import Buffered, Counted, OwnGenerator, Unsaved

from phasetrain.data.datasets.forward import ForwardDataset
from phasetrain.data.loading.seed_check import check_position
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.testing import assert_exact_resume

WORDS = (
    "PHASES={epochs: null, updates: 12}",
    "PHASES.limit.train=null",
    "DATA.TRAIN.batch_size=12",
    "DATA.TRAIN.transforms=[{name: noise, std: 0.1}]",
    "MODEL.classes=10",
    "MODEL={name: small_cnn, channels: 1, width: 4}",
)


def words(kind: str) -> list[str]:
    return [*WORDS, f"DATA.TRAIN.dataset=stream_parts.{kind}"]


@pytest.mark.feature(
    "data.saved_position",
    "iterables of unknown length resume at the position that they save, which is checked first",
    "`state_dict`, `load_state_dict` of a dataset",
)
@pytest.mark.by_default("Counted")
@pytest.mark.parametrize("kind", ["Counted", "Buffered", "Unsaved"])
def test_killed_run_resumes_exactly_with_other_workers(kind: str) -> None:
    assert_exact_resume(words(kind), workers=(0, 1))


@pytest.mark.addon("observe")  # it reads a batch for the plan
@pytest.mark.feature("data.saved_position")
def test_only_a_saved_position_is_reached_without_the_samples_before(tmp_path: Path) -> None:
    read = {}
    for kind in (Counted, Unsaved):
        folder = tmp_path / kind.__name__
        hooks = {"save": SaveEachStep(), "kill": KillAfter(11)}
        more = [*words(kind.__name__), "DATA.TRAIN.exact=false"]  # without the check's samples
        run_until_killed(folder, *more, hooks=hooks)
        saved = newest(folder)
        assert saved.manifest.state["updates"] == 11
        assert ("data.train.stream" in saved.state["task"]) == (kind is Counted)
        Counted.read = 0
        train(folder, *more)
        read[kind] = Counted.read
    # One update of 12 samples is left, and the first sample is read for its target and its shape.
    assert read == {Counted: 2 + 12, Unsaved: 1 + 12 * 12}


@pytest.mark.parametrize("kind", [Counted, Buffered])
def test_position_of_the_middle_of_a_pass_restores_later_samples(kind: type[Counted]) -> None:
    whole = ForwardDataset(kind(), seed=3)
    expected = [whole[index] for index in range(200)]
    first = ForwardDataset(kind(), seed=3)
    for index in range(100):
        first[index]
    saved = first.save_position()
    assert saved is not None
    assert saved["passes"] == 1
    second = ForwardDataset(kind(), seed=3)
    second.load_position(saved)
    Counted.read = 0
    found = [second[index] for index in range(100, 200)]
    equal = [torch.equal(one[0], two[0]) for one, two in zip(found, expected[100:], strict=True)]
    # A buffer that is not part of the state changes the samples after it.
    assert all(equal) == (kind is Counted)
    assert Counted.read >= 100
    if kind is Counted:
        assert Counted.read == 100
        assert torch.equal(second[50][0], expected[50][0]), "an earlier sample begins again"


@pytest.mark.feature("data.saved_position")
@pytest.mark.parametrize(
    ("kind", "saves", "level"),
    [(Counted, True, "INFO"), (Buffered, False, "WARNING"), (Unsaved, False, "INFO")],
)
def test_way_of_resuming_is_said_before_the_first_step(
    kind: type[Counted], saves: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = ForwardDataset(kind(), seed=0)
    with caplog.at_level(logging.INFO):
        check_position(dataset, "DATA.TRAIN")
    assert dataset.saves_position == saves
    # Further ahead than the check has read: the iteration goes on, and has to be the right one.
    assert torch.equal(dataset[30][0], ForwardDataset(kind(), seed=0)[30][0])
    assert [(one.levelname, one.args[0]) for one in caplog.records if one.args] == [  # type: ignore[index]
        (level, "DATA.TRAIN")
    ]
    assert caplog.text.count("fingerprint()") == 1, "what a resume does not notice"


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [False, True])
def test_stream_of_hugging_face_continues_with_the_same_samples(shuffled: bool) -> None:
    import datasets  # takes seconds

    def make() -> ForwardDataset:
        rows = {"x": list(range(60))}
        stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=4)
        if shuffled:
            stream = stream.shuffle(seed=1, buffer_size=20)
        made = ForwardDataset(stream, seed=0)
        check_position(made, "DATA.TRAIN")
        return made

    whole = make()
    expected = [whole[index]["x"] for index in range(150)]
    assert sorted(expected[:60]) == list(range(60))
    first = make()
    for index in range(85):
        first[index]
    second = make()
    if (saved := first.save_position()) is not None:
        second.load_position(saved)
    assert [second[index]["x"] for index in range(85, 150)] == expected[85:]


def test_state_that_fails_is_not_used() -> None:
    class Failing(Unsaved):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("at")

    dataset = ForwardDataset(Failing(), seed=0)
    check_position(dataset, "DATA.TRAIN")
    assert not dataset.saves_position
    assert torch.equal(dataset[30][0], ForwardDataset(Unsaved(), seed=0)[30][0])


@pytest.mark.feature("data.saved_position")
@pytest.mark.parametrize(
    ("kind", "code", "before"),
    [
        ("Counted", "resume.data_changed", []),
        ("Unsaved", "resume.data_changed", []),
        ("Unsaved", "", ["DATA.TRAIN.exact=false"]),
        ("Begun", "", []),  # an object that has been read from begins elsewhere
    ],
)
def test_first_samples_that_have_changed_are_noticed(
    kind: str, code: str, before: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [*words(kind), *before]
    run_until_killed(tmp_path, *more, hooks={"save": SaveEachStep(), "kill": KillAfter(3)})
    saved = newest(tmp_path).promised["first_samples"]["train"]
    assert len(saved) == (0 if before else 2)
    monkeypatch.setattr(Counted, "stride", 11)
    if not code:
        train(tmp_path, *more)
        return
    with raises(ChangedError, key="DATA.TRAIN", code=code):
        train(tmp_path, *more)
    train(tmp_path, *more, "RUN.allow=data")
    assert newest(tmp_path).promised["first_samples"]["train"] != saved


def test_own_generator_is_rejected(tmp_path: Path) -> None:
    assert OwnGenerator.generator is not None
    with raises(ConfigError, code="config.impure_sample"):
        train(tmp_path, *words("OwnGenerator"))


class TestProcesses:
    @pytest.mark.feature("data.saved_position")
    @pytest.mark.slow
    @pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)], ids=str)
    def test_position_of_another_world_size_is_resumed(
        self, launcher: Launcher, tmp_path: Path, sizes: tuple[int, int]
    ) -> None:
        more = [
            *words("Counted"),
            "RUN.imports=[world_parts]",
            "MODEL={name: mlp, input_shape: [1, 8, 8]}",
            "HOOKS.console=null",
            "MACHINE.threads=1",
        ]
        more = [word for word in more if "small_cnn" not in word]
        assert launcher.run(tmp_path / "whole", 1, *more).codes == [0]
        folder = tmp_path / "run"
        first, second = sizes
        halt = f"HOOKS.halt={{phase: 0, step: 3, rank: {first - 1}}}"
        assert launcher.run(folder, first, *more, halt).codes == [143] * first
        done = launcher.run(folder, second, *more)
        assert done.codes == [0] * second, done.outputs
        whole = newest(tmp_path / "whole").state["task"]["model"]
        for name, tensor in newest(folder).state["task"]["model"].items():
            torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=1e-5)
