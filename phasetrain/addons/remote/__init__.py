"""Files elsewhere: run folders on object stores, data and weights from any scheme of fsspec."""

from phasetrain.config.addons import AddOn

PACKAGE = "phasetrain.addons.remote"


def register(addon: AddOn) -> None:
    """Declare the parts, commands and keys of this add-on."""
    addon.add_service("fetch", f"{PACKAGE}.cache:fetch")
    addon.add_service("list_urls", f"{PACKAGE}.systems:list_urls")
    addon.add_service("memory_handler", f"{PACKAGE}.memory:MemoryHandler")
    addon.add_service("open_copies", f"{PACKAGE}.objects:CachedObjects")
    addon.add_service("open_objects", f"{PACKAGE}.objects:open_objects")
    addon.add_service("open_run_objects", f"{PACKAGE}.objects:open_run_objects")
    addon.add_service("stat_url", f"{PACKAGE}.systems:stat_url")
