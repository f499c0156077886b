"""Observing a run: trackers, profilers, rechecks, checks of collective calls, and a view of its log
and progress."""

from phasetrain.config.addons import AddOn, Command

PACKAGE = "phasetrain.addons.observe"
TRACKERS = f"{PACKAGE}.trackers"
PROFILING = f"{PACKAGE}.profiling"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_commands(
        Command(
            "runs follow",
            "RUN",
            "print log and progress of a run until it ends",
            f"{PACKAGE}.follow_command:run_follow",
            arguments=f"{PACKAGE}.follow_command:add_follow_arguments",
        ),
        Command(
            "profile",
            "[OVERRIDE ...]",
            "name the bottleneck of a run (data, device, host, tests, saves), and try keys",
            f"{PROFILING}.profile_command:run_profile",
            takes_overrides=True,
            arguments=f"{PROFILING}.profile_command:add_profile_arguments",
        ),
    )
    addon.add_service(
        "check_collective_order", f"{PACKAGE}.collective_check:check_collective_order"
    )
    addon.add_service("assert_learns_one_batch", f"{PACKAGE}.learning:assert_learns_one_batch")
    addon.add_service("assert_no_device_sync", f"{PACKAGE}.device_sync:assert_no_device_sync")
    addon.add_service("supervise", f"{PACKAGE}.supervisor:supervise")
    addon.add_service("check_held_weights", f"{PACKAGE}.held_weights:check_held_weights")
    addon.add_service("format_result", f"{PACKAGE}.notebook:format_result")
    addon.add_service("show_in_notebook", f"{PACKAGE}.notebook:NotebookProgress")
    addon.add_service("prepare_hooks", f"{PACKAGE}.before_first_step:prepare_hooks")
    addon.add_service("inspect_model", f"{PROFILING}.inspection:inspect")
    for name in ("list_longer_warnings", "warn_before_longer"):
        addon.add_service(name, f"{PACKAGE}.longer_runs:{name}")
    addon.add_service("list_unused", f"{PACKAGE}.plan_warnings:list_unused")
    addon.add_service("report_unmeasured", f"{PACKAGE}.unmeasured:report_unmeasured")
    addon.add_service("read_held_state", f"{PACKAGE}.state_watch:HeldState")
    addon.add_service("watch_held_state", f"{PACKAGE}.run_watch:RunWatch")
    addon.add_service(
        "warn_of_silent_mistakes", f"{PACKAGE}.silent_mistakes:warn_of_silent_mistakes"
    )
    addon.add_service("warn_of_trained_splits", f"{PACKAGE}.trained_splits:warn_of_trained_splits")
    for name in ("log_audio", "log_figure", "log_image", "log_text"):
        addon.add_name(name, f"{PACKAGE}.media:{name}")
    addon.add_parts(
        "hook",
        {
            **{name: f"{TRACKERS}.{name}" for name in ("csv", "mlflow", "tensorboard", "wandb")},
            **{name: f"{PROFILING}.{name}" for name in ("activations", "breakdown", "memory")},
            "profiler": f"{PROFILING}.profiler",
            "recheck": f"{PACKAGE}.recheck.recheck",
            **{name: f"{PACKAGE}.{name}" for name in ("gradient_norm", "stragglers", "watchdog")},
        },
    )
    addon.add_keys("HOOKS", f"{PACKAGE}.keys:HookKeys")
