"""Predictions for files equal those of the model with transforms done by hand."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import SMALL
from PIL import Image
from raising import raises
from torch import Tensor

from phasetrain import load
from phasetrain.addons.deploy.predict.predict import (
    Prediction,
    PredictOptions,
    format_csv,
    predict,
)
from phasetrain.addons.deploy.predict.raw_inputs import InputReader, _read_array
from phasetrain.app.api import run
from phasetrain.cli import main
from phasetrain.errors import ConfigError

NORMALIZE = "[{name: normalize, mean: [0.5], std: [0.25]}]"
BYTES = (torch.arange(64).reshape(8, 8) * 4).to(torch.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "run"
    words = ["PHASES.epochs=1", f"DATA.TEST.transforms={NORMALIZE}", f"RUN.dir={folder}"]
    run([*SMALL, *words])
    return folder


@pytest.fixture(scope="module")
def image(folder: Path) -> Path:
    """Return the path of a grey image of 8 x 8 pixels with the values of `BYTES`."""
    path = folder.parent / "images" / "one.png"
    path.parent.mkdir()
    Image.fromarray(BYTES.numpy()).save(path)
    return path


@pytest.fixture(scope="module")
def by_hand(folder: Path) -> Tensor:
    """Return the probabilities for `BYTES` with the normalization done by hand."""
    pixels = (BYTES.float() / 255 - 0.5) / 0.25
    scores = load(folder).predict(pixels[None, None], transform=False)
    return torch.softmax(scores, 1)[0]


@pytest.mark.feature("predict")
def test_image_gets_the_probabilities_of_a_normalization_by_hand(
    folder: Path, image: Path, by_hand: Tensor
) -> None:
    [found] = predict(str(folder), [str(image)], options=PredictOptions(top=10))
    assert (found.file, found.index) == (str(image), 0)
    assert [p for _, p in found.classes] == by_hand.sort(descending=True).values.tolist()
    assert [int(name) for name, _ in found.classes] == by_hand.argsort(descending=True).tolist()


@pytest.mark.feature(
    "predict",
    "predictions for files: images, tensors, tables, text, lines of standard input",
    "`phasetrain predict RUN_FOLDER FILE...`, `task.predict(PATH)`",
)
def test_task_takes_paths_as_the_command_does(folder: Path, image: Path, by_hand: Tensor) -> None:
    task = load(folder)
    for inputs in (image, str(image), [str(image)], image.parent):
        assert torch.softmax(task.predict(inputs), 1)[0].equal(by_hand)
    assert task.predict([image, str(image)], transform=True, batch_size=1).shape == (2, 10)
    with raises(ConfigError, code="predict.unreadable"):
        task.predict("images/nobody.png")
    with raises(ConfigError, code="predict.wrong_type"):
        task.predict(image, transform=False)


@pytest.mark.feature(
    "predict.images",
    "images of Pillow are predicted, and an array is a sample or a batch by the recorded shape",
    "`task.predict`, `phasetrain predict`",
)
def test_task_takes_images_of_pillow(folder: Path, image: Path, by_hand: Tensor) -> None:
    task = load(folder)
    with Image.open(image) as picture:
        for inputs in (picture, [picture], picture.convert("RGB")):
            assert torch.softmax(task.predict(inputs), 1)[0].equal(by_hand)
        assert task.predict([picture, picture], transform=True).shape == (2, 10)
        with raises(ConfigError, code="predict.wrong_type"):
            task.predict(picture, transform=False)


PLAIN = """
import torch
from torch.utils.data import TensorDataset


def plain(outputs: int, kind: str) -> TensorDataset:
    inputs = torch.arange(96).reshape(16, 6) / 96
    targets = {
        "class": torch.arange(16) % max(outputs, 2),
        "labels": torch.zeros(16, outputs),
        "number": inputs[:, :outputs],
    }
    return TensorDataset(inputs, targets[kind])
