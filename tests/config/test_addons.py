"""Add-ons: the mechanism, and the example package of the docs, installed with pip."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from raising import raises

import phasetrain
from phasetrain import testing
from phasetrain.app import slots
from phasetrain.app.setup import resolve_config
from phasetrain.app.slots import list_slots
from phasetrain.config import addons, engines
from phasetrain.config.addons import AddOn, Command, Engine, PartPlace, import_object, load_addons
from phasetrain.config.registry import Registry
from phasetrain.config.sections import extended
from phasetrain.config.sections.keys import Section, key
from phasetrain.errors import ConfigError
from phasetrain.losses import LOSSES

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "addon"

OWN = [
    addon.name for addon in load_addons() if addon.package == "phasetrain" and not addon.is_deleted
]


def list_paths(addon: AddOn) -> list[str]:
    """Return every `module:name` that an add-on declares."""
    paths = [*addon.sections.values(), *addon.services.values()]
    paths += [path for keys in addon.keys.values() for path in keys]
    paths += addon.names.values()
    paths += [slot.section for slot in addon.slots]
    for command in addon.commands:
        paths += [command.run, command.arguments, command.config_words]
    paths += [engine.run for engine in addon.engines]
    return [path for path in paths if path]


def test_own_add_ons_are_those_of_the_folder() -> None:
    folders = sorted(
        path.parent.name for path in (ROOT / "phasetrain/addons").glob("*/__init__.py")
    )
    assert folders == OWN
    assert [addon.error for addon in load_addons()] == [""] * len(load_addons())


@pytest.mark.parametrize("name", OWN)
def test_everything_that_an_add_on_declares_exists(name: str) -> None:
    (addon,) = (addon for addon in load_addons() if addon.name == name)
    for path in list_paths(addon):
        assert callable(import_object(path)), path


@pytest.fixture
def _fresh_addons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addons, "load_addons", addons.load_addons.__wrapped__)


def install(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    """Let these be the only add-ons that are installed."""
    monkeypatch.setattr(addons, "entry_points", lambda group: points)
    monkeypatch.setattr(addons, "_list_unlisted", lambda names: [])


def add_losses(addon: AddOn) -> None:
    addon.add_parts("losses", {"mine": "module"})


def add_loss_of_the_core(addon: AddOn) -> None:
    addon.add_parts("loss", {"cross_entropy": "module"})


@dataclass(frozen=True, kw_only=True)
class SeedKeys(Section):
    """A key that section RUN has."""

    seed: int = key(1, "another seed", resume="free")


def add_slot(addon: AddOn) -> None:
    addon.add_slots(PartPlace("LOSS.inner", "loss", only=("LOSS", "wrapped")))


def add_command(addon: AddOn) -> None:
    addon.add_commands(Command("spikes", "", "list spikes", "module:run"))


@pytest.mark.usefixtures("_fresh_addons")
class TestFailures:
    def test_add_on_whose_folder_was_deleted_is_skipped(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(monkeypatch, EntryPoint("gone", "phasetrain.addons.gone:register", addons.GROUP))
        assert addons.list_failures() == []
        assert addons.explain_missing() == ("; not installed here: the add-ons gone of phasetrain")

    def test_nothing_is_said_of_add_ons_that_are_installed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(monkeypatch)
        assert addons.explain_missing() == ""

    def test_add_on_that_cannot_be_imported_is_a_warning(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(monkeypatch, EntryPoint("stale", "no_such_module:register", addons.GROUP))
        assert addons.list_failures() == [
            "add-on 'stale' of no_such_module is skipped: ModuleNotFoundError: No module named "
            "'no_such_module'"
        ]

    @pytest.mark.parametrize(
        ("function", "names", "advice"),
        [
            ("add_command", ("one", "two"), "; uninstall one of them"),
            ("add_slot", ("one", "two"), "; uninstall one of them"),
            ("add_loss_of_the_core", ("one",), f"; uninstall {__name__!r}"),
        ],
    )
    def test_same_thing_of_two_packages_is_rejected(
        self, monkeypatch: pytest.MonkeyPatch, function: str, names: tuple[str, ...], advice: str
    ) -> None:
        value = f"{__name__}:{function}"
        monkeypatch.setitem(sys.modules, __name__, sys.modules[add_command.__module__])
        install(monkeypatch, *(EntryPoint(name, value, addons.GROUP) for name in names))
        with raises(ConfigError, code="addon.conflict") as caught:
            addons.load_addons()
        assert str(caught.value).endswith(advice)

    @pytest.mark.parametrize(
        ("register", "code"),
        [
            (lambda addon: addon.add_engines(Engine("train", "module:run")), "addon.conflict"),
            (lambda addon: addon.add_section("LOSS", "module:Section"), "addon.conflict"),
            (lambda addon: addon.add_keys("RUN", f"{__name__}:SeedKeys"), "addon.conflict"),
            (lambda addon: addon.add_keys("RUN", "no_such_module:Keys"), "addon.failed"),
            (lambda addon: addon.add_section("MINE", f"{addons.__name__}:NoSuch"), "addon.failed"),
        ],
    )
    def test_what_cannot_be_added_is_rejected(
        self, monkeypatch: pytest.MonkeyPatch, register: Callable[[AddOn], None], code: str
    ) -> None:
        addon = AddOn("mine", "package")
        register(addon)
        monkeypatch.setitem(sys.modules, __name__, sys.modules[SeedKeys.__module__])
        for module in (engines, extended):
            monkeypatch.setattr(module, "load_addons", lambda: (addon,))
        monkeypatch.setattr(extended, "list_engines", engines.list_engines.__wrapped__)
        with raises(ConfigError, code=code):
            extended.complete_config.__wrapped__()

    def test_names_of_the_python_api_are_those_that_are_installed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(addons, "load_addons", lambda: ())
        assert {"fit", "run", "__version__"} <= set(phasetrain.__all__)
        assert {"pack", "load_pack", "PackedModel"} & set(phasetrain.__all__) == set()

    def test_object_store_in_memory_without_its_add_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(addons, "load_addons", lambda: ())
        names = runpy.run_path(str(testing.__file__))
        with raises(ConfigError, code="addon.missing") as caught:
            names["MemoryHandler"]({})
        assert "'remote'" in str(caught.value)

    def test_unknown_kind_of_parts_is_a_warning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, __name__, sys.modules[add_losses.__module__])
        install(monkeypatch, EntryPoint("mine", f"{__name__}:add_losses", addons.GROUP))
        (failure,) = addons.list_failures()
        assert "did you mean 'loss'?" in failure
        assert addons.explain_missing().endswith(failure)


def test_interface_for_addons_is_public_and_exists() -> None:
    page = (ROOT / "docs" / "stability.md").read_text("utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| interface for [add-ons]")]
    listed = [
        f"{module}:{name}"
        for module, names in re.findall(r"`(phasetrain[\w.]+)`: ((?:`\w+`(?:, )?)+)", row)
        for name in re.findall(r"`(\w+)`", names)
    ]
    pinned = json.loads((ROOT / "tests" / "data" / "public_names.json").read_text("utf-8"))
    assert listed == pinned["addons"]
    for path in listed:
        assert addons.import_object(path) is not None


@dataclass(frozen=True, kw_only=True)
class InnerSection(Section):
    """Keys next to the parameters of an inner loss."""

    share: float = key(1.0, "share of the inner loss", resume="forbidden")


class Wrapped:
    """A loss around another one."""

    def __init__(self, inner: Mapping[str, Any]) -> None:
        self.inner = inner


@pytest.fixture
def _wrapped_loss(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let an installed add-on have a loss that holds another one."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Wrapped.__module__])
    addon = AddOn("mine", "package")
    addon.add_slots(
        PartPlace(
            "LOSS.inner",
            "loss",
            provided=frozenset({"label_smoothing"}),
            only=("LOSS", "wrapped"),
            section=f"{__name__}:InnerSection",
        )
    )
    installed = (*load_addons(), addon)
    for module in (slots, extended):
        monkeypatch.setattr(module, "load_addons", lambda: installed)
    monkeypatch.setitem(LOSSES._own, "wrapped", Wrapped)
    extended.complete_entries.cache_clear()
    yield
    extended.complete_entries.cache_clear()


@pytest.mark.usefixtures("_wrapped_loss")
class TestPlacesOfParts:
    def test_part_within_a_part_of_an_add_on_is_valid(self) -> None:
        words = ["LOSS.name=wrapped", "LOSS.inner={name: cross_entropy, share: 0.5}"]
        assert resolve_config(words).config.LOSS is not None

    @pytest.mark.parametrize(
        ("inner", "code", "key"),
        [
            ("{name: cross_entropi}", "config.unknown_part", "LOSS.inner.name"),
            ("{share: 0.5}", "config.missing_part", "LOSS.inner"),
            ("{name: cross_entropy, shar: 0.5}", "config.unknown_parameter", "LOSS.inner.shar"),
            ("{name: cross_entropy, share: a}", "config.wrong_type", "LOSS.inner.share"),
            (
                "{name: cross_entropy, label_smoothing: 0.1}",
                "config.reserved_parameter",
                "LOSS.inner.label_smoothing",
            ),
        ],
    )
    def test_mistakes_within_it_are_reported(self, inner: str, code: str, key: str) -> None:
        with raises(ConfigError, code=code, key=key):
            resolve_config(["LOSS.name=wrapped", f"LOSS.inner={inner}"])

    @pytest.mark.addon("authoring")
    def test_place_is_in_help_reference_and_schema(self) -> None:
        from phasetrain.addons.authoring.editor.sections import describe_sections
        from phasetrain.addons.authoring.reference import reference_page
        from phasetrain.addons.authoring.topic_help import topic_help

        assert "  LOSS.inner.share = 1.0" in topic_help("LOSS")
        assert "## Entries of `LOSS.inner`" in reference_page()
        inner = describe_sections({})["definitions"]["LOSS.inner"]
        assert "share" in str(inner)

    def test_place_of_the_core_is_rejected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        addon = AddOn("mine", "package")
        addon.add_slots(PartPlace("LOSS", "loss"))
        monkeypatch.setattr(slots, "load_addons", lambda: (addon,))
        with raises(ConfigError, code="addon.conflict"):
            list_slots()


def test_docs_show_the_example() -> None:
    _, code = (EXAMPLE / "phasetrain_spikes.py").read_text("utf-8").split('"""\n\n', 1)
    assert f"```python\n{code}```" in (ROOT / "docs" / "addons.md").read_text("utf-8")


