"""Predict for files with the model of a run folder (`phasetrain predict`)."""

import csv
import io
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phasetrain.addons.deploy.input_transform import InputTransform
from phasetrain.addons.deploy.options import PredictOptions
from phasetrain.addons.deploy.predict.raw_inputs import InputReader, OnUnreadable, RawInput
from phasetrain.addons.deploy.stage import select_facts
from phasetrain.addons.deploy.task_forward import (
    describe_task_call,
    find_task_forward,
    predicts_by_itself,
    warn_of_task_forward,
)
from phasetrain.app.load import (
    choose_weights,
    find_test_split,
    load_checkpoint,
    load_task,
    read_data_facts,
)
from phasetrain.app.select_checkpoint import find_stage
from phasetrain.app.stored.stored_config import read_loaded_config
from phasetrain.config.nested import to_json_value, to_plain
from phasetrain.data.datasets.images import import_pillow
from phasetrain.data.loading.collate import UnequalShapesError
from phasetrain.data.transforms import Pipeline
from phasetrain.engine.batch import IGNORED, entry
from phasetrain.errors import ConfigError
from phasetrain.losses.cross_entropy import CrossEntropy
from phasetrain.meters.accuracy import Accuracy
from phasetrain.runs.paths import make_parent
from phasetrain.runtime.format import format_count
from phasetrain.runtime.storage import open_storage
from phasetrain.tasks import Task
from phasetrain.tasks.inference import Predictor
from phasetrain.tasks.shape_errors import describe_shapes

log = logging.getLogger(__name__)

TOP = 3
"""Number of classes per sample by default."""

MULTI_LABEL = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
"""Losses whose classes are independent of each other: a sample may have several."""


COLUMNS = 64
"""Largest length of output vectors with a column per entry in a CSV file."""

CLASSIFYING = (nn.CrossEntropyLoss, nn.NLLLoss, CrossEntropy, Accuracy, *MULTI_LABEL)
"""Losses and meters of models that classify."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one sample.

    Attributes:
        file: path of its file.
        index: position of the sample in the file.
        classes: pairs of class name and probability, the most probable first; with a mask the share
            of each class, the largest first; empty if the model does not classify.
        output: output of the model; None if it classifies.
        mask: class of each pixel, `(H, W)`; None if the model does not classify pixels.
        names: name of each class of the data; empty if there are none.
    """

    file: str
    index: int
    classes: Sequence[tuple[str, float]] = ()
    output: Any = None
    mask: Sequence[Sequence[int]] | None = None
    names: Sequence[str] = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON data."""
        content: dict[str, Any] = {"file": self.file, "index": self.index}
        if self.mask is not None:
            shares = [{"name": name, "share": share} for name, share in self.classes]
            return content | {"mask": self.mask, "classes": shares}
        if self.output is not None:
            return content | {"output": to_json_value(self.output)}
        return content | {"classes": [{"name": name, "probability": p} for name, p in self.classes]}


@dataclass(frozen=True)
class OutputForm:
    """The meaning of the output of a model.

    Attributes:
        classes: number of classes that the data has; None if it is not known.
        class_names: name of each class; empty if there are none.
        is_classifier: whether the loss or a meter shows that outputs are scores of classes.
        is_multi_label: whether a sample may have several classes.
        of_bytes: whether the classes are tokens of a text, bytes unless they have names, and the
            output has scores for each position.
    """

    classes: int | None = None
    class_names: Sequence[str] = ()
    is_classifier: bool = False
    is_multi_label: bool = False
    of_bytes: bool = False

    def count_classes(self, output: Any) -> int | None:
        """Return the number of classes that an output has scores of; None if it has none.

        Args:
            output: scores `(N, C)` of samples, or `(N, C, H, W)` of pixels.
        """
        if not isinstance(output, Tensor) or output.ndim not in (2, 4):
            return None
        if not output.is_floating_point():
            return None
        classes = self.classes
        if classes is None and self.is_classifier:
            # A single score, as for BCEWithLogitsLoss, is not a class.
            classes = max(2, output.shape[1])
        if output.shape[1] == classes:
            return classes
        return None

    def name_class(self, index: int) -> str:
        """Return the name of a class, its number if it has none."""
        if index < len(self.class_names):
            return self.class_names[index]
        if self.of_bytes:
            # 256 is the token at the end of a document
            return repr(bytes([index]))[1:] if index < 256 else "end"
        return str(index)


def find_output_form(task: Task, reader: InputReader) -> OutputForm:
    """Return the meaning of the output of a task's model."""
    classes = reader.facts.get("classes")
    method = find_task_forward(type(task)) or ""
    parts: Sequence[Any] = [*task.parts.meters.values()]
    # A custom `forward` need not use LOSS, which has a default.
    if not method.startswith("forward"):
        parts = [task.loss, *parts]
    if not task.uses_loss:
        parts = []  # such a task measures other outputs than those of its model
    names = list_token_names(reader) or tuple(task.class_names)
    return OutputForm(
        classes if isinstance(classes, int) else None,
        names,
        any(isinstance(part, CLASSIFYING) for part in parts),
        isinstance(task.loss, MULTI_LABEL),
        reader.is_text,
    )


