"""Export weights and models from a checkpoint, in formats that can be used without phasetrain
(`phasetrain export`)."""

import io
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phasetrain import __version__
from phasetrain.addons.deploy.complete_weights import (
    choose_example_split,
    complete_weights,
    read_batch,
)
from phasetrain.addons.deploy.input_transform import build_input_transform, describe_transform
from phasetrain.addons.deploy.native_folder import is_native, make_native_files
from phasetrain.addons.deploy.stage import select_stage
from phasetrain.addons.deploy.task_forward import warn_of_task_forward
from phasetrain.addons.deploy.tensor_part import TransformedModel, split_tensor_part
from phasetrain.app.load import choose_weights, find_test_split, load_task, resolve_for_inference
from phasetrain.app.select_checkpoint import find_stage
from phasetrain.app.setup import Setup
from phasetrain.app.stored.stored_config import read_loaded_config
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.weights import find_checkpoint, holds_plain_weights
from phasetrain.config.addons import require_service
from phasetrain.config.changes import trajectory_digest
from phasetrain.config.schema import default_schema
from phasetrain.config.trust import trust_only
from phasetrain.data import SampleReader
from phasetrain.data.transforms import Pipeline
from phasetrain.errors import ConfigError, did_you_mean, is_out_of_memory
from phasetrain.hooks.observers import classify_hooks
from phasetrain.models.sources import WeightSource, parse_sources
from phasetrain.models.sources.files import flatten_tensors, without_tied
from phasetrain.runs.paths import make_parent
from phasetrain.runtime.name_patterns import filter_names
from phasetrain.runtime.storage import TEMPORARY, Storage, open_storage
from phasetrain.tasks import TASKS
from phasetrain.tasks.shape_errors import shorten_shape_error

log = logging.getLogger(__name__)

FORMATS = ("safetensors", "huggingface", "peft", "torch_export", "onnx")

RELATIVE = 1e-5
"""Maximum difference between the outputs of an exported model and of the model itself, relative to
the largest output."""


WITH_COMPUTATION = ("torch_export", "onnx")
"""Formats that hold the computation of the model as well."""

OF_FOLDER = ("phasetrain", "checkpoint", "updates", "weights", "config")
"""Facts about the weights in a folder of Hugging Face, in addition to metrics and transforms."""

SUFFIXES = MappingProxyType(
    {".safetensors": "safetensors", ".pt2": "torch_export", ".onnx": "onnx"}
)
"""Suffix of a file -> its format."""


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        count: number of tensors, or number of bytes for `torch_export` and `onnx`.
        size: bytes of the file, or of all files of the folder.
        weights: which weights were written: `model`, or the name of an average.
        inside: transforms that the file applies to its input.
        outside: transforms of the test split that it does not apply, in order, before those inside.
        input: type and shape of the input, such as `float32 (N, 3, 32, 32)`; empty for weights.
        output: the same of the output; empty also if it is not a single tensor.
        class_names: classes of the columns of the output; empty if they are not known.
    """

    count: int
    size: int
    weights: str
    inside: Sequence[str] = ()
    outside: Sequence[str] = ()
    input: str = ""
    output: str = ""
    class_names: Sequence[str] = ()


@dataclass(frozen=True)
class Weights:
    """Weights from a checkpoint.

    Attributes:
        tensors: name -> tensor.
        metadata: metadata of the file, as text.
        source: where they are from, with the weights that were chosen.
        loaded: the checkpoint.
        transforms: the transforms of the first test split, in the stage of the checkpoint.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    source: WeightSource
    loaded: LoadedCheckpoint
    transforms: Sequence[str] = ()


@dataclass(frozen=True)
class BuiltModel:
    """A model in test mode.

    Attributes:
        model: takes the example.
        example: a batch of inputs.
        inside: transforms that the model applies.
        outside: transforms of the test split that it does not apply.
        class_names: names of the classes in the data, if it has any.
    """

    model: nn.Module
    example: Tensor
    inside: Sequence[str] = ()
    outside: Sequence[str] = ()
    class_names: Sequence[str] = ()


