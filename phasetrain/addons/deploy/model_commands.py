"""The commands that use the model of a run: export, pack and predict."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasetrain.addons.deploy.options import (
    ExportedWeights,
    ModelOptions,
    PackOptions,
    PredictOptions,
)
from phasetrain.cli.options import add_options, read_options
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import TRUST, Call
from phasetrain.errors import ConfigError
from phasetrain.runtime.format import format_count

if TYPE_CHECKING:
    from phasetrain.addons.deploy.predict.predict import Prediction
    from phasetrain.addons.deploy.predict.raw_inputs import OnUnreadable

# The modules of the commands are imported in the functions that run them, as in
# phasetrain.cli.train_commands.


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare checkpoint, file and format."""
    parser.add_argument("path", metavar="RUN", help="a run folder, or one of its checkpoints")
    parser.add_argument("out", metavar="OUT", help="file or folder to write; it must not exist")
    parser.add_argument(
        "--format",
        help="safetensors, torch_export, onnx or huggingface (default: by the suffix of OUT, which "
        "is .safetensors or none, .pt2, or .onnx)",
    )
    add_options(parser, ExportedWeights)
    parser.add_argument(
        "--with-transforms",
        action="store_true",
        help="let a model of torch_export or onnx take inputs before the transforms of the test",
    )
    parser.add_argument("--trust", action="store_true", help=TRUST)


def run_export(call: Call) -> Outcome:
    """Write weights or a model from a checkpoint to a file."""
    from phasetrain.addons.deploy.export import choose_format, export

    flags = call.flags
    form = choose_format(flags.out, flags.format)
    made = export(
        flags.path,
        flags.out,
        form,
        source=vars(read_options(ExportedWeights, flags)),
        overrides=call.overrides,
        config_dir=flags.config_dir,
        with_transforms=flags.with_transforms,
        trust=flags.trust,
    )
    sizes = {"bytes": made.size}
    if form in ("safetensors", "huggingface", "peft"):
        sizes = {"tensors": made.count, **sizes}
    transforms = {"inside": list(made.inside), "outside": list(made.outside)}
    content = {
        "out": flags.out,
        "format": form,
        **sizes,
        "weights": made.weights,
        "transforms": transforms,
        "input": made.input,
        "output": made.output,
        "class_names": list(made.class_names),
    }
    sizes_text = ", ".join(f"{count:,} {unit}" for unit, count in sizes.items())
    lines = [f"{flags.out}: {sizes_text} ({form})"]
    if made.weights != "model":
        lines.append(f"weights: {made.weights}, the average of MODEL.{made.weights}")
    if made.input:
        input_form = (
            "as the transforms below give it" if made.outside else "as the dataset gives it"
        )
        lines.append(
            f"input: {made.input}, {input_form}; what the dataset does, such as resizing images "
            "and scaling them to [0, 1], is not included"
        )
    if made.output:
        lines.append(f"output: {made.output}")
    if made.class_names:
        lines.append(f"classes of the output: {', '.join(made.class_names)}")
    if made.inside:
        lines.append(f"transforms inside: {', '.join(made.inside)}")
    if made.outside:
        lines.append(f"transforms to apply to its inputs first: {', '.join(made.outside)}")
    return Outcome(text="\n".join(lines), content=content)


def add_pack_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run, file and the entries of the card."""
    parser.add_argument("run_folder", metavar="RUN", help="a run folder, or one of its checkpoints")
    parser.add_argument("out", metavar="MODEL.zip", help="file to write; it must not exist")
    add_options(parser, PackOptions)


def run_pack(call: Call) -> Outcome:
    """Write the model of a run to a single file."""
    from phasetrain.addons.deploy.pack.pack import pack

    flags = call.flags
    options = read_options(PackOptions, flags)
    made = pack(flags.run_folder, flags.out, **vars(options))
    lines = [f"{made.out}: {made.size:,} bytes, sha256 {made.digest}"]
    which = made.card["weights"]
    if which != "model":
        lines.append(f"weights: {which}, the average of MODEL.{which}")
    if made.card["code"]:
        names = ", ".join(entry["file"] for entry in made.card["code"])
        lines.append(f"custom code that its users need, and that is not included: {names}")
    lines.append(f"use: phasetrain predict {made.out} FILE...")
    content = {"out": made.out, "bytes": made.size, "sha256": made.digest, "card": made.card}
    return Outcome(text="\n".join(lines), content=content)


def add_model_arguments(parser: argparse.ArgumentParser, options: type = ModelOptions) -> None:
    """Declare a run or a packed model, and how it is loaded and used."""
    parser.add_argument(
        "run_folder",
        metavar="RUN_FOLDER|MODEL.zip",
        help="a run, one of its checkpoints, or a file of phasetrain pack",
    )
    add_options(parser, options)


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run or packed model, files and the form of the predictions."""
    add_model_arguments(parser, PredictOptions)
    parser.add_argument("--out", metavar="FILE", help="FILE.json or FILE.csv instead of a table")
    parser.add_argument(
        "--masks", metavar="FOLDER", help="folder for the class of each pixel, as PNG files"
    )
    parser.add_argument("--csv", action="store_true", help="print CSV instead of a table")
    parser.add_argument(
        "--skip-unreadable",
        action="store_true",
        help="report files that cannot be read, and predict for the others",
    )
    parser.add_argument(
        "--digest", metavar="SHA256", help="reject a packed model with another digest"
    )


