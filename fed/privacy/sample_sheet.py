"""Sheet of a run whose clients' samples are private: each client has costs of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fed.privacy.accounting import most_costly
from fed.privacy.plan import PrivacyPlan
from fed.privacy.sheet import Costs, PrivacySheet, costs_of, facts_of, near, upward, values_of
from fed.quantities import counted, epsilon_text

__all__ = ["ClientCosts", "SampleCosts", "sample_costs_of", "sample_sheet_of"]

_FEW = 10
"""Number of clients up to which each has a line."""


@dataclass(frozen=True, kw_only=True)
class ClientCosts:
    """Costs of one client.

    Args:
        client: the client, or its place among all by size.
        samples: number of its samples.
        costs: costs of its plan.
    """

    client: str
    samples: int
    costs: Costs


@dataclass(frozen=True, kw_only=True)
class SampleCosts:
    """Costs of a run's clients.

    Args:
        clients: clients with a line, in ascending order of samples.
        worst: the client that loses most, whether or not it has a line.
        count: number of all clients.
        target: ε for which each client finds its noise; None where the noise is given.
    """

    clients: tuple[ClientCosts, ...]
    worst: ClientCosts
    count: int
    target: float | None = None


def sample_costs_of(
    plans: Mapping[int, PrivacyPlan],
    sizes: Mapping[int | str, int],
    *,
    noise_multipliers: Sequence[float] = (),
    target: float | None = None,
) -> SampleCosts:
    """Costs of clients: of each one where they are few, else of the smallest, the median and the largest.

    Args:
        plans: number of samples → plan of a client with so many.
        sizes: client → number of its samples, of at least one client.
        noise_multipliers: values > 0 of the key ``noise_multiplier`` to compare; some near the plans' unless given.
        target: ε for which each client finds its noise; None where the noise is given.
    """
    by_size = sorted(sizes, key=lambda client: (sizes[client], str(client)))
    shown = {str(client): sizes[client] for client in by_size}
    if len(sizes) > _FEW:
        places = {"smallest": 0, "median": len(by_size) // 2, "largest": -1}
        shown = {name: sizes[by_size[place]] for name, place in places.items()}
    delta = next(iter(plans.values())).delta
    most = most_costly({size: plan.releases() for size, plan in plans.items()}, delta)
    noises = sorted(set(noise_multipliers)) or near([plans[size].noise_multiplier for size in shown.values()])
    costs = {size: costs_of(plans[size], noises) for size in {*shown.values(), most}}
    return SampleCosts(
        clients=tuple(ClientCosts(client=name, samples=size, costs=costs[size]) for name, size in shown.items()),
        worst=ClientCosts(client="worst", samples=most, costs=costs[most]),
        count=len(sizes),
        target=target,
    )


def sample_sheet_of(costs: SampleCosts, name: str) -> PrivacySheet:
    """The sheet of a run.

    Args:
        costs: costs of its clients.
        name: name of the experiment.
    """
    worst = costs.worst.costs
    rounds = counted(worst.plan.rounds, "round")
    columns = {client.samples: client.costs for client in sorted(_columns(costs), key=lambda client: client.samples)}
    by_noise = [["noise_multiplier", *(counted(size, "sample") for size in columns)]]
    by_noise += [
        [f"{cells[0].noise_multiplier:.4g}", *(epsilon_text(cell.epsilon) for cell in cells)]
        for cells in zip(*(own.cells for own in columns.values()), strict=True)
    ]
    values = {
        "experiment": name,
        "epsilon": worst.epsilon,
        **values_of(worst.plan),
        "samples": costs.worst.samples,
        "clients": costs.count,
        "by_client": [_values(client) for client in costs.clients],
        "table": [
            {"noise_multiplier": cell.noise_multiplier, "samples": size, "epsilon": cell.epsilon}
            for size, own in columns.items()
            for cell in own.cells
        ],
    }
    return PrivacySheet(
        name=name,
        facts=tuple(_facts(costs)),
        tables={f"Clients, over {rounds}": _clients_table(costs), f"ε of {rounds} at one noise for all": by_noise},
        values=values,
    )


def _columns(costs: SampleCosts) -> list[ClientCosts]:
    """Clients that are compared over noise multipliers: the smallest, the median, the largest, and the worst."""
    shown = costs.clients
    return [shown[0], shown[len(shown) // 2], shown[-1], costs.worst]


def _facts(costs: SampleCosts) -> list[tuple[str, str]]:
    """Lines of the sheet, of the client that loses most where clients differ."""
    worst = costs.worst
    plan = worst.costs.plan
    who = f"the client with {counted(worst.samples, 'sample')}"
    named = {
        "ε": f"of {who}, which loses most of {counted(costs.count, 'client')}",
        "amplification": f"that is of {who}",
        "budget": f"that is of {who}; one that cannot afford another task is not asked any more",
    }
    facts = []
    for fact, text in facts_of(worst.costs):
        if fact == "mechanism" and costs.target is not None:
            noise = f"noise_multiplier by client, for ε = {costs.target:g} of each"
            facts.append((fact, f"{plan.mechanism}; {noise}"))
            continue
        facts.append((fact, f"{text}; {named[fact]}" if fact in named else text))
        if fact == "composition":
            steps = f"{plan.releases_a_round} in a round, each of them a release; that is of {who}"
            facts.append(("local steps", steps))
    return facts


def _clients_table(costs: SampleCosts) -> list[list[str]]:
    """Rows of the clients' table, the headings first."""
    budget = costs.worst.costs.plan.budget_epsilon
    headings = ["client", "samples", "q", "steps a round", "noise_multiplier", "ε"]
    if budget is not None:
        headings += [f"rounds for ε = {budget:g}", "noise for it"]
    rows = [headings]
    for client in costs.clients:
        plan = client.costs.plan
        row = [
            client.client,
            str(client.samples),
            f"{plan.sampling:.3g}",
            str(plan.releases_a_round),
            f"{plan.noise_multiplier:.4g}",
            epsilon_text(client.costs.epsilon),
        ]
        if budget is not None:
            noise = client.costs.noise_for_budget
            row += [str(client.costs.rounds_within_budget), "none" if noise is None else upward(noise)]
        rows.append(row)
    return rows


def _values(client: ClientCosts) -> dict[str, Any]:
    plan = client.costs.plan
    return {
        "client": client.client,
        "samples": client.samples,
        "sampling": plan.sampling,
        "steps_a_round": plan.releases_a_round,
        "noise_multiplier": plan.noise_multiplier,
        "epsilon": client.costs.epsilon,
        "rounds_within_budget": client.costs.rounds_within_budget,
        "noise_for_budget": client.costs.noise_for_budget,
    }
