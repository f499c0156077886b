"""The commands that work on run folders, checkpoints and extracted features."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phasetrain.commands.cli.output import Outcome
from phasetrain.commands.cli.parsing import TRUST, Call

DEFAULT_FOLDER = "runs"
"""Folder that `runs list` searches if none is named."""

# The modules of the commands are imported in the functions that run them: torch alone takes a
# second to import, and `runs list` or a usage error do without it.


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder to search."""
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", help=f"folder of runs (default: {DEFAULT_FOLDER})"
    )


def run_list(call: Call) -> Outcome:
    """List the runs below a folder."""
    from phasetrain.commands.runs import list_runs

    folder = call.flags.folder or DEFAULT_FOLDER
    found = []
    # Where nothing has been trained yet there is no default folder: an empty list, no mistake.
    if call.flags.folder or Path(folder).exists():
        found = list_runs.list_runs(folder)
    if call.flags.json:
        rows = [asdict(row) for row in found]
        return Outcome(content={"folder": folder, "runs": rows})
    return Outcome(text=list_runs.format_table(found, folder))


def add_recipes_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder of configs."""
    parser.add_argument("--config-dir", metavar="DIR", help="folder with your configs")


def run_recipes_list(call: Call) -> Outcome:
    """List the recipes and their results."""
    from phasetrain.commands.recipes.facts import read_recipes
    from phasetrain.commands.recipes.pages import format_list, list_content
    from phasetrain.config.compose.sources import find_config_dir

    recipes = read_recipes(find_config_dir(call.flags.config_dir))
    if call.flags.json:
        return Outcome(content={"recipes": list_content(recipes)})
    return Outcome(text=format_list(recipes))


def add_follow_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run."""
    parser.add_argument("run", metavar="RUN", help="folder of a run")


def run_follow(call: Call) -> Outcome:
    """Print the log and the progress of a run until it ends."""
    from phasetrain.commands.runs import follow, list_runs

    code = follow.watch_run(call.flags.run)
    if not call.flags.json:
        return Outcome(code)
    return Outcome(code, content={"run": asdict(list_runs.summarize_run(Path(call.flags.run)))})


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare two runs."""
    parser.add_argument("a", metavar="A", help="folder of a run, or path of its steps.ledger")
    parser.add_argument("b", metavar="B", help="the same of another run")


def run_compare(call: Call) -> Outcome:
    """Compare states, metrics, configs and ledgers of two runs."""
    from phasetrain.commands.runs import list_runs

    one, other = call.flags.a, call.flags.b
    if not call.flags.json:
        return Outcome(text=list_runs.compare_runs(one, other))
    list_runs.reject_object_stores(one, other)
    runs = [
        asdict(list_runs.summarize_run(Path(path))) for path in (one, other) if Path(path).is_dir()
    ]
    return Outcome(content={"runs": runs, "diff": _diff_content(one, other)})


def run_diff(call: Call) -> Outcome:
    """Find the first update and the component in which two runs differ."""
    from phasetrain.commands.runs.diff import diff

    if call.flags.json:
        content = _diff_content(call.flags.a, call.flags.b)
        return Outcome(int(not content["equal"]), content={"diff": content})
    found = diff(call.flags.a, call.flags.b)
    return Outcome(int(not found.equal), text=found.report())


def _diff_content(one: str, other: str) -> dict[str, Any]:
    from phasetrain.commands.runs.diff import diff

    found = diff(one, other)
    return {
        "equal": found.equal,
        "update": found.updates,
        "components": found.components,
        "verdict": found.verdict,
        "config": [
            {"key": change.path, "a": change.old, "b": change.new} for change in found.config
        ],
        "environment": found.environment,
        "data": found.data,
        "notes": found.notes,
    }


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare runs and files."""
    parser.add_argument(
        "folders", nargs="+", metavar="RUN_FOLDER", help="folder of a run, finished or not"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="default: report.html in the folder of a single run, otherwise comparison.html",
    )
    parser.add_argument(
        "--png",
        metavar="FOLDER",
        help='folder for plots as PNG files; needs pip install "phasetrain[plot]"',
    )


