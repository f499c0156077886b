"""Models and datasets of other libraries on one rank and on several."""

from pathlib import Path

import pytest
import torch
from harness import newest
from processes import Launcher
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.build import resolve_overrides
from phasetrain.testing.kills import run_quietly

BERT = (
    "{model_type: bert, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16, "
    "vocab_size: 50, max_position_embeddings: 16, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}"
)


CELLS = """
import torch
from torch.utils.data import Dataset

class Cells(Dataset):
    def __init__(self, count: int, shift: float = 0.0):
        self.values = torch.linspace(-1, 1, count * 4).reshape(count, 4) + shift

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index], index % 3
"""


def test_torch_dataset_class_is_named_by_dotted_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cells_of_a_test.py").write_text(CELLS)
    monkeypatch.syspath_prepend(tmp_path)
    split = "{dataset: cells_of_a_test.Cells, count: 24, shift: 0.5, batch_size: 6, transforms: []}"
    words = [
        f"DATA.TRAIN={split}",
        f"DATA.TEST={split}",
        "MODEL={name: mlp, classes: 3, input_shape: [4]}",
    ]
    assert_exact_resume([*words, "METERS={accuracy: {}}"], steps=[2], workers=None)
    with raises(
        ConfigError,
        code="config.unknown_parameter",
        key="DATA.TRAIN.shft",
        given="3",
        suggestion="DATA.TRAIN.shift",
    ):
        resolve_overrides([*words, "DATA.TRAIN.shft=3"])


@pytest.mark.slow  # each process imports transformers
def test_three_processes_learn_from_inputs_by_name_what_one_learns(
    launcher: Launcher, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    ids = torch.randint(1, 50, (24, 6), generator=torch.Generator().manual_seed(0))
    rows = {
        "input_ids": ids.tolist(),
        "attention_mask": (ids > 5).long().tolist(),
        "label": (ids[:, 0] % 3).tolist(),
    }
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "texts"))
    split = f"{{dataset: huggingface, path: {tmp_path}/texts, classes: 3, batch_size: 6, transforms: []}}"
    words = (
        f"DATA.TRAIN={split}",
        f"DATA.TEST={split}",
        f"MODEL={{name: transformers.AutoModelForSequenceClassification, config: {BERT}}}",
        "PHASES.epochs=2",
        "METERS={accuracy: {}}",
        "MACHINE.threads=1",
        "HOOKS.console=null",
    )
    done = launcher.run(tmp_path / "three", 3, *words)
    assert done.codes == [0, 0, 0], done.outputs
    run_quietly([*words, f"RUN.dir={tmp_path}/one"])
    three, one = (newest(tmp_path / name).state["task"]["model"] for name in ("three", "one"))
    assert set(three) == set(one)
    for name, tensor in one.items():
        torch.testing.assert_close(three[name], tensor, atol=1e-5, rtol=1e-4)
