"""HTML reports of a comparison or of a single run: one page that needs no network, and can be read without its script.

The pages' texts and layout are in ``comparison.html`` and ``run.html``, which extend ``report.html``.

Shapes: see :mod:`fed.vectors.layout`.
"""

import base64
import hashlib
import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fed.config import yaml
from fed.config.experiment import Experiment
from fed.errors import InvalidExperiment
from fed.quantities import bytes_text, duration_text, epsilon_text, mean_text, score_text
from fed.reports import charts, heat_maps, population
from fed.reports.client_scores import ClientScores, last_client_scores
from fed.reports.conclusions import failures, finding, seen_by_coordinator
from fed.reports.difference_texts import difference_notes
from fed.reports.graphs import picture
from fed.reports.plot_style import INK, NARROW_INCH, Style, for_file, for_page, styles
from fed.reports.private_runs import privacy_note
from fed.reports.summary import ComparisonResult, Runs, has_finished
from fed.reports.tables import columns, difference_columns
from fed.storage.atomic_files import write_atomically
from fed.storage.run import Run
from fed.storage.run_folder import environment, written_to
from fed.storage.run_reader import json_of
from fed.storage.scores import LOSS, NamedMetric, metrics_of

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["comparison_report", "comparison_svg", "run_report", "write_run_report"]

_SCRIPT = Path(__file__).with_name("page.js")
_Partitions: TypeAlias = Mapping[str, population.Partition | None]


class _Figure(NamedTuple):
    """Picture of a page.

    Args:
        heading: heading above the picture.
        note: name of the template's note beneath it; empty for none.
        svg: picture as SVG.
        narrow: the same drawn for a narrow page; empty where one serves both.
    """

    heading: str
    note: str
    svg: str
    narrow: str = ""


def _figure(heading: str, note: str, draw: Callable[..., str]) -> _Figure:
    """A picture drawn twice, for a wide page and for a narrow one.

    Args:
        heading: heading above the picture.
        note: name of the template's note beneath it; empty for none.
        draw: function that draws it, of its width.
    """
    return _Figure(heading, note, draw(), draw(width_inch=NARROW_INCH))


def comparison_report(
    result: ComparisonResult,
    partitions: _Partitions,
    graphs: "Mapping[str, nx.Graph[int]] | None" = None,
    clients: ClientScores | None = None,
) -> str:
    """The page of a comparison.

    Args:
        result: result of the comparison.
        partitions: heading → samples by client and class; None: not known.
        graphs: names of variants → graph of their first round's neighbours.
        clients: names of variants → last value of the first metric of each client, over all seeds.
    """
    variants = result.comparison.variants()
    reference = _reference(result)
    look = _look(result)
    metric = result.metrics()[0]
    return _page(
        "comparison.html",
        partitions,
        environment(),
        result=result,
        metric=metric,
        finding=finding(result),
        summaries=[run["summary"] for runs in result.runs.values() for run in runs.values() if has_finished(run)],
        by_clients=bool(_where_clients_evaluate(result.runs, metric)),
        figures=[*_curve_figures(result, look), *_client_figures(result, look, clients or {})],
        graphs={names: picture(graph) for names, graph in (graphs or {}).items() if population.can_be_drawn(graph)},
        columns=columns(result),
        difference_columns=difference_columns(result),
        difference_notes=difference_notes(result),
        looks=list(look.values()),
        failures=failures(result),
        privacy=privacy_note(result.runs),
        # Variants have names and seeds of their own, which are in the tables.
        settings=yaml.dump({key: value for key, value in reference.dump().items() if key not in ("name", "seed")}),
        changes={name: _changed_keys(reference, variant) for name, variant in variants.items()},
    )


def comparison_svg(result: ComparisonResult) -> str | None:
    """The curves as a file of their own; None where nothing was measured."""
    return next((for_file(figure.svg) for figure in _curve_figures(result, _look(result))), None)


def write_run_report(folder: Path) -> Path:
    """Draw the run in a folder, into its ``report.html``; returns the path of that page.

    Raises:
        InvalidInput: if there is no run, or it cannot be read or written to.
    """
    run = Run.load(folder)
    # The environment of the run: a report may be drawn on another machine.
    found = json_of(folder / "environment.json") or environment()
    # A resume needs these; they tell a reader nothing.
    for name in ("given", "inputs", "sha256"):
        found.pop(name, None)
    drawn = population.read(json_of(folder / "population.json") or population.described(None))
    page = run_report(run, *drawn, found, last_client_scores(folder))
    with written_to(folder):
        write_atomically(folder / "report.html", page.encode())
    return folder / "report.html"


