"""Models whose inputs and outputs are mappings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor, nn

import phasetrain
from phasetrain.addons.deploy.extract.feature_files import read_index
from phasetrain.addons.deploy.predict.predict import PredictOptions, _check_rows, predict
from phasetrain.cli import main
from phasetrain.data import DATASETS
from phasetrain.errors import ConfigError
from phasetrain.models import MODELS

INPUTS = ("image", "size")
LABEL = "label: {name: cross_entropy, output: label, target: label}"
BOX = "box: {name: MSELoss, output: box, target: box}"
DATA = "{dataset: sized_images, batch_size: 4, inputs: [image, size], targets: [label, box]}"
WORDS = (
    *("experiment=null", f"DATA.TRAIN={DATA}", f"DATA.TEST={DATA}", "HOOKS.report=null"),
    *("MODEL={name: label_and_box, inputs_by_name: true}", "RUN.rehearse=false"),
    *(f"LOSS={{name: weighted_sum, losses: {{{LABEL}, {BOX}}}}}", "PHASES.epochs=1"),
)


BALANCED = "MODEL={name: with_balance, inputs_by_name: true}"


@DATASETS.register("sized_images")
class SizedImages:
    """Mappings of two inputs and two targets."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.full((1, 2, 2), index / 8)
        return {"image": image, "size": image[0, 0], "label": index % 3, "box": torch.ones(4)}


@MODELS.register("label_and_box")
class LabelAndBox(nn.Module):
    """Returns scores of classes and the corners of a box."""

    def __init__(self) -> None:
        super().__init__()
        self.label = nn.Linear(6, 3)
        self.box = nn.Linear(6, 4)

    def forward(self, image: Tensor, size: Tensor) -> dict[str, Tensor]:
        features = torch.cat([image.flatten(1), size], 1)
        return {"label": self.label(features), "box": self.box(features)}


