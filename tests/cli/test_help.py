"""What `phasetrain help` prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from phasetrain.cli import main
from phasetrain.cli.help_command import general_help, wrap_help
from phasetrain.config.addons import Command
from phasetrain.config.parts import FACTS
from phasetrain.errors import EXIT_CODES
from phasetrain.testing.build import resolve_overrides


def test_groups_sections_and_exit_codes() -> None:
    text = general_help("phasetrain [...]", None)
    assert text.startswith("usage: phasetrain [...]\n")
    for expected in (
        "  experiment   cifar10, digits, ",
        "  LOSS         cross_entropy, label_smoothing\n",
        "RUN, DATA, TASK",
        "128+n",
    ):
        assert expected in text


def test_exit_codes_are_those_of_the_docs() -> None:
    rows = (Path(__file__).parents[2] / "docs" / "config.md").read_text("utf-8")
    (table,) = re.findall(r"## Exit codes\n(.*?)\n\n", rows, re.DOTALL)
    documented = [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
    assert sorted(EXIT_CODES) == documented == list(range(10))
    text = general_help("", None)
    assert all(f"\n  {code}      {meaning}" in text for code, meaning in EXIT_CODES.items())


@pytest.mark.parametrize(
    ("commands", "flags"), [((), []), (("rerun", "sweep"), ["--from", "--multirun"])]
)
def test_flags_of_add_ons_are_listed_with_them(
    commands: tuple[str, ...], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = [Command(name, "", "", "module:run") for name in commands]
    monkeypatch.setattr("phasetrain.cli.help_command.list_commands", lambda: installed)
    text = general_help("", None)
    assert [flag for flag in ("--from", "--multirun") if flag in text] == flags


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=digits"],
        pytest.param(["experiment=text_tiny"], marks=pytest.mark.addon("text")),
    ],
)
def test_every_fact_of_a_run_is_known(words: list[str]) -> None:
    builder = resolve_overrides(words).builder()
    data = builder.data()
    assert builder.facts(data, builder.plan(data)).keys() <= FACTS


def test_lines_are_wrapped_to_a_width() -> None:
    text = wrap_help("  a b c d e f\nlong-word", 8)
    assert text == "  a b c\n  d e f\nlong-word"


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["--help"], "usage: "),
        pytest.param(
            ["-h", "LOSS"],
            "keys of LOSS\n  LOSS.name = 'cross_entropy'",
            marks=pytest.mark.addon("authoring"),
        ),
    ],
)
def test_the_flag(words: list[str], start: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(start)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["help", "train"], ["runs", "list"]])
def test_commands_that_read_no_config_import_neither_torch_nor_hydra(
    words: list[str], tmp_path: Path
) -> None:
    program = (
        "import sys; from phasetrain.cli import main; code = main(sys.argv[1:]); "
        "print([name for name in ('torch', 'hydra', 'omegaconf', 'numpy') if name in sys.modules]); "
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
