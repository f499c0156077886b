"""Low-rank adapters, and their files for other libraries."""

from phasetrain.config.addons import AddOn

PACKAGE = "phasetrain.addons.adapters"


def register(addon: AddOn) -> None:
    """Declare the parts and services of this add-on."""
    addon.add_parts("adapter", {"lora": f"{PACKAGE}.lora"})
    addon.add_service("make_peft_files", f"{PACKAGE}.peft:make_peft_files")
