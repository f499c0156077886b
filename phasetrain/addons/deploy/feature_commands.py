"""The commands that use extracted features: probe and cluster; and consolidate."""

import argparse
import json
from dataclasses import asdict

from phasetrain.addons.deploy.options import ClusterSettings
from phasetrain.cli.options import add_options, read_options
from phasetrain.cli.output import Outcome
from phasetrain.cli.parsing import Call


def add_consolidate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare checkpoint and file."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of the checkpoint")
    parser.add_argument("out", metavar="OUT", help="file to write; it must not exist")
    parser.add_argument(
        "--all", action="store_true", help="all tensors of the checkpoint, not only the weights"
    )


def run_consolidate(call: Call) -> Outcome:
    """Write the tensors of a sharded checkpoint to one file."""
    from phasetrain.addons.deploy.consolidate import consolidate

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
    parser.add_argument(
        "--similarity",
        default="cosine",
        choices=["cosine", "dot"],
        help="similarity of neighbours; dot: product of features that are not normalized",
    )
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
    from phasetrain.addons.deploy.extract.linear_probe import (
        NEIGHBOURS,
        PENALTIES,
        Probed,
        ProbeSettings,
        probe,
    )
    from phasetrain.addons.deploy.extract.svm_probe import (
        COSTS,
        SvmProbed,
        SvmSettings,
        probe_by_svm,
    )
    from phasetrain.runtime.terminal import Terminal

    flags = call.flags
    result: Probed | SvmProbed
    if flags.kind == "svm":
        costs = flags.costs or COSTS
        svm = SvmSettings(flags.layer, costs, flags.folds, flags.shots, flags.draws, flags.seed)
        result = probe_by_svm(flags.train, flags.test, svm, flags.out)
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
            flags.similarity,
        )
        result = probe(flags.train, flags.test, settings, flags.out)
        measured = "accuracy"
    title = (
        f"{result.layer}: {result.dimensions} numbers, {result.samples[0]} training samples, "
        f"{result.samples[1]} test samples"
    )
    Terminal().print_table(title, ("classifier", measured), result.rows())
    # through JSON, so that numbers as keys become texts exactly as in probe.json
    return Outcome(content=json.loads(json.dumps(asdict(result))))


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare features and clustering."""
    parser.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="features to cluster, and others to label"
    )
    add_options(parser, ClusterSettings)
    parser.add_argument("--out", metavar="DIR", default="clusters", help="default: clusters")


def run_cluster(call: Call) -> Outcome:
    """Label samples by k-means of extracted features."""
    from phasetrain.addons.deploy.extract.cluster import cluster_features

    flags = call.flags
    settings = read_options(ClusterSettings, flags)
    clustered = cluster_features(flags.folders, settings, flags.out)
    sizes = f"largest cluster: {clustered.largest} samples; empty clusters: {clustered.empty}"
    return Outcome(text="\n".join([*clustered.labels.values(), sizes]), content=asdict(clustered))