def run_report(
    run: Run,
    partition: population.Partition | None,
    graph: "nx.Graph[Any] | None" = None,
    confusion: population.Confusion | None = None,
    found: Mapping[str, Any] | None = None,
    clients: ClientScores | None = None,
) -> str:
    """The page of a single run, however it ended.

    Args:
        run: run to report, which may be interrupted or failed.
        partition: samples by client and class; None: not known here.
        graph: graph of the first round's neighbours, where there are some; for a real peer's run the graph of its own
            neighbours in the last round.
        confusion: test samples that the final model takes for each class, where it classifies.
        found: versions and hardware of the run; those of this process unless given.
        clients: last scores of each client.
    """
    metrics = metrics_of(run.summary)
    figures = list(_run_figures(run, clients or {}))
    if confusion is not None and confusion.counts_CC is not None:
        draw = partial(heat_maps.confusion, confusion.counts_CC, confusion.names)
        figures.append(_figure("Confusion matrix", "confusion", draw))
    if graph is not None and population.can_be_drawn(graph):
        is_real = "peer" in run.summary
        heading = "This peer and its neighbours" if is_real else "Peers and their neighbours"
        figures.append(_Figure(heading, "own graph" if is_real else "graph", picture(graph)))
    return _page(
        "run.html",
        {"Who holds what": partition},
        found or environment(),
        run=run,
        metric=metrics[0],
        metrics=metrics,
        by_clients=_clients_evaluate(run.metrics, metrics[0]),
        confusion=confusion,
        figures=figures,
        settings=yaml.dump(run.experiment.dump()),
        seen=seen_by_coordinator(run.experiment, run.metrics, is_deployed="nodes" in run.summary),
    )


def _page(template: str, partitions: _Partitions, found: Mapping[str, Any], **content: Any) -> str:
    """A page of its template, which escapes all but the pictures, whose texts matplotlib escapes.

    Args:
        template: file name of the template.
        partitions: heading → samples by client and class; None: not known.
        found: versions and hardware of the runs.
        content: further values that the template needs.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    script = _SCRIPT.read_text(encoding="utf-8")
    # Names and reasons may hold markup.
    pages = Environment(
        loader=PackageLoader("fed.reports", ""),
        autoescape=True,
        undefined=StrictUndefined,  # a slip in a template must fail, not leave a gap in the page
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {
        "for_page": for_page,
        "bytes": bytes_text,
        "duration": duration_text,
        "epsilon": epsilon_text,
        "mean": mean_text,
        "score": score_text,
    }
    return pages.get_template(template).render(
        partitions=[
            (one, _figure(heading, "", partial(heat_maps.partition, *one[:2])))
            for heading, one in partitions.items()
            if one
        ],
        ink=INK,
        script=script,
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        command=shlex.join([Path(found["command"][0]).name, *found["command"][1:]]),
        environment=_flat(found),
        **content,
    )


def _run_figures(run: Run, clients: ClientScores) -> Iterator[_Figure]:
    """Pictures of a run."""
    metrics = run.metrics
    first, *others = metrics_of(run.summary)
    panels = {
        first.words: _scores(metrics, first),
        "loss": _run_curves(metrics, {"test loss": LOSS.test, "training loss": "train_loss"}),
    }
    panels = {label: lines for label, lines in panels.items() if lines}
    if panels:
        yield _figure("Round by round", "evaluation", partial(charts.by_round, panels))
        label, lines = next(iter(panels.items()))
        draw = partial(charts.against_time, lines, styles(dict.fromkeys(lines, "")), label=label)
        yield _figure(f"{label[:1].upper()}{label[1:]} against simulated time", "", draw)
    panels = {metric.words: lines for metric in others if (lines := _scores(metrics, metric))}
    # Two panels a picture: more are too narrow to be read.
    for first_of_two in range(0, len(panels), 2):
        pair = dict(itertools.islice(panels.items(), first_of_two, first_of_two + 2))
        yield _figure("Other metrics by round", "evaluation", partial(charts.by_round, pair))
    values = clients.get(first.name)
    if values is not None and len(values) > 1:
        draw = partial(charts.distribution, {"": values}, styles({"": ""}), label=f"{first.words} of clients")
        yield _figure("Distribution over clients", "distribution", draw)
    if spent := _run_curves(metrics, {"ε": "epsilon"}):
        yield _figure("Privacy spent by round", "privacy", partial(charts.by_round, {"ε": spent}))
    if apart := _run_curves(metrics, {"of peers' models from their mean": "consensus_distance"}):
        yield _figure("Consensus by round", "consensus", partial(charts.by_round, {"consensus distance": apart}))
    if any("neighbours" in line for line in metrics):  # of a real peer, whose tasks are its own
        met = _run_curves(metrics, {"members": "members", "neighbours": "neighbours", "mixed without": "late"})
        yield _figure("Members and neighbours", "members", partial(charts.by_round, {"peers": met}))
        return
    happened = [
        key for key in ("replied", "late", "failed", "staleness_mean") if any(line.get(key) for line in metrics)
    ]
    if set(happened) - {"replied"}:
        tasks = _run_curves(metrics, {key: key for key in happened if key != "staleness_mean"})
        staleness = _run_curves(metrics, {"staleness": "staleness_mean"} if "staleness_mean" in happened else {})
        panels = {"clients": tasks, "mean staleness": staleness}
        panels = {label: lines for label, lines in panels.items() if lines}
        yield _figure("What became of tasks", "tasks", partial(charts.by_round, panels))


def _run_curves(metrics: Sequence[Mapping[str, Any]], measures: Mapping[str, str]) -> dict[str, charts.Curve]:
    """Curves of one run's measures that were measured, by the name of the measure."""
    found = {name: charts.curve_of([metrics], measure) for name, measure in measures.items()}
    return {name: curve for name, curve in found.items() if curve is not None}


