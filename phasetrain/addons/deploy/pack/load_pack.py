"""Load a packed model: verify its file, build the model from registered parts, and repeat its
example."""

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from phasetrain.addons.deploy.input_transform import build_input_transform
from phasetrain.addons.deploy.pack.archive import (
    CARD,
    CONFIG,
    EXAMPLE_TENSORS,
    EXAMPLE_TREE,
    TOKENIZER_FILE,
    WEIGHTS,
    Archive,
    make_damage_error,
    read_archive,
)
from phasetrain.addons.deploy.pack.example import (
    Example,
    Verification,
    compare_outputs,
    to_plain_output,
)
from phasetrain.addons.deploy.pack.user_code import NeededCode, import_needed_code
from phasetrain.addons.deploy.predict.predict import (
    FilePredictor,
    OutputForm,
    Prediction,
    list_token_names,
)
from phasetrain.addons.deploy.predict.raw_inputs import Arrays, InputReader, OnUnreadable
from phasetrain.addons.deploy.stage import select_stage
from phasetrain.app.setup import Setup, resolve_config
from phasetrain.app.stored.stored_config import StoredConfig
from phasetrain.checkpoint.codec import reject_malformed
from phasetrain.checkpoint.snapshot import parse_safetensors
from phasetrain.config.addons import require_service
from phasetrain.config.objects import GivenObject, GivenObjects, is_object_name, provide_objects
from phasetrain.config.trust import trust_only
from phasetrain.distributed import World
from phasetrain.errors import ConfigError, InvalidCheckpointError
from phasetrain.models.prepare import copy_expanded_buffers
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import TASKS
from phasetrain.tasks.build.builder import build_model
from phasetrain.tasks.build.sections import BuildContext, parameters_of
from phasetrain.tasks.inference import Predictor
from phasetrain.tasks.parts import Parts
from phasetrain.tasks.shape_errors import shorten_shape_error

log = logging.getLogger(__name__)

OF_TRAINING = frozenset(
    {"weights", "freeze", "freeze_updates", "ema", "swa", "schedule_free", "adapters"}
)
"""Keys of MODEL without effect on predictions; some of them name files, and adapters are merged."""

OF_INPUTS = ("transforms", "collate", "inputs", "targets")
"""Keys of a split that make a batch of samples."""

NUMERICS = ("precision", "test_precision")
"""Keys of MACHINE that decide how a forward pass computes."""