"""


@pytest.mark.parametrize(
    ("loss", "kind", "outputs", "classes"),
    [
        ("CrossEntropyLoss", "class", 3, ["0", "1", "2"]),
        ("MultiMarginLoss", "class", 3, []),
        ("MSELoss", "number", 3, []),
        ("BCEWithLogitsLoss", "labels", 2, ["0", "1"]),
        ("BCEWithLogitsLoss", "labels", 1, []),
    ],
)
def test_classifier_is_recognized_by_its_loss_if_the_dataset_reports_no_classes(
    loss: str,
    kind: str,
    outputs: int,
    classes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "plain_numbers.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(tmp_path)
    data = f"{{dataset: plain_numbers.plain, outputs: {outputs}, kind: {kind}, batch_size: 16}}"
    words = ["experiment=null", f"DATA.TRAIN={data}", "MODEL={name: mlp, hidden: [2]}"]
    parts = [f"MODEL.classes={outputs}", f"LOSS.name={loss}", "PHASES.epochs=1"]
    run([*words, *parts, f"RUN.dir={tmp_path}/run"])
    np.save(tmp_path / "one.npy", np.zeros((1, 6), np.float32))
    [found] = predict(
        str(tmp_path / "run"), [str(tmp_path / "one.npy")], options=PredictOptions(trust=True)
    )
    assert sorted(name for name, _ in found.classes) == classes
    assert (found.output is None) == bool(classes)


def test_class_names_of_a_custom_dataset_are_an_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PLAIN.replace("return TensorDataset", "data = TensorDataset")
    source += '    data.class_names = ["cat", "dog"]\n    return data\n'
    (tmp_path / "named_numbers.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    data = "{dataset: named_numbers.plain, outputs: 2, kind: class, batch_size: 16}"
    words = ["experiment=null", f"DATA.TRAIN={data}", f"DATA.TEST={data}", "MODEL.name=mlp"]
    run([*words, "LOSS=cross_entropy", "PHASES.epochs=1", f"RUN.dir={tmp_path}/run"])
    assert load(tmp_path / "run", trust=True).class_names == ("cat", "dog")
    np.save(tmp_path / "one.npy", np.zeros(6, np.float32))
    files = [str(tmp_path / "one.npy")]
    [found] = predict(str(tmp_path / "run"), files, options=PredictOptions(trust=True))
    assert sorted(name for name, _ in found.classes) == ["cat", "dog"]


@pytest.mark.feature("predict.images")
def test_array_of_one_sample_is_no_batch_though_the_dataset_reports_no_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain_numbers.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(tmp_path)
    data = "{dataset: plain_numbers.plain, outputs: 3, kind: class, batch_size: 16}"
    words = ["experiment=null", f"DATA.TRAIN={data}", "MODEL={name: torch.nn.Linear}"]
    own = ["MODEL.in_features=6", "MODEL.out_features=3", "PHASES.epochs=1"]
    run([*words, *own, f"RUN.dir={tmp_path}/run"])
    plan = tmp_path / "run" / "plan.json"
    assert json.loads(plan.read_text())["data"]["train"]["facts"] == {"sample_shape": [6]}
    options = PredictOptions(trust=True)
    np.save(tmp_path / "one.npy", np.zeros(6, np.float32))
    np.save(tmp_path / "two.npy", np.zeros((2, 6), np.float32))
    files = [str(tmp_path / name) for name in ("one.npy", "two.npy")]
    found = predict(str(tmp_path / "run"), files, options=options)
    assert [(Path(one.file).name, one.index) for one in found] == [
        ("one.npy", 0),
        ("two.npy", 0),
        ("two.npy", 1),
    ]


FRAMES = """
import torch


class Frames(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3 + index % 3, 2), index / 8), index % 2


class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, batch):
        return self.layer(batch.mean(1))