def list_token_names(reader: InputReader) -> tuple[str, ...]:
    """Return the text of each token of a language model; empty for bytes and for other models."""
    if not reader.is_text or reader.codec.content is None:
        return ()
    return tuple(map(reader.name_token, range(reader.codec.vocabulary)))


@dataclass(frozen=True)
class FilePredictor:
    """Predicts for files.

    Attributes:
        predictor: has the model.
        transform: makes batches of samples.
        reader: reads files as samples.
        form: meaning of the outputs.
    """

    predictor: Predictor
    transform: InputTransform
    reader: InputReader
    form: OutputForm

    def predict(
        self,
        files: Sequence[str],
        *,
        top: int | None = None,
        output: str | None = None,
        batch_size: int = 64,
        on_unreadable: OnUnreadable | None = None,
    ) -> list[Prediction]:
        """Return the predictions for files.

        Args:
            files: see `InputReader.iterate`.
            top: number of classes per sample, the most probable ones first; None: three, if the
                model classifies.
            output: entry of a mapping that the model returns; None: all of them, without scalars.
            batch_size: samples that are in memory at once.
            on_unreadable: see `InputReader.iterate`.

        Raises:
            ConfigError: a file cannot be read, the model does not take its samples, its output does
                not have an entry per sample, `top` is given and there are no classes, or `top` or
                `batch_size` is below 1.
        """
        if top is not None and top < 1:
            raise ConfigError(
                f"top = {top}: expected at least 1, the number of classes per sample",
                code="cli.usage",
            )
        predictions: list[Prediction] = []
        scalars: set[str] = set()
        for inputs in batched(self.reader.iterate(files, on_unreadable), batch_size):
            if self.form.of_bytes:
                # Texts of one length form a batch; padding would change what follows them.
                for _, same in groupby(inputs, key=lambda raw_input: len(raw_input.sample)):
                    predictions += self._predict_batch(list(same), top, output, scalars)
            else:
                predictions += self._predict_batch(inputs, top, output, scalars)
        if scalars:
            log.warning(
                "predict: %s of the model's output are left out, scalars of a whole batch; "
                "--output NAME selects another entry, and ranks classes if it has scores of them",
                ", ".join(sorted(scalars)),
            )
        return predictions

    def _predict_batch(
        self, inputs: Sequence[RawInput], top: int | None, name: str | None, scalars: set[str]
    ) -> Iterator[Prediction]:
        try:
            output = self.compute_output([raw_input.sample for raw_input in inputs], inputs[0].file)
        except ConfigError as error:
            unequal = _describe_unequal_files(error, inputs)
            if unequal is None:
                raise
            raise unequal from error
        if name is not None:
            output = _select_entry(output, name)
        elif left_out := find_scalars(output):
            scalars.update(left_out)
            output = {key: value for key, value in output.items() if key not in left_out}
        _check_rows(output, len(inputs))
        if self.form.count_classes(output) is not None:
            if output.ndim == 4:
                return _name_pixels(self.form, inputs, output, top or TOP)
            return _name_classes(self.form, inputs, output, top or TOP)
        if top is not None:
            raise ConfigError(
                f"top = {top}: the model gives {describe_shapes(output)} for a batch, and no "
                "scores of classes that could be ranked; leave --top out",
                code="cli.conflict",
            )
        if isinstance(output, Tensor) and output.ndim == 2 and output.dtype == torch.int64:
            # Decoded sequences, each without its padding.
            output = [tokens[tokens != IGNORED] for tokens in output]
        return _split_output(self.form, inputs, output)

    def compute_output(self, samples: Sequence[Any], name: str) -> Any:
        """Return the output for samples; for a text of bytes, the output at its last position.

        Args:
            samples: as the dataset gives them.
            name: where the first one comes from, for messages.

        Raises:
            ConfigError: the model does not take them.
        """
        batch = self.transform(samples)
        expected = self.reader.facts.get("input_shape")
        # A network with adaptive pooling takes images of any size, and says nothing sensible.
        if isinstance(batch, Tensor) and isinstance(expected, list):
            shape = tuple(batch.shape[1:])
            if shape != tuple(expected):
                split = self.transform.split
                raise ConfigError(
                    f"{name}: after {split}.transforms its shape is {shape}, and the model was "
                    f"tested on {tuple(expected)}; resize it, or change the transforms: "
                    f"{split}.transforms=[...]",
                    code="predict.wrong_shape",
                )
        try:
            output = self.predictor.predict(batch, transform=False)
        except ConfigError as error:
            if error.code == "config.misfit" and self._takes_floats(batch):
                dtype = str(batch.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"{name}: its numbers are {dtype}, and the model takes float32; convert "
                    "them, with array.astype('float32') or tensor.float(), to the range of the "
                    "samples of the dataset",
                    code="predict.wrong_dtype",
                ) from error
            if error.code != "config.misfit" or predicts_by_itself(self.predictor):
                raise
            advice = describe_task_call(type(self.predictor))
            raise ConfigError(f"{error}{advice}", code="config.misfit") from error
        if self.form.of_bytes and isinstance(output, Tensor) and output.ndim == 3:
            output = output[:, -1]  # after the last token of the text
        return output

    def _takes_floats(self, batch: Any) -> bool:
        """Return whether the model takes a batch that it has rejected as float32."""
        if not isinstance(batch, Tensor) or batch.is_floating_point():
            return False
        try:
            self.predictor.predict(batch.float(), transform=False)
        except ConfigError:
            return False
        return True