def run_predict(call: Call) -> Outcome:
    """Predict for files with the model of a run, or with a packed model."""
    from phasetrain.addons.deploy.pack.archive import names_archive
    from phasetrain.addons.deploy.predict.predict import (
        format_csv,
        format_rows,
        write_masks,
        write_predictions,
    )
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    # A file may have "=" in its name.
    files = [word for word in call.overrides if "=" not in word or Path(word).exists()]
    changes = [word for word in call.overrides if word not in files]
    if not files:
        raise ConfigError(
            f"predict {flags.run_folder}: expected at least one file", code="cli.usage"
        )
    content: dict[str, Any] = {"folder": flags.run_folder}
    lines = []
    skipped: list[dict[str, str]] = []
    on_unreadable = None
    if flags.skip_unreadable:
        on_unreadable = partial(_report_skipped, skipped)
    if names_archive(flags.run_folder):
        predictions, verified = _predict_packed(call, files, changes, on_unreadable)
        content["pack"] = verified
        lines.append(f"{flags.run_folder}: example {verified['example']}")
    else:
        predictions = _predict_run(call, files, changes, on_unreadable)
    if skipped and not predictions:
        raise ConfigError(
            f"--skip-unreadable: none of the {format_count(len(skipped), 'file')} can be read, the "
            f"first one because of: {skipped[0]['error']}; expected at least one readable file",
            code="predict.unreadable",
        )
    if flags.skip_unreadable:
        content["skipped"] = skipped
    content["predictions"] = [prediction.to_json() for prediction in predictions]
    name = flags.output or "output"
    if flags.masks is not None:
        lines.append(f"{flags.masks}: {write_masks(predictions, flags.masks)} masks")
    if flags.out is not None:
        write_predictions(predictions, flags.out, name)
        lines.append(f"{flags.out}: {len(predictions)} predictions")
    elif flags.csv:
        lines = [format_csv(predictions, name).rstrip("\n")]
    elif not flags.json:
        head, rows = format_rows(predictions, name)
        Terminal().print_table(f"predictions of {flags.run_folder}", head, rows)
    return Outcome(text="\n".join(lines), content=content)


def list_config_words(call: Call) -> None:
    """Leave the files of `predict` out of the overrides, for `--cfg`."""
    call.flags.overrides = [word for word in call.flags.overrides if "=" in word]


def _report_skipped(skipped: list[dict[str, str]], file: str, reason: str) -> None:
    sys.stderr.write(f"skipped: {reason}\n")
    skipped.append({"file": file, "error": reason})


def _predict_run(
    call: Call, files: list[str], changes: list[str], on_unreadable: "OnUnreadable | None"
) -> "list[Prediction]":
    from phasetrain.addons.deploy.predict.predict import predict

    flags = call.flags
    if flags.imports or flags.digest:
        raise ConfigError(
            f"{flags.run_folder} is not a packed model: --imports and --digest are for the files "
            "of phasetrain pack; a run takes --trust",
            code="cli.conflict",
        )
    options = read_options(PredictOptions, flags)
    return predict(flags.run_folder, files, changes, options, on_unreadable=on_unreadable)


def reject_run_options(call: Call, changes: Sequence[str]) -> None:
    """Reject the options of a run, if a packed model is given.

    Raises:
        ConfigError: names the first one.
    """
    flags = call.flags
    is_given_by_name = {
        "--checkpoint": flags.checkpoint not in (None, "latest"),
        "--weights": flags.weights not in (None, "model"),
        "--trust": flags.trust,
        "overrides": bool(changes),
    }
    for name, is_given in is_given_by_name.items():
        if is_given:
            raise ConfigError(
                f"{name} and {flags.run_folder}: a packed model has one set of weights and one "
                "config; remove it, or name the run folder",
                code="cli.conflict",
            )


def _predict_packed(
    call: Call, files: list[str], changes: list[str], on_unreadable: "OnUnreadable | None"
) -> "tuple[list[Prediction], dict[str, Any]]":
    """Return the predictions of a packed model, and how it was verified."""
    from phasetrain.addons.deploy.pack.load_pack import load_pack

    flags = call.flags
    reject_run_options(call, changes)
    packed = load_pack(
        flags.run_folder, device=flags.device, imports=flags.imports, digest=flags.digest
    )
    predictions = packed.predict_files(
        files,
        top=flags.top,
        output=flags.output,
        batch_size=flags.batch_size,
        arrays=flags.arrays,
        on_unreadable=on_unreadable,
    )
    verified = {
        "sha256": packed.digest,
        "example": packed.verification.describe(),
        "identical": packed.verification.identical,
        "difference": packed.verification.difference,
    }
    return predictions, verified
