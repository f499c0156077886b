"""Weights and models out of a checkpoint, in formats that need no phasetrain to be used
(`tools/export.py`)."""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from phasetrain import __version__
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.weights import find_checkpoint
from phasetrain.commands.setup import settle
from phasetrain.config.changes import trajectory_digest
from phasetrain.config.schema import default_schema
from phasetrain.distributed import World
from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.models.sources import Source
from phasetrain.models.sources.files import flat
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Builder

log = logging.getLogger(__name__)

FORMATS = ("safetensors", "huggingface", "torchscript", "torch_export", "onnx")

RELATIVE = 1e-5
"""Largest difference between what an exported model and the model itself return, relative to the
largest value."""


@dataclass(frozen=True)
class Weights:
    """Weights out of a checkpoint.

    Attributes:
        tensors: name -> tensor.
        facts: what is known of them, as text.
        loaded: the checkpoint.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, str]
    loaded: LoadedCheckpoint


def export(
    path: str,
    out: str,
    form: str = "safetensors",
    *,
    source: Mapping[str, Any] = MappingProxyType({}),
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
) -> int:
    """Write what a checkpoint holds of a model to a new file, or for `huggingface` to a new folder.

    Args:
        path: a checkpoint, or a run folder, whose newest one is taken.
        out: does not exist yet; `PREFIX://...` goes through the registered path handler.
        form: one of `FORMATS`. The last three hold the computation too, for batches of any size, in
            test mode; the model is built from `overrides` on the CPU, and what is written is
            compared with it, except for `onnx`.
        source: which checkpoint of a run, and whose weights: `checkpoint`, `which`, and patterns
            `include` and `exclude` of names, as in MODEL.weights.
        overrides: those of the run, which stand in its overrides.yaml; for the last three formats.
        config_dir: a folder with configs of your own.

    Returns:
        The number of tensors, or of bytes where the computation is written too.

    Raises:
        ConfigError: nothing was written; the message says why.
    """
    if form not in FORMATS:
        raise ConfigError(
            f"format {form!r}: no such format{did_you_mean(form, FORMATS) or '.'} Known: {', '.join(FORMATS)}"
        )
    storage = open_storage(out)
    if storage.exists(out):
        raise ConfigError(f"{out!r} exists; name a file or folder that does not")
    weights = read_weights(Source(path, **source, where="export"))
    if form == "safetensors":
        storage.replace(out, _safetensors(weights))
        return len(weights.tensors)
    if form == "huggingface":
        _write_folder(out, weights)
        return len(weights.tensors)
    model, example = built(weights, overrides, config_dir)
    content = _written(form, model, example)
    storage.replace(out, content)
    return len(content)


def _safetensors(weights: Weights) -> bytes:
    return save(_without_tied(weights.tensors), dict(weights.facts))


def read_weights(source: Source) -> Weights:
    """Return the weights in a checkpoint, with what is known of them.

    Raises:
        ConfigError: there is no such checkpoint, or a pattern matches nothing.
    """
    storage = source.storage()
    if not storage.exists(source.path):
        raise source.refused("there is no such folder")
    loaded = find_checkpoint(source, storage)
    learned = loaded.state["task"]
    if source.which not in learned:
        raise source.refused(
            f"{loaded.path} was made without averaged weights; leave out which={source.which}"
        )
    taken = _patterned(source, flat(learned[source.which]))
    config = loaded.promised["config"]
    manifest = loaded.manifest
    facts = {
        "format": "pt",
        "phasetrain": __version__,
        "checkpoint": loaded.path.rpartition("/")[2],
        "updates": str(manifest.state["updates"]),
        "model": str(config["MODEL"]["name"]),
        "config": trajectory_digest(config, default_schema()),
        "metrics": json.dumps(dict(manifest.facts.metrics)),
    }
    return Weights(taken, facts, loaded)


def built(
    weights: Weights, overrides: Sequence[str], config_dir: str | None
) -> tuple[nn.Module, Tensor]:
    """Return the model that overrides describe, in test mode with these weights, and a batch of its
    input.

    Raises:
        ConfigError: the weights are of another model, or its input is more than a tensor.
    """
    words = [*overrides, "MACHINE.device=cpu"]
    setup = settle(words, config_dir=config_dir, terminal=Terminal(io.StringIO(), live=False))
    builder = Builder(setup.config, setup.machine, World(), setup.stages)
    data = builder.data()
    plan = builder.plan(data)
    parts = builder.parts(data, plan, train=False)
    try:
        parts.model.load_state_dict(dict(weights.tensors))
    except RuntimeError as error:
        raise ConfigError(
            f"{weights.loaded.path} is of another model than the overrides describe, or some of it is left out; give "
            f"the overrides of its run, which stand in overrides.yaml: {error}"
        ) from error
    phase = plan.phases[0]
    loader = parts.loaders[phase.split]
    example = loader.reader[next(iter(loader.sampler.steps(phase, 0)))[0]].input
    if not isinstance(example, Tensor):
        raise ConfigError(
            f"the model takes a {type(example).__name__}; only models of one tensor are written with their "
            "computation. Take the format safetensors or huggingface"
        )
    return parts.model.eval(), example


def _written(form: str, model: nn.Module, example: Tensor) -> bytes:
    """Return an exported model, which was compared with the model on another size of batch than it
    was made with."""
    with torch.no_grad():
        content, call = WRITERS[form](model, example)
        if call is None:
            return content
        for batch in (example, example[: max(1, len(example) // 2)]):
            expected = model(batch)
            found = call(batch)
            if not isinstance(expected, Tensor):
                raise ConfigError(
                    f"the model returns {type(expected).__name__}, and only a tensor can be compared"
                )
            difference = float((expected - found).abs().max())
            if difference > RELATIVE * float(expected.abs().max()):
                raise ConfigError(
                    f"the exported model returns other values than the model, by up to {difference:.3g}; does it "
                    "branch on its input, or draw random numbers in test mode?"
                )
    return content


Exported = tuple[bytes, Callable[[Tensor], Tensor] | None]
"""The content of a file, and what reads it and computes; None where nothing here can."""


def _torchscript(model: nn.Module, example: Tensor) -> Exported:
    with _announced():
        file = io.BytesIO()
        torch.jit.save(torch.jit.trace(model, example), file)  # type: ignore[no-untyped-call]
        call = torch.jit.load(io.BytesIO(file.getvalue()))  # type: ignore[no-untyped-call]
    return file.getvalue(), call


def _torch_export(model: nn.Module, example: Tensor) -> Exported:
    file = io.BytesIO()
    torch.export.save(_program(model, example), file)
    return file.getvalue(), torch.export.load(io.BytesIO(file.getvalue())).module()


def _onnx(model: nn.Module, example: Tensor) -> Exported:
    try:
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError as error:
        raise ConfigError(
            "the format onnx needs the package onnxscript, which is not installed: pip install 'phasetrain[onnx]'"
        ) from error
    file = io.BytesIO()
    with _announced():
        made = torch.onnx.export(_program(model, example), dynamo=True, verbose=False)
        assert made is not None, "torch.onnx.export with dynamo returns the program"
        file.write(made.model_proto.SerializeToString())
    return file.getvalue(), None


WRITERS: Mapping[str, Callable[[nn.Module, Tensor], Exported]] = MappingProxyType(
    {"torchscript": _torchscript, "torch_export": _torch_export, "onnx": _onnx}
)
"""Formats that hold the computation."""


def _program(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    if len(example) < 2:  # of a batch of one, torch takes the size for fixed
        example = torch.cat([example, example])
    try:
        return torch.export.export(
            model, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)
        )
    except Exception as error:  # torch raises its own kinds, and any that the model does
        first = next(iter(str(error).strip().splitlines()), "")
        raise ConfigError(
            f"torch.export cannot follow the model ({type(error).__name__}: {first})"
        ) from error


@contextmanager
def _announced() -> Iterator[None]:
    """Leave out that torch is going to drop TorchScript: whoever asks for it knows why."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        warnings.filterwarnings("ignore", message=".*is deprecated.*")
        yield