def export(  # noqa: PLR0913 - the keyword arguments are those of the command
    path: str,
    out: str,
    form: str | None = None,
    *,
    source: Mapping[str, Any] = MappingProxyType({}),
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    with_transforms: bool = False,
    trust: bool = False,
) -> Exported:
    """Write the model of a checkpoint to a new file, or for `huggingface` to a new folder.

    The transforms of the test split are not part of the model: the result lists them, and so does
    the file, unless they are written into it.

    Args:
        path: a checkpoint, or a run folder.
        out: must not exist yet; `PREFIX://...` goes through the registered path handler.
        form: one of `FORMATS`; None: the format of the suffix of `out`, see `choose_format`.
            `torch_export` and `onnx` hold the computation as well, for batches
            of any size, in test mode: the model is built from the config of the checkpoint on the
            CPU, and for `torch_export` the outputs of the file are compared with its outputs.
        source: which checkpoint of a run, and which weights: `checkpoint`, `which`, and patterns
            `include` and `exclude` of names, as in MODEL.weights; without `which`, see
            `choose_weights`.
        overrides: changes of the config of the checkpoint; only for `torch_export` and `onnx`.
        config_dir: folder with your configs, from which overrides may choose.
        with_transforms: let the file take raw inputs, for `torch_export` and `onnx`: it applies the
            transforms of the test split that compute on tensors without random numbers, from the
            last one backwards.
        trust: run the modules and dotted paths that the config of the checkpoint names.

    Raises:
        ConfigError: nothing was written; the message says why.
    """
    form = choose_format(out, form)
    if with_transforms and form not in WITH_COMPUTATION:
        raise ConfigError(
            f"with_transforms and the format {form!r}, which holds weights only: expected one of "
            f"{', '.join(WITH_COMPUTATION)}",
            code="cli.conflict",
        )
    storage = open_storage(out)
    # first, because reading and tracing a large model takes minutes
    if storage.exists(out):
        raise ConfigError(
            f"{out!r} exists; name a file or folder that does not", code="file.exists"
        )
    make_parent(out, storage)
    remove_partial(out, storage)
    chosen, loaded = _find_source(path, source)
    if form == "peft":
        return _export_peft(chosen, loaded, out, trust=trust)
    weights = _read_weights(chosen, loaded, trust=trust)
    if form in ("safetensors", "huggingface"):
        size = _write_weights(weights, out, form, trust=trust)
        return Exported(len(weights.tensors), size, chosen.which, outside=weights.transforms)
    built = build_model(
        weights, overrides, config_dir, with_transforms=with_transforms, trust=trust
    )
    metadata = {
        **weights.metadata,
        "transforms": json.dumps(built.outside),
        "transforms_inside": json.dumps(built.inside),
    }
    if form == "onnx":
        content = _encode_onnx(built.model, built.example, metadata)
    else:
        content = _encode_torch_export(built.model, built.example, metadata)
    storage.replace(out, content)
    return _describe_file(built, len(content), chosen.which)


