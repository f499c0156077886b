"""Write the model of a run to a single file, with everything that predictions need
(`phasetrain pack`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phasetrain import __version__
from phasetrain.addons.deploy.complete_weights import complete_weights, takes_several_inputs
from phasetrain.addons.deploy.export import remove_partial
from phasetrain.addons.deploy.merge_adapters import merge_adapters, remove_adapters
from phasetrain.addons.deploy.options import PackOptions
from phasetrain.addons.deploy.pack.archive import (
    CARD,
    CARD_PAGE,
    CONFIG,
    TOKENIZER_FILE,
    WEIGHTS,
    encode_archive,
    encode_json,
    parse_archive,
)
from phasetrain.addons.deploy.pack.card import format_page, make_card
from phasetrain.addons.deploy.pack.example import TOLERANCES, Example, to_plain_output
from phasetrain.addons.deploy.pack.load_pack import NUMERICS, Description, open_pack
from phasetrain.addons.deploy.pack.user_code import find_needed_code
from phasetrain.addons.deploy.predict.predict import FilePredictor, make_file_predictor
from phasetrain.addons.deploy.predict.raw_inputs import InputReader
from phasetrain.addons.deploy.stage import read_splits, select_stage
from phasetrain.addons.deploy.task_forward import predicts_by_itself, warn_of_task_forward
from phasetrain.app.load import (
    choose_weights,
    find_test_split,
    load_checkpoint,
    load_task,
    read_data_facts,
    resolve_for_inference,
)
from phasetrain.app.select_checkpoint import find_stage
from phasetrain.app.stored.stored_config import read_loaded_config
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.snapshot import DTYPES, Snapshot
from phasetrain.config.changes import trajectory_digest
from phasetrain.config.objects import is_object_name
from phasetrain.config.schema import default_schema
from phasetrain.config.sections.model import WhichWeights
from phasetrain.config.trust import trust_only
from phasetrain.data import DATASETS, SampleReader
from phasetrain.data.samplers.phase_sampler import Draw
from phasetrain.errors import ConfigError
from phasetrain.hooks.observers import classify_hooks
from phasetrain.models.sources.files import without_tied
from phasetrain.runs.paths import make_parent
from phasetrain.runtime.storage import open_storage
from phasetrain.tasks import Task

EXAMPLE_SAMPLES = 2
"""Samples of the test split in the example."""

OF_READING = ("dataset", "inputs", "mode", "size", "form")
"""Keys of a split by which `InputReader` reads files."""

HERE = frozenset({"world", "device", "precision"})
"""Facts about the machine, which differ where the model is loaded."""


@dataclass(frozen=True)
class Packed:
    """The result of packing.

    Attributes:
        out: the file.
        size: its bytes.
        digest: its SHA-256.
        card: the model card.
    """

    out: str
    size: int
    digest: str
    card: Mapping[str, Any]


def pack(  # noqa: PLR0913 - the keyword arguments are those of the command
    run: str | Path,
    out: str | Path,
    *,
    checkpoint: str = "latest",
    weights: WhichWeights | None = None,
    example: Sequence[str] = (),
    license_name: str | None = None,
    certificate: str | None = None,
    trust: bool = False,
    model: nn.Module | None = None,
) -> Packed:
    """Write the model of a run to a new file, after loading it from there and comparing outputs.

    On the same machine, a run gives the same bytes each time.

    Args:
        run: a run folder, or one of its checkpoints.
        out: file that ends in `.zip`, and does not exist yet.
        checkpoint: `latest`, `best`, or a name.
        weights: the trained weights, or an average of them; None: `schedule_free` if the run
            has MODEL.schedule_free, else `model`.
        example: files with the samples of the example, see `phasetrain predict`; by default the
            first samples of the test split.
        license_name: license of the model, such as `Apache-2.0`.
        certificate: path of a certificate.json of `phasetrain certify`.
        trust: run the code that the config of the folder names.
        model: the network, for a run whose model was given as an object in Python.

    Raises:
        ConfigError: nothing was written; the message says why.

    Example:
        >>> phasetrain.pack("runs/adamw", "model.zip", checkpoint="best").digest
    """
    options = PackOptions(checkpoint, weights, tuple(example), license_name, certificate, trust)
    folder = str(run).rstrip("/")
    target = str(out)
    storage = open_storage(target)
    # First, because loading a large model takes minutes.
    if not target.endswith(".zip"):
        raise ConfigError(f"{target!r}: expected a name that ends in .zip", code="cli.usage")
    if storage.exists(target):
        raise ConfigError(f"{target!r} exists; name a file that does not", code="file.exists")
    make_parent(target, storage)
    remove_partial(target, storage)
    archive, card = _make_archive(folder, options, model)
    # What is written has been loaded: a file that does not work here works nowhere.
    checked = open_pack(
        parse_archive(target, archive),
        device="cpu",
        # Imported already, by the run that was loaded.
        imports=[entry["module"] for entry in card["code"]],
        model=model,
    )
    if not checked.verification.identical:
        raise ConfigError(
            "the packed model gives other outputs than the run "
            f"({checked.verification.describe()}); does it draw random numbers in test mode?",
            code="pack.other_outputs",
        )
    storage.replace(target, archive)
    return Packed(target, len(archive), checked.digest, card)


def _make_archive(
    folder: str, options: PackOptions, model: nn.Module | None
) -> tuple[bytearray, dict[str, Any]]:
    """Return the content of the file, and the card in it."""
    loaded = load_checkpoint(folder, options.checkpoint)
    which = choose_weights(options.weights, loaded)
    task = load_task(loaded, folder, which, trust=options.trust, model=model)
    warn_of_task_forward(type(task), decodes=True)
    config = loaded.promised["config"]
    stage = find_stage(loaded)
    run_folder = loaded.path.rpartition("/checkpoints/")[0] or "."
    test = find_test_split(config["DATA"])
    split = test or "TRAIN"
    section = select_stage(config, stage)["DATA"][split]
    _check_transforms(split, section)
    splits = read_splits(run_folder, config, stage)
    data = splits.get(split.lower(), {}).get("facts", {})
    predictor = make_file_predictor(task, InputReader(section, data), split)
    samples = _read_samples(loaded, folder, split, predictor, options)
    if predictor.reader.sample_rank is None and isinstance(samples[0], Tensor | np.ndarray):
        data["sample_rank"] = samples[0].ndim
    recorded = read_data_facts(run_folder, split)
    if "input_shape" in recorded and "input_shape" not in data and not options.example:
        # Of the tests in this stage; plan.json has the shape in the first one.
        data["input_shape"] = list(predictor.transform(samples).shape[1:])
    if config["MODEL"].get("adapters") is not None:
        # Before the output is computed: the sums of the weights are rounded.
        if takes_several_inputs(task.model):
            state = complete_weights(loaded, which, trust=options.trust)
            remove_adapters(task.model)
            task.model.load_state_dict(state)
        else:
            merge_adapters(task.model, predictor.transform(samples))
    with torch.no_grad():
        output = to_plain_output(predictor.compute_output(samples, "example"))
    form = predictor.form
    if form.count_classes(output) is None:
        form = replace(form, class_names=())  # of the data, and not of the output
    tokenizer = _read_tokenizer(predictor.reader)
    if tokenizer:
        form = replace(form, class_names=())  # of tens of thousands of tokens
    has_task = predicts_by_itself(task)
    needed = {"MODEL": config["MODEL"], "DATA": {split: _select_parts(section)}}
    if has_task:
        needed["TASK"] = config["TASK"]
    description = Description(
        split=test or "TEST",
        has_tests=test is not None,
        facts=_find_build_values(task),
        section={key: section[key] for key in OF_READING if key in section},
        fields=_find_fields(section),
        data=data,
        takes_numbers=_are_numbers(samples, predictor.reader),
        form=form,
        code=find_needed_code(needed),
        has_task=has_task,
        stage=stage,
        tolerance=TOLERANCES[task.parts.machine.test_precision or task.parts.machine.precision],
    )
    weights = _encode_weights(task.model)
    model_info = _describe_model(loaded, which, task, description, sha256(weights).hexdigest())
    card = make_card(
        run_folder,
        config,
        model_info,
        splits,
        license_name=options.license_name,
        certificate=options.certificate,
    )
    members: dict[str, bytes | memoryview] = {
        CARD_PAGE: format_page(card).encode(errors="surrogateescape"),
        CARD: encode_json(card),
        CONFIG: encode_json(config),
        **tokenizer,
        **Example(samples, output).encode(),
        WEIGHTS: weights,
    }
    index = {"phasetrain": __version__, **description.to_json()}
    return bytearray(encode_archive(index, members)), card


def _read_tokenizer(reader: InputReader) -> dict[str, bytes]:
    """Return name -> content of the file of a tokenizer; empty for bytes and for other data."""
    if not reader.is_text or reader.codec.content is None:
        return {}
    return {TOKENIZER_FILE: reader.codec.content}


def _find_fields(section: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the declared fields of samples, which choose the transforms of the input; None without
    any."""
    fields = section.get("fields")
    if fields is None and not is_object_name(str(section["dataset"])):
        fields = getattr(DATASETS.find(section["dataset"], "DATA"), "field_kinds", None)
    return fields


