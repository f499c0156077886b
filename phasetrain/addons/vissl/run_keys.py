"""VISSL's sections around the training: hooks, checkpoints, device, processes, SLURM."""

from typing import Any

from phasetrain.addons.vissl.compose import VisslConfig
from phasetrain.addons.vissl.draft import ExperimentDraft

CLUSTER_OPTIONS = {
    "FEATURES.LAYER_NAME": "layer",
    "NUM_CLUSTERS": "clusters",
    "NUM_ITER": "iterations",
    "DATA_LIMIT": "samples",
    "DATA_LIMIT_SAMPLING.SEED": "seed",
    "OUTPUT_DIR": "out",
}
"""Key below CLUSTERFIT -> option of `phasetrain cluster`."""

COST_KEYS = ("costs_list", "base", "power_range")


def convert_run(source: VisslConfig, draft: ExperimentDraft) -> None:
    """Write RUN, PHASES, MACHINE, DISTRIBUTED, HOOKS, CHECKPOINT and LAUNCH."""
    if not draft.experiment.get("RUN", {}).get("engine"):
        draft.skip("training is the default", "engine_name")
    if source.get("TEST_ONLY"):
        # Not RUN.engine=test, which tests a checkpoint of a run: the weights are of a file.
        draft.put("PHASES", {"epochs": 0, "test_first": True}, "TEST_ONLY")
    _convert_machine(source, draft)
    _convert_strategy(source, draft)
    _convert_hooks(source, draft)
    _convert_checkpoint(source, draft)
    _convert_slurm(source, draft)
    _convert_probes(source, draft)


def _convert_machine(source: VisslConfig, draft: ExperimentDraft) -> None:
    if source.get("MACHINE.DEVICE") == "cpu":
        draft.put("MACHINE.device", "cpu", "MACHINE.DEVICE")
    else:
        draft.skip("CUDA is used if it is available (MACHINE.device: auto)", "MACHINE.DEVICE")
    if source.get("MODEL.AMP_PARAMS.USE_AMP"):
        draft.put("MACHINE.precision", "fp16", "MODEL.AMP_PARAMS.USE_AMP")
    deterministic_key = "REPRODUCIBILITY.CUDDN_DETERMINISTIC"
    draft.skip("kernels are deterministic (MACHINE.deterministic: true)", deterministic_key)


def _convert_strategy(source: VisslConfig, draft: ExperimentDraft) -> None:
    sync = "MODEL.SYNC_BN_CONFIG"
    if source.get(f"{sync}.CONVERT_BN_TO_SYNC_BN"):
        # VISSL's default of -1 synchronizes the processes of one machine.
        group = int(source.get(f"{sync}.GROUP_SIZE"))
        value: Any = {-1: "node", 0: "global"}.get(group, group)
        if value == 1:
            draft.skip("groups of one process", f"{sync}.CONVERT_BN_TO_SYNC_BN")
        else:
            keys = (f"{sync}.CONVERT_BN_TO_SYNC_BN", f"{sync}.GROUP_SIZE")
            draft.put("DISTRIBUTED.sync_batch_norm", value, *keys)
    else:
        draft.deactivate(f"{sync}.", "batch norm is not synchronized")
    fsdp = "MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP"
    if source.get(fsdp) or "fsdp" in str(source.get("TRAINER.TASK_NAME")):
        draft.put("DISTRIBUTED.strategy", "fsdp", fsdp)
    elif source.get("MODEL.SHARDED_DDP_SETUP.USE_SDP"):
        draft.put("DISTRIBUTED.strategy", "sharded_ddp", "MODEL.SHARDED_DDP_SETUP.USE_SDP")
    # The sharding strategies have no such option.
    elif source.is_changed("DISTRIBUTED.BROADCAST_BUFFERS"):
        value = bool(source.get("DISTRIBUTED.BROADCAST_BUFFERS"))
        draft.put("DISTRIBUTED.sync_buffers", value, "DISTRIBUTED.BROADCAST_BUFFERS")
    processes = source.get("DISTRIBUTED.NUM_PROC_PER_NODE")
    nodes = source.get("DISTRIBUTED.NUM_NODES")
    torchrun = f"torchrun --nnodes {nodes} --nproc-per-node {processes} -m phasetrain FILE.yaml"
    draft.note(
        f"Batch sizes are over {nodes} x {processes} processes: start `{torchrun}`, or set LAUNCH."
    )