def _scores(metrics: Sequence[Mapping[str, Any]], metric: NamedMetric) -> dict[str, charts.Curve]:
    """Curves of a metric: on the test set, and over clients."""
    if metric == LOSS:
        return {}
    own = "mean of clients" if _clients_evaluate(metrics, metric) else "clients' own models"
    measures = {f"test {metric.words}": metric.test, own: metric.of_clients("mean")}
    return _run_curves(metrics, {**measures, "worst tenth of clients": metric.of_clients("worst_decile")})


def _look(result: ComparisonResult) -> dict[str, Style]:
    return styles({row["name"]: row["algorithm"] for row in result.rows})


def _curve_figures(result: ComparisonResult, look: Mapping[str, Style]) -> Iterator[_Figure]:
    """Pictures of a comparison's curves."""
    first = result.metrics()[0]
    target = result.comparison.target
    # The loss is drawn only where no run has measured the metric.
    for metric in (first, LOSS):
        if lines := _lines(result.runs, metric.test):
            label = f"test {metric.words}"
            level = target if metric == first else None
            draw = partial(charts.curves, lines, look, label=label, target=level)
            yield _figure(f"{metric.title} against rounds and bytes", "curves", draw)
            if charts.differ_by_way(lines.values()):
                draw = partial(charts.curves, lines, look, label=label, target=level, by_way=True)
                yield _figure(f"{metric.title} against bytes up and down", "bytes", draw)
            draw = partial(charts.against_time, lines, look, label=label, target=level)
            yield _figure(f"{metric.title} against simulated time", "seeds", draw)
            break
    by_clients = _where_clients_evaluate(result.runs, first)
    # Scores on clients' own samples and on one test set do not compare: they have pictures of their own.
    others = {name: runs for name, runs in result.runs.items() if name not in by_clients}
    mean = first.of_clients("mean")
    worst = first.of_clients("worst_decile")
    for heading, note, runs, measure, label in (
        ("Clients' own models", "own", others, mean, f"{first.words} of clients' own models"),
        ("Clients on samples of their own", "clients", by_clients, mean, f"mean {first.words} of clients"),
        ("Worst tenth of clients", "worst", by_clients, worst, f"{first.words} of the worst tenth"),
    ):
        if lines := _lines(runs, measure):
            yield _figure(heading, note, partial(charts.curves, lines, look, label=label))


def _client_figures(result: ComparisonResult, look: Mapping[str, Style], clients: ClientScores) -> Iterator[_Figure]:
    """Picture of the first metric's distribution over clients by variant."""
    if drawn := {name: clients[name] for name in look if len(clients.get(name, ())) > 1}:
        label = f"{result.metrics()[0].words} of clients"
        draw = partial(charts.distribution, drawn, look, label=label)
        yield _figure("Distribution over clients", "distribution", draw)


def _where_clients_evaluate(runs: Runs, metric: NamedMetric) -> Runs:
    """The variants whose clients evaluate."""
    return {
        name: by_seed
        for name, by_seed in runs.items()
        if any(_clients_evaluate(run["metrics"], metric) for run in by_seed.values())
    }


def _clients_evaluate(metrics: Iterable[Mapping[str, Any]], metric: NamedMetric) -> bool:
    return any(metric.of_clients("worst_decile") in line for line in metrics)


def _lines(runs: Runs, measure: str) -> dict[str, charts.Curve]:
    """A curve of each variant that has finished runs with this measure."""
    done = {name: [run["metrics"] for run in by_seed.values() if has_finished(run)] for name, by_seed in runs.items()}
    found = {name: charts.curve_of(metrics, measure) for name, metrics in done.items()}
    return {name: curve for name, curve in found.items() if curve is not None}


def _reference(result: ComparisonResult) -> Experiment:
    """Experiment to compare the others with: the base, or the first variant if the base is no experiment by itself."""
    try:
        return Experiment(**result.comparison.base)  # the base may lack what each variant brings
    except InvalidExperiment:
        return next(iter(result.comparison.variants().values()))


def _changed_keys(reference: Experiment, variant: Experiment) -> list[str]:
    ours = _flat(variant.dump())
    theirs = _flat(reference.dump())
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