def _are_numbers(samples: Sequence[Any], reader: InputReader) -> bool:
    """Return whether samples are arrays of numbers, and neither images nor text."""
    if reader.is_text or "channels" in reader.facts:
        return False
    return isinstance(samples[0], Tensor | np.ndarray)


def _select_parts(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: section[key] for key in ("transforms", "collate") if key in section}


def _check_transforms(split: str, section: Mapping[str, Any]) -> None:
    """Reject transforms and collate functions that no file can describe."""
    parts = [section.get("collate"), *(section.get("transforms") or ())]
    names = [part.get("name") if isinstance(part, Mapping) else part for part in parts]
    if any(is_object_name(str(name)) for name in names):
        raise ConfigError(
            f"DATA.{split}: its transforms or its collate function were given as objects in "
            "Python, which a file cannot name; register them, and name them in the config",
            code="pack.unsupported",
        )


def _read_samples(
    loaded: LoadedCheckpoint,
    folder: str,
    split: str,
    predictor: FilePredictor,
    options: PackOptions,
) -> list[Any]:
    """Return the samples of the example, before the transforms.

    Raises:
        ConfigError: the data of the run cannot be opened here, or a file cannot be read.
    """
    if options.example:
        samples = [raw_input.sample for raw_input in predictor.reader.read(options.example)]
    else:
        try:
            samples = _read_test_samples(loaded, folder, split, trust=options.trust)
        except ConfigError as error:
            raise ConfigError(
                f"the example is a sample of DATA.{split}, which cannot be read here: {error}; "
                "give another one with --example FILE",
                code="pack.no_example",
            ) from error
    if not samples:
        raise ConfigError(
            "--example: the files contain no sample; expected at least one", code="pack.no_example"
        )
    return samples