@MODELS.register("with_balance")
class WithBalance(LabelAndBox):
    """Returns a scalar of the batch as well."""

    def forward(self, image: Tensor, size: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(image, size)
        return {**outputs, "balance": outputs["label"].softmax(1).mean(0).square().sum()}


@MODELS.register("only_balance")
class OnlyBalance(WithBalance):
    """Returns the scalar alone."""

    def forward(self, image: Tensor, size: Tensor) -> dict[str, Tensor]:
        return {"balance": super().forward(image, size)["balance"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mappings") / "run"
    phasetrain.run([*WORDS, f"RUN.dir={folder}"])
    return folder


def read_samples(count: int) -> list[dict[str, Tensor]]:
    return [{name: SizedImages()[at][name] for name in INPUTS} for at in range(count)]


def stack(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in INPUTS}


@pytest.mark.feature(
    "predict.mappings",
    "samples that are mappings, for models with several inputs",
    "`task.predict({NAME: batch})`, `phasetrain predict RUN FILE.pt --arrays batch`",
)
def test_mapping_in_a_file_is_a_sample_or_a_batch(folder: Path, tmp_path: Path) -> None:
    samples = read_samples(3)
    task = phasetrain.load(folder)
    expected = task.predict(stack(samples), transform=False)
    for inputs in (stack(samples), samples):
        found = task.predict(inputs, transform=True)
        assert all(found[name].equal(expected[name]) for name in ("label", "box"))
    rows = [{name: expected[name][at].tolist() for name in expected} for at in range(3)]
    contents = {"sample": samples[0], "batch": stack(samples), "auto": samples}
    for arrays, content in contents.items():
        torch.save(content, tmp_path / "a.pt")
        options = PredictOptions(arrays=arrays)  # type: ignore[arg-type]
        outputs = [one.output for one in predict(str(folder), [f"{tmp_path}/a.pt"], (), options)]
        assert outputs == [
            {name: pytest.approx(row[name], rel=1e-5) for name in row}
            for row in rows[: len(outputs)]
        ]
        assert len(outputs) == (1 if arrays == "sample" else 3)


@pytest.mark.parametrize(
    ("content", "options", "code"),
    [
        (torch.zeros(3, 1, 2, 2), PredictOptions(arrays="batch"), "predict.wrong_type"),
        ({"image": torch.zeros(3, 1, 2, 2)}, PredictOptions(arrays="batch"), "predict.wrong_type"),
        (stack(read_samples(3)), PredictOptions(), "predict.ambiguous"),
        (read_samples(1)[0], PredictOptions(arrays="batch"), "predict.unreadable"),
        ([torch.zeros(1)], PredictOptions(), "predict.wrong_type"),
        ([], PredictOptions(), "predict.unreadable"),
        (read_samples(3), PredictOptions(top=2), "cli.conflict"),
    ],
    ids=["tensor", "missing", "ambiguous", "lengths", "list", "empty", "top"],
)
def test_what_is_no_sample_is_rejected(
    folder: Path, tmp_path: Path, content: Any, options: PredictOptions, code: str
) -> None:
    torch.save(content, tmp_path / "a.pt")
    with raises(ConfigError, code=code):
        predict(str(folder), [f"{tmp_path}/a.pt"], (), options)


def test_extracted_labels_are_those_of_outputs_that_classify(folder: Path, tmp_path: Path) -> None:
    words = ["RUN.engine=extract", "EXTRACT.splits=[test]", f"EXTRACT.dir={tmp_path}"]
    phasetrain.run([*WORDS, f"RUN.dir={folder}", *words])
    columns = read_index(f"{tmp_path}/test")["columns"]
    assert {name for name in columns if not name.startswith("target")} == {
        *("id", "scores.label", "scores.box", "label.label"),
    }


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("balanced") / "run"
    phasetrain.run([*WORDS, BALANCED, f"RUN.dir={folder}"])
    return folder


@pytest.mark.feature(
    "predict.output", "predictions of one entry of a mapping", "`phasetrain predict --output`"
)
def test_scalars_of_a_batch_are_left_out_and_an_entry_can_be_selected(
    balanced: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = f"{tmp_path}/a.pt"
    torch.save(read_samples(2), file)
    made = predict(str(balanced), [file], (), PredictOptions(arrays="sample", batch_size=1))
    assert [list(prediction.output) for prediction in made] == [["label", "box"]] * len(made)
    assert [line for line in caplog.messages if "balance" in line][1:] == []
    (chosen, *_) = predict(str(balanced), [file], (), PredictOptions(output="box"))
    out = file.replace(".pt", ".csv")
    assert main(["predict", str(balanced), file, "--output", "box", "--out", out]) == 0
    assert Path(out).read_text().startswith("file,index,box_0,box_1,")
    assert len(chosen.output) == 4
    with raises(ConfigError, code="predict.wrong_output", suggestion="label"):
        predict(str(balanced), [file], (), PredictOptions(output="lable"))


def test_rejected_extraction_leaves_nothing_behind(balanced: Path, tmp_path: Path) -> None:
    words = ["RUN.engine=extract", "EXTRACT.splits=[test]", f"EXTRACT.dir={tmp_path}"]
    only_balance = "MODEL={name: only_balance, inputs_by_name: true}"
    with pytest.raises(ConfigError, match="expected a row for each sample"):
        phasetrain.run([*WORDS, only_balance, f"RUN.dir={balanced}", *words])
    assert list(tmp_path.iterdir()) == []
    layers = ["EXTRACT.predictions=false", "EXTRACT.layers=[label]"]
    phasetrain.run([*WORDS, BALANCED, f"RUN.dir={balanced}", *words, *layers])
    assert "layer.label" in read_index(f"{tmp_path}/test")["columns"]


@pytest.mark.parametrize(
    "output",
    [
        torch.zeros(()),
        torch.zeros(3, 2),
        {"scores": torch.zeros(2, 3), "aux": torch.zeros(())},
        (torch.zeros(2, 3), [torch.zeros(1)]),
        None,
    ],
)
def test_output_without_an_entry_per_sample_is_rejected(output: Any) -> None:
    with raises(ConfigError, code="predict.wrong_output"):
        _check_rows(output, 2)
    _check_rows({"scores": torch.zeros(2, 3), "boxes": [torch.zeros(1)] * 2}, 2)
