"""The picture of runs that share their first updates."""

import re

from phasetrain.addons.experiments.fork.draw_tree import draw_tree
from phasetrain.addons.experiments.fork.prefix_tree import Branch, PrefixTree

TREE = PrefixTree(
    (
        Branch("a", "lr=1", 20),
        Branch("b", "lr=<2>", 20, parent=0, fork=5, key="lr", reason="1 or 2"),
        Branch("c", "lr=3", 20, parent=0, fork=15, key="lr", reason="1 or 3"),
        Branch("d", "lr=4", 10),
    )
)


def test_runs_forked_later_are_nearer_so_that_no_line_crosses_another() -> None:
    assert TREE.list_by_latest_fork() == [0, 2, 1, 3]
    labels = re.findall('class="y">(.*?)</text>', draw_tree(TREE, {"c": "third"}))
    assert labels == ["lr=1", "third", "lr=&lt;2&gt;", "lr=4"]


def test_forks_and_ends_are_drawn_to_scale() -> None:
    text = draw_tree(TREE, {})
    lines = re.findall(r'<path d="(M[^"]*)"/>', text)
    # 200 to 830 pixels are 20 updates
    assert lines == [
        "M200.0 26H830.0",
        "M672.5 26V52M672.5 52H830.0",
        "M357.5 26V78M357.5 78H830.0",
        "M200.0 104H515.0",
    ]
    assert "chart" not in text  # the script of the page would look for values in it
    assert re.findall(r'<text x="[0-9.]+" y="[0-9]+">(\d+)</text>', text) == ["15", "5"]


def test_summary_of_runs_that_share_nothing() -> None:
    assert TREE.summarize() == "shared prefixes: 50 updates instead of 70 (71 %) for 4 runs"
    apart = PrefixTree((Branch("a", "lr=1", 20), Branch("b", "lr=2", 20)))
    assert apart.summarize() == "shared prefixes: none, the 2 runs differ from the start"
