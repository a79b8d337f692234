"""FedAvg as anybody would write it in PyTorch: ``torch.optim.SGD`` made anew for each client, averages of states."""

import time

import torch
from side import Pair, Problem, Trained, main
from torch import Tensor, nn

State = dict[str, Tensor]


def train(problem: Problem, rounds: int) -> Trained:
    """Train so many rounds."""
    module = problem.module()
    loss = nn.CrossEntropyLoss()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    ends_s = []
    for _ in range(rounds):
        cohort = [problem.clients[client] for client in torch.randperm(len(problem.clients))[: problem.cohort]]
        states = []
        for samples in cohort:
            module.load_state_dict(state)
            train_client(module, loss, samples, problem)
            states.append({name: value.clone() for name, value in module.state_dict().items()})
        state = average(states, [len(targets) for _, targets in cohort])
        ends_s.append(time.perf_counter())
    module.load_state_dict(state)
    return Trained(ends_s, module)


def train_client(module: nn.Module, loss: nn.Module, samples: Pair, problem: Problem) -> None:
    """One client's epochs."""
    inputs, targets = samples
    optimizer = torch.optim.SGD(module.parameters(), lr=problem.lr)
    for _ in range(problem.epochs):
        for batch in torch.randperm(len(targets)).split(problem.batch_size):
            optimizer.zero_grad()
            loss(module(inputs[batch]), targets[batch]).backward()
            optimizer.step()


def average(states: list[State], weights: list[int]) -> State:
    """The weighted mean of states."""
    total = sum(weights)
    return {
        name: sum(state[name] * (weight / total) for state, weight in zip(states, weights, strict=True))
        for name in states[0]
    }


if __name__ == "__main__":
    main(train)