def _convert_hooks(source: VisslConfig, draft: ExperimentDraft) -> None:
    if source.get("HOOKS.PERF_STATS.MONITOR_PERF_STATS"):
        draft.put("HOOKS.breakdown", {}, "HOOKS.PERF_STATS.MONITOR_PERF_STATS")
    # Without the check VISSL continues with NaN, and phasetrain stops by default.
    if not source.get("HOOKS.CHECK_NAN"):
        draft.put("OPTIMIZER.on_nonfinite", "ignore", "HOOKS.CHECK_NAN")
    board = "HOOKS.TENSORBOARD_SETUP"
    if source.get(f"{board}.USE_TENSORBOARD"):
        options = {}
        every = int(source.get(f"{board}.LOG_PARAMS_EVERY_N_ITERS"))
        if source.get(f"{board}.LOG_PARAMS") and every > 0:
            options = {"histograms_every": every}
        keys = [key for key in source.given if key.startswith(f"{board}.")]
        draft.put("HOOKS.tensorboard", options)
        draft.translate(
            "HOOKS.tensorboard", *[key for key in keys if "LOG_P" in key or "USE" in key]
        )
    else:
        draft.deactivate(f"{board}.", "TensorBoard is not used")
    activations = "MONITORING.MONITOR_ACTIVATION_STATISTICS"
    if every := int(source.get(activations, 0)):
        draft.put("HOOKS.activations.every_updates", every, activations)
    if source.get("PROFILING.RUNTIME_PROFILING.USE_PROFILER"):
        options = {
            "skip_first": int(source.get("PROFILING.START_ITERATION")),
            "warmup": int(source.get("PROFILING.WARMUP_ITERATIONS")),
            "active": int(source.get("PROFILING.NUM_ITERATIONS")),
        }
        keys = [key for key in source.given if key.startswith("PROFILING.")]
        draft.put("HOOKS.profiler", options, *keys)
    else:
        draft.deactivate("PROFILING.", "there is no profiling")
    ema = "HOOKS.EMA_MODEL"
    if source.get(f"{ema}.SAVE_EMA_MODEL") or source.get(f"{ema}.ENABLE_EMA_METERS"):
        section = {
            "decay": float(source.get(f"{ema}.DECAY")),
            "every": int(source.get(f"{ema}.UPDATE_ITER")),
            "test": bool(source.get(f"{ema}.ENABLE_EMA_METERS")),
        }
        keys = [key for key in source.given if key.startswith(ema) and "WARMUP" not in key]
        draft.put("MODEL.ema", section, *keys)
    else:
        draft.deactivate(f"{ema}.", "no average of the weights is kept")


def _convert_checkpoint(source: VisslConfig, draft: ExperimentDraft) -> None:
    folder = str(source.get("CHECKPOINT.DIR"))
    if folder not in (".", ""):
        draft.put("RUN.dir", folder, "CHECKPOINT.DIR")
    else:
        draft.skip("each config has a folder below runs/", "CHECKPOINT.DIR")
    if not source.get("CHECKPOINT.AUTO_RESUME"):
        draft.put("RUN.resume", "never", "CHECKPOINT.AUTO_RESUME")
    every = int(source.get("CHECKPOINT.CHECKPOINT_ITER_FREQUENCY"))
    if every > 0:
        draft.put("CHECKPOINT.every_updates", every, "CHECKPOINT.CHECKPOINT_ITER_FREQUENCY")


