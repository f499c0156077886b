"""Each kind of difference has a row with its cause, and belongs to a section of the config."""

import pytest

from phasetrain.proof.causes import CAUSES, explain
from phasetrain.runs.ledger import COMPONENTS


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("batch.0.input", "batch*"),
        ("output.0.0", "output*"),
        ("loss", "loss*"),
        ("loss.1", "loss*"),
        ("generator.0.cpu", "generator*"),
        ("gradient.0.body.weight", "gradient*"),
        ("logs", "logs*"),
        ("metrics.loss/first", "metrics*"),
        ("state.loss.weight", "state*"),
        ("hooks.mine.steps", "hooks*"),
        ("restored", "restored*"),
        ("result", "result*"),
    ],
)
def test_path_has_the_cause_of_its_first_component(path: str, pattern: str) -> None:
    assert explain(path) == CAUSES[pattern]


def test_each_component_of_a_ledger_has_a_row() -> None:
    rows = {pattern for pattern in CAUSES if pattern.startswith("ledger.")}
    assert rows == {f"ledger.{name}" for name in (*COMPONENTS, "metrics")}
    assert explain("ledger.loss") != explain("loss")