def _find_source(path: str, options: Mapping[str, Any]) -> tuple[WeightSource, LoadedCheckpoint]:
    """Return the source with the weights to use, and its checkpoint.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    source = WeightSource(path, **options, where="export")
    storage = source.get_storage()
    if not storage.exists(path):
        raise source.make_error("there is no such folder; expected a run or one of its checkpoints")
    loaded = find_checkpoint(source, storage)
    return replace(source, which=choose_weights(options.get("which"), loaded)), loaded


def _write_weights(weights: Weights, out: str, form: str, *, trust: bool) -> int:
    """Write weights as a file or a folder, and return its size in bytes."""
    if form == "huggingface":
        return _write_folder(out, _make_files(weights, trust=trust))
    content = _encode_safetensors(weights)
    open_storage(out).replace(out, content)
    return len(content)


def _export_peft(
    source: WeightSource, loaded: LoadedCheckpoint, out: str, *, trust: bool
) -> Exported:
    """Write the adapters of a checkpoint as a folder of PEFT."""
    task = load_task(loaded, loaded.path, trust=trust)
    model = task.model
    if source.which != "model":
        model.load_state_dict(loaded.state["task"][source.which])
    config = loaded.promised["config"]["MODEL"]
    section = config.get("adapters") or {}
    train = section.get("train", ())
    sources = parse_sources(config["weights"])
    make_peft_files = require_service("make_peft_files", "adapters", "the format 'peft'")
    files = make_peft_files(
        model,
        [train] if isinstance(train, str) else train,
        sources[-1].path if sources else None,
    )
    size = _write_folder(out, files)
    count = len(load_safetensors(files["adapter_model.safetensors"]))
    return Exported(count, size, source.which)


@torch.no_grad()
def _describe_file(built: BuiltModel, size: int, which: str) -> Exported:
    """Return the report on a file of `size` bytes with a model."""
    example = _describe_batch(built.example)
    made = Exported(size, size, which, built.inside, built.outside, example)
    output = built.model(built.example)
    if not isinstance(output, Tensor):
        return made
    made = replace(made, output=_describe_batch(output))
    if output.ndim == 2 and output.shape[1] == len(built.class_names):
        return replace(made, class_names=built.class_names)
    return made


def _describe_batch(batch: Tensor) -> str:
    sizes = ", ".join(["N", *map(str, batch.shape[1:])])
    return f"{str(batch.dtype).removeprefix('torch.')} ({sizes})"


def choose_format(out: str, form: str | None = None) -> str:
    """Return the format to write: the given one, or the format of the suffix of a file.

    Args:
        out: file or folder to write; without a suffix it is a file of `safetensors`.
        form: one of `FORMATS`, or None.

    Raises:
        ConfigError: there is no such format, the suffix belongs to another format than the given
            one, or no format is given and the suffix belongs to none.
    """
    suffix = PurePosixPath(out).suffix
    by_suffix = SUFFIXES.get(suffix)
    if form is None:
        if suffix and by_suffix is None:
            raise ConfigError(
                f"{out!r}: no format has the suffix {suffix}; expected a file that ends in "
                f"{', '.join(SUFFIXES)}, or --format with one of {', '.join(FORMATS)}",
                code="export.unknown_format",
            )
        return by_suffix or "safetensors"
    if form == "torchscript":
        raise ConfigError(
            "format 'torchscript': removed, because torch deprecates TorchScript; use torch_export "
            "for Python and C++, or onnx",
            code="export.removed_format",
        )
    if form not in FORMATS:
        raise ConfigError(
            f"format {form!r}: no such format{did_you_mean(form, FORMATS) or '.'} "
            f"Known: {', '.join(FORMATS)}",
            code="export.unknown_format",
        )
    if by_suffix not in (None, form):
        raise ConfigError(
            f"{out!r} and --format {form}: a file that ends in {suffix} is read as {by_suffix}; "
            "change the name, or omit --format",
            code="cli.conflict",
        )
    return form


def remove_partial(out: str, storage: Storage) -> None:
    """Remove the leftovers of exports to the same place that were killed while they wrote."""
    if not storage.keeps_files:
        return
    path = Path(storage.local_path(out.rstrip("/")))
    for name in storage.list_names(str(path.parent)):
        if TEMPORARY.sub("", name) == path.name:
            storage.remove(f"{path.parent}/{name}")


def _encode_safetensors(weights: Weights) -> bytes:
    metadata = {**weights.metadata, "transforms": json.dumps(weights.transforms)}
    return save(without_tied(weights.tensors), metadata)


def _read_weights(source: WeightSource, loaded: LoadedCheckpoint, *, trust: bool) -> Weights:
    """Return the weights of a checkpoint with their metadata.

    Args:
        source: which of its weights.
        loaded: the checkpoint.
        trust: see `export`; needed only for a checkpoint that leaves out tensors.

    Raises:
        ConfigError: it has no such weights, or a pattern matches nothing.
    """
    learned = loaded.state["task"]
    if source.which not in learned:
        raise source.make_error(f"{loaded.path} has no averaged weights; expected which=model")
    state = learned[source.which]
    if not holds_plain_weights(loaded):
        state = complete_weights(loaded, source.which, trust=trust)
    tensors = flatten_tensors(state)
    taken = filter_names(
        tensors,
        source.include,
        source.exclude,
        lambda key, _, pattern: f"--{key} {pattern}: no tensor of the checkpoint has such a name",
        code="export.unknown_tensor",
    )
    config = loaded.promised["config"]
    manifest = loaded.manifest
    metadata = {
        "format": "pt",
        "phasetrain": __version__,
        "checkpoint": loaded.path.rpartition("/")[2],
        "updates": str(manifest.state["updates"]),
        "weights": source.which,
        "model": str(config["MODEL"]["name"]),
        "config": trajectory_digest(config, classify_hooks(default_schema(), config)),
        "metrics": json.dumps(dict(manifest.facts.metrics)),
        "ledger": manifest.facts.ledger,
    }
    chosen = {name: tensors[name] for name in taken}
    return Weights(chosen, metadata, source, loaded, _list_transforms(loaded))


def _list_transforms(loaded: LoadedCheckpoint) -> list[str]:
    """Return the transforms of the first test split in the stage of a checkpoint, if it has one."""
    config = select_stage(loaded.promised["config"], find_stage(loaded))
    split = find_test_split(config.get("DATA", {}))
    if split is None:
        return []
    return [describe_transform(item) for item in config["DATA"][split].get("transforms") or ()]


def build_model(
    weights: Weights,
    overrides: Sequence[str],
    config_dir: str | None,
    *,
    with_transforms: bool = False,
    trust: bool = False,
) -> BuiltModel:
    """Return the model of a checkpoint in test mode with these weights, and a batch of its input.

    Args:
        weights: from the checkpoint.
        overrides: changes of its config.
        config_dir: folder with your configs.
        with_transforms: put transforms of the test split in front of the model.
        trust: run the code that its config names.

    Raises:
        ConfigError: the weights are of another model, its input is not a single tensor, or its
            config names code that is not trusted.
    """
    stored = read_loaded_config(weights.loaded, weights.loaded.path)
    merged: list[str] = []
    if weights.loaded.promised["config"]["MODEL"].get("adapters") is not None:
        merged = ["MODEL.adapters=null"]
    # on the CPU, so that the file does not hold CUDA devices
    words = [*overrides, *merged, "MACHINE.device=cpu"]
    setup = resolve_for_inference(stored, words, trust=trust, config_dir=config_dir)
    with trust_only(setup.trusted_paths):
        return _build_model(setup, weights, with_transforms=with_transforms)


def _build_model(setup: Setup, weights: Weights, *, with_transforms: bool) -> BuiltModel:
    builder = setup.builder()
    data = builder.data()
    plan = builder.plan(data)
    parts = builder.parts(data, plan, train=False)
    try:
        parts.model.load_state_dict(dict(weights.tensors))
    except RuntimeError as error:
        raise ConfigError(
            f"{weights.loaded.path} is of another model than the overrides describe, or tensors "
            "were excluded; remove overrides, --include and --exclude: "
            f"{shorten_shape_error(error)}",
            code="checkpoint.other_model",
        ) from error
    warn_of_task_forward(TASKS.find(setup.config.TASK.name, "TASK.name"))
    split = find_test_split(setup.config.DATA)
    name = choose_example_split(setup, data)
    stage = find_stage(weights.loaded) if setup.stages else 0
    reader = data[name].at(stage).reader
    inside: Sequence[Any] = ()
    transform = None
    if split is not None:
        context = replace(builder.context, config=builder.context.stage_configs[stage])
        transform = build_input_transform(context, split)
    if transform is not None and with_transforms:
        before, inside = split_tensor_part(transform.pipeline.transforms)
        assert isinstance(reader, SampleReader), "only training data has sources"
        reader = reader.with_pipeline(Pipeline(before))
    example = read_batch(builder, data, parts, name, reader).input
    if not isinstance(example, Tensor):
        raise ConfigError(
            f"the model takes a {type(example).__name__}, and only models of a single tensor can "
            "be exported with their computation; use the format safetensors or huggingface",
            code="export.unsupported_model",
        )
    described = [] if transform is None else list(transform.described)
    model = parts.model.eval()
    if inside:
        model = TransformedModel(inside, model).eval()
    at = len(described) - len(inside)
    class_names = tuple(map(str, data[name].facts.get("class_names") or ()))
    return BuiltModel(model, example, described[at:], described[:at], class_names)


@torch.no_grad()
def _encode_torch_export(model: nn.Module, example: Tensor, metadata: Mapping[str, str]) -> bytes:
    """Return a program of torch.export, after comparing its outputs for two batch sizes."""
    file = io.BytesIO()
    torch.export.save(_trace_program(model, example), file, extra_files=dict(metadata))
    # loaded again, so that the outputs of the file are compared and not of the program in memory
    exported = torch.export.load(io.BytesIO(file.getvalue())).module()
    # a second batch size reveals a program in which the size was traced as a constant
    for batch in (example, example[: max(1, len(example) // 2)]):
        expected, actual = tree_leaves(model(batch)), tree_leaves(exported(batch))
        if not expected or not all(isinstance(leaf, Tensor) for leaf in expected):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in expected})) or "nothing"
            raise ConfigError(
                f"the model returns {kinds}; expected a tensor, or a mapping, list or tuple of "
                "tensors, so that the outputs can be compared; let the model return them in eval "
                "mode, or export its weights, as with --format safetensors",
                code="export.unsupported_model",
            )
        for own, other in zip(expected, actual, strict=True):
            difference = float((own.double() - other.double()).abs().max())
            if not difference > RELATIVE * float(own.double().abs().max()):
                continue
            raise ConfigError(
                "the outputs of the exported model differ from the outputs of the model by up to "
                f"{difference:.3g}; does it branch on its input, or draw random numbers in test "
                "mode?",
                code="export.other_outputs",
            )
    return file.getvalue()


@torch.no_grad()
def _encode_onnx(model: nn.Module, example: Tensor, metadata: Mapping[str, str]) -> bytes:
    """Return an ONNX model; its outputs are not compared, because that takes onnxruntime."""
    try:
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError as error:
        raise ConfigError(
            "the format onnx needs the package onnxscript, which is not installed: "
            "pip install 'phasetrain[onnx]'",
            code="export.missing_package",
        ) from error
    # torch's own exporter uses deprecated functions, which a user cannot act on
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        warnings.filterwarnings("ignore", message=".*is deprecated.*")
        exported = torch.onnx.export(_trace_program(model, example), dynamo=True, verbose=False)
        assert exported is not None, "torch.onnx.export with dynamo returns the program"
        made = exported.model_proto
        for key, value in metadata.items():
            made.metadata_props.add(key=key, value=value)
        content: bytes = made.SerializeToString()
        return content


def _trace_program(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    if len(example) < 2:  # torch.export specializes a dimension of size 1
        example = torch.cat([example, example])
    try:
        return torch.export.export(
            model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)
        )
    except Exception as error:  # torch has several classes, and the model may raise any other
        if is_out_of_memory(error):
            raise
        first = next(iter(str(error).strip().splitlines()), "")
        raise ConfigError(
            f"torch.export cannot trace the model ({type(error).__name__}: {first}); "
            "export its weights, as with --format safetensors",
            code="export.unsupported_model",
        ) from error


def _make_files(weights: Weights, *, trust: bool) -> Mapping[str, bytes]:
    """Return name -> content of a folder of Hugging Face.

    A whole model of transformers or timm is written by its library, which then reads it.
    """
    config = weights.loaded.promised["config"]
    metadata = {
        **{key: weights.metadata[key] for key in OF_FOLDER},
        "metrics": json.loads(weights.metadata["metrics"]),
        "transforms": list(weights.transforms),
    }
    source = weights.source
    selects = bool(source.include or source.exclude)
    if is_native(weights.metadata["model"]) and not selects:
        merged = None
        if config["MODEL"].get("adapters") is not None:
            merged = weights.tensors
        files = make_native_files(
            weights.loaded.path, config, source.which, trust=trust, merged=merged
        )
        return {**files, "phasetrain.json": _encode_json(metadata)}
    named = {
        "model_type": "phasetrain",
        "architectures": [weights.metadata["model"]],
        "model": {key: value for key, value in config["MODEL"].items() if key != "weights"},
    }
    return {
        "config.json": _encode_json(named | metadata),
        "model.safetensors": _encode_safetensors(weights),
    }


def _encode_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _write_folder(out: str, files: Mapping[str, bytes]) -> int:
    """Write the files of a folder, and return the sum of their bytes."""
    storage = open_storage(out)
    # Written aside and renamed: a reader never finds config.json without the weights.
    working = storage.begin_folder(out.rstrip("/"))
    try:
        for name, content in files.items():
            storage.create(f"{working}/{name}", content)
        storage.publish_folder(working, out.rstrip("/"))
    except OSError:
        storage.abandon_folder(working, out.rstrip("/"))
        raise
    return sum(map(len, files.values()))
