"""The settings with which a batch is computed in parts."""

from collections.abc import Mapping

from phasetrain.app.preflight.run_spec import RunSpec


def list_splits(run_spec: RunSpec) -> list[str]:
    """Return the settings that compute a batch in parts."""
    setup = run_spec.setup
    config = setup.config
    sampler = config.DATA.TRAIN.sampler
    splits = {
        f"OPTIMIZER.accumulate = {config.OPTIMIZER.accumulate}": (
            (config.OPTIMIZER.accumulate or 1) > 1
        ),
        f"a world size of {setup.world.size}": not setup.world.is_single_process,
        "DISTRIBUTED.reduction = 'ordered'": config.DISTRIBUTED.reduction == "ordered",
        "max_tokens of DATA.TRAIN.sampler": (
            isinstance(sampler, Mapping) and sampler.get("max_tokens") is not None
        ),
    }
    return [text for text, is_set in splits.items() if is_set]
