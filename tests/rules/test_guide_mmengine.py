"""The guide for users of MMEngine: its tables have every name of MMEngine 0.10.7, and the losses are
equal where that is installed."""

import runpy
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from guide_tables import ROOT, check_counterparts, compare_names, read_table, write_files

from phasetrain.testing.kills import run_quietly

pytestmark = pytest.mark.addon()  # the page is about the whole package

PAGE = ROOT / "docs" / "guides" / "mmengine.md"

MODES = ("train", "val", "test")

NAMES = MappingProxyType(
    {
        "Runner arguments": (
            *("model", "work_dir", "train_dataloader", "val_dataloader", "test_dataloader"),
            *("train_cfg", "val_cfg", "test_cfg", "auto_scale_lr", "optim_wrapper"),
            *("param_scheduler", "val_evaluator", "test_evaluator", "default_hooks"),
            *("custom_hooks", "data_preprocessor", "load_from", "resume", "launcher", "env_cfg"),
            *("log_processor", "log_level", "visualizer", "default_scope", "randomness"),
            *("experiment_name", "cfg"),
            # fields of a config that are no arguments
            *("_base_", "_delete_", "custom_imports", "sync_bn", "find_unused_parameters"),
            *("model_wrapper_cfg", "compile", "activation_checkpointing"),
            *("efficient_conv_bn_eval", "vis_backends"),
        ),
        "Dataloader fields": (
            *("dataset", "batch_size", "num_workers", "persistent_workers", "sampler"),
            *("batch_sampler", "collate_fn", "drop_last", "pin_memory", "prefetch_factor"),
            *("worker_init_fn", "num_batch_per_epoch", "pipeline", "indices"),
            *("ConcatDataset", "RepeatDataset", "ClassBalancedDataset"),
        ),
        "Loops": (
            *("EpochBasedTrainLoop", "IterBasedTrainLoop", "ValLoop", "TestLoop", "BaseLoop"),
            *("max_epochs", "max_iters", "val_begin", "val_interval", "dynamic_intervals", "fp16"),
        ),
        "Hooks": (
            *("Hook", "IterTimerHook", "DistSamplerSeedHook", "ParamSchedulerHook"),
            *("SyncBuffersHook", "EmptyCacheHook", "CheckpointHook", "LoggerHook"),
            *("NaiveVisualizationHook", "EMAHook", "RuntimeInfoHook", "ProfilerHook"),
            *("PrepareTTAHook", "NPUProfilerHook", "EarlyStoppingHook"),
        ),
        "Events": (
            *("before_run", "after_run", "before_save_checkpoint", "after_load_checkpoint"),
            *(f"{when}_{mode}" for when in ("before", "after") for mode in MODES),
            *(f"{when}_{mode}_epoch" for when in ("before", "after") for mode in MODES),
            *(f"{when}_{mode}_iter" for when in ("before", "after") for mode in MODES),
        ),
        "Parameter schedulers": (
            *("ConstantLR", "CosineAnnealingLR", "CosineRestartLR", "ExponentialLR", "LinearLR"),
            *("MultiStepLR", "OneCycleLR", "PolyLR", "ReduceOnPlateauLR", "StepLR"),
        ),
        "Optimizer wrappers": (
            *("OptimWrapper", "AmpOptimWrapper", "ApexOptimWrapper", "OptimWrapperDict"),
            *("ZeroRedundancyOptimizer", "DefaultOptimWrapperConstructor", "optimizer"),
            *("accumulative_counts", "clip_grad", "paramwise_cfg", "custom_keys"),
            *("bias_lr_mult", "bias_decay_mult", "norm_decay_mult", "flat_decay_mult"),
            *("dwconv_decay_mult", "dcn_offset_lr_mult", "bypass_duplicate"),
        ),
        "Registries": (
            *("RUNNERS", "RUNNER_CONSTRUCTORS", "LOOPS", "HOOKS", "STRATEGIES", "DATASETS"),
            *("DATA_SAMPLERS", "TRANSFORMS", "MODELS", "MODEL_WRAPPERS", "WEIGHT_INITIALIZERS"),
            *("OPTIMIZERS", "OPTIM_WRAPPERS", "OPTIM_WRAPPER_CONSTRUCTORS", "PARAM_SCHEDULERS"),
            *("METRICS", "EVALUATOR", "TASK_UTILS", "VISUALIZERS", "VISBACKENDS"),
            *("LOG_PROCESSORS", "INFERENCERS", "FUNCTIONS"),
        ),
        "Visualization backends": (
            *("LocalVisBackend", "WandbVisBackend", "TensorboardVisBackend", "MLflowVisBackend"),
            *("ClearMLVisBackend", "NeptuneVisBackend", "DVCLiveVisBackend", "AimVisBackend"),
        ),
        "Models and metrics": (
            *("BaseModel.forward", "BaseModel.train_step", "BaseModel.val_step"),
            *("BaseModel.test_step", "BaseModel.parse_losses", "BaseModel.data_preprocessor"),
            *("BaseMetric.process", "BaseMetric.compute_metrics", "Evaluator", "MessageHub"),
        ),
    }
)
"""Heading -> names, from the source of MMEngine 0.10.7, which the tests do not install."""


@pytest.mark.feature(
    "guide.mmengine",
    "guide from MMEngine: arguments, hooks, schedulers, registries",
    "`docs/guides/mmengine.md`",
)
@pytest.mark.parametrize("heading", NAMES)
def test_table_has_every_name_and_counterparts_exist(heading: str) -> None:
    rows = read_table(PAGE, heading)
    assert compare_names(rows, NAMES[heading]) == []
    assert check_counterparts(rows) == []


@pytest.mark.feature("guide.mmengine")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MMEngine uses what Python has deprecated
def test_losses_are_those_of_mmengine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = pytest.importorskip("mmengine.hooks", reason="only where the other frameworks are")
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # Put back afterwards as it was: not there.
    monkeypatch.setitem(sys.modules, "digits_net", None)
    monkeypatch.delitem(sys.modules, "digits_net")
    expected = []

    class Recorder(hooks.Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
            expected.append(outputs["loss"].item())

    runner = runpy.run_path("digits_mmengine.py")["runner"]
    torch.save(runner.model.state_dict(), "initial.pt")
    runner.register_hook(Recorder())
    runner.train()

    def losses(*overrides: str) -> list[float]:
        settings = ["MODEL.weights=initial.pt", "HOOKS.metrics.every_updates=1", *overrides]
        result = run_quietly(["digits_mm.yaml", *settings])
        return [row["loss"] for row in result.history.steps()]

    assert losses() == pytest.approx(expected, rel=0, abs=1e-6)
    assert losses("DATA.TRAIN.sampler=shuffled", "RUN.dir=other") != pytest.approx(
        expected, rel=0, abs=1e-3
    )