"""


@pytest.mark.feature("predict.images")
@pytest.mark.parametrize("is_recorded", [True, False])
def test_array_of_one_sequence_is_no_batch_though_sequences_differ_in_length(
    is_recorded: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "frames.py").write_text(FRAMES)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "run"
    data = "{dataset: frames.Frames, batch_size: 4, collate: {name: pad, mask: null}}"
    words = ["experiment=null", f"DATA.TRAIN={data}", f"DATA.TEST={data}", "MODEL.name=frames.Mean"]
    run([*words, "PHASES.epochs=1", f"RUN.dir={folder}"])
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["data"]["test"]["facts"] == {"sample_rank": 2}
    np.save(tmp_path / "one.npy", np.zeros((5, 2), np.float32))
    np.save(tmp_path / "two.npy", np.zeros((2, 5, 2), np.float32))
    files = [str(tmp_path / name) for name in ("one.npy", "two.npy")]
    if is_recorded:
        predictions = predict(str(folder), files, options=PredictOptions(trust=True))
        assert [prediction.index for prediction in predictions] == [0, 0, 1]
        np.save(tmp_path / "flat.npy", np.zeros(2, np.float32))
        with raises(ConfigError, code="predict.wrong_shape"):
            predict(str(folder), [str(tmp_path / "flat.npy")], options=PredictOptions(trust=True))
        return
    del plan["data"]["test"]["facts"]["sample_rank"]  # as an older version has left it
    (folder / "plan.json").write_text(json.dumps(plan))
    for file, arrays, count in ((files[0], "sample", 1), (files[1], "batch", 2)):
        command = ["predict", str(folder), file, "--trust", "--json"]
        capsys.readouterr()
        assert main(command) == 2
        assert '"predict.ambiguous"' in capsys.readouterr().out
        assert main([*command, "--arrays", arrays]) == 0
        assert len(json.loads(capsys.readouterr().out)["predictions"]) == count


def test_meter_of_classes_shows_a_classifier_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain_numbers.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(tmp_path)
    data = "{dataset: plain_numbers.plain, outputs: 3, kind: class, batch_size: 16}"
    words = ["experiment=null", f"DATA.TRAIN={data}", "MODEL={name: mlp, classes: 3}"]
    own = ["LOSS.name=MultiMarginLoss", "METERS.accuracy={}", "PHASES.epochs=1"]
    run([*words, *own, f"RUN.dir={tmp_path}/run"])
    np.save(tmp_path / "one.npy", np.zeros((1, 6), np.float32))
    [found] = predict(
        str(tmp_path / "run"), [str(tmp_path / "one.npy")], options=PredictOptions(trust=True)
    )
    assert len(found.classes) == 3


def test_bytes_are_scaled_in_python_too(folder: Path, by_hand: Tensor) -> None:
    task = load(folder)
    for inputs in (BYTES[None, None], BYTES[None, None].numpy(), [BYTES[None].numpy()]):
        scores = task.predict(inputs, transform=True)
        assert torch.equal(torch.softmax(scores, 1)[0], by_hand)


def test_tensors_are_samples_or_batches(
    folder: Path, image: Path, by_hand: Tensor, tmp_path: Path
) -> None:
    torch.save(BYTES.float()[None] / 255, tmp_path / "sample.pt")
    torch.save(BYTES.double()[None, None].repeat(3, 1, 1, 1) / 255, tmp_path / "batch.pt")
    np.save(tmp_path / "bytes.npy", BYTES.numpy()[None])
    files = [str(tmp_path / name) for name in ("sample.pt", "batch.pt", "bytes.npy")]
    options = PredictOptions(top=1, batch_size=2)
    found = predict(str(folder), [*files, str(image.parent)], options=options)
    assert [(Path(one.file).name, one.index) for one in found] == [
        ("sample.pt", 0),
        *(("batch.pt", number) for number in range(3)),
        ("bytes.npy", 0),
        ("one.png", 0),
    ]
    best = float(by_hand.max())
    assert [one.classes[0][1] for one in found] == pytest.approx([best] * 6, abs=1e-6)


def test_command_prints_writes_and_returns_them(
    folder: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(folder), str(image), "--top", "2"]) == 0
    assert "probability" in capsys.readouterr().out
    assert main(["predict", str(folder), str(image), "--json", "--checkpoint", "latest"]) == 0
    [found] = json.loads(capsys.readouterr().out)["predictions"]
    assert len(found["classes"]) == 3
    for out in ("a.json", "a.csv"):
        assert main(["predict", str(folder), str(image), "--out", str(tmp_path / out)]) == 0
    assert json.loads((tmp_path / "a.json").read_text()) == [found]
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [row["class"] for row in rows] == [one["name"] for one in found["classes"]]
    assert main(["predict", str(folder), str(image), "--out", "a.txt"]) == 2
    assert main(["predict", str(folder)]) == 2


def test_image_of_another_size_is_rejected_until_a_transform_resizes_it(
    folder: Path, tmp_path: Path
) -> None:
    Image.fromarray(np.zeros((20, 16), dtype=np.uint8)).save(tmp_path / "large.png")
    large = str(tmp_path / "large.png")
    with raises(ConfigError, code="predict.wrong_shape"):
        predict(str(folder), [large])
    resized = f"DATA.TEST.transforms=[{{name: resize, size: 8}}, {NORMALIZE[1:]}"
    [found] = predict(str(folder), [large], [resized])
    assert len(found.classes) == 3


def test_file_whose_shape_differs_from_the_others_is_named(folder: Path, tmp_path: Path) -> None:
    for name, size in (("a", 8), ("b", 8), ("odd", 9)):
        np.save(tmp_path / f"{name}.npy", np.zeros((1, size, size), np.float32))
    with raises(ConfigError, code="predict.wrong_shape") as caught:
        predict(str(folder), [str(tmp_path)])
    assert str(tmp_path / "odd.npy") in str(caught.value)


def test_integers_are_rejected_where_floats_are_expected(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "image.npy", np.zeros((1, 8, 8), np.int64))
    # Before normalize makes floats of them.
    with raises(ConfigError, code="predict.unreadable") as caught:
        predict(str(folder), [str(tmp_path / "image.npy")])
    assert "float32" in str(caught.value)


def test_top_and_batch_size_are_at_least_1(folder: Path, image: Path) -> None:
    for options in (PredictOptions(top=0), PredictOptions(top=-1), PredictOptions(batch_size=0)):
        with raises(ConfigError, code="cli.usage"):
            predict(str(folder), [str(image)], options=options)


def test_files_that_cannot_be_read_are_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "three.png").write_bytes(b"")
    with raises(ConfigError, code="predict.unreadable", suggestion="three.png"):
        predict(str(folder), [str(tmp_path / "tree.png")])
    (tmp_path / "broken.png").write_bytes(b"nothing")
    (tmp_path / "pickle.npy").write_bytes(b"\x80\x04.")
    torch.save({"a": 1}, tmp_path / "mapping.pt")
    (tmp_path / "empty").mkdir()
    for name in ("broken.png", "pickle.npy", "mapping.pt", "missing.png", "empty"):
        with raises(ConfigError, code="predict.unreadable") as caught:
            predict(str(folder), [str(tmp_path / name)])
        assert name in str(caught.value)
    (tmp_path / "words.txt").write_text("words")
    with raises(ConfigError, code="predict.unknown_kind") as unknown:
        predict(str(folder), [str(tmp_path / "words.txt")])
    assert ".png" in str(unknown.value)
    assert not str(unknown.value).endswith(".text")


@pytest.mark.feature("predict")
def test_unreadable_files_are_skipped_on_request(
    folder: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.png").write_bytes(b"nothing")
    (tmp_path / "notes.md").write_text("words")
    bad = [str(tmp_path / name) for name in ("broken.png", "notes.md", "missing.png")]
    words = ["predict", str(folder), *bad, str(image), "--skip-unreadable"]
    assert main(["predict", str(folder), *bad, str(image)]) == 2
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [one["file"] for one in found["predictions"]] == [str(image)]
    assert [one["file"] for one in found["skipped"]] == bad
    assert captured.err.count("skipped: ") == 3
    assert main(["predict", str(folder), bad[0], "--skip-unreadable", "--json"]) == 2
    assert '"predict.unreadable"' in capsys.readouterr().out


@pytest.mark.feature("predict")
@pytest.mark.addon("text")
def test_language_model_predicts_the_next_byte(tmp_path: Path) -> None:
    words = [
        "experiment=text_tiny",
        "PHASES={epochs: null, updates: 2}",
        "PHASES.limit.test=1",
        "DATA.TRAIN.context=16",
        "DATA.TEST.context=16",
        f"RUN.dir={tmp_path / 'run'}",
    ]
    run(words)
    text = "Alice was beginning to get very tired"
    (tmp_path / "start.txt").write_text(text)
    options = PredictOptions(top=257)
    [found] = predict(str(tmp_path / "run"), [str(tmp_path / "start.txt")], options=options)
    tokens = torch.tensor([list(text.encode())[-16:]])
    scores = load(tmp_path / "run").predict(tokens)[0, -1]
    assert found.classes[0][0] == repr(bytes([int(scores.argmax())]))[1:]
    assert sum(p for _, p in found.classes) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("outputs", "names", "head"),
    [
        ([[3.45, 4.95, 6.5], [0.1, 2.0, 3.0]], (), "output_0,output_1,output_2"),
        ([[3.45, 4.95], [0.1, 2.0]], ("low", "high"), "low,high"),
        ([[3.45, 4.95], [0.1, 2.0]], ("low", "middle", "high"), "output_0,output_1"),
        ([[1.0] * 64, [2.0] * 64], (), ",".join(f"output_{number}" for number in range(64))),
        ([[1.0] * 65, [2.0] * 65], (), "output"),
        ([[3.45, 4.95], [0.1]], (), "output"),
        ([[[3.45], [4.95]], [[0.1], [2.0]]], (), "output"),
        ([3.45, 4.95], (), "output"),
        ([{"a": 3.45}, {"a": 4.95}], (), "output"),
    ],
)
def test_csv_has_a_column_per_entry_of_short_vectors(
    outputs: list[Any], names: tuple[str, ...], head: str
) -> None:
    found = [Prediction("a.pt", at, output=one, names=names) for at, one in enumerate(outputs)]
    first, *rows = csv.reader(format_csv(found).splitlines())
    assert first == ["file", "index", *head.split(",")]
    read = [[json.loads(cell) for cell in row[2:]] for row in rows]
    assert read == ([[one] for one in outputs] if head == "output" else outputs)


def test_model_without_classes_gives_its_output(tmp_path: Path) -> None:
    words = [
        "DATA.TRAIN={dataset: synthetic, samples: 32, classes: 3, input_shape: [4], batch_size: 8}",
        "DATA.TEST={dataset: synthetic, samples: 32, classes: 3, input_shape: [4], batch_size: 8}",
        "MODEL={name: torch.nn.Linear, in_features: 4, out_features: 5}",
        "PHASES={epochs: null, updates: 2}",
        "DATA.TRAIN.transforms=[]",
        f"RUN.dir={tmp_path / 'run'}",
    ]
    run(words)
    inputs = torch.ones(2, 4)
    torch.save(inputs, tmp_path / "a.pt")
    found = predict(str(tmp_path / "run"), [str(tmp_path / "a.pt")])
    expected = load(tmp_path / "run").predict(inputs).tolist()
    assert [one.to_json()["output"] for one in found] == expected
    torch.save(inputs.long(), tmp_path / "integers.pt")
    with raises(ConfigError, code="predict.wrong_dtype"):
        predict(str(tmp_path / "run"), [str(tmp_path / "integers.pt")])
    torch.save(torch.ones(2, 5), tmp_path / "wide.pt")
    with raises(ConfigError, code="predict.wrong_shape"):
        predict(str(tmp_path / "run"), [str(tmp_path / "wide.pt")])


def test_lines_of_text_are_samples_of_datasets_of_text(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    reader = InputReader({"dataset": "lines", "form": "text"}, {})
    found = reader.read([str(tmp_path / "lines.txt")])
    assert [(one.index, one.sample) for one in found] == [(0, "one"), (1, "two")]


def test_list_of_tensors_has_a_sample_per_entry(tmp_path: Path) -> None:
    samples = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    torch.save(samples, tmp_path / "a.pt")
    found = InputReader({}, {"sample_rank": 1}).read([str(tmp_path / "a.pt")])
    assert [(one.index, one.sample.tolist()) for one in found] == [(0, [1, 2, 3]), (1, [4, 5])]
    with raises(ConfigError, code="predict.wrong_shape"):
        InputReader({}, {"sample_rank": 2}).read([str(tmp_path / "a.pt")])


class Hostile:
    """What creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_code_in_a_sample_is_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    torch.save(Hostile(mark), tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.array([Hostile(mark)]), allow_pickle=True)
    for name in ("a.pt", "a.npy"):
        with pytest.raises(ValueError):
            _read_array(str(tmp_path / name))
    assert not mark.exists()
    np.load(tmp_path / "a.npy", allow_pickle=True)  # the control: it is hostile
    assert mark.exists()
