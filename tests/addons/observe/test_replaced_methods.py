"""A method of a custom task that replaces a method of phasetrain by accident is rejected."""

from pathlib import Path
from typing import Any

import pytest
from raising import raises

import phasetrain
from phasetrain.errors import ConfigError
from phasetrain.tasks import Supervised

SHORT = ("PHASES.epochs=1", "PHASES.limit.train=2", "DATA.TEST=null", "MODEL.width=4")


class Energy(Supervised):
    def measure(self, batch: Any) -> Any:
        return batch.input.mean()


class Reset(Supervised):
    def begin(self, phase: Any) -> None:
        pass


class Held(Supervised):
    def updater(self) -> None:
        pass


class Inherited(Energy):
    """Has the mistake in its base class."""


class Intended(Supervised):
    def forward(self, data: Any) -> Any:
        return super().forward(data)

    def train_step(self, *arguments: Any) -> Any:
        return super().train_step(*arguments)

    def begin_epoch(self, _phase: Any) -> None:
        pass

    def begin(self, phase: Any, **options: Any) -> None:
        super().begin(phase, **options)

    def measure(self, phase: Any, scale: float = 1.0) -> Any:
        return super().measure(phase)

    def score(self, batch: Any) -> Any:
        return batch


@pytest.mark.feature(
    "task.replaced_methods",
    "a method of a custom task that replaces one of phasetrain by accident is rejected",
    "docs/task.md",
)
@pytest.mark.parametrize("rehearse", ["auto", "false"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Energy", ("Energy.measure", "(phase)")),
        ("Inherited", ("Energy.measure", "(phase)")),
        ("Reset", ("Reset.begin", "(phase, fresh)")),
    ],
)
def test_method_that_replaces_another_one_is_rejected(
    name: str, words: tuple[str, ...], rehearse: str, tmp_path: Path
) -> None:
    task = (f"TASK.name={__name__}.{name}", f"RUN.rehearse={rehearse}", f"RUN.dir={tmp_path}")
    with raises(ConfigError, key="TASK.name", code="task.signature") as caught:
        phasetrain.run([*SHORT, *task])
    for word in words:
        assert word in str(caught.value)


def test_intended_methods_train(tmp_path: Path) -> None:
    task = f"TASK.name={__name__}.Intended"
    assert phasetrain.run([*SHORT, task, f"RUN.dir={tmp_path}"]).updates == 2