def _describe_unequal_files(error: ConfigError, inputs: Sequence[RawInput]) -> ConfigError | None:
    """Return the error about a batch whose samples differ in shape with the names of two files;
    None for any other error."""
    cause = error.__cause__
    if not isinstance(cause, UnequalShapesError) or cause.sample is None:
        return None
    first, odd = inputs[0], inputs[cause.sample]
    return ConfigError(
        f"{odd.file}: after the transforms its shape is {cause.shapes[1]}, and the shape of "
        f"{first.file} is {cause.shapes[0]}; resize one of them, or predict for them one by one: "
        "--batch-size 1",
        code="predict.wrong_shape",
    )


def find_scalars(output: Any) -> list[str]:
    """Return the entries of a mapping that are scalars, if there are others as well."""
    if not isinstance(output, Mapping):
        return []
    scalars = [key for key, value in output.items() if isinstance(value, Tensor) and not value.ndim]
    return scalars if len(scalars) < len(output) else []


def _select_entry(output: Any, name: str) -> Any:
    """Return an entry of an output.

    Raises:
        ConfigError: there is none of this name.
    """
    try:
        return entry(output, name, "--output")
    except ValueError as error:
        raise ConfigError(str(error), code="predict.wrong_output") from error


def _check_rows(output: Any, samples: int, name: str = "") -> None:
    """Reject an output in which a tensor has no entry for each sample: its rows would be taken for
    predictions of samples.

    Args:
        output: output of the model, or an entry of it.
        samples: number of samples in the batch.
        name: path of the entry.
    """
    if isinstance(output, Mapping | tuple):
        pairs = output.items() if isinstance(output, Mapping) else enumerate(output)
        for key, value in pairs:
            _check_rows(value, samples, f"{name}.{key}" if name else f"{key}")
        return
    has_rows = isinstance(output, list) or (isinstance(output, Tensor) and output.ndim > 0)
    if not has_rows or len(output) != samples:
        raise ConfigError(
            f"MODEL: its output{f' {name!r}' if name else ''} is {describe_shapes(output)} for "
            f"{format_count(samples, 'sample')}, expected an entry for each; if a sample has "
            "many rows, as a graph has, use task.predict in Python; if the output has other values "
            "for the loss, let the model return them in training only (`if self.training`)",
            code="predict.wrong_output",
        )


