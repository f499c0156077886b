"""One declaration gives the flags of a command and the object with their values."""

import argparse
from dataclasses import MISSING, dataclass
from typing import Literal

import pytest

from phasetrain.cli.options import add_options, option, read_options


@dataclass(frozen=True)
class Options:
    out: str = option(MISSING, "file to write", metavar="FILE")
    batch_size: int = option(64, "samples at once", metavar="N")
    share: float | None = option(None, "share of the samples")
    is_quick: bool = option(False, "do less", flag="--quick")
    names: tuple[str, ...] = option((), "a name", flag="--name")
    device: Literal["cpu", "cuda"] | None = option(None, None)
    launch: str = "not a flag"


def parse(*words: str) -> Options:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, Options, exclusive=("share", "is_quick"))
    return read_options(Options, parser.parse_args(words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), Options("a")),
        (("--batch-size", "8", "--quick"), Options("a", 8, is_quick=True)),
        (("--share", "0.5", "--device", "cuda"), Options("a", share=0.5, device="cuda")),
        (("--name", "x", "--name", "y"), Options("a", names=("x", "y"))),
    ],
)
def test_flags_give_the_values_of_fields(words: tuple[str, ...], expected: Options) -> None:
    # Twice: a default that argparse appends to would keep the names of the first call.
    assert [parse("--out", "a", *words) for _ in range(2)] == [expected, expected]


@pytest.mark.parametrize(
    "words",
    [
        ("--batch-size", "8"),
        ("--out", "a", "--batch-size", "many"),
        ("--out", "a", "--device", "tpu"),
        ("--out", "a", "--share", "1", "--quick"),
        ("--out", "a", "--launch", "x"),
    ],
    ids=["required", "type", "choice", "exclusive", "no flag"],
)
def test_wrong_flags_are_rejected(words: tuple[str, ...]) -> None:
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parse(*words)


def test_help_has_names_and_meanings() -> None:
    parser = argparse.ArgumentParser(prog="run")
    add_options(parser, Options)
    lines = [line.split() for line in parser.format_help().splitlines()]
    assert ["--batch-size", "N", "samples", "at", "once"] in lines
    assert ["--quick", "do", "less"] in lines


def test_flags_that_another_command_lacks_have_their_defaults() -> None:
    assert read_options(Options, argparse.Namespace(out="a", other=1)) == Options("a")
