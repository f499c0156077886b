"""What `--help` prints."""

import pytest
from raising import raises

from phasetrain.commands.cli import main
from phasetrain.commands.help import general_help, section_help
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError


def test_groups_sections_and_exit_codes() -> None:
    text = general_help("phasetrain [...]", None)
    assert text.startswith("usage: phasetrain [...]\n")
    for expected in (
        "  experiment   digits, ",
        "  LOSS         cross_entropy, label_smoothing\n",
        "RUN, DATA, TASK",
        "128+n",
    ):
        assert expected in text


@pytest.mark.parametrize("section", default_schema().sections)
def test_every_key_of_every_section(section: str) -> None:
    text = section_help(section)
    for path, key in default_schema().keys.items():
        if path.split(".")[0] == section:
            assert f"  {path} = " in text
            assert key.meaning in text


def test_parts_with_the_parameters_that_a_config_sets() -> None:
    text = section_help("OPTIMIZER")
    assert (
        "optimizers (OPTIMIZER)\n  adam(betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, fused=true)"
        in text
    )
    assert "  none()\n      No scaler" in text
    assert "params" not in text


def test_an_unknown_section() -> None:
    with raises(ConfigError, code="config.unknown_section", suggestion="LOSS"):
        section_help("LOS")


def test_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for words, start in (
        (["--help"], "usage: "),
        (["-h", "LOSS"], "keys of LOSS\n  LOSS.name = 'cross_entropy'"),
    ):
        assert main(words) == 0
        assert capsys.readouterr().out.startswith(start)