def batched(inputs: Iterable[RawInput], size: int) -> Iterator[list[RawInput]]:
    """Yield inputs in lists of at most `size`.

    Raises:
        ConfigError: `size` is below 1.
    """
    if size < 1:
        raise ConfigError(f"batch_size = {size}: expected at least 1", code="cli.usage")
    left = iter(inputs)
    while chunk := list(islice(left, size)):
        yield chunk


def predict(
    folder: str,
    files: Sequence[str],
    changes: Sequence[str] = (),
    options: PredictOptions | None = None,
    *,
    on_unreadable: OnUnreadable | None = None,
) -> list[Prediction]:
    """Return the predictions of a run for files.

    Images, `.npy`, `.pt` and `.csv` files, and text are read as the dataset of the first test split
    reads its samples, and go through its transforms. For a language model, the
    prediction is the token after the text.

    Args:
        folder: folder of a run, or of one checkpoint.
        files: files, folders of images, or `-` for the lines of standard input.
        changes: overrides of the config of the run, such as `DATA.TEST.transforms=[...]`.
        options: by default the newest checkpoint, and three classes.
        on_unreadable: called with the path and the error of each file that cannot be read, which is
            then skipped; by default the first one is an error.

    Raises:
        ConfigError: there is no such run or file, the model does not take the samples, or the
            folder names code that is not trusted.
    """
    options = options or PredictOptions()
    path = folder.rstrip("/")
    loaded = load_checkpoint(path, options.checkpoint or "latest")
    task = load_task(
        loaded,
        path,
        choose_weights(options.weights, loaded),
        device=options.device,
        changes=changes,
        trust=options.trust,
    )
    warn_of_task_forward(type(task), decodes=True)
    stored = read_loaded_config(loaded, path)
    split = find_test_split(stored.values["DATA"]) or "TRAIN"
    facts = read_data_facts(stored.folder, split)
    facts = select_facts(facts, stored.values, split, find_stage(loaded))
    reader = InputReader(stored.values["DATA"][split], facts, arrays=options.arrays)
    predictor = make_file_predictor(task, reader, split)
    return predictor.predict(
        files,
        top=options.top,
        output=options.output,
        batch_size=options.batch_size,
        on_unreadable=on_unreadable,
    )


def make_file_predictor(task: Task, reader: InputReader, split: str) -> FilePredictor:
    """Return a predictor for files with a task.

    Args:
        task: from `phasetrain.load`.
        reader: of the dataset of a split.
        split: key of the split in DATA.
    """
    transform = task.transform
    if transform is None:
        scales = "channels" in reader.facts
        transform = InputTransform(f"DATA.{split}", Pipeline(), scales_bytes=scales)
    return FilePredictor(task, transform, reader, find_output_form(task, reader))


def _name_classes(
    form: OutputForm, inputs: Sequence[RawInput], scores: Tensor, top: int
) -> Iterator[Prediction]:
    scores = scores.float().cpu()
    if form.is_multi_label:
        probabilities = torch.sigmoid(scores)
    else:
        probabilities = torch.softmax(scores, dim=1)
    best = probabilities.topk(min(top, scores.shape[1]))
    for raw_input, values, indices in zip(inputs, best.values, best.indices, strict=True):
        pairs = [
            (form.name_class(index), value)
            for index, value in zip(indices.tolist(), values.tolist(), strict=True)
        ]
        yield Prediction(raw_input.file, raw_input.index, pairs)


def _name_pixels(
    form: OutputForm, inputs: Sequence[RawInput], scores: Tensor, top: int
) -> Iterator[Prediction]:
    for raw_input, mask in zip(inputs, scores.argmax(1).cpu(), strict=True):
        shares = torch.bincount(mask.flatten(), minlength=scores.shape[1]) / mask.numel()
        best = shares.topk(min(top, len(shares)))
        pairs = [
            (form.name_class(index), share)
            for index, share in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            if share
        ]
        yield Prediction(raw_input.file, raw_input.index, pairs, mask=mask.tolist())


def write_masks(predictions: Sequence[Prediction], folder: str) -> int:
    """Write the mask of each prediction as a grey PNG file with the class of each pixel, and return
    their number.

    Raises:
        ConfigError: there is no mask, a class above 255, or the folder cannot be written.
    """
    if not any(prediction.mask is not None for prediction in predictions):
        raise ConfigError(
            f"--masks {folder}: the model gives no class for each pixel; expected a model of "
            "segmentation",
            code="cli.conflict",
        )
    image = import_pillow("predict --masks")
    written = 0
    for prediction in predictions:
        if prediction.mask is None:
            continue
        # Numbered, because files in two folders may have the same name.
        path = Path(folder, f"{written:05d}-{Path(prediction.file).stem}-{prediction.index}.png")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(np.array(prediction.mask, dtype=np.uint8)).save(path)
        except OSError as error:
            raise ConfigError(
                f"--masks {folder}: could not be written: {error}; expected a folder that can be "
                "written",
                code="file.not_writable",
            ) from error
        written += 1
    return written


