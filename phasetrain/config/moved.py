"""Imports of modules from their former places, which work and warn until 0.4."""

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

REMOVED_IN = "0.4"

ADDONS = "phasetrain.addons"
EXPERIMENTS = "phasetrain.addons.experiments"
DEPLOY = "phasetrain.addons.deploy"
METRICS = "phasetrain.addons.metrics"
TEXT = "phasetrain.addons.text"
BATCH_TRANSFORMS = "phasetrain.addons.vision.batch_transforms"
TRANSFORMS = "phasetrain.addons.vision.transforms"
SHARDING = "phasetrain.addons.sharding"
SELF_SUPERVISED_LOSSES = "phasetrain.addons.vision.self_supervised_losses"

MOVED = MappingProxyType(
    {
        **{
            f"phasetrain.{former}.{name}": present
            for former in ("app", "commands")
            for name, present in (
                ("runs", "phasetrain.app"),
                ("runs.diff", f"{EXPERIMENTS}.compare.diff"),
                ("runs.follow", f"{ADDONS}.observe.follow"),
            )
        },
        "phasetrain.app.code_cache": f"{ADDONS}.authoring.code_cache",
        "phasetrain.app.complete_weights": f"{DEPLOY}.complete_weights",
        "phasetrain.app.submit": f"{ADDONS}.submission.submit",
        "phasetrain.app.train.longer": f"{ADDONS}.observe.longer_runs",
        "phasetrain.app.train.resume_fork": f"{EXPERIMENTS}.fork.resume_fork",
        "phasetrain.checkpoint.sharded": f"{SHARDING}.checkpoint",
        "phasetrain.cli.help": f"{ADDONS}.authoring.topic_help",
        "phasetrain.commands": "phasetrain.app",
        **{
            f"phasetrain.commands.{name}": f"{EXPERIMENTS}.{name}"
            for name in (
                *("certify", "find", "fork", "judge", "recipes", "replay", "rerun", "sweep"),
                *("verify", "what_if"),
            )
        },
        **{
            f"phasetrain.commands.{name}": f"{DEPLOY}.{name}"
            for name in ("consolidate", "export", "extract", "pack", "predict")
        },
        "phasetrain.commands.cli": "phasetrain.cli",
        "phasetrain.commands.editor": "phasetrain.addons.authoring.editor",
        "phasetrain.commands.migrate": "phasetrain.addons.vissl",
        "phasetrain.commands.new": "phasetrain.addons.authoring.new",
        "phasetrain.commands.plan": "phasetrain.app.preflight",
        "phasetrain.commands.tokenize": f"{TEXT}.tokenize",
        **{
            f"phasetrain.data.batch_transforms.{name}": f"{BATCH_TRANSFORMS}.{name}"
            for name in ("cutmix", "each_view", "mixing", "mixup", "one_of")
        },
        "phasetrain.config.reference": f"{ADDONS}.authoring.reference",
        "phasetrain.data.datasets.byte_counts": f"{TEXT}.byte_counts",
        "phasetrain.data.datasets.text": f"{TEXT}.blocks",
        "phasetrain.data.datasets.from_task": f"{ADDONS}.sampling.from_task",
        "phasetrain.data.datasets.windows": f"{ADDONS}.sampling.windows",
        "phasetrain.data.datasets.lines": f"{TEXT}.lines",
        "phasetrain.data.datasets.file_list": f"{ADDONS}.vision.file_list",
        "phasetrain.data.datasets.image_folder": f"{ADDONS}.vision.image_folder",
        "phasetrain.data.loading.sources_reader": f"{ADDONS}.sampling.sources_reader",
        "phasetrain.data.mixture": f"{ADDONS}.sampling.mixture",
        "phasetrain.data.samplers.lanes": f"{TEXT}.lanes",
        "phasetrain.data.samplers.length_buckets": f"{TEXT}.length_buckets",
        "phasetrain.data.tokens": f"{TEXT}.tokens",
        **{
            f"phasetrain.data.transforms.{name}": f"{TRANSFORMS}.{name}"
            for name in ("random_erase", "random_resized_crop", "random_rotate", "rotate")
        },
        **{
            f"phasetrain.distributed.strategies.{name}": f"{SHARDING}.{name}"
            for name in ("fsdp", "sharded_ddp", "sharded_state", "zero")
        },
        "phasetrain.data.transforms.joint.torchvision": f"{ADDONS}.libraries.torchvision_fields",
        "phasetrain.distributed.collective_check": f"{ADDONS}.observe.collective_check",
        "phasetrain.hooks.profiling": "phasetrain.addons.observe.profiling",
        "phasetrain.hooks.recheck": "phasetrain.addons.observe.recheck",
        "phasetrain.hooks.report": "phasetrain.addons.report.hook",
        "phasetrain.hooks.state_watch": f"{ADDONS}.observe.state_watch",
        "phasetrain.hooks.trackers": "phasetrain.addons.observe.trackers",
        "phasetrain.hooks.monitors.plateau": f"{ADDONS}.optimizers.plateau",
        "phasetrain.hooks.monitors.stragglers": f"{ADDONS}.observe.stragglers",
        "phasetrain.hooks.progress.notebook": f"{ADDONS}.observe.notebook",
        "phasetrain.hooks.watchdog": f"{ADDONS}.observe.watchdog",
        "phasetrain.hooks.weights": f"{ADDONS}.reload.reload_weights",
        "phasetrain.losses.distillation": f"{ADDONS}.vision.soft_targets",
        "phasetrain.losses.self_supervised": f"{ADDONS}.vision.self_supervised_losses",
        "phasetrain.losses.clustering": f"{ADDONS}.vision.clustering",
        "phasetrain.losses.self_supervised.clustering": f"{ADDONS}.vision.clustering",
        "phasetrain.meters.classification": METRICS,
        "phasetrain.meters.classification.accuracy": "phasetrain.meters.accuracy",
        "phasetrain.meters.classification.class_scores": "phasetrain.meters.class_scores",
        "phasetrain.meters.dense": f"{ADDONS}.vision.meters",
        "phasetrain.meters.regression": f"{METRICS}.regression",
        "phasetrain.models.adapters.merge": f"{DEPLOY}.merge_adapters",
        "phasetrain.models.adapters.lora": f"{ADDONS}.adapters.lora",
        "phasetrain.models.adapters.peft": f"{ADDONS}.adapters.peft",
        "phasetrain.models.heads": f"{ADDONS}.vision.trunk_head",
        "phasetrain.models.layers": f"{DEPLOY}.extract.layers",
        "phasetrain.models.model_calls": f"{ADDONS}.libraries.models.model_calls",
        "phasetrain.models.pooling": f"{ADDONS}.vision.pooling",
        "phasetrain.models.resnet": f"{ADDONS}.vision.resnet",
        "phasetrain.models.resnet_cifar": f"{ADDONS}.vision.resnet_cifar",
        "phasetrain.models.trunk_heads": f"{ADDONS}.vision.trunk_heads",
        "phasetrain.tasks.distillation": f"{ADDONS}.vision.distillation",
        "phasetrain.tasks.flops": f"{ADDONS}.observe.profiling.flops",
        "phasetrain.tasks.generation": f"{TEXT}.generation",
        "phasetrain.tasks.input_transform": f"{DEPLOY}.input_transform",
        "phasetrain.tasks.raw_inputs": f"{DEPLOY}.predict.raw_inputs",
        "phasetrain.optim.update.sam": f"{ADDONS}.optimizers.sam",
        "phasetrain.optim.large_batch": f"{ADDONS}.optimizers.large_batch",
        "phasetrain.optim.muon": f"{ADDONS}.optimizers.muon",
        "phasetrain.proof.uses": f"{ADDONS}.observe.uses",
        "phasetrain.runs.report": "phasetrain.addons.report.page",
        "phasetrain.runs.statistics": f"{EXPERIMENTS}.statistics",
        "phasetrain.runtime.images": f"{ADDONS}.report.images",
        "phasetrain.runtime.source_tree": f"{EXPERIMENTS}.source_tree",
        "phasetrain.runtime.storage.cache": f"{ADDONS}.remote.cache",
        "phasetrain.runtime.storage.objects": f"{ADDONS}.remote.objects",
        "phasetrain.runtime.storage.remote": f"{ADDONS}.remote.systems",
        "phasetrain.runtime.storage.remote_handler": f"{ADDONS}.remote.handler",
        "phasetrain.testing.learning": f"{ADDONS}.observe.learning",
        "phasetrain.testing.memory": f"{ADDONS}.remote.memory",
        "phasetrain.testing.sync": f"{ADDONS}.observe.device_sync",
    }
)
"""Former name of a module or package -> its present name; the longest match counts."""

