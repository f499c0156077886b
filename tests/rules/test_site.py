"""The documentation site is built without warnings, and works from the file system, without network."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import PROGRAM, Browser

# Building takes as long as 40 trainings; `.ci/run` does it before each change is taken.
pytestmark = [pytest.mark.slow, pytest.mark.addon()]  # the site is about the whole package

ROOT = Path(__file__).parents[2]
RESULTS = "[...document.querySelectorAll('.md-search-result__item h1, .md-search-result__item h2')].map((one) => one.textContent)"


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Build the site into a folder, where every warning is an error."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    return subprocess.run([*words, "--site-dir", str(folder)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Return a browser."""
    if not PROGRAM:
        pytest.skip("there is no chromium: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_every_page_of_the_docs_is_in_the_navigation(site: Path) -> None:
    files = (path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))
    # MkDocs makes README.md the index of its folder.
    pages = {
        path.with_name(path.name.replace("README", "index")).with_suffix(".html") for path in files
    }
    links = set(
        re.findall(
            r'<a href="([^"#:]+\.html)" class="md-nav__link', (site / "index.html").read_text()
        )
    )
    assert {Path(link) for link in links} | {Path("index.html")} == pages


def test_named_blocks_have_their_file_name_as_title(site: Path) -> None:
    page = (site / "tutorials" / "your-data.html").read_text()
    titles = re.findall(r'<span class="filename">([^<]*)</span>', page)
    assert titles[:4] == ["write_photos.py", "photos.yaml", "folder.yaml", "cells.py"]


def test_pages_load_nothing_from_the_network(site: Path) -> None:
    loaded = [
        (page.name, found)
        for page in site.rglob("*.html")
        for found in re.findall(
            r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(?:https?:)?//[^"]*"',
            page.read_text(),
        )
    ]
    assert loaded == []


@pytest.mark.feature(
    "site", "documentation site with offline search and an API reference", "`make docs-site`"
)
def test_search_finds_a_key_without_a_server(site: Path, browser: Browser) -> None:
    browser.open(f"{(site / 'index.html').as_uri()}?q=CHECKPOINT.best")
    assert "CHECKPOINT.best" in browser.wait_for(RESULTS)
    assert browser.trouble == []


@pytest.mark.parametrize(
    ("page", "heading"),
    [("index.html", "phasetrain"), ("reference.html", "Reference"), ("api.html", "Python API")],
)
def test_page_renders_without_script_errors(
    page: str, heading: str, site: Path, browser: Browser
) -> None:
    browser.open((site / page).as_uri())
    assert heading in browser.evaluate("document.querySelector('h1').textContent")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.trouble == []


@pytest.mark.feature("site")
def test_api_page_shows_signatures_and_arguments(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "api.html").read_text())
    assert "epochs" in text
    assert "passes over the training data" in text


def test_error_of_a_script_is_seen(tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "page.html"
    page.write_text("<script>null.x</script>")
    before = len(browser.trouble)
    browser.open(page.as_uri())
    assert len(browser.trouble) == before + 1
    browser.trouble.clear()


def test_link_to_a_missing_page_or_anchor_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# A\n\n[b](b.md) [c](#c)\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text("site_name: x\nvalidation: {anchors: warn}\n")
    built = build(tmp_path / "site", config)
    assert built.returncode == 1
    assert "b.md" in built.stderr
    assert "#c" in built.stderr