def _read_test_samples(
    loaded: LoadedCheckpoint, folder: str, split: str, *, trust: bool
) -> list[Any]:
    setup = resolve_for_inference(read_loaded_config(loaded, folder), trust=trust)
    with trust_only(setup.trusted_paths):
        data = setup.builder().data()[split.lower()].at(0)
        reader = data.reader
        assert isinstance(reader, SampleReader), "only training data has sources"
        chosen = reader.chosen
        if chosen is None:  # no subset
            chosen = np.arange(len(reader.dataset))
        indices = np.asarray(chosen[:EXAMPLE_SAMPLES], dtype=np.int64)
        draw = Draw(split.lower(), 0, 0, indices)
        untransformed = reader.pipeline.replace_transforms(())
        plain = reader.with_pipeline(untransformed).with_policy("raise")
        # A sample that cannot be read has raised an error.
        return [sample[0] for sample in plain.read_samples(draw) if isinstance(sample, tuple)]


def _encode_weights(model: nn.Module) -> memoryview:
    """Return the weights of a model as a safetensors file.

    Raises:
        ConfigError: a tensor has a type that the format does not have.
    """
    # The model ties them again when it is built.
    tensors = without_tied(model.state_dict())
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise ConfigError(
                f"{name} is of type {tensor.dtype} and layout {tensor.layout}, and only dense "
                "tensors of the types of safetensors can be packed",
                code="pack.unsupported",
            )
    return Snapshot().copy_tensors(list(tensors.items()))


def _describe_model(
    loaded: LoadedCheckpoint,
    which: WhichWeights,
    task: Task,
    description: Description,
    weights_digest: str,
) -> dict[str, Any]:
    """Return the description of the model for its card."""
    config = loaded.promised["config"]
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    metrics = dict(loaded.manifest.facts.metrics)
    return {
        "model": {"name": config["MODEL"]["name"], "parameters": parameters},
        "checkpoint": loaded.path.rpartition("/")[2],
        "weights": which,
        "updates": loaded.manifest.state["updates"],
        "metrics": {name: metrics[name] for name in sorted(metrics)},
        "classes": list(description.form.class_names),
        "code": [module.to_json() for module in description.code],
        "transforms": list(task.transform.described) if task.transform is not None else [],
        "precision": {key: config["MACHINE"].get(key) for key in NUMERICS},
        "weights_sha256": weights_digest,
        "ledger": loaded.manifest.facts.ledger,
        "config": trajectory_digest(config, classify_hooks(default_schema(), config)),
    }


def _find_build_values(task: Task) -> dict[str, Any]:
    """Return the properties of the data that the model was built with, by name."""
    return {
        path.rpartition(".")[2]: value
        for path, value in task.parts.facts.items()
        if path.startswith("MODEL.") and path.rpartition(".")[2] not in HERE
    }