def run_report(call: Call) -> Outcome:
    """Write the report of a run, or of several runs compared."""
    from phasetrain.runs.report.png import write_png
    from phasetrain.runs.report.reading import read_run
    from phasetrain.runs.report.write import write_report

    folders = call.flags.folders
    files = [str(write_report(folders, call.flags.out))]
    if call.flags.png is not None:
        files += map(str, write_png([read_run(folder) for folder in folders], call.flags.png))
    return Outcome(text="\n".join(files), content={"files": files})


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare run and amount."""
    parser.add_argument(
        "path",
        metavar="RUN_FOLDER|WEIGHTS",
        help="folder of a run, or weights from `phasetrain export` or `phasetrain pack`",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--fraction",
        type=float,
        default=0.05,
        help="share of the updates to train again (default: 0.05)",
    )
    amount.add_argument(
        "--segments", type=int, metavar="N", help="number of segments between kept checkpoints"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of the choice of segments (default: unpredictable)"
    )
    parser.add_argument(
        "--run",
        default="",
        metavar="RUN_FOLDER",
        help="run that the weights are from (default: the run folder that contains them)",
    )
    parser.add_argument("--trust", action="store_true", help=TRUST)


def run_verify(call: Call) -> Outcome:
    """Check the ledger of a run, and train random segments of it again."""
    from phasetrain.commands.engines import print_log
    from phasetrain.commands.verify.verify import VerifyOptions, verify
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    options = VerifyOptions(flags.fraction, flags.segments, flags.seed, flags.run, flags.trust)
    with print_log(Terminal()):
        found = verify(flags.path, options)
    return Outcome(found.exit_code, text=found.format_text(), content=found.to_json())


def add_consolidate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare checkpoint and file."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of the checkpoint")
    parser.add_argument("out", metavar="OUT", help="file to write; it must not exist")
    parser.add_argument(
        "--all", action="store_true", help="all tensors of the checkpoint, not only the weights"
    )


def run_consolidate(call: Call) -> Outcome:
    """Write the tensors of a sharded checkpoint to one file."""
    from phasetrain.commands.consolidate import consolidate

    out = call.flags.out
    tensors, size = consolidate(call.flags.checkpoint, out, everything=call.flags.all)
    content = {"out": out, "tensors": tensors, "bytes": size}
    return Outcome(text=f"{out}: {tensors} tensors, {size:,} bytes", content=content)


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare features and classifiers."""
    parser.add_argument("--train", required=True, metavar="FOLDER", help="features to fit")
    parser.add_argument("--test", required=True, metavar="FOLDER", help="features to classify")
    parser.add_argument("--layer", required=True, help="name of the layer, or scores")
    parser.add_argument(
        "--kind",
        default="linear",
        choices=["linear", "svm"],
        help="linear: nearest neighbours and logistic regression; svm: one SVM per class",
    )
    parser.add_argument(
        "--neighbours", type=int, nargs="+", metavar="K", help="numbers of neighbours that vote"
    )
    parser.add_argument("--temperature", type=float, default=0.07, help="temperature of the votes")
    parser.add_argument("--l2", type=float, nargs="+", help="penalties to choose from")
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="share of --train on which the penalty is chosen",
    )
    parser.add_argument("--costs", type=float, nargs="+", help="svm: costs to choose from")
    parser.add_argument("--folds", type=int, default=3, help="svm: folds that choose the cost")
    parser.add_argument(
        "--shots", type=int, nargs="+", default=(), metavar="K", help="svm: samples per class"
    )
    parser.add_argument("--draws", type=int, default=5, help="svm: how often --shots are drawn")
    parser.add_argument("--seed", type=int, default=0, help="selects held-out or drawn samples")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--out", metavar="FILE", help="default: probe.json next to --test")


