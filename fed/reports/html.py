"""HTML reports of a comparison or of a single run: one page that needs neither network nor scripts.

The pages' texts and layout are in ``comparison.html`` and ``run.html``, which extend ``report.html``.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fed.config import yaml
from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment
from fed.quantities import bytes_text, duration_text
from fed.reports import charts, population
from fed.reports.conclusions import failures, finding, seen_by_coordinator
from fed.reports.graphs import picture
from fed.reports.plot_style import INK, Style, for_file, for_page, styles
from fed.reports.summary import ComparisonResult, Runs, has_finished
from fed.reports.tables import columns
from fed.storage.atomic_files import write_atomically
from fed.storage.run import Run
from fed.storage.run_folder import RunFolder, environment, written_to
from fed.storage.run_reader import RunState, json_of, metrics_lines, summary_of, totals

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Recorded", "comparison_report", "comparison_svg", "run_report", "write_run_report"]

_Partitions: TypeAlias = Mapping[str, population.Partition | None]


class Recorded(NamedTuple):
    """A run as its folder has it, without its model.

    Args:
        experiment: with every default resolved.
        metrics: one mapping for each round.
        summary: of the run; of one without an end, what its metrics say.
    """

    experiment: Experiment
    metrics: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]


def comparison_report(
    result: ComparisonResult, partitions: _Partitions, graphs: "Mapping[str, nx.Graph[int]] | None" = None
) -> str:
    """The page of a comparison.

    Args:
        result: what it found.
        partitions: heading → who holds what; None: not known.
        graphs: names of variants → the graph of their first round's neighbours.
    """
    variants, reference, look = result.comparison.variants(), _reference(result), _look(result)
    return _page(
        "comparison.html",
        partitions,
        environment(),
        result=result,
        finding=finding(result),
        summaries=[run["summary"] for runs in result.runs.values() for run in runs.values() if has_finished(run)],
        by_clients=bool(_where_clients_evaluate(result.runs)),
        figures=list(_curve_figures(result, look)),
        graphs={names: picture(graph) for names, graph in (graphs or {}).items() if population.can_be_drawn(graph)},
        columns=columns(result),
        looks=list(look.values()),
        failures=failures(result),
        settings=yaml.dump({key: value for key, value in reference.dump().items() if key not in ("name", "seed")}),
        changes={name: _differences(reference, variant) for name, variant in variants.items()},
    )


def comparison_svg(result: ComparisonResult) -> str | None:
    """The curves as a file of their own; None where nothing was measured."""
    return next((for_file(svg) for _, svg in _curve_figures(result, _look(result))), None)


def write_run_report(folder: Path) -> Path:
    """Draw the run in a folder, into its ``report.html``; returns the path of that page.

    Raises:
        InvalidInput: if there is no run, or it cannot be read or written to.
    """
    kept = RunFolder.existing(folder)
    experiment, metrics = kept.experiment(), [line for line, _ in metrics_lines(folder)]
    summary = summary_of(folder) or {"status": RunState.UNFINISHED, **totals(experiment, metrics)}
    found = json_of(folder / "environment.json") or environment()
    for name in ("given", "inputs", "sha256"):
        found.pop(name, None)
    partition, graph = population.read(json_of(folder / "population.json") or population.described(None))
    page = run_report(Recorded(experiment, metrics, summary), partition, graph, found)
    with written_to(folder):
        write_atomically(folder / "report.html", page.encode())
    return folder / "report.html"


def run_report(
    run: Run | Recorded,
    partition: population.Partition | None,
    graph: "nx.Graph[Any] | None" = None,
    found: Mapping[str, Any] | None = None,
) -> str:
    """The page of a single run, however it ended.

    Args:
        run: what to report; its summary may be that of an interrupted or failed run.
        partition: who held what, if that is known here.
        graph: of the first round's neighbours, where there are some; of a real peer's run, of its own in the last one.
        found: where it ran; here unless given.
    """
    figures = list(_run_figures(run.metrics))
    if graph is not None and population.can_be_drawn(graph):
        is_real = "peer" in run.summary
        figures.append(("This peer and its neighbours" if is_real else "Peers and their neighbours", picture(graph)))
    return _page(
        "run.html",
        {"Who holds what": partition},
        found or environment(),
        run=run,
        by_clients=_clients_evaluate(run.metrics),
        figures=figures,
        settings=yaml.dump(run.experiment.dump()),
        seen=seen_by_coordinator(run.experiment, run.metrics, is_deployed="nodes" in run.summary),
    )


def _page(template: str, partitions: _Partitions, found: Mapping[str, Any], **content: Any) -> str:
    """A page of its template, which escapes all but the pictures, whose texts matplotlib escapes.

    Args:
        template: its file.
        partitions: heading → who holds what; None: not known.
        found: where the runs ran.
        content: what else the template needs.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # names and reasons may hold markup
    pages = Environment(
        loader=PackageLoader("fed.reports", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"for_page": for_page, "bytes": bytes_text, "duration": duration_text}
    return pages.get_template(template).render(
        partitions=[(heading, one, charts.partition(*one[:2])) for heading, one in partitions.items() if one],
        ink=INK,
        command=shlex.join([Path(found["command"][0]).name, *found["command"][1:]]),
        environment=_flat(found),
        **content,
    )


def _run_figures(metrics: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Headings and pictures of a run."""
    own = "mean of clients" if _clients_evaluate(metrics) else "clients' own models"
    accuracies = {"test accuracy": "test_accuracy", own: "client_accuracy_mean"}
    accuracies["worst tenth of clients"] = "client_accuracy_worst_decile"
    losses = {"test loss": "test_loss", "training loss": "train_loss"}
    panels = {"accuracy": _run_curves(metrics, accuracies), "loss": _run_curves(metrics, losses)}
    panels = {label: lines for label, lines in panels.items() if lines}
    if panels:
        yield "Round by round", charts.by_round(panels)
        label, lines = next(iter(panels.items()))
        svg = charts.against_time(lines, styles(dict.fromkeys(lines, "")), label=label)
        yield f"{label.capitalize()} against simulated time", svg
    if apart := _run_curves(metrics, {"of peers' models from their mean": "consensus_distance"}):
        yield "Consensus by round", charts.by_round({"consensus distance": apart})
    if any("neighbours" in line for line in metrics):  # of a real peer, whose tasks are its own
        met = _run_curves(metrics, {"members": "members", "neighbours": "neighbours", "mixed without": "late"})
        yield "Members and neighbours", charts.by_round({"peers": met})
        return
    happened = [
        key for key in ("replied", "late", "failed", "staleness_mean") if any(line.get(key) for line in metrics)
    ]
    if set(happened) - {"replied"}:
        tasks = _run_curves(metrics, {key: key for key in happened if key != "staleness_mean"})
        staleness = _run_curves(metrics, {"staleness": "staleness_mean"} if "staleness_mean" in happened else {})
        panels = {"clients": tasks, "mean staleness": staleness}
        yield "What became of tasks", charts.by_round({label: lines for label, lines in panels.items() if lines})


def _run_curves(metrics: Sequence[Mapping[str, Any]], measures: Mapping[str, str]) -> dict[str, charts.Curve]:
    """Curves of one run's measures that were measured, by the name of the measure."""
    found = {name: charts.curve_of([metrics], measure) for name, measure in measures.items()}
    return {name: curve for name, curve in found.items() if curve is not None}


def _look(result: ComparisonResult) -> dict[str, Style]:
    return styles({row["name"]: row["algorithm"] for row in result.rows})


def _curve_figures(result: ComparisonResult, look: Mapping[str, Style]) -> Iterator[tuple[str, str]]:
    """Headings and pictures of a comparison."""
    for what, target in (("accuracy", result.comparison.target_accuracy), ("loss", None)):
        if lines := _lines(result.runs, f"test_{what}"):
            label = f"test {what}"
            yield (
                f"{what.capitalize()} against rounds and bytes",
                charts.curves(lines, look, label=label, target=target),
            )
            if charts.differ_by_way(lines.values()):
                svg = charts.against_bytes(lines, look, label=label, target=target)
                yield f"{what.capitalize()} against bytes up and down", svg
            svg = charts.against_time(lines, look, label=label, target=target)
            yield f"{what.capitalize()} against simulated time", svg
            break
    by_clients = _where_clients_evaluate(result.runs)
    others = {name: runs for name, runs in result.runs.items() if name not in by_clients}
    mean, worst = "client_accuracy_mean", "client_accuracy_worst_decile"
    for heading, runs, measure, label in (
        ("Clients' own models", others, mean, "accuracy of clients' own models"),
        ("Clients on samples of their own", by_clients, mean, "mean accuracy of clients"),
        ("Worst tenth of clients", by_clients, worst, "accuracy of the worst tenth"),
    ):
        if lines := _lines(runs, measure):
            yield heading, charts.curves(lines, look, label=label)


def _where_clients_evaluate(runs: Runs) -> Runs:
    """The variants whose clients evaluate."""
    return {
        name: by_seed
        for name, by_seed in runs.items()
        if any(_clients_evaluate(run["metrics"]) for run in by_seed.values())
    }


def _clients_evaluate(metrics: Iterable[Mapping[str, Any]]) -> bool:
    return any("client_accuracy_worst_decile" in line for line in metrics)


def _lines(runs: Runs, measure: str) -> dict[str, charts.Curve]:
    """A curve of each variant that has finished runs with this measure."""
    done = {name: [run["metrics"] for run in by_seed.values() if has_finished(run)] for name, by_seed in runs.items()}
    found = {name: charts.curve_of(metrics, measure) for name, metrics in done.items()}
    return {name: curve for name, curve in found.items() if curve is not None}


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