@pytest.mark.addon
@pytest.mark.usefixtures("_fresh_addons")
def test_add_on_that_older_metadata_lacks_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [point for point in addons.entry_points(group=addons.GROUP) if point.name != "report"]
    monkeypatch.setattr(addons, "entry_points", lambda group: points)
    assert addons.list_failures() == [
        "add-on 'report' of phasetrain is skipped: the installed metadata does not list it; install "
        "phasetrain again"
    ]


@pytest.mark.addon("vision")
def test_kinds_are_those_of_the_registries() -> None:
    assert {slot.kind for slot in list_slots()} == set(addons.KINDS) - {"format of weights"}
    addon = AddOn("mine", "package")
    addon.add_parts("format of weights", {"mine": "module"})
    assert addon.parts == {"format of weights": {"mine": "module"}}


@pytest.mark.parametrize("module", ["no_such_module", addons.__name__])
def test_part_that_its_module_does_not_register_is_rejected(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setattr("phasetrain.config.registry.list_parts", lambda kind: {"mine": module})
    with raises(ConfigError, code="addon.failed"):
        Registry("loss", "LOSS").find("mine")


PROGRAM = """
import io, json, sys
from contextlib import redirect_stdout
from phasetrain.cli import main

def call(*words):
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(words)
    return code, out.getvalue()

print(json.dumps([call(*words) for words in json.loads(sys.argv[1])]))
"""


def run_words(python: Path, folder: Path, *lines: str) -> list[tuple[int, str]]:
    """Run command lines in one process; return exit code and output of each."""
    words = json.dumps([line.split() for line in lines])
    done = subprocess.run(
        [python, "-c", PROGRAM, words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results: list[tuple[int, str]] = json.loads(done.stdout)
    return results


def list_files(folder: Path) -> set[Path]:
    """Return all files below a folder, without caches of Python."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_example_installs_works_and_uninstalls_without_a_trace(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    environment = tmp_path / "venv"
    venv.create(environment)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    # All packages of this environment, of which phasetrain may be an editable one.
    (site / "base.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    before = list_files(environment)
    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "install", *options, project], check=True, env=dict(os.environ))

    small = "PHASES.epochs=1 PHASES.limit.train=3 RUN.dir=run"
    results = run_words(
        python,
        tmp_path,
        "--help",
        "spikes --help",
        f"LOSS.name=clipped_cross_entropy HOOKS.spike_alarm.limit=1000 {small}",
        "spikes run",
        "RUN.engine=count_updates PHASES.epochs=2 --json",
        "LOSS.name=clipped_cross_entropy LOSS.limt=3 --json",
        "HOOKS.spike_alarm.limt=3 --json",
        "help clipped_cross_entropy",
        "schema",
        "completion bash",
    )
    codes = [code for code, _ in results]
    texts = [text for _, text in results]
    assert codes == [0, 0, 0, 0, 0, 2, 2, 0, 0, 0]
    assert "  spikes           list the epochs" in texts[0]
    assert texts[1].startswith("usage: phasetrain spikes [flags] RUN_FOLDER")
    assert texts[3] == "no spikes\n"
    assert json.loads(texts[4])["details"] == {"updates": 44}
    suggestions = [json.loads(text)["errors"][0]["suggestion"] for text in texts[5:7]]
    assert suggestions == ["LOSS.limit", "HOOKS.spike_alarm.limit"]
    assert "clipped_cross_entropy(limit=10.0)" in texts[7]
    assert "clipped_cross_entropy" in texts[8]
    assert "spike_alarm" in texts[9]

    subprocess.run([*pip, "uninstall", "--yes", "phasetrain-spikes"], check=True)
    assert list_files(environment) == before
    (code, text), (unknown, _) = run_words(
        python, tmp_path, "--help", "LOSS.name=clipped_cross_entropy --json"
    )
    assert (code, unknown) == (0, 2)
    assert "spikes" not in text
