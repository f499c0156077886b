"""Predict for files with the model of a run folder (`phasetrain predict`)."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.commands.json_values import to_json_value
from phasetrain.commands.load import find_test_split, load, read_data_facts
from phasetrain.commands.stored.stored_config import read_checkpoint_config
from phasetrain.config.sections.model import WhichWeights
from phasetrain.data.transforms import Pipeline
from phasetrain.errors import ConfigError
from phasetrain.losses.cross_entropy import CrossEntropy
from phasetrain.meters.classification.accuracy import Accuracy
from phasetrain.runs.paths import make_parent
from phasetrain.runtime.storage import open_storage
from phasetrain.tasks import Task
from phasetrain.tasks.input_transform import InputTransform
from phasetrain.tasks.raw_inputs import InputReader, RawInput

MULTI_LABEL = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
"""Losses whose classes are independent of each other: a sample may have several."""


CLASSIFYING = (nn.CrossEntropyLoss, nn.NLLLoss, CrossEntropy, Accuracy, *MULTI_LABEL)
"""Losses and meters of models that classify."""


@dataclass(frozen=True)
class PredictOptions:
    """How to predict.

    Attributes:
        checkpoint: `latest`, `best`, or a name.
        weights: the trained weights, or an average of them.
        device: see MACHINE.device.
        top: number of classes per sample, the most probable ones first.
        batch_size: samples per forward pass.
        trust: run the code that the config of the folder names.
    """

    checkpoint: str = "latest"
    weights: WhichWeights = "model"
    device: str = "auto"
    top: int = 3
    batch_size: int = 64
    trust: bool = False


@dataclass(frozen=True)
class Prediction:
    """The prediction for one sample.

    Attributes:
        file: path of its file.
        index: position of the sample in the file.
        classes: pairs of class name and probability, the most probable first; empty if the model
            does not classify.
        output: output of the model; None if it classifies.
    """

    file: str
    index: int
    classes: Sequence[tuple[str, float]] = ()
    output: Any = None

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON data."""
        found: dict[str, Any] = {"file": self.file, "index": self.index}
        if self.output is not None:
            return found | {"output": to_json_value(self.output)}
        return found | {"classes": [{"name": name, "probability": p} for name, p in self.classes]}


def predict(
    folder: str,
    files: Sequence[str],
    changes: Sequence[str] = (),
    options: PredictOptions | None = None,
) -> list[Prediction]:
    """Return the predictions of a run for files.

    Images, `.npy` and `.pt` files, and text are read as the dataset of the first test split reads
    its samples, and go through its transforms. For a language model of bytes, the prediction is the
    byte after the text.

    Args:
        folder: folder of a run, or of one checkpoint.
        files: files, or folders of images.
        changes: overrides of the config of the run, such as `DATA.TEST.transforms=[...]`.
        options: by default the newest checkpoint, and three classes.

    Raises:
        ConfigError: there is no such run or file, the model does not take the samples, or the
            folder names code that is not trusted.
    """
    options = options or PredictOptions()
    task = load(
        folder,
        options.checkpoint,
        weights=options.weights,
        device=options.device,
        changes=changes,
        trust=options.trust,
    )
    stored = read_checkpoint_config(folder, options.checkpoint)
    split = find_test_split(stored.values["DATA"]) or "TRAIN"
    reader = InputReader(stored.values["DATA"][split], read_data_facts(stored.folder, split))
    if task.transform is None:
        task.transform = InputTransform(
            f"DATA.{split}", Pipeline(), scales_bytes="channels" in reader.facts
        )
    inputs = reader.read(files)
    found: list[Prediction] = []
    for at in range(0, len(inputs), options.batch_size):
        found += _predict_batch(task, reader, inputs[at : at + options.batch_size], options.top)
    return found


