"""Tables of recipes: in the terminal, and as Markdown for `docs/recipes/`.

    python -m phasetrain.addons.experiments.recipes.pages docs/recipes

writes the part between the markers of every page from the YAML files of the recipes.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phasetrain.addons.experiments.recipes.recipe import Measurement, Recipe, Variant, read_recipes
from phasetrain.addons.experiments.recipes.requirements import list_missing
from phasetrain.runtime.format import format_count, format_metric

BEGIN = "<!-- facts: written by python -m phasetrain.addons.experiments.recipes.pages -->"
END = "<!-- end of facts -->"

NOT_MEASURED = "not measured yet"
NOT_RUN = "not run by us"

COLUMNS = ("recipe", "data", "metric", "result", "CPU minutes")


def describe_result(recipe: Recipe, variant: Variant) -> str:
    """Return mean and spread of the first metric, or why there is none."""
    if recipe.status == "not_run_by_us":
        return NOT_RUN
    if variant.measured is None:
        return NOT_MEASURED
    return _format_values(variant.measured, variant.metric)


def _format_values(measured: Measurement, metric: str) -> str:
    values = f"{format_metric(measured.mean(metric))} +- {format_metric(measured.spread(metric))}"
    return f"{values} ({len(measured.values[metric])} seeds)"


def _format_minutes(variant: Variant) -> str:
    if variant.measured is None:
        return ""
    return f"{variant.measured.minutes:.1f}"


def list_rows(recipes: Sequence[Recipe]) -> list[tuple[str, ...]]:
    """Return a row of COLUMNS for each variant."""
    return [
        (
            variant.full_name,
            recipe.data,
            f"{variant.metric} {variant.metrics[variant.metric].text}".rstrip(),
            describe_result(recipe, variant),
            _format_minutes(variant),
        )
        for recipe in recipes
        for variant in recipe.variants.values()
    ]


def format_list(recipes: Sequence[Recipe]) -> str:
    """Return the recipes as a table for the terminal."""
    rows = [COLUMNS, *list_rows(recipes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    missing = [recipe.name for recipe in recipes if list_missing(recipe)]
    if missing:
        lines += ["", f"packages or data are missing for: {', '.join(missing)}"]
    return "\n".join([*lines, "", "phasetrain rerun --recipe NAME repeats one and checks it"])


def list_content(recipes: Sequence[Recipe]) -> list[dict[str, Any]]:
    """Return the recipes as JSON data, one entry per variant."""
    return [
        {
            "name": variant.full_name,
            "title": variant.title,
            "data": recipe.data,
            "status": recipe.status,
            "metric": variant.metric,
            "criterion": variant.metrics[variant.metric].text,
            "published": variant.published,
            "missing": [package.name for package in list_missing(recipe)],
            **_list_measured(variant),
        }
        for recipe in recipes
        for variant in recipe.variants.values()
    ]


def _list_measured(variant: Variant) -> dict[str, Any]:
    """Return the results of a variant, or None for each of them if it was not measured."""
    measured = variant.measured
    if measured is None:
        return dict.fromkeys(("date", "minutes", "mean", "spread"))
    return {
        "date": measured.date,
        "minutes": measured.minutes,
        "mean": measured.mean(variant.metric),
        "spread": measured.spread(variant.metric),
    }


def render_page(recipe: Recipe) -> str:
    """Return the generated part of the page of a recipe, as Markdown."""
    lines = [
        "| variant | command | metric | result | criterion | CPU minutes | published |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in recipe.variants.values():
        lines += _list_metric_rows(recipe, variant)
    if recipe.baselines:
        metrics = list(dict.fromkeys(metric for row in recipe.baselines.values() for metric in row))
        lines += ["", f"| baseline | {' | '.join(metrics)} |", "|---" * (len(metrics) + 1) + "|"]
        for name, values in recipe.baselines.items():
            cells = [
                format_metric(values[metric]) if metric in values else "" for metric in metrics
            ]
            lines.append(f"| {' | '.join([name, *cells])} |")
    for variant in recipe.variants.values():
        if variant.measured is not None:
            lines += ["", *_describe_measurement(variant, variant.measured)]
    return "\n".join(lines)


def _list_metric_rows(recipe: Recipe, variant: Variant) -> list[str]:
    rows = []
    command = f"`phasetrain rerun --recipe {variant.full_name}`"
    before = [variant.title, command]
    after = [_format_minutes(variant), variant.published or "own baseline"]
    for metric, criterion in variant.metrics.items():
        result = describe_result(recipe, variant)
        if variant.measured is not None:
            result = _format_values(variant.measured, metric)
        cells = [*before, f"`{metric}`", result, criterion.text, *after]
        rows.append(f"| {' | '.join(cells)} |")
        # The first row alone has the cells that are the same for all metrics of the variant.
        before = after = ["", ""]
    return rows


def _describe_measurement(variant: Variant, measured: Measurement) -> list[str]:
    platform = measured.platform
    values = ", ".join(format_metric(value) for value in measured.values[variant.metric])
    first_stage = " of the first stage" if len(variant.stages) > 1 else ""
    lines = [
        f"`{variant.full_name}`, measured on {measured.date} with torch {platform.get('torch')}, "
        f"{format_count(platform.get('threads') or 1, 'thread')}, {platform.get('cpu')} "
        f"({platform.get('capability')}): {variant.metric} by seed {values}. Weights of seed 0: "
        f"`{measured.digests[0]}`; after the first epoch{first_stage} "
        f"`{measured.first_epochs[0]}`.",
    ]
    if measured.kills:
        updates = ", ".join(f"{update:,}" for update in measured.kills)
        lines.append(
            f"Seed 0 was killed after {updates} updates and resumed: its weights have the same "
            "digest."
        )
    lines += ["", f"![{variant.metric} of {variant.full_name} by update]({curve_file(variant)})"]
    return lines


def curve_file(variant: Variant) -> str:
    """Return the name of the picture of the curve, in the folder of the pages."""
    return f"{variant.recipe}-{variant.name}.svg"


def render_index(recipes: Sequence[Recipe]) -> str:
    """Return the generated part of the page that lists all recipes, as Markdown: those with a
    result first."""
    results = [variant.measured for recipe in recipes for variant in recipe.variants.values()]
    measured = sum(result is not None for result in results)
    lines = [
        f"{measured} of {len(results)} variants are measured. Of the others, only the criterion is "
        "given.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    rows = list_rows(recipes)
    for row in sorted(rows, key=lambda row: (row[3] in (NOT_MEASURED, NOT_RUN), row[3] == NOT_RUN)):
        name = row[0].partition("/")[0]
        lines.append(f"| {' | '.join([f'[{row[0]}]({name}.md)', *row[1:]])} |")
    return "\n".join(lines)


def replace_generated(page: str, generated: str) -> str:
    """Return a page with the part between the markers replaced.

    Raises:
        ValueError: the markers are missing.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected a line {BEGIN} and a line {END}")
    return f"{head}{BEGIN}\n{generated}\n{END}{tail}"


def write_pages(folder: Path, config_dir: str | None = None) -> None:
    """Write the generated part of the pages in a folder: `index.md` and one per recipe."""
    recipes = read_recipes(config_dir)
    texts = {f"{recipe.name}.md": render_page(recipe) for recipe in recipes}
    for name, text in (texts | {"index.md": render_index(recipes)}).items():
        path = folder / name
        path.write_text(replace_generated(path.read_text("utf-8"), text), "utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