def _write_folder(out: str, weights: Weights) -> None:
    storage = open_storage(out)
    config = weights.loaded.promised["config"]
    described = {
        "model_type": "phasetrain",
        "architectures": [weights.facts["model"]],
        "model": {key: value for key, value in config["MODEL"].items() if key != "weights"},
        **{key: weights.facts[key] for key in ("phasetrain", "checkpoint", "updates", "config")},
        "metrics": json.loads(weights.facts["metrics"]),
    }
    working = storage.begin_folder(out.rstrip("/"))
    try:
        storage.create(f"{working}/config.json", (json.dumps(described, indent=1) + "\n").encode())
        storage.create(f"{working}/model.safetensors", _safetensors(weights))
        storage.publish_folder(working, out.rstrip("/"))
    except OSError:
        storage.abandon_folder(working, out.rstrip("/"))
        raise


def _patterned(source: Source, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = dict(tensors)
    for key, patterns in (("include", source.include), ("exclude", source.exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in tensors):
                raise ConfigError(
                    f"--{key} {pattern}: no tensor of the checkpoint has such a name"
                    f"{did_you_mean(pattern, tensors) or '.'} It has {', '.join(tensors)}"
                )
    if source.include:
        found = {
            name: one
            for name, one in found.items()
            if any(fnmatchcase(name, p) for p in source.include)
        }
    return {
        name: one
        for name, one in found.items()
        if not any(fnmatchcase(name, p) for p in source.exclude)
    }


def _without_tied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of which no two share memory; a model ties the others again."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape)
        if not tensor.numel() or place not in seen:
            found[name] = tensor.contiguous()
        seen.add(place)
    return found