def run_probe(call: Call) -> Outcome:
    """Classify extracted features by nearest neighbours and a linear classifier, or by SVMs."""
    from phasetrain.commands.extract.linear_probe import (
        NEIGHBOURS,
        PENALTIES,
        Probed,
        ProbeSettings,
        probe,
    )
    from phasetrain.commands.extract.svm_probe import COSTS, SvmProbed, SvmSettings, probe_by_svm
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    found: Probed | SvmProbed
    if flags.kind == "svm":
        costs = flags.costs or COSTS
        svm = SvmSettings(flags.layer, costs, flags.folds, flags.shots, flags.draws, flags.seed)
        found = probe_by_svm(flags.train, flags.test, svm, flags.out)
        measured = "mean average precision"
    else:
        settings = ProbeSettings(
            flags.layer,
            flags.neighbours or NEIGHBOURS,
            flags.temperature,
            flags.l2 or PENALTIES,
            flags.held_out,
            flags.seed,
            flags.device,
        )
        found = probe(flags.train, flags.test, settings, flags.out)
        measured = "accuracy"
    title = (
        f"{found.layer}: {found.dimensions} numbers, {found.samples[0]} training samples, "
        f"{found.samples[1]} test samples"
    )
    Terminal().print_table(title, ("classifier", measured), found.rows())
    # through JSON, so that numbers as keys become texts exactly as in probe.json
    return Outcome(content=json.loads(json.dumps(asdict(found))))


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare features and clustering."""
    parser.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="features to cluster, and others to label"
    )
    parser.add_argument("--layer", required=True, help="name of the layer, or scores")
    parser.add_argument("--clusters", type=int, required=True, help="number of clusters")
    parser.add_argument("--iterations", type=int, default=50, help="iterations of k-means")
    parser.add_argument("--samples", type=int, help="samples that k-means uses; default: all")
    parser.add_argument("--seed", type=int, default=0, help="selects samples and first centroids")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--out", metavar="DIR", default="clusters", help="default: clusters")


def run_cluster(call: Call) -> Outcome:
    """Label samples by k-means of extracted features."""
    from phasetrain.commands.extract.cluster import ClusterSettings, cluster_features

    flags = call.flags
    settings = ClusterSettings(
        flags.layer, flags.clusters, flags.iterations, flags.samples, flags.seed, flags.device
    )
    found = cluster_features(flags.folders, settings, flags.out)
    sizes = f"largest cluster: {found.largest} samples; empty clusters: {found.empty}"
    return Outcome(text="\n".join([*found.labels.values(), sizes]), content=asdict(found))


def add_migrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare configs and output."""
    parser.add_argument(
        "configs",
        nargs="+",
        metavar="CONFIG.yaml",
        help="a config of VISSL, and others to merge over it, in this order",
    )
    parser.add_argument(
        "--out", metavar="FILE.yaml", help="file to write; default: print the experiment"
    )
    parser.add_argument(
        "--catalog", metavar="FILE.json", help="VISSL's dataset_catalog.json, for the paths of data"
    )


def run_migrate_vissl(call: Call) -> Outcome:
    """Convert a config of VISSL; the exit code is 1 if it uses something without counterpart."""
    from phasetrain.commands.migrate.vissl import migrate_vissl

    flags = call.flags
    found = migrate_vissl(flags.configs, flags.out, flags.catalog)
    content = {
        "experiment": found.experiment,
        "out": flags.out,
        "keys": [asdict(one) for one in found.keys],
        "notes": list(found.notes),
    }
    text = found.format_report()
    if flags.out is None:
        title = ", ".join(Path(path).name for path in flags.configs)
        text = f"{found.format_yaml(title)}\n{text}"
    return Outcome(int(bool(found.missing)), text=text, content=content)