NAMES = MappingProxyType(
    {
        "phasetrain.hooks": {
            "Activations": f"{ADDONS}.observe.profiling.activations",
            "Breakdown": f"{ADDONS}.observe.profiling.breakdown",
            "CSV": f"{ADDONS}.observe.trackers.csv",
            "MLflow": f"{ADDONS}.observe.trackers.mlflow",
            "Memory": f"{ADDONS}.observe.profiling.memory",
            "Plateau": f"{ADDONS}.optimizers.plateau",
            "Profiler": f"{ADDONS}.observe.profiling.profiler",
            "Recheck": f"{ADDONS}.observe.recheck.recheck",
            "Record": f"{ADDONS}.observe.trackers.base",
            "ReloadWeights": f"{ADDONS}.reload.reload_weights",
            "Report": f"{ADDONS}.report.hook",
            "Stragglers": f"{ADDONS}.observe.stragglers",
            "TensorBoard": f"{ADDONS}.observe.trackers.tensorboard",
            "Tracker": f"{ADDONS}.observe.trackers.base",
            "WandB": f"{ADDONS}.observe.trackers.wandb",
            "Watchdog": f"{ADDONS}.observe.watchdog",
        },
        "phasetrain.data": {
            "LaneOrder": f"{TEXT}.lanes",
            "MixedDataset": f"{ADDONS}.sampling.mixture",
            "SourcesReader": f"{ADDONS}.sampling.sources_reader",
            "Tokens": f"{TEXT}.tokens.dataset",
        },
        "phasetrain.data.batch_transforms": {
            "CutMix": f"{BATCH_TRANSFORMS}.cutmix",
            "EachView": f"{BATCH_TRANSFORMS}.each_view",
            "Mixup": f"{BATCH_TRANSFORMS}.mixup",
            "OneOf": f"{BATCH_TRANSFORMS}.one_of",
            "PairMixing": f"{BATCH_TRANSFORMS}.mixing",
        },
        "phasetrain.checkpoint": {
            "SaveGroup": f"{SHARDING}.checkpoint",
        },
        "phasetrain.data.datasets": {
            "ByteTokenizer": f"{TEXT}.blocks",
            "FileList": f"{ADDONS}.vision.file_list",
            "HuggingFace": f"{ADDONS}.libraries.huggingface",
            "IGNORED": "phasetrain.engine.batch",
            "ImageFolder": f"{ADDONS}.vision.image_folder",
            "ImageMaskFolder": f"{ADDONS}.vision.masks.folder",
            "Lines": f"{TEXT}.lines",
            "NumberSamples": f"{ADDONS}.libraries.scikit_learn",
            "PackedTokens": f"{TEXT}.blocks",
            "Series": f"{ADDONS}.text.sequences",
            "Stamps": f"{ADDONS}.vision.masks.stamps",
            "TokenPairs": f"{ADDONS}.text.sequences",
            "TorchvisionSamples": f"{ADDONS}.libraries.torchvision",
            "WebDataset": f"{ADDONS}.libraries.webdataset",
            "Windows": f"{ADDONS}.sampling.windows",
            "find_torchvision_dataset": f"{ADDONS}.libraries.torchvision",
            "load_alice": f"{TEXT}.blocks",
            "load_cmudict": f"{ADDONS}.text.sequences",
            "load_text": f"{TEXT}.blocks",
            "load_sklearn": f"{ADDONS}.libraries.scikit_learn",
            "load_ucr": f"{ADDONS}.text.sequences",
            "make_windows": f"{ADDONS}.sampling.windows",
        },
        "phasetrain.data.transforms": {
            "MultiCrop": f"{ADDONS}.vision.multi_crop",
            "MultiCropOfSamples": f"{ADDONS}.vision.multi_crop",
            "RandomErase": f"{TRANSFORMS}.random_erase",
            "RandomResizedCrop": f"{TRANSFORMS}.random_resized_crop",
            "RandomRotate": f"{TRANSFORMS}.random_rotate",
            "Rotate": f"{TRANSFORMS}.rotate",
            "find_albumentations_transform": f"{ADDONS}.libraries.albumentations",
            "find_torchvision_transform": f"{ADDONS}.libraries.torchvision_transforms",
        },
        "phasetrain.distributed.strategies": {
            "FullyShard": f"{SHARDING}.fsdp",
            "ShardedDataParallel": f"{SHARDING}.sharded_ddp",
            "Zero": f"{SHARDING}.zero",
        },
        "phasetrain.losses": {
            "BYOL": f"{SELF_SUPERVISED_LOSSES}.byol",
            "BarlowTwins": f"{SELF_SUPERVISED_LOSSES}.barlow_twins",
            "ClusteringLoss": f"{SELF_SUPERVISED_LOSSES}.multi_view",
            "DINO": f"{SELF_SUPERVISED_LOSSES}.dino",
            "DeepClusterV2": f"{SELF_SUPERVISED_LOSSES}.deepcluster",
            "DiceLoss": f"{ADDONS}.vision.dice",
            "FreezingLoss": f"{SELF_SUPERVISED_LOSSES}.multi_view",
            "InstanceLoss": f"{SELF_SUPERVISED_LOSSES}.multi_view",
            "MemoryLoss": f"{SELF_SUPERVISED_LOSSES}.multi_view",
            "MoCo": f"{SELF_SUPERVISED_LOSSES}.moco",
            "NPID": f"{SELF_SUPERVISED_LOSSES}.npid",
            "ScheduledLoss": f"{SELF_SUPERVISED_LOSSES}.multi_view",
            "SimCLR": f"{SELF_SUPERVISED_LOSSES}.simclr",
            "SoftTargets": f"{ADDONS}.vision.soft_targets",
            "SwAV": f"{SELF_SUPERVISED_LOSSES}.swav",
            "TeacherLoss": f"{SELF_SUPERVISED_LOSSES}.multi_view",
            "ViewDistillation": f"{SELF_SUPERVISED_LOSSES}.view_distillation",
        },
        "phasetrain.meters": {
            "AUROC": f"{METRICS}.auroc",
            "AveragePrecision": f"{METRICS}.average_precision",
            "BitsPerByte": f"{ADDONS}.text.perplexity",
            "ConfusionMatrix": f"{METRICS}.confusion_matrix",
            "Dice": f"{ADDONS}.vision.meters.pixels",
            "F1": f"{METRICS}.f1",
            "FrechetDistance": f"{ADDONS}.vision.frechet_distance",
            "GroupedAUROC": f"{METRICS}.auroc",
            "MeanAveragePrecision": f"{ADDONS}.vision.meters.detection",
            "MeanIoU": f"{ADDONS}.vision.meters.pixels",
            "MultilabelAccuracy": f"{METRICS}.multilabel_accuracy",
            "PerClassAccuracy": f"{METRICS}.per_class_accuracy",
            "Perplexity": f"{ADDONS}.text.perplexity",
            "PixelAccuracy": f"{ADDONS}.vision.meters.pixels",
            "PrecisionAtK": f"{METRICS}.at_k",
            "PresentAccuracy": f"{METRICS}.present_accuracy",
            "RecallAtK": f"{METRICS}.at_k",
            "Regression": f"{METRICS}.regression",
            "SequenceErrorRate": f"{ADDONS}.text.sequence_errors",
            "SequenceErrors": f"{ADDONS}.text.sequence_errors",
            "TokenErrorRate": f"{ADDONS}.text.sequence_errors",
            "TorchMetric": f"{ADDONS}.libraries.torchmetrics",
        },
        "phasetrain.models": {
            "AlexNet": f"{ADDONS}.vision.alexnet",
            "ConditionalGAN": f"{ADDONS}.vision.conditional_gan",
            "Decodes": f"{ADDONS}.text.models",
            "KeyValueCache": f"{ADDONS}.text.transformer",
            "ResNetCifar": f"{ADDONS}.vision.resnet_cifar",
            "Seq2SeqGRU": f"{ADDONS}.text.models",
            "Seq2SeqTransformer": f"{ADDONS}.text.models",
            "SeriesFCN": f"{ADDONS}.text.models",
            "SeriesResNet": f"{ADDONS}.text.models",
            "Transformer": f"{ADDONS}.text.transformer",
            "TrunkHead": f"{ADDONS}.vision.trunk_head",
            "TrunkHeads": f"{ADDONS}.vision.trunk_heads",
            "UNet": f"{ADDONS}.vision.unet",
            "find_timm_model": f"{ADDONS}.libraries.models",
            "find_torchvision_model": f"{ADDONS}.libraries.models",
            "find_transformers_model": f"{ADDONS}.libraries.models",
            "make_resnet": f"{ADDONS}.vision.resnet",
        },
        "phasetrain.optim": {
            "LAMB": f"{ADDONS}.optimizers.large_batch",
            "LARS": f"{ADDONS}.optimizers.large_batch",
            "Muon": f"{ADDONS}.optimizers.muon",
            "SamSettings": f"{ADDONS}.optimizers.sam",
        },
        "phasetrain.models.adapters": {
            "LoRA": f"{ADDONS}.adapters.lora",
            "make_peft_files": f"{ADDONS}.adapters.peft",
            "merge_adapters": f"{DEPLOY}.merge_adapters",
            "remove_adapters": f"{DEPLOY}.merge_adapters",
        },
        "phasetrain.tasks": {
            "Distillation": f"{ADDONS}.vision.distillation",
            "GAN": f"{ADDONS}.vision.gan",
            "LanguageModel": f"{ADDONS}.text.language_model",
            "SelfSupervised": f"{ADDONS}.vision.self_supervised",
            "SequenceToSequence": f"{ADDONS}.text.sequence_to_sequence",
        },
    }
)
"""Package -> names that it had -> their modules."""


