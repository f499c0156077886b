"""Screenshots of the report for the docs.

    python benchmarks/report_screenshots.py

Trains three small runs, one of them killed and resumed, and a sweep, and writes docs/report.png
(one run), docs/report-compared.png (three runs, dark) and docs/sweep.png. Takes about two minutes
on 2 cores. Needs Chromium: `apt-get install chromium`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from phasetrain.addons.report.page import write_report

DOCS = Path(__file__).parents[1] / "docs"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
COMMON = (
    "PHASES.epochs=20",
    "OPTIMIZER.clip_norm=5",
    "HOOKS.metrics.every_updates=5",
    "CHECKPOINT.every_updates=50",
)
RUNS = {
    "lr-0.1": ("OPTIMIZER.lr=0.1",),
    "lr-0.03": ("OPTIMIZER.lr=0.03",),
    "wide": ("OPTIMIZER.lr=0.1", "MODEL.width=64"),
}


def main() -> int:
    """Train the runs and take the screenshots; return the exit code."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        print("there is no Chromium: apt-get install chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)  # so that paths in the pictures are short
        folders = [trained(f"runs/{name}", words) for name, words in RUNS.items()]
        write_report(folders[:1])
        write_report(folders, "comparison.html")
        picture(browser, f"{folders[0]}/report.html", DOCS / "report.png", "1200,2290")
        dark = "--blink-settings=preferredColorScheme=0"
        picture(browser, "comparison.html", DOCS / "report-compared.png", "1200,1660", dark)
        words = (
            "PHASES.epochs=6",
            "OPTIMIZER.lr=0.3,0.1,0.03,0.01",
            "MODEL.width=8,32",
            "hydra.sweep.dir=runs/first",
        )
        subprocess.run(
            [sys.executable, "-m", "phasetrain", "-m", *words],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        picture(browser, "runs/first/sweep.html", DOCS / "sweep.png", "1200,1150")
        os.chdir(DOCS)
    return 0


def trained(folder: str, words: tuple[str, ...]) -> str:
    """Train a run to its end, killing the first one once, and return its folder."""
    command = [sys.executable, "-m", "phasetrain", f"RUN.dir={folder}", *COMMON, *words]
    if folder.endswith(next(iter(RUNS))):
        killed(command)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def killed(command: list[str]) -> None:
    """Start a run and kill it in its seventh epoch, before that epoch's checkpoint."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "6/20" in line and "test" in line:
                process.kill()
                break


def picture(browser: str, page: str, target: Path, size: str, *flags: str) -> None:
    """Take a screenshot of a page."""
    profile = tempfile.mkdtemp(dir=Path.cwd())
    words = [
        browser,
        *FLAGS,
        *flags,
        f"--user-data-dir={profile}",
        f"--window-size={size}",
        f"--screenshot={target}",
    ]
    subprocess.run(
        [*words, Path(page).resolve().as_uri()], check=True, timeout=120, stderr=subprocess.DEVNULL
    )
    print(target)


if __name__ == "__main__":
    sys.exit(main())
