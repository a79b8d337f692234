"""Low-rank adapters (LoRA) of a causal language model, averaged in four ways.

    pip install 'fed[lora]' && python examples/lora.py

A GPT-2 of transformers is made from its configuration, so that nothing is downloaded, and learns to count by 1 to 6
modulo 24. Then nine clients, each of which counts by 7, 8 or 9, train adapters of its attention, which peft makes. What
travels are the adapters alone; where matrices move, the clients' adapters travel on to all, once the first round has
brought the matrices. The bytes are those of a client in the last round. It takes less than a minute on two cores.
"""

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fed

TOKENS = 24
LENGTH = 12
CLIENTS = 9
ROUNDS = 5
ALGORITHMS = ["fedavg", "ffa_lora", "fedex_lora", "flora", {"kind": "flora", "ranks": [1, 2]}]


def sequences(steps: list[int], count: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of the model, sequences that count by one of some steps from anywhere; and the same one place later.

    Args:
        steps: numbers to count by.
        count: number of sequences.
        seed: seed of their beginnings and steps.
    """
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(TOKENS, (count, 1), generator=generator)
    by = torch.tensor(steps)[torch.randint(len(steps), (count, 1), generator=generator)]
    tokens = (begins + by * torch.arange(LENGTH + 1)) % TOKENS
    return {"input_ids": tokens[:, :-1].clone()}, tokens[:, 1:].clone()


def base_model() -> nn.Module:
    """A small GPT-2 that counts by 1 to 6, trained here in a few seconds."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=LENGTH,
        n_embd=96,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(250):
        inputs, following = sequences([*range(1, 7)], 48, seed=step)
        optimizer.zero_grad()
        cross_entropy(model(**inputs).logits.transpose(1, 2), following).backward()
        optimizer.step()
    return model


def with_adapters(base: nn.Module) -> nn.Module:
    """The model with adapters of rank 2 in its attention, which alone are trained."""
    torch.manual_seed(1)
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted: nn.Module = get_peft_model(base, config)
    return adapted


def adapted_weights(model: nn.Module) -> Tensor:
    """All weights that have adapters, as one vector."""
    weights = [part.detach().flatten() for name, part in model.named_parameters() if "base_layer.weight" in name]
    return torch.cat(weights)


def main() -> None:
    """Train adapters with each algorithm, and print what it sends and what it reaches."""
    torch.set_num_threads(1)  # for matrices as small as these a second thread costs more than it does
    model = with_adapters(base_model())
    clients = {number: sequences([7 + number % 3], 48, seed=1000 + number) for number in range(CLIENTS)}
    data = fed.FederatedData(clients, sequences([7, 8, 9], 288, seed=999))
    experiment = fed.Experiment(
        model=None,
        local={"optimizer": "adam", "lr": 0.01, "epochs": 2, "batch_size": 16},
        rounds={"count": ROUNDS},
        simulation={"workers": 0},  # which would import transformers first, for longer than they save
    )
    model_bytes = sum(part.nbytes for part in model.parameters())
    print(
        f"{'algorithm':<20} {'bytes up':>9} {'model bytes / up':>17} {'bytes down':>11} {'model bytes / down':>19} "
        f"{'loss':>7} {'accuracy':>9}"
    )
    for algorithm in ALGORITHMS:
        run = fed.simulate(experiment.override({"algorithm": algorithm}), data=data, model=model)
        last = run.metrics[-1]
        up = last["bytes_up"] // CLIENTS
        down = last["bytes_down"] // CLIENTS
        name = str(algorithm) if isinstance(algorithm, str) else "flora, ranks 1 and 2"
        scores = f"{last['test_loss']:>7.4f} {last['test_accuracy']:>9.3f}"
        print(f"{name:<20} {up:>9,} {model_bytes / up:>16.0f}× {down:>11,} {model_bytes / down:>18.0f}× {scores}")
        if algorithm == "fedavg":
            averaged = run.model
    print(f"the model itself: {model_bytes:,} bytes")
    # One more round from FedAvg's model: its residual is what a product of means has left out.
    again = experiment.override({"algorithm": "fedex_lora", "rounds.count": 1})
    exact = fed.simulate(again, data=data, model=averaged).model
    gap = adapted_weights(exact) - adapted_weights(averaged)
    print(f"a round's gap, the norm of mean(BA) - mean(B) mean(A), scaled: {float(gap.norm()):.4f}")


if __name__ == "__main__":
    main()
