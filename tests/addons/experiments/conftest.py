"""Pages and drawings of sweeps need the add-on `report`."""

from phasetrain.config.addons import find_service

collect_ignore = (
    [] if find_service("write_report") else ["sweep/test_page.py", "fork/test_draw_tree.py"]
)