def _split_output(
    form: OutputForm, inputs: Sequence[RawInput], output: Any
) -> Iterator[Prediction]:
    for row, raw_input in enumerate(inputs):
        sample = _take_sample(output, row)
        yield Prediction(raw_input.file, raw_input.index, output=sample, names=form.class_names)


def _take_sample(output: Any, row: int) -> Any:
    """Return the output of one sample as JSON data."""
    if isinstance(output, Tensor):
        return _to_json_output(output[row])
    if isinstance(output, Mapping):
        return {str(key): _take_sample(value, row) for key, value in output.items()}
    # Detection models return a list with an entry per sample, others a tuple of batches.
    if isinstance(output, tuple):
        return [_take_sample(value, row) for value in output]
    return _to_json_output(output[row])


def _to_json_output(value: Any) -> Any:
    def convert_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return to_json_value(leaf)
        return (leaf.float() if leaf.is_floating_point() else leaf).cpu().tolist()

    return to_plain(value, convert_leaf, text_keys=True)


def format_rows(
    predictions: Sequence[Prediction], name: str = "output"
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table: a row per class, or per sample if there are no classes.

    Args:
        predictions: the predictions.
        name: name of the column of outputs.
    """
    if any(prediction.output is not None for prediction in predictions):
        head = ["file", "index", name]
        return head, [
            [prediction.file, str(prediction.index), json.dumps(prediction.output)]
            for prediction in predictions
        ]
    value = (
        "share of pixels"
        if any(prediction.mask is not None for prediction in predictions)
        else "probability"
    )
    head = ["file", "index", "rank", "class", value]
    rows = [
        [prediction.file, str(prediction.index), str(rank), name, f"{probability:.4f}"]
        for prediction in predictions
        for rank, (name, probability) in enumerate(prediction.classes, 1)
    ]
    return head, rows


def _name_columns(predictions: Sequence[Prediction], name: str) -> list[str]:
    """Return the names of the columns of outputs that are vectors of one length: the classes of the
    data, or `name` with a number, as in `output_0`; empty for other outputs."""
    lengths = set()
    for prediction in predictions:
        output = prediction.output
        # Integers are tokens or classes, whose number may differ from file to file.
        if not isinstance(output, list) or not all(isinstance(entry, float) for entry in output):
            return []
        lengths.add(len(output))
    if len(lengths) != 1 or not 1 <= max(lengths) <= COLUMNS:
        return []
    length = lengths.pop()
    names = predictions[0].names
    return [*names] if len(names) == length else [f"{name}_{number}" for number in range(length)]


def format_csv(predictions: Sequence[Prediction], name: str = "output") -> str:
    """Return the rows of `format_rows` as CSV, with a column per entry of short vectors."""
    file = io.StringIO()
    columns = _name_columns(predictions, name)
    head, rows = format_rows(predictions, name)
    if columns:
        head = ["file", "index", *columns]
        rows = [
            [prediction.file, str(prediction.index), *map(json.dumps, prediction.output)]
            for prediction in predictions
        ]
    csv.writer(file, lineterminator="\n").writerows([head, *rows])
    return file.getvalue()


def write_predictions(predictions: Sequence[Prediction], out: str, name: str = "output") -> None:
    """Write predictions to a file, `.json` or `.csv`; `name` see `format_rows`.

    Raises:
        ConfigError: another suffix, or the file cannot be written.
    """
    if out.endswith(".json"):
        text = json.dumps([prediction.to_json() for prediction in predictions], indent=1) + "\n"
    elif out.endswith(".csv"):
        text = format_csv(predictions, name)
    else:
        raise ConfigError(f"--out {out}: expected a file FILE.json or FILE.csv", code="cli.usage")
    make_parent(out, open_storage(out))
    try:
        open_storage(out).replace(out, text.encode(errors="surrogateescape"))
    except OSError as error:
        raise ConfigError(
            f"--out {out}: could not be written: {error}; expected a path that can be written",
            code="file.not_writable",
        ) from error