def import_moved_name(package: str, name: str) -> object:
    """Return the former content of a package under a name, with a warning.

    Raises:
        AttributeError: it had nothing of this name.
    """
    module = NAMES.get(package, {}).get(name)
    if module is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    _warn(f"{package}.{name}", f"{module}.{name}", stacklevel=4)
    return vars(importlib.import_module(module))[name]


class MovedFinder:
    """Finds modules under their former names."""

    # Not derived from the classes of importlib.abc, which takes 20 modules to import.

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how the module is loaded from its present place; None if it has not moved."""
        new_name = find_new_name(name) if name.startswith("phasetrain.") else None
        if new_name is None:
            return None
        new_spec = importlib.util.find_spec(new_name)
        is_package = new_spec is None or new_spec.submodule_search_locations is not None
        return ModuleSpec(name, _Loader(new_name), is_package=is_package)  # type: ignore[arg-type]


class _Loader:
    def __init__(self, new_name: str) -> None:
        self.new_name = new_name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module at its present place."""
        # `import phasetrain.commands.x` imports the package first, which says nothing by itself.
        if spec.name != "phasetrain.commands":
            _warn(spec.name, self.new_name, stacklevel=3)
        module = importlib.import_module(self.new_name)
        self.spec = module.__spec__
        return module

    def get_code(self, name: str) -> Any:
        """Return the code of the module, for `python -m`."""
        spec: Any = importlib.util.find_spec(self.new_name)
        return spec.loader.get_code(self.new_name)

    def exec_module(self, module: ModuleType) -> None:
        """Undo the changes of the import system to the module, which is loaded already."""
        module.__spec__ = self.spec


def find_new_name(name: str) -> str | None:
    """Return the present name of a module; None if it has not moved."""
    former = max(
        (old for old in MOVED if name == old or name.startswith(f"{old}.")), key=len, default=None
    )
    if former is None:
        return None
    return MOVED[former] + name.removeprefix(former)


def _warn(old: str, new: str, *, stacklevel: int) -> None:
    warnings.warn(
        f"{old}: moved to {new} in 0.2; the old name works until {REMOVED_IN}",
        FutureWarning,
        stacklevel=stacklevel,  # of the import; frames of importlib do not count
    )
