"""Shares of VISSL's complete configs that convert, that build as written, and that mean the same.

    python benchmarks/vissl_configs.py [--only TEXT]

Converts the configs in tests/data/vissl, builds data, model, loss and optimizer of each, and compares it
with VISSL's behaviour (`vissl_meaning.py`): transforms with their random parameters, layers of heads, options
of losses, which weights a file of VISSL sets, and for each parameter whether it trains, and its learning rate
and weight decay at seven points of the training. Prints each difference that no gap and no note names.

Paths lead to generated images, and weights to generated files with VISSL's names. Before the conversion,
transformers get a width of 16 per head and at most four blocks, wide ResNets a width of 2, DATA_LIMIT is at
most 8, and clusterings have two clusters; after it, the command line sets batch size 4, no worker, and the
CPU with one process in full precision. Everything else is as written. Needs the extras image, torchvision and
timm.
"""

import argparse
import functools
import gzip
import inspect
import json
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vissl_meaning as meaning
from PIL import Image
from torch import nn

import phasetrain
from phasetrain.addons.vissl.compose import VisslConfig
from phasetrain.addons.vissl.draft import to_yaml
from phasetrain.addons.vissl.vissl import Migration, convert_vissl
from phasetrain.testing.build import BuiltRun, build_run

CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "vissl" / "configs.json.gz"
TOO_LARGE = ("regnet10B",)
BATCH = 4
WEIGHTS = "MODEL.WEIGHTS_INIT"
SPLITS = ("STL10", "SVHN")
"""Datasets of torchvision that name their classes `labels`."""


