"""The page in a real browser: it renders, its script runs without an error, and the pointer shows
values."""

import json
import re
import subprocess
from html import unescape
from pathlib import Path

import pytest
from browser import PROGRAM

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1200,900",
)
CONSOLE = re.compile(r"CONSOLE[(:]\d+[)\]].*")

PROBE = """<script>
const picture = document.querySelector('#chart-accuracy svg[role="img"]');
picture.scrollIntoView();
const frame = picture.getBoundingClientRect();
picture.dispatchEvent(new PointerEvent("pointermove", {clientX: frame.right - 5, clientY: frame.top + 50}));
const shown = [...document.querySelectorAll("#tip div")].map((one) => one.textContent);
document.querySelector("#chart-accuracy .legend button").click();
document.getElementById("theme").click();
const found = {
  shown,
  off: document.querySelectorAll("#chart-accuracy g.off").length,
  theme: document.documentElement.style.colorScheme,
  charts: [...document.querySelectorAll("figure.chart svg[role=img]")]
    .filter((one) => one.getBoundingClientRect().height > 100).length,
  lines: [...document.querySelectorAll("figure.chart g.line path")].filter((one) => one.getTotalLength() > 50).length,
  images: [...document.images].filter((one) => one.complete && one.naturalWidth > 0).length,
  cells: document.querySelectorAll("table.matrix td").length,
  wide: document.documentElement.scrollWidth > innerWidth,
};
document.body.dataset.found = JSON.stringify(found);
</script>"""

pytestmark = pytest.mark.skipif(
    not PROGRAM, reason="there is no chromium: apt-get install chromium"
)


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """Return the document as the browser has it in the end, and what came to its console."""
    words = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return found.stdout, CONSOLE.findall(found.stderr)


def with_script(page: Path, script: str) -> Path:
    """Return a copy of a page that runs one more script at its end."""
    path = page.with_name("probed.html")
    path.write_text(page.read_text().replace("</body>", script + "</body>"))
    return path


@pytest.mark.feature("report")
def test_it_renders_without_errors_and_shows_values_under_the_pointer(
    run_folder: Path, tmp_path: Path
) -> None:
    page = with_script(run_folder / "report.html", PROBE)
    document, console = opened(page, tmp_path / "profile")
    assert console == []
    found = json.loads(unescape(re.findall(r'data-found="([^"]*)"', document)[0]))
    run = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["shown"][0] == "update 15, epoch 3"
    assert found["shown"][2] == f"test{run['metrics']['accuracy']:#.4g}"
    assert (found["off"], found["theme"]) == (1, "dark")
    assert found["charts"] == 6
    assert found["lines"] >= 6
    assert found["cells"] == 100
    assert found["images"] >= 12
    assert not found["wide"]


@pytest.mark.slow
def test_error_of_a_script_is_detected(run_folder: Path, tmp_path: Path) -> None:
    page = with_script(run_folder / "report.html", "<script>null.x</script>")
    _, console = opened(page, tmp_path / "profile")
    assert len(console) == 1
    assert "Cannot read properties of null" in console[0]