@dataclass(frozen=True)
class Description:
    """The description of a model in `pack.json`.

    Attributes:
        split: key in DATA of the test split whose transforms are packed.
        has_tests: whether the run has this split; otherwise there are no transforms.
        facts: properties of the data that the model was built with, by name.
        section: keys of the split by which files are read: `dataset`, `mode`, `size`.
        fields: declared fields of samples; None without any.
        data: recorded properties of the data of the split.
        takes_numbers: whether a sample is an array.
        form: meaning of the outputs.
        has_task: whether the task of the run makes predictions of the outputs of the model.
        stage: number of the stage in PHASES.stages whose transforms are packed.
        code: modules with custom parts.
        tolerance: see `example.TOLERANCES`.
    """

    split: str
    has_tests: bool
    facts: Mapping[str, Any]
    section: Mapping[str, Any]
    fields: Mapping[str, Any] | None
    data: Mapping[str, Any]
    takes_numbers: bool
    form: OutputForm
    code: Sequence[NeededCode]
    tolerance: float
    has_task: bool = False
    stage: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the entries of `pack.json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, index: Mapping[str, Any]) -> "Description":
        """Read the entries of `pack.json`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: they are malformed.
        """
        form = OutputForm(**index["form"])
        return cls(
            split=str(index["split"]),
            has_tests=bool(index["has_tests"]),
            facts=dict(index["facts"]),
            section=dict(index["section"]),
            fields=index.get("fields"),
            data=dict(index["data"]),
            takes_numbers=bool(index["takes_numbers"]),
            form=replace(form, class_names=tuple(map(str, form.class_names))),
            code=[NeededCode.from_json(entry) for entry in index["code"]],
            tolerance=float(index["tolerance"]),
            has_task=bool(index.get("has_task")),
            stage=int(index.get("stage") or 0),
        )


class PackedModel(Predictor):
    """A model from the file of `phasetrain pack`, whose example has been repeated here.

    Attributes:
        path: its file.
        digest: SHA-256 of the file.
        card: the model card: metrics, data, versions, license.
        config: config of the run.
        classes: name of each class; empty if the model does not classify, or classes have no names.
        model: the network in test mode, a plain `torch.nn.Module`.
        transform: makes batches of raw samples.
        verification: how the output for the example compares with the expected one.

    Example:
        >>> packed = phasetrain.load_pack("model.zip")
        >>> packed.predict(images).argmax(1)
        >>> packed.predict_files(["photos/"], top=1)[0].classes
    """

    reader: InputReader

    def __init__(
        self, archive: Archive, parts: Parts, predictor: FilePredictor, verification: Verification
    ) -> None:
        self.path = archive.path
        self.digest = archive.digest
        self.card: dict[str, Any] = archive.parse_json(CARD)
        self.config: dict[str, Any] = archive.parse_json(CONFIG)
        self.parts = parts
        self.model = parts.model
        self.transform = predictor.transform
        self.reader = predictor.reader
        self.class_names = tuple(predictor.form.class_names)
        self.verification = verification
        self._files = predictor

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class."""
        return self.class_names

    def __repr__(self) -> str:
        return f"PackedModel({self.path!r}, example {self.verification.describe()})"

    def predict(
        self, inputs: Any, *, transform: bool | None = True, batch_size: int | None = None
    ) -> Any:
        """Return the model's output for raw samples, in test mode and without gradients.

        Args:
            inputs: samples as the dataset gives them: a tensor or array `(N, ...)`, a list of
                samples, or a path of a file or folder, or a list of paths. A text is a sample if
                the dataset has texts, and else a path.
            transform: False: `inputs` is a batch after the transforms.
            batch_size: maximum number of samples per forward pass; default: all.

        Raises:
            ConfigError: the model does not take them, or a file cannot be read.
        """
        items = inputs if isinstance(inputs, list | tuple) else [inputs]
        if transform and items and all(isinstance(item, str) for item in items):
            inputs = self._read_texts(items)
        return super().predict(inputs, transform=transform, batch_size=batch_size)

    def _predict_slice(self, tensors: Any, part: slice) -> Any:
        return self._files.predictor._predict_slice(tensors, part)

    def _read_texts(self, texts: Sequence[str]) -> Sequence[Any]:
        """Return texts as samples or as paths."""
        if self.reader.takes_numbers or "channels" in self.reader.facts:
            return [Path(text) for text in texts]
        return self.reader.read_lines(texts, "inputs")

    def predict_files(
        self,
        files: Sequence[str],
        *,
        top: int | None = None,
        output: str | None = None,
        batch_size: int = 64,
        arrays: Arrays = "auto",
        on_unreadable: OnUnreadable | None = None,
    ) -> list[Prediction]:
        """Return the predictions for files, as `phasetrain predict` does.

        Args:
            files: images, `.npy`, `.pt`, `.csv` and text files, folders of images, or `-` for the
                lines of standard input.
            top: number of classes per sample, the most probable ones first; None: three, if the
                model classifies.
            output: entry of a mapping that the model returns; None: all of them.
            batch_size: samples that are in memory at once.
            arrays: whether a `.npy` or `.pt` file is a sample or a batch; `auto`: by the number of
                dimensions of a sample in the run.
            on_unreadable: called with the path and the error of each file that cannot be read,
                which is then skipped; by default the first one is an error.

        Raises:
            ConfigError: the model does not take them, or a file cannot be read.
        """
        predictor = replace(self._files, reader=replace(self.reader, arrays=arrays))
        return predictor.predict(
            list(map(str, files)),
            top=top,
            output=output,
            batch_size=batch_size,
            on_unreadable=on_unreadable,
        )


def load_pack(
    path: str | Path,
    *,
    device: str = "auto",
    imports: Sequence[str | Path] = (),
    model: nn.Module | None = None,
    digest: str | None = None,
) -> PackedModel:
    """Return a model from the file of `phasetrain pack`, for predictions.

    The file is verified, the model is built from registered parts and the config, and its example
    is repeated: the output has to be the expected one. No code from the file is executed.

    Args:
        path: the file.
        device: see MACHINE.device.
        imports: files, or names of modules, with the custom parts that the model needs.
        model: the network, for a run whose model was given as an object in Python; its weights are
            replaced.
        digest: expected SHA-256 of the file, or its beginning, of at least 12 digits.

    Raises:
        ConfigError: the file is damaged, hostile or of a newer format (`pack.*`), a custom part is
            missing (`pack.code_needed`), or the example gives another output
            (`pack.other_outputs`).

    Example:
        >>> packed = phasetrain.load_pack("model.zip")
        >>> packed.predict(images).argmax(1), packed.classes, packed.card["metrics"]
    """
    archive = read_archive(str(path))
    if digest is not None:
        _check_digest(archive, digest)
    return open_pack(archive, device=device, imports=list(map(str, imports)), model=model)


def _check_digest(archive: Archive, digest: str) -> None:
    # Shorter ones are easily met by another file.
    expected = digest.removeprefix("sha256:").lower()
    if len(expected) < 12 or not archive.digest.startswith(expected):
        raise ConfigError(
            f"{archive.path}: its SHA-256 is {archive.digest}, expected {digest}: it is not the "
            "file whose digest you have",
            code="pack.other_file",
        )


def open_pack(
    archive: Archive,
    *,
    device: str,
    imports: Sequence[str] = (),
    model: nn.Module | None = None,
) -> PackedModel:
    """Return the model in a verified file, see `load_pack`."""
    path = archive.path
    try:
        description = Description.from_json(archive.index)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise make_damage_error(path, f"pack.json is malformed ({error!r})") from error
    config = _select_config(archive, description)
    # Before the config is resolved, which looks the parts up.
    names = import_needed_code(path, description.code, config, imports)
    objects = _provide_model(path, config, model)
    with provide_objects(objects), _reject_foreign_parts(path):
        setup = _resolve(path, config, names, device)
        with trust_only(setup.trusted_paths):
            parts, predictor = _build(archive, setup, description)
    verification = _repeat_example(archive, predictor, description.tolerance)
    log.info("%s: example %s", path, verification.describe())
    return PackedModel(archive, parts, predictor, verification)


@contextmanager
def _reject_foreign_parts(path: str) -> Iterator[None]:
    """Reject a function of a library as a part: there is no source that the user could review and
    name, as for custom code."""
    try:
        yield
    except ConfigError as error:
        if error.code != "trust.needed":
            raise
        key, _, rest = str(error).partition(" = ")
        raise ConfigError(
            f"{path}: {key} = {rest.partition(' ')[0]} is not a class that a packed model may "
            "name; get the original file",
            code="pack.unsafe",
        ) from error


@contextmanager
def _explain_failure(path: str) -> Iterator[None]:
    """Raise ConfigError if a model cannot be built, such as one that no memory could hold."""
    try:
        yield
    except (RuntimeError, MemoryError, AssertionError) as error:
        reason = shorten_shape_error(error)
        raise ConfigError(
            f"{path}: MODEL in {CONFIG} cannot be built here: {reason}; free memory if the model "
            "is large, or get the original file",
            code="pack.not_built",
        ) from error


def _select_config(archive: Archive, description: Description) -> dict[str, Any]:
    """Return the part of the config that predictions need. The data of the run is replaced by a
    dataset that is never opened, because its class may not exist here."""
    whole = archive.parse_json(CONFIG)
    try:
        model_section = {
            key: value for key, value in whole["MODEL"].items() if key not in OF_TRAINING
        }
        split: dict[str, Any] = {"dataset": "digits"}
        if description.has_tests:
            section = select_stage(whole, description.stage)["DATA"][description.split]
            split |= {key: section[key] for key in OF_INPUTS if key in section}
            split["fields"] = description.fields
        numerics = {key: whole["MACHINE"].get(key) for key in NUMERICS}
        task = dict(whole["TASK"]) if description.has_task else {}
        return {
            **({"TASK": task} if task else {}),
            "MODEL": model_section,
            "DATA": {"TRAIN": {"dataset": None}, description.split: split},
            "MACHINE": {key: value for key, value in numerics.items() if value is not None},
        }
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise make_damage_error(archive.path, f"{CONFIG} is malformed ({error!r})") from error


def _provide_model(path: str, config: Mapping[str, Any], model: nn.Module | None) -> GivenObjects:
    """Return the model that the caller gives for one that was given in Python."""
    name = config["MODEL"].get("name")
    if not is_object_name(str(name)):
        return GivenObjects({})
    if model is None:
        raise ConfigError(
            f"{path}: the model of this run was given as an object in Python, which no file holds; "
            "make the same model and load it with phasetrain.load_pack(path, model=...)",
            code="pack.code_needed",
        )
    return GivenObjects({str(name): GivenObject(model, "MODEL.name", is_copied=True)})


def _resolve(path: str, config: Mapping[str, Any], names: frozenset[str], device: str) -> Setup:
    stored = StoredConfig(path, config, "", trusted_names=names)
    return resolve_config(
        ["RUN.engine=test", f"MACHINE.device={device}"],
        terminal=Terminal(io.StringIO(), live=False),
        stored=stored,
    )


def _build(archive: Archive, setup: Setup, description: Description) -> tuple[Parts, FilePredictor]:
    context = BuildContext(setup.config, setup.machine, World())
    # JSON has no tuples, and parts expect shapes as tuples.
    build_values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in description.facts.items()
    }
    build_values |= {
        "world": 1,
        "device": setup.machine.device,
        "precision": setup.machine.precision,
    }
    with _explain_failure(archive.path):
        model = build_model(context, build_values)
    copy_expanded_buffers(model)  # weights cannot be loaded into views
    _load_weights(archive, model)
    model.to(setup.machine.device).eval()
    parts = Parts(
        model=model,
        loss=nn.Identity(),
        meters={},
        updater=None,
        loaders={},
        machine=setup.machine,
        world=World(),
        seed=0,
        known_facts={**description.data, **build_values},
    )
    transform = build_input_transform(context, description.split)
    # As in `phasetrain.load`: only datasets of images report channels.
    transform.scales_bytes = "channels" in description.data
    codec = None
    if TOKENIZER_FILE in archive.members:
        content = bytes(archive.find_member(TOKENIZER_FILE))
        read_tokenizer = require_service("read_tokenizer", "text", archive.path)
        codec = read_tokenizer(content, description.data.get("end_token"), archive.path)
    reader = InputReader(description.section, description.data, description.takes_numbers, codec)
    form = description.form
    # Tens of thousands of names, which the tokenizer has already.
    form = replace(form, class_names=form.class_names or list_token_names(reader))
    runner = Predictor()
    runner.parts = parts
    if description.has_task:
        section = setup.config.TASK
        runner = TASKS.build(section.name, parameters_of(section, {"name"}), facts={"parts": parts})
    return parts, FilePredictor(runner, transform, reader, form)


def _load_weights(archive: Archive, model: nn.Module) -> None:
    """Load the weights into a new model.

    Raises:
        ConfigError: they are malformed, or of another model than the config describes.
    """
    # Copied, since members begin at any byte, and tensors have to begin at a multiple of their
    # element size.
    content = bytearray(archive.find_member(WEIGHTS))
    try:
        with reject_malformed(WEIGHTS):
            tensors = parse_safetensors(content)
    except InvalidCheckpointError as error:
        raise make_damage_error(archive.path, str(error)) from error
    try:
        model.load_state_dict(_with_tied(model, tensors))
    except RuntimeError as error:
        raise make_damage_error(
            archive.path,
            f"{WEIGHTS} is of another model than {CONFIG}: {shorten_shape_error(error)}",
        ) from error


def _with_tied(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by name, with those that the model ties to one of them."""
    completed = dict(tensors)
    by_storage: dict[tuple[Any, ...], str] = {}
    state = model.state_dict()
    for name, tensor in state.items():
        if name in tensors:
            by_storage[tensor.data_ptr(), tensor.shape] = name
    for name, tensor in state.items():
        twin = by_storage.get((tensor.data_ptr(), tensor.shape))
        if name not in tensors and twin is not None:
            completed[name] = tensors[twin]
    return completed


def _repeat_example(archive: Archive, predictor: FilePredictor, tolerance: float) -> Verification:
    """Compute the output for the example, and compare it.

    Raises:
        ConfigError: it is not the expected one.
    """
    try:
        members = map(archive.find_member, (EXAMPLE_TREE, EXAMPLE_TENSORS))
        example = Example.decode(*members)
    except InvalidCheckpointError as error:
        raise make_damage_error(archive.path, str(error)) from error
    output = to_plain_output(predictor.compute_output(example.samples, "example"))
    verification = compare_outputs(example.output, output, tolerance)
    if not verification.is_equal:
        raise ConfigError(
            f"{archive.path}: the output for its example is not the expected one "
            f"({verification.describe()}): weights, transforms, code or a library differ from "
            "those with which it was packed; see `versions` in its card",
            code="pack.other_outputs",
        )
    return verification
