"""Observing a run: trackers and profilers."""

from phasetrain.config.addons import AddOn

TRACKERS = "phasetrain.addons.observe.trackers"
PROFILING = "phasetrain.addons.observe.profiling"


def register(addon: AddOn) -> None:
    """Declare what this add-on adds."""
    addon.add_parts(
        "hook",
        {
            **{name: f"{TRACKERS}.{name}" for name in ("csv", "mlflow", "tensorboard", "wandb")},
            **{name: f"{PROFILING}.{name}" for name in ("activations", "breakdown", "memory")},
            "profiler": f"{PROFILING}.profiler",
        },
    )