def _convert_slurm(source: VisslConfig, draft: ExperimentDraft) -> None:
    if not source.get("SLURM.USE_SLURM"):
        draft.deactivate("SLURM.", "SLURM.USE_SLURM is false")
        return
    minutes = 60 * int(source.get("SLURM.TIME_HOURS")) + int(source.get("SLURM.TIME_MINUTES"))
    launch: dict[str, Any] = {
        "cluster": "slurm",
        "nodes": int(source.get("DISTRIBUTED.NUM_NODES")),
        "processes": int(source.get("DISTRIBUTED.NUM_PROC_PER_NODE")),
        "cpus": int(source.get("SLURM.NUM_CPU_PER_PROC")),
        "memory": float(source.get("SLURM.MEM_GB")),
        "minutes": minutes,
    }
    for key in ("PARTITION", "LOG_FOLDER"):
        value = source.get(f"SLURM.{key}")
        if value not in ("", "."):
            launch[{"PARTITION": "partition", "LOG_FOLDER": "folder"}[key]] = value
    parameters = dict(source.get("SLURM.ADDITIONAL_PARAMETERS") or {})
    for key in ("CONSTRAINT", "COMMENT"):
        if source.get(f"SLURM.{key}"):
            parameters[key.lower()] = source.get(f"SLURM.{key}")
    launch["parameters"] = parameters
    below = [key for key in source.given if key.startswith("SLURM.") and key != "SLURM.PORT_ID"]
    draft.put("LAUNCH", launch, *below)
    draft.put("RUN.name", source.get("SLURM.NAME"), "SLURM.NAME")


def _convert_probes(source: VisslConfig, draft: ExperimentDraft) -> None:
    """Say how extracted features are probed."""
    probe = "phasetrain probe --train EXTRACT_DIR/train --test EXTRACT_DIR/test --layer LAYER"
    if source.has("NEAREST_NEIGHBOR"):
        neighbours = source.get("NEAREST_NEIGHBOR.TOPK")
        sigma = source.get("NEAREST_NEIGHBOR.SIGMA")
        options = f"--neighbours {neighbours} --temperature {sigma}"
        if not source.get("NEAREST_NEIGHBOR.L2_NORM_FEATS"):
            options += " --similarity dot"
        draft.note(f"Nearest neighbours: `{probe} {options}`")
        keys = [key for key in source.given if key.startswith("NEAREST_NEIGHBOR.")]
        draft.translate(f"probe {options}", *keys)
    if source.has("LOW_SHOT_BENCHMARK"):
        penalty = source.get("LOW_SHOT_BENCHMARK.LOGISTIC_REGRESSION.LAMBDA")
        draft.note(f"Low-shot benchmark: `{probe} --l2 {penalty}`")
        keys = [key for key in source.given if key.startswith("LOW_SHOT_BENCHMARK.")]
        if source.get("LOW_SHOT_BENCHMARK.METHOD") == "logistic_regression":
            draft.translate(f"probe --l2 {penalty}", *keys)
    if source.has("SVM"):
        _convert_svm(source, draft, probe)
    if source.has("CLUSTERFIT"):
        _convert_clusterfit(source, draft)


def _convert_clusterfit(source: VisslConfig, draft: ExperimentDraft) -> None:
    words = "phasetrain cluster EXTRACT_DIR/train EXTRACT_DIR/test"
    for name, option in CLUSTER_OPTIONS.items():
        value = source.get(f"CLUSTERFIT.{name}")
        if value not in (-1, "", None):
            words += f" --{option} {value}"
        draft.translate(f"cluster --{option}", f"CLUSTERFIT.{name}")
    layers = ", ".join(draft.experiment.get("EXTRACT", {}).get("layers", []))
    draft.note(f"Clusters as labels: `{words}`, where the layers are {layers}")


def _convert_svm(source: VisslConfig, draft: ExperimentDraft, probe: str) -> None:
    costs = list(source.get("SVM.costs.costs_list"))
    if (base := source.get("SVM.costs.base")) > 0:
        costs += [base**power for power in range(*source.get("SVM.costs.power_range"))]
    options = f"--kind svm --costs {' '.join(format(cost, 'g') for cost in costs)}"
    options += f" --folds {source.get('SVM.cross_val_folds')}"
    draft.translate("probe --costs", *(f"SVM.costs.{name}" for name in COST_KEYS))
    draft.translate("probe --folds", "SVM.cross_val_folds")
    shots = source.get("SVM.low_shot.k_values")
    draws = len(source.get("SVM.low_shot.sample_inds"))
    few = f"--shots {' '.join(map(str, shots))} --draws {draws}"
    draft.note(f"SVMs: `{probe} {options}`, or with few samples per class: `{few}`")
    draft.translate("probe --shots", "SVM.low_shot.k_values")
    draft.translate("probe --draws", "SVM.low_shot.sample_inds")
