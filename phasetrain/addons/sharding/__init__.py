"""Training with sharded weights, gradients or optimizer state: strategies and checkpoints."""

from phasetrain.config.addons import AddOn

PACKAGE = "phasetrain.addons.sharding"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_parts(
        "strategy",
        {
            "zero": f"{PACKAGE}.zero",
            "sharded_ddp": f"{PACKAGE}.sharded_ddp",
            "fsdp": f"{PACKAGE}.fsdp",
        },
    )
    addon.add_service("make_save_group", f"{PACKAGE}.checkpoint:make_save_group")
    addon.add_service("load_sharded_checkpoint", f"{PACKAGE}.checkpoint:load_sharded_checkpoint")
    addon.add_service("verify_shards", f"{PACKAGE}.verification:verify_shards")