def _predict_batch(
    task: Task, reader: InputReader, inputs: Sequence[RawInput], top: int
) -> Iterator[Prediction]:
    assert task.transform is not None, "set in predict()"
    batch = task.transform([one.sample for one in inputs])
    expected = reader.facts.get("input_shape")
    # A network with adaptive pooling takes images of any size, and says nothing sensible.
    if isinstance(batch, Tensor) and isinstance(expected, list):
        shape = tuple(batch.shape[1:])
        if shape != tuple(expected):
            raise ConfigError(
                f"{inputs[0].file}: after {task.transform.split}.transforms its shape is {shape}, "
                f"and the model was tested on {tuple(expected)}; resize it, or change the "
                f"transforms: {task.transform.split}.transforms=[...]",
                code="predict.wrong_shape",
            )
    output = task.predict(batch, transform=False)
    if reader.is_text and isinstance(output, Tensor) and output.ndim == 3:
        output = output[:, -1]  # after the last token of the text
    classes = reader.facts.get("classes")
    if classes is None and isinstance(output, Tensor) and output.ndim == 2 and _is_classifier(task):
        # A single score, as for BCEWithLogitsLoss, is no class.
        classes = max(2, output.shape[1])
    if isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] == classes:
        return _name_classes(task, reader, inputs, output, top)
    return _split_output(inputs, output)


def _is_classifier(task: Task) -> bool:
    """Return whether a loss or a meter shows that outputs are scores of classes, for a dataset that
    does not tell their number."""
    parts = (task.loss, *task.parts.meters.values())
    return any(isinstance(part, CLASSIFYING) for part in parts)


def _name_classes(
    task: Task, reader: InputReader, inputs: Sequence[RawInput], scores: Tensor, top: int
) -> Iterator[Prediction]:
    scores = scores.float().cpu()
    if isinstance(task.loss, MULTI_LABEL):
        probabilities = torch.sigmoid(scores)
    else:
        probabilities = torch.softmax(scores, dim=1)
    best = probabilities.topk(min(top, scores.shape[1]))
    for one, values, indices in zip(inputs, best.values, best.indices, strict=True):
        pairs = [
            (_name_class(task, reader, index), value)
            for index, value in zip(indices.tolist(), values.tolist(), strict=True)
        ]
        yield Prediction(one.file, one.index, pairs)


def _name_class(task: Task, reader: InputReader, index: int) -> str:
    if reader.is_text:
        # 256 is the token at the end of a document
        return repr(bytes([index]))[1:] if index < 256 else "end"
    if index < len(task.class_names):
        return task.class_names[index]
    return str(index)


def _split_output(inputs: Sequence[RawInput], output: Any) -> Iterator[Prediction]:
    for place, one in enumerate(inputs):
        yield Prediction(one.file, one.index, output=_take_sample(output, place))


def _take_sample(output: Any, place: int) -> Any:
    """Return the output of one sample as JSON data."""
    if isinstance(output, Tensor):
        return _to_plain(output[place])
    if isinstance(output, Mapping):
        return {str(key): _take_sample(value, place) for key, value in output.items()}
    # Detection models return a list with an entry per sample, others a tuple of batches.
    if isinstance(output, tuple):
        return [_take_sample(value, place) for value in output]
    return _to_plain(output[place])


def _to_plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float().cpu().tolist()
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return to_json_value(value)


def format_rows(found: Sequence[Prediction]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table: a row per class, or per sample if there are no classes."""
    if any(one.output is not None for one in found):
        head = ["file", "index", "output"]
        return head, [[one.file, str(one.index), json.dumps(one.output)] for one in found]
    head = ["file", "index", "rank", "class", "probability"]
    rows = [
        [one.file, str(one.index), str(rank), name, f"{probability:.4f}"]
        for one in found
        for rank, (name, probability) in enumerate(one.classes, 1)
    ]
    return head, rows


def write_predictions(found: Sequence[Prediction], out: str) -> None:
    """Write predictions to a file, `.json` or `.csv`.

    Raises:
        ConfigError: another suffix, or the file cannot be written.
    """
    if out.endswith(".json"):
        text = json.dumps([one.to_json() for one in found], indent=1) + "\n"
    elif out.endswith(".csv"):
        file = io.StringIO()
        head, rows = format_rows(found)
        csv.writer(file, lineterminator="\n").writerows([head, *rows])
        text = file.getvalue()
    else:
        raise ConfigError(f"--out {out}: expected a file FILE.json or FILE.csv", code="cli.usage")
    make_parent(out, open_storage(out))
    try:
        open_storage(out).replace(out, text.encode(errors="surrogateescape"))
    except OSError as error:
        raise ConfigError(
            f"--out {out}: could not be written: {error}", code="file.not_writable"
        ) from error
