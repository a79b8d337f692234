"""HTML reports of a comparison or of a single run: one page that needs neither network nor scripts.

Shapes: see :mod:`fed.layout`.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from fed.config import yaml
from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment
from fed.quantities import bytes_text, count_text, duration_text
from fed.reports import charts
from fed.reports.conclusions import failures, finding
from fed.reports.plot_style import INK, Style, for_file, for_page, styles
from fed.reports.summary import ComparisonResult, Runs, has_finished
from fed.reports.tables import Column, columns
from fed.storage.run_folder import Run, environment

__all__ = ["Figure", "Page", "comparison_report", "comparison_svg", "run_report"]

_NOTE = (
    "Means over seeds, ± their sample standard deviation; of clients' own accuracy and of the mean of clients, ± the "
    "standard deviation over clients. To the target: through the first evaluated round whose test accuracy is at least "
    "the target, in the mean over the seeds that reach it; – where none does. Bytes are those of all clients in all "
    "rounds. Late and failed: shares of all tasks; staleness: how often the model had moved, on average, since those "
    "that replied were asked; idle: the share of clients' time in which they had no task."
)
_BY_CLIENTS = (
    "Where clients evaluate, each does so on samples of its own that it does not train on: its own model where it "
    "keeps one, otherwise the coordinator's. The test accuracy is then the mean weighted by these samples."
)
_TASKS = (
    "Late: answered too late to count. Failed: broke down, went away, or gave no valid answer. Staleness: how often "
    "the model had moved, on average, since those that replied were asked."
)
_OVER_CLIENTS = "client_accuracy_mean", "client_accuracy_std"
_WORST = "Worst tenth of clients: the mean over those with the lowest accuracies, rounded up to a whole client."


@dataclass(frozen=True)
class Figure:
    """A picture of a page: its heading, its SVG, and how to read it."""

    heading: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Page:
    """Values that the template shows. It escapes all but the pictures, whose texts matplotlib escapes."""

    title: str
    subject: str
    finding: str
    facts: Mapping[str, str]
    figures: Sequence[Figure]
    settings: str
    warning: str = ""
    table: Sequence[Column] = ()
    note: str = ""
    looks: Sequence[Style] = ()
    failures: Sequence[str] = ()
    changes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def html(self) -> str:
        """The page."""
        from jinja2 import Environment, StrictUndefined

        text = files("fed.reports").joinpath("report.html").read_text(encoding="utf-8")
        # names and reasons may hold markup
        template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        template.filters["for_page"] = for_page
        found = environment()
        command = shlex.join([Path(found["command"][0]).name, *found["command"][1:]])
        return template.from_string(text).render(page=self, ink=INK, command=command, environment=_flat(found))


def comparison_report(result: ComparisonResult, partitions: Mapping[str, charts.Partition | None]) -> str:
    """The page of a comparison.

    Args:
        result: what it found.
        partitions: heading → who holds what; None: not known.
    """
    variants, reference = result.comparison.variants(), _reference(result)
    failed = [row["name"] for row in result.rows if row["status"] == "failed"]
    warnings = ["Interrupted: only what was done until then is here."] if result.status == "interrupted" else []
    warnings += [f"Runs of {', '.join(failed)} failed; the reasons stand below the table."] if failed else []
    look = _look(result)
    return Page(
        title=result.comparison.name,
        subject="comparison",
        finding=finding(result),
        facts=_facts_of_comparison(result),
        figures=[*_curve_figures(result, look), *_partition_figures(partitions, "holds")],
        settings=yaml.dump({key: value for key, value in reference.dump().items() if key not in ("name", "seed")}),
        warning=" ".join(warnings),
        table=columns(result),
        note=f"{_NOTE} {_BY_CLIENTS} {_WORST}" if _where_clients_evaluate(result.runs) else _NOTE,
        looks=list(look.values()),
        failures=failures(result),
        changes={name: _differences(reference, variant) for name, variant in variants.items()},
    ).html()


def comparison_svg(result: ComparisonResult) -> str | None:
    """The curves as a file of their own; None where nothing was measured."""
    drawn = next(_curve_figures(result, _look(result)), None)
    return for_file(drawn.svg) if drawn else None


def run_report(run: Run, partition: charts.Partition | None) -> str:
    """The page of a single run, however it ended.

    Args:
        run: what to report; its summary may be that of an interrupted or failed run.
        partition: who held what, if that is known here.
    """
    summary, kind = run.summary, run.experiment.algorithm.kind
    accuracy, loss = summary["final_test_accuracy"], summary["final_test_loss"]
    idle = summary.get("idle_share")
    worst = summary.get("final_client_accuracy_worst_decile")
    measured = f"a test accuracy of {accuracy:.4f}" if accuracy is not None else None
    measured = measured or (f"a test loss of {loss:.4g}" if loss is not None else "nothing measured on test data")
    return Page(
        title=run.experiment.name,
        subject=f"run of {kind}",
        finding=f"{summary['rounds']} rounds of {kind} end with {measured}.",
        facts={
            "clients": str(summary["clients"]),
            "parameters": f"{summary['parameters']:,}",
            "seed": str(summary["seed"]),
            "bytes up": bytes_text(summary["bytes_up"]),
            "bytes down": bytes_text(summary["bytes_down"]),
            **({"worst tenth of clients": f"{worst:.4f}"} if worst is not None else {}),
            "simulated time": duration_text(summary["virtual_s"]),
            **({"clients' time without a task": f"{idle:.0%}"} if idle is not None else {}),
            "wall time": duration_text(summary["wall_s"]),
        },
        figures=[
            *_run_figures(run),
            *_partition_figures({"Who holds what": partition}, "trains on"),
        ],
        settings=yaml.dump(run.experiment.dump()),
        warning="" if has_finished(summary) else f"Status: {summary['status']}. {summary.get('reason') or ''}",
    ).html()


def _run_figures(run: Run) -> Iterator[Figure]:
    by_clients = _clients_evaluate(run.metrics)
    own = "mean of clients" if by_clients else "clients' own models"
    measures = {
        "accuracy": {
            "test accuracy": "test_accuracy",
            own: "client_accuracy_mean",
            "worst tenth of clients": "client_accuracy_worst_decile",
        },
        "loss": {"test loss": "test_loss", "training loss": "train_loss"},
    }
    panels: dict[str, dict[str, charts.Curve]] = {}
    for label, keys in measures.items():
        for name, key in keys.items():
            within = "client_accuracy_std" if key == "client_accuracy_mean" else None
            curve = charts.curve_of([run.metrics], key, within)
            if curve is not None:
                panels.setdefault(label, {})[name] = curve
    if panels:
        captions = [_BY_CLIENTS] if by_clients else []
        if any(own in lines for lines in panels.values()):
            captions.append(f"{own.capitalize()}: mean over clients; band: one standard deviation.")
            captions += [_WORST] if by_clients else []
        yield Figure("Round by round", charts.by_round(panels), " ".join(captions))
        label, lines = next(iter(panels.items()))
        svg = charts.against_time(lines, styles(dict.fromkeys(lines, "")), label=label)
        yield Figure(f"{label.capitalize()} against simulated time", svg, "")
    yield from _task_figures(run)


def _task_figures(run: Run) -> Iterator[Figure]:
    """Figures of late, failed and refused tasks, where there are any."""
    if not any(line.get(key) for line in run.metrics for key in ("late", "failed", "staleness_mean")):
        return
    panels: dict[str, dict[str, charts.Curve]] = {}
    for label, keys in {"clients": ("replied", "late", "failed"), "mean staleness": ("staleness_mean",)}.items():
        found = {key.removesuffix("_mean"): charts.curve_of([run.metrics], key) for key in keys}
        drawn = {name: curve for name, curve in found.items() if curve is not None and curve.mean.any()}
        panels |= {label: drawn} if drawn else {}
    late = [f"{of['client']} ({of['late']} of {of['tasks']} tasks)" for of in run.summary.get("most_late", ())]
    said = f"{_TASKS} Late most often: {', '.join(late)}." if late else _TASKS
    yield Figure("What became of tasks", charts.by_round(panels), said)


def _look(result: ComparisonResult) -> dict[str, Style]:
    return styles({row["name"]: row["algorithm"] for row in result.rows})


def _curve_figures(result: ComparisonResult, look: Mapping[str, Style]) -> Iterator[Figure]:
    target, seeds = result.comparison.target_accuracy, len(result.comparison.seeds)
    of_seeds = f"Line: mean over {seeds} seeds; band: one standard deviation. " if seeds > 1 else "One seed. "
    level = "What sends nothing is a level line at its final value in the right panel."
    by_clients = _where_clients_evaluate(result.runs)
    level += f" {_BY_CLIENTS}" if by_clients else ""
    for what, mark in (("accuracy", target), ("loss", None)):
        if lines := _lines(result.runs, f"test_{what}"):
            svg = charts.curves(lines, look, label=f"test {what}", target=mark)
            yield Figure(f"{what.capitalize()} against rounds and bytes", svg, of_seeds + level)
            svg = charts.against_time(lines, look, label=f"test {what}", target=mark)
            yield Figure(f"{what.capitalize()} against simulated time", svg, of_seeds)
            break
    within = "Line: mean over clients; band: one standard deviation."
    own = _lines({name: runs for name, runs in result.runs.items() if name not in by_clients}, *_OVER_CLIENTS)
    if own:
        svg = charts.curves(own, look, label="accuracy of clients' own models")
        yield Figure("Clients' own models", svg, f"Each client's model on the whole test set. {within}")
    if theirs := _lines(by_clients, *_OVER_CLIENTS):
        svg = charts.curves(theirs, look, label="mean accuracy of clients")
        yield Figure("Clients on samples of their own", svg, f"Each counts alike. {within}")
    if worst := _lines(by_clients, "client_accuracy_worst_decile"):
        svg = charts.curves(worst, look, label="accuracy of the worst tenth")
        yield Figure("Worst tenth of clients", svg, f"{_WORST} {of_seeds}")


def _where_clients_evaluate(runs: Runs) -> Runs:
    """Names of the variants whose clients evaluate."""
    return {
        name: by_seed
        for name, by_seed in runs.items()
        if any(_clients_evaluate(run["metrics"]) for run in by_seed.values())
    }


def _clients_evaluate(metrics: Iterable[Mapping[str, Any]]) -> bool:
    return any("client_accuracy_worst_decile" in line for line in metrics)


def _lines(runs: Runs, measure: str, within: str | None = None) -> dict[str, charts.Curve]:
    done = {
        name: [run["metrics"] for run in by_seed.values() if has_finished(run["summary"])]
        for name, by_seed in runs.items()
    }
    found = {name: charts.curve_of(metrics, measure, within) for name, metrics in done.items()}
    return {name: curve for name, curve in found.items() if curve is not None}


def _partition_figures(partitions: Mapping[str, charts.Partition | None], does: str) -> Iterator[Figure]:
    for heading, partition in partitions.items():
        if partition is None:
            continue
        clients, counts_KC, population = partition
        some = f" of {len(clients)}, evenly spaced among {population:,}," if len(clients) < population else ""
        by_class = "Below, how many of each class; an empty cell is none." if counts_KC.shape[1] > 1 else ""
        caption = f"Samples that each client{some} {does}. {by_class}"
        yield Figure(heading, charts.partition(clients, counts_KC), caption)


def _facts_of_comparison(result: ComparisonResult) -> dict[str, str]:
    comparison = result.comparison
    summaries = [
        run["summary"] for runs in result.runs.values() for run in runs.values() if has_finished(run["summary"])
    ]
    facts = {
        "variants": str(len(result.rows)),
        "seeds": ", ".join(map(str, comparison.seeds)),
    }
    for key, text in (("rounds", count_text), ("clients", count_text), ("parameters", "{:,}".format)):
        values = sorted({summary[key] for summary in summaries if summary.get(key) is not None})
        if values:
            facts[key] = " to ".join(dict.fromkeys(text(value) for value in (values[0], values[-1])))
    if comparison.target_accuracy is not None:
        facts["target accuracy"] = f"{comparison.target_accuracy:g}"
    return facts | {"wall time of all runs": duration_text(sum(summary["wall_s"] for summary in summaries))}


def _reference(result: ComparisonResult) -> Experiment:
    """Experiment to compare the others with: the base, or the first variant if the base is no experiment by itself."""
    try:
        return Experiment(**result.comparison.base)
    except InvalidExperiment:
        return next(iter(result.comparison.variants().values()))


def _differences(reference: Experiment, variant: Experiment) -> list[str]:
    ours, theirs = _flat(variant.dump()), _flat(reference.dump())
    return [
        f"{key}: {value}" for key, value in ours.items() if theirs.get(key) != value and key not in ("name", "seed")
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted path of a key → its value as YAML holds it.

    Example:
        >>> _flat({"local": {"lr": 0.1, "steps": None}, "hidden": [8]})
        {'local.lr': '0.1', 'local.steps': 'null', 'hidden': '[8]'}
    """
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = yaml.dump(value).removesuffix("...\n").strip()
    return flat