def write_images(folder: Path) -> None:
    """Write images of two classes, and lists of them."""
    draw = np.random.default_rng(0)
    for name in "ab":
        (folder / "images" / name).mkdir(parents=True)
        for number in range(8):
            pixels = draw.integers(0, 255, (240, 260, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")
    paths = [str(folder / f"images/{name}/{number}.png") for name in "ab" for number in range(8)]
    np.save(folder / "images.npy", np.array(paths))
    np.save(folder / "labels.npy", np.array([0] * 8 + [1] * 8))


def replace_torchvision_datasets() -> None:
    """Give the datasets of torchvision 16 generated images, and leave names and parameters."""
    from torchvision import datasets

    for name, size, mode in (
        *(("CIFAR10", 32, "RGB"), ("CIFAR100", 32, "RGB"), ("STL10", 96, "RGB")),
        *(("SVHN", 32, "RGB"), ("MNIST", 28, "L")),
    ):
        kind = vars(datasets)[name]
        image = Image.new(mode, (size, size), 100)
        kind.__init__ = _with_signature(kind.__init__, "labels" if name in SPLITS else "targets")
        kind.__len__ = lambda self: 16
        kind.__getitem__ = lambda self, index, image=image: (image, index % 2)


def _with_signature(original: Any, labels: str) -> Any:
    """Return a constructor of generated data, with the parameters of another one."""

    @functools.wraps(original)
    def init(self: Any, root: str, *args: Any, **kwargs: Any) -> None:
        inspect.signature(original).bind(self, root, *args, **kwargs)
        self.root = root
        vars(self)[labels] = [index % 2 for index in range(16)]

    return init


# --- a config on generated data


def shrink(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a config of VISSL on generated images, with a small trunk."""
    small = deepcopy(dict(given))
    for split in ("TRAIN", "TEST"):
        key = f"DATA.{split}"
        sources = small.get(f"{key}.DATA_SOURCES") or []
        if sources:
            folders = sources[0] == "disk_folder"
            path = folder / ("images" if folders else "images.npy")
            small[f"{key}.DATA_PATHS"] = [str(path)]
            small[f"{key}.LABEL_PATHS"] = [str(folder / "labels.npy")]
        if int(small.get(f"{key}.DATA_LIMIT") or 0) > 0:
            small[f"{key}.DATA_LIMIT"] = 8
            small.pop(f"{key}.DATA_LIMIT_SAMPLING.SKIP_NUM_SAMPLES", None)
        small.pop(f"{key}.COPY_TO_LOCAL_DISK", None)
    for base in ("MODEL", "DISTILLATION.TEACHER_MODEL"):
        _shrink_trunk(small, f"{base}.TRUNK")
    if "LOSS.deepclusterv2_loss.num_clusters" in small:
        small["LOSS.deepclusterv2_loss.num_clusters"] = [2, 2, 2]
    return small


def _shrink_trunk(small: dict[str, Any], base: str) -> None:
    width = f"{base}.RESNETS.WIDTH_MULTIPLIER"
    if width in small:
        small[width] = min(2, small[width])
    for section in ("VISION_TRANSFORMERS", "XCIT"):
        key = f"{base}.{section}"
        if f"{key}.HIDDEN_DIM" in small or f"{key}.NUM_HEADS" in small:
            heads = small.get(f"{key}.NUM_HEADS", 12 if section != "XCIT" else 8)
            small[f"{key}.HIDDEN_DIM"] = 16 * heads
            small[f"{key}.NUM_LAYERS"] = min(4, small.get(f"{key}.NUM_LAYERS", 12))
            if section != "XCIT":
                small[f"{key}.MLP_DIM"] = 64 * heads


# --- names of weights


def list_names(
    config: VisslConfig, built: BuiltRun, model: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Return the name in the state of the model, and of the loss -> VISSL's name and kind."""
    net = built.task.parts.model
    names: dict[str, tuple[str, str]] = {}
    heads = meaning.read_heads(config)
    is_whole = "trunk" not in model
    cut = ""
    if is_whole and "classes" not in model:
        # Features of the trunk: its own last layer is no head of VISSL.
        heads = []
    if is_whole:
        ours = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
        cut = f"{ours[-1]}."
    for path, module in net.named_modules():
        for name, _ in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            full = f"{path}.{name}" if path else name
            if is_whole and not full.startswith(cut):
                names[full] = (meaning.name_in_trunk(config, full), _kind(module))
            elif full.startswith("trunk."):
                own = full.removeprefix("trunk.")
                names[full] = (meaning.name_in_trunk(config, own), _kind(module))
    labels = list(model.get("heads", {}))
    for number, head in enumerate(heads):
        prefix = cut if is_whole else (f"heads.{labels[number]}." if labels else "head.")
        if number == 0 or labels:
            names |= _name_head(net, prefix, head)
    prototypes = dict(built.task.parts.loss.named_parameters()) if built.task.parts.loss else {}
    if "prototypes" in prototypes and heads:
        names["LOSS.prototypes"] = ("heads.0.prototypes0.weight", "linear")
    return names


def _name_head(net: nn.Module, prefix: str, head: meaning.HeadShape) -> dict[str, tuple[str, str]]:
    names: dict[str, tuple[str, str]] = {}
    layers: list[str] = []
    for path, module in net.named_modules():
        inside = f"{path}.".startswith(prefix)
        if not inside or not isinstance(module, nn.Linear | nn.BatchNorm1d | nn.BatchNorm2d):
            continue
        if path == f"{prefix}norm":
            number = head.weights[0].name.split(".")[1]
            for part in ("weight", "bias", "running_mean", "running_var"):
                names[f"{path}.{part}"] = (f"heads.{number}.channel_bn.{part}", "norm")
        else:
            layers.append(path)
    theirs = dict.fromkeys(
        weight.name.rpartition(".")[0]
        for weight in head.weights
        if "channel_bn" not in weight.name and "prototypes" not in weight.name
    )
    for path, vissl_path in zip(layers, theirs, strict=True):
        module = net.get_submodule(path)
        for part in ("weight", "bias", "running_mean", "running_var"):
            if part in module.state_dict():
                names[f"{path}.{part}"] = (f"{vissl_path}.{part}", _kind(module))
    for weight in head.weights:
        if "prototypes" in weight.name:
            end = "scales" if weight.name.endswith("_g") else "prototypes"
            names[f"{prefix}{end}"] = (weight.name, weight.kind)
    return names


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
        return "linear"
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.LayerNorm):
        return "norm"
    return "other"


def write_weights(
    config: VisslConfig, built: BuiltRun, model: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """Write a file of VISSL with random weights for the model, and return name in the model -> value."""
    names = list_names(config, built, model)
    state = built.task.parts.model.state_dict()
    draw = torch.Generator().manual_seed(1)
    values = {
        name: torch.rand(state[name].shape, generator=draw).to(state[name].dtype) + 1
        for name in names
        if name in state and state[name].is_floating_point()
    }
    # In a file, the trunk of a frozen one is not marked.
    tensors = {names[name][0].replace("base_model.", ""): value for name, value in values.items()}
    if str(config.get(f"{WEIGHTS}.STATE_DICT_KEY_NAME")) == "classy_state_dict":
        parts = {
            part: {
                name.removeprefix(f"{part}."): value
                for name, value in tensors.items()
                if name.startswith(f"{part}.")
            }
            for part in ("trunk", "heads")
        }
        torch.save({"classy_state_dict": {"base_model": {"model": parts}}}, path)
    else:
        added = str(config.get(f"{WEIGHTS}.APPEND_PREFIX") or "")
        key = str(config.get(f"{WEIGHTS}.STATE_DICT_KEY_NAME"))
        torch.save(
            {key: {name.removeprefix(added): value for name, value in tensors.items()}}, path
        )
    return values


# --- comparisons; each returns sentences


def compare_transforms(config: VisslConfig, found: Migration) -> list[str]:
    """Compare the transforms of each split."""
    differences = []
    for split, section in found.experiment["DATA"].items():
        expected = meaning.list_ops(config.get(f"DATA.{split}.TRANSFORMS", []))
        made = meaning.list_converted_ops(section["transforms"])
        noted = {"RandAugment"}
        for view in expected:
            view[:] = [(op[0], ()) if op[0] in noted else op for op in view]
        if made != expected:
            differences.append(f"transforms of {split}: {made} instead of {expected}")
    return differences


def compare_heads(config: VisslConfig, model: Mapping[str, Any]) -> list[str]:
    """Compare the layers of heads."""
    expected = meaning.read_heads(config)
    if "heads" in model:
        made = [meaning.read_converted_head(section) for section in model["heads"].values()]
    elif "head" in model:
        made = [meaning.read_converted_head(model["head"])]
    else:
        layers = [(model.get("classes"), False, "none", False)]
        made = [meaning.HeadShape(layers, biases=[True])]
    parts = ("layers", "biases", "prototypes", "scale", "input_norm")
    for head in expected:
        # SwAV's prototypes are in the loss.
        if head.prototypes and not any(one.prototypes for one in made):
            head.prototypes = 0
    shapes = [[vars(head)[part] for part in parts] for head in expected]
    built = [[vars(head)[part] for part in parts] for head in made]
    return [] if shapes == built else [f"heads: {built} instead of {shapes}"]


def compare_losses(config: VisslConfig, found: Migration) -> list[str]:
    """Compare the options of losses of views and of distillation."""
    batch_size = found.experiment["DATA"]["TRAIN"]["batch_size"]
    differences = []
    for key, expected in meaning.list_loss_options(config, batch_size).items():
        section, _, name = key.partition(".")
        value = found.experiment.get(section, {}).get(name)
        if value != expected:
            differences.append(f"{key}: {value} instead of {expected}")
    return differences


def compare_options(config: VisslConfig, built: BuiltRun, model: Mapping[str, Any]) -> list[str]:
    """Compare, for each parameter, whether it trains, its learning rate and its weight decay."""
    task, plan = built.task, built.plan
    updater = task.parts.updater
    epochs = int(config.get("OPTIMIZER.num_epochs"))
    names = list_names(config, built, model)
    groups = meaning.Groups(config, epochs, _count_blocks(config))
    frozen = meaning.freezes_trunk(config)
    heads = {weight.name: weight for head in meaning.read_heads(config) for weight in head.weights}
    ours = dict(task.parts.model.named_parameters())
    ours |= {f"LOSS.{name}": p for name, p in task.parts.loss.named_parameters()}
    updates_per_epoch = plan.updates // epochs
    found: list[str] = []
    for update, where, start in meaning.iterate_points(updates_per_epoch, epochs):
        updater.begin(where, 0, where, (start, start))
        options = {
            id(parameter): group
            for group in updater.optimizer.param_groups
            for parameter in group["params"]
        }
        for name, parameter in ours.items():
            if name not in names:
                found.append(f"{name}: not in VISSL")
                continue
            vissl_name, kind = names[name]
            group = options.get(id(parameter))
            trains = group is not None and parameter.requires_grad and group["lr"] != 0
            should = not (frozen and vissl_name.startswith("trunk."))
            should = should and (vissl_name not in heads or heads[vissl_name].trains)
            wanted = groups.options(vissl_name, kind) if should else None
            rate = _evaluate(wanted.lr, where, start) * wanted.factor if wanted else 0.0
            if trains != (rate != 0):
                found.append(
                    f"{name}: trains = {trains} in update {update}, VISSL's rate is {rate}"
                )
            if not trains or wanted is None:
                continue
            if not math.isclose(group["lr"], rate, rel_tol=2e-5, abs_tol=1e-9):
                found.append(f"{name}: learning rate {group['lr']} instead of {rate} in {update}")
            decay = _evaluate(wanted.decay, where, start)
            made = group.get("weight_decay", 0.0)
            if not math.isclose(made, decay, rel_tol=2e-5, abs_tol=1e-9):
                found.append(f"{name}: weight decay {made} instead of {decay} in {update}")
    return [*_compare_method(config, updater.optimizer.param_groups[0]), *found[:4]]


def _evaluate(schedule: tuple[meaning.Schedule, bool], where: float, start: float) -> float:
    function, held = schedule
    return function(start if held else where)


def _count_blocks(config: VisslConfig) -> int:
    return int(config.get("MODEL.TRUNK.VISION_TRANSFORMERS.NUM_LAYERS"))


def _compare_method(config: VisslConfig, group: Mapping[str, Any]) -> list[str]:
    name = str(config.get("OPTIMIZER.name"))
    expected: dict[str, Any] = {}
    if name in ("sgd", "sgd_fsdp", "lars"):
        expected = {key: config.get(f"OPTIMIZER.{key}") for key in ("momentum", "nesterov")}
    if config.get("OPTIMIZER.use_larc"):
        expected |= {"all_weights": True, "joint_norm": False}
        expected["clip"] = config.get("OPTIMIZER.larc_config.clip")
        expected["trust"] = config.get("OPTIMIZER.larc_config.trust_coefficient")
    elif name == "lars":
        excludes = config.get("OPTIMIZER.exclude_bias_and_norm", default=False)
        expected |= {"all_weights": not excludes, "joint_norm": True, "clip": False}
        expected |= {"nesterov": False, "trust": 0.001}
    elif name.startswith("adam"):
        expected = {"betas": list(config.get("OPTIMIZER.betas"))}
    return [
        f"OPTIMIZER.{key}: {group.get(key)} instead of {value}"
        for key, value in expected.items()
        if (list(group[key]) if key == "betas" else group.get(key)) != value
    ]


def compare_modes(config: VisslConfig, model: Mapping[str, Any]) -> list[str]:
    """Compare whether the trunk is in test mode during the training."""
    stays = "trunk" in model.get("freeze", [])
    expected = config.is_feature_extractor
    return [] if stays == expected else [f"trunk in test mode: {stays} instead of {expected}"]


def compare_weights(
    config: VisslConfig, built: BuiltRun, values: Mapping[str, Any], model: Mapping[str, Any]
) -> list[str]:
    """Compare which weights are loaded."""
    names = list_names(config, built, model)
    state = built.task.parts.model.state_dict()
    skipped = list(config.get(f"{WEIGHTS}.SKIP_LAYERS", []))
    differences = []
    for name, value in values.items():
        vissl_name = names[name][0]
        expected = not any(word in vissl_name for word in skipped)
        if vissl_name.startswith("heads"):
            expected = expected and meaning.loads_head(config)
        loaded = torch.equal(state[name], value)
        if loaded != expected:
            differences.append(f"weights of {name} are loaded: {loaded} instead of {expected}")
    return differences[:4]


def compare_extraction(config: VisslConfig, found: Migration) -> list[str]:
    """Compare what is extracted, and how neighbours are compared."""
    layers = found.experiment.get("EXTRACT", {}).get("layers")
    model = found.experiment["MODEL"]
    heads = [item[0] for item in config.get("MODEL.HEAD.PARAMS", [])]
    engine = str(config.get("engine_name"))
    uses_head = config.get(f"{meaning.SETTINGS}.EVAL_TRUNK_AND_HEAD") and "identity" not in heads
    differences = []
    if engine == "extract_label_predictions":
        if heads:
            differences += compare_heads(config, model)
    elif uses_head and engine != "extract_cluster" and layers != ["head"]:
        differences.append(f"layers {layers} instead of the head")
    if config.has("NEAREST_NEIGHBOR"):
        dot = not config.get("NEAREST_NEIGHBOR.L2_NORM_FEATS")
        if any("--similarity dot" in note for note in found.notes) != dot:
            differences.append("similarity of neighbours")
    return differences


# --- all configs


def make_reference(given: Mapping[str, Any]) -> VisslConfig:
    """Return a config for VISSL; fragments without data get what they leave to other files."""
    config = VisslConfig(given)
    pools = config.get(f"{meaning.SETTINGS}.LINEAR_EVAL_FEAT_POOL_OPS_MAP")
    if not config.get("DATA.TRAIN.DATA_SOURCES") and pools:
        for key in ("EVAL_MODE_ON", "FREEZE_TRUNK_ONLY"):
            config.assume(f"{meaning.SETTINGS}.{key}", value=True)
    return config


def compare_config(config: VisslConfig, found: Migration) -> list[str]:
    """Compare what the experiment says, without building it."""
    differences = compare_transforms(config, found)
    if found.experiment.get("RUN", {}).get("engine") == "extract":
        return differences + compare_extraction(config, found)
    model = found.experiment["MODEL"]
    differences += compare_heads(config, model) + compare_losses(config, found)
    return differences + compare_modes(config, model)


def examine(given: Mapping[str, Any], folder: Path) -> tuple[str, list[str]]:
    """Return why a config does not build, or an empty text, and its differences from VISSL."""
    given = shrink(given, folder)
    config = make_reference(given)
    if given.get(f"{WEIGHTS}.PARAMS_FILE"):
        given[f"{WEIGHTS}.PARAMS_FILE"] = str(folder / "weights.torch")
    teacher = "DISTILLATION.TEACHER_MODEL"
    if any(key.startswith(teacher) for key in given):
        given[f"{teacher}.WEIGHTS_INIT.PARAMS_FILE"] = str(folder / "teacher.torch")
    found = convert_vissl(VisslConfig(given))
    experiment = json.loads(json.dumps(found.experiment))
    _complete(experiment, folder)
    model = experiment.get("MODEL", {})
    values: dict[str, Any] = {}
    weights = model.pop("weights", None)
    differences: list[str] = []
    is_extraction = experiment.get("RUN", {}).get("engine") == "extract"
    try:
        if experiment.get("TASK", {}).get("teacher"):
            _write_teacher(experiment, folder)
        if weights is not None:
            plain = _make_training(experiment) if is_extraction else experiment
            built = build(plain, folder)
            values = write_weights(config, built, model, folder / "weights.torch")
            model["weights"] = weights
        if is_extraction:
            # As written, for features do not need a second look.
            phasetrain.run([write_experiment(experiment, folder)])
            experiment = _make_training(experiment)
        built = build(experiment, folder)
        if values:
            differences += compare_weights(config, built, values, model)
        if not is_extraction:
            differences += compare_options(config, built, model)
    except Exception as error:  # noqa: BLE001 - every reason is listed
        return f"{type(error).__name__}: {error}", []
    differences += compare_config(config, found)
    return "", differences


def _complete(experiment: dict[str, Any], folder: Path) -> None:
    """Set what this machine needs, and what fragments lack."""
    for split in experiment["DATA"].values():
        split["batch_size"] = BATCH
        split["workers"] = 0
        for key in ("start_method", "pin_memory", "prefetch_to_device"):
            split.pop(key, None)
        if split["dataset"] == "file_list" and not Path(split["images"]).exists():
            split["images"] = str(folder / "images.npy")
            split["labels"] = str(folder / "labels.npy")
        if split["dataset"] == "synthetic":
            split["samples"] = 16
    shutil.rmtree(folder / "run", ignore_errors=True)
    experiment.setdefault("RUN", {})["dir"] = str(folder / "run")
    if "EXTRACT" in experiment:
        experiment["EXTRACT"]["dir"] = str(folder / "run" / "features")
    experiment["RUN"].pop("resume", None)
    experiment.setdefault("MACHINE", {})["precision"] = "fp32"
    experiment["MACHINE"]["device"] = "cpu"
    experiment.pop("LAUNCH", None)
    distributed = experiment.get("DISTRIBUTED", {})
    distributed.pop("strategy", None)


def _write_teacher(experiment: dict[str, Any], folder: Path) -> None:
    """Write a file with the weights of the teacher of a distillation, by their names here."""
    teacher = experiment["TASK"]["teacher"]
    teacher["weights"] = {"path": str(folder / "teacher.pt")}
    section = {key: value for key, value in teacher.items() if key != "weights"}
    plain = deepcopy(experiment)
    plain["MODEL"] = section
    plain.pop("TASK")
    for key in ("LOSS", "METERS", "OPTIMIZER"):
        plain.pop(key, None)
    if teacher["name"] == "trunk_head":
        plain["TASK"] = {"name": "self_supervised"}
        plain["LOSS"] = {"name": "simclr"}
    net = build(plain, folder).task.parts.model
    torch.save(net.state_dict(), folder / "teacher.pt")


def _make_training(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return an extraction as a training, whose model can be looked at."""
    training = {key: value for key, value in experiment.items() if key not in ("EXTRACT", "RUN")}
    return {**training, "PHASES": {"epochs": 1}}


def write_experiment(experiment: Mapping[str, Any], folder: Path) -> str:
    """Write an experiment, and return its path."""
    path = folder / "experiment.yaml"
    path.write_text("# @package _global_\n" + to_yaml(experiment))
    return str(path)


def build(experiment: Mapping[str, Any], folder: Path) -> BuiltRun:
    """Return the parts of an experiment."""
    return build_run([write_experiment(experiment, folder)])


def list_configs(only: str) -> dict[str, Any]:
    """Return the configs whose names contain a text: name -> key -> value."""
    configs = json.loads(gzip.decompress(CONFIGS.read_bytes()))
    return {name: given for name, given in configs.items() if only in name}


def main(words: Sequence[str] | None = None) -> None:
    """Print the shares, and each config that does not build, or that differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="TEXT", help="names of configs contain it")
    flags = parser.parse_args(words)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "end_to_end"))

    from operators import declared_operators

    operators = declared_operators()  # while it lives, a torchvision for CUDA can be imported
    # Initial weights take most of the time of a build, and do not decide whether it succeeds.
    inits = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
    vars(nn.init).update({name: lambda tensor, *_args, **_kwargs: tensor for name in inits})
    replace_torchvision_datasets()
    configs = list_configs(flags.only)
    counts: Counter[str] = Counter()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder)
        for config, given in configs.items():
            gaps = sorted({one.text for one in convert_vissl(VisslConfig(given)).missing})
            counts["with gaps" if gaps else "without a gap"] += 1
            if any(word in config for word in TOO_LARGE):
                counts["too large to build"] += 1
                continue
            if gaps:
                continue
            failure, differences = examine(given, folder)
            counts["without a gap and not built" if failure else "without a gap and built"] += 1
            counts["without a gap and different"] += bool(differences)
            for text in [failure, *differences]:
                if text:
                    sys.stdout.write(f"{config}: {text}\n")
                    sys.stdout.flush()
    for what, count in counts.items():
        sys.stdout.write(f"{what}: {count} of {len(configs)} ({count / len(configs):.0%})\n")
    sys.stdout.write(f"{time.monotonic() - started:.0f} s\n")
    del operators


if __name__ == "__main__":
    main()
