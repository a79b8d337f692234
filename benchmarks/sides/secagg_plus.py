"""Flower's SecAgg+: all stages of a client, and the last stage of the server, on messages that are made here.

Every client is every other's neighbour. A server that would take over three minutes is estimated: its parts are timed
once each and multiplied. The sizes come as JSON on the command line, and the last line of output is JSON.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt, generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_subtraction
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen, share_keys_plaintext_concat
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow, WorkflowState
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
)
from flwr.supercore.task_identity import TaskIdentity

CONFIGS = "secaggplus_configs"
CLIPPING = 8.0
QUANTISED = 1 << 22
MODULUS = 1 << 32
MOST_S = 180.0


class Size(NamedTuple):
    """Size of a session.

    Args:
        clients: n, with the nodes 1 … n.
        numbers: number of the model's parameters.
        staying: clients that send a masked message, the first ones.
        threshold: shares that recover a secret.
    """

    clients: int
    numbers: int
    staying: int
    threshold: int

    @property
    def nodes(self) -> list[int]:
        """Numbers of the clients."""
        return list(range(1, self.clients + 1))


class Masked(NamedTuple):
    """Clients after their masked messages.

    Args:
        spent_s: seconds of one of them, by stage.
        public: keys of all.
        vector: masked message of the timed client.
    """

    spent_s: Mapping[str, float]
    public: Mapping[int, list[bytes]]
    vector: list[np.ndarray]


def clients(size: Size) -> Masked:
    """All stages of a client."""
    first, *others = nodes = size.nodes
    contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in nodes}
    spent_s: dict[str, float] = defaultdict(float)
    values = np.random.default_rng(0).normal(0, 0.1, size.numbers).astype(np.float32)
    trained = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([values]), 1, {})

    def ask(stage: str, node: int, said: Mapping[str, Any]) -> Any:
        record = RecordDict({CONFIGS: ConfigRecord(dict(said))})
        asked = Message(record, dst_node_id=node, message_type="train", group_id="1")
        fitted = Message(fitres_to_recorddict(trained, keep_input=True), reply_to=asked)
        began_s = perf_counter()
        replied = secaggplus_mod(asked, contexts[node], lambda *_: fitted)
        if node == first:
            spent_s[stage] += perf_counter() - began_s
        return replied.content.config_records[CONFIGS]

    ranges = {"clipping_range": CLIPPING, "target_range": QUANTISED, "mod_range": MODULUS, "max_weight": 1000.0}
    counts = {"sample_num": size.clients, "share_num": size.clients, "threshold": size.threshold}
    replies = {node: ask("sharing", node, {"stage": "setup", **counts, **ranges}) for node in nodes}
    public = {node: [reply["pk1"], reply["pk2"]] for node, reply in replies.items()}
    ask("sharing", first, {**{str(node): keys for node, keys in public.items()}, "stage": "share_keys"})
    part = create_shares(bytes(32), 2, 2)[0]
    own = bytes_to_public_key(public[first][1])
    boxes = []
    for node in others:
        private = bytes_to_private_key(contexts[node].state.config_records["secaggplus_state"]["sk2"])
        content = share_keys_plaintext_concat(node, first, part, part)
        boxes.append(encrypt(generate_shared_key(private, own), content))
    masked = ask("masking", first, {"stage": "collect_masked_vectors", "ctxts": boxes, "srcs": others})
    active = nodes[: size.staying]
    dead = nodes[size.staying :]
    ask("unmasking", first, {"stage": "unmask", "active_nids": active, "dead_nids": dead})
    return Masked(spent_s, public, [bytes_to_ndarray(one) for one in masked["masked_params"]])


@cache
def shares(clients: int, staying: int, threshold: int) -> tuple[list[list[bytes]], list[float]]:
    """Shares of a seed and of a private key that the survivors hold, and the seconds to recover each.

    Args:
        clients: n, and so many shares.
        staying: survivors.
        threshold: shares that recover a secret.
    """
    secrets = os.urandom(32), private_key_to_bytes(generate_key_pairs()[0])
    held = [create_shares(secret, threshold, clients)[:staying] for secret in secrets]
    return held, [seconds(partial(combine_shares, one)) for one in held]


def server(size: Size, masked: Masked) -> tuple[float, bool]:
    """Seconds of the server's last stage, and whether it was run."""
    nodes = size.nodes
    lost = size.clients - size.staying
    active = set(nodes[: size.staying])
    held, recovery_s = shares(size.clients, size.staying, size.threshold)
    shapes = [array.shape for array in masked.vector]
    mask_s = seconds(lambda: parameters_subtraction(masked.vector, pseudo_rand_gen(bytes(32), MODULUS, shapes)))
    masks = size.staying + lost * (size.clients - 1)
    estimate_s = size.staying * recovery_s[0] + lost * recovery_s[1] + masks * mask_s
    if estimate_s > MOST_S:
        return estimate_s, False
    state = WorkflowState(
        sampled_node_ids=set(nodes),
        active_node_ids=active,
        num_shares=size.clients,
        threshold=size.threshold,
        clipping_range=CLIPPING,
        quantization_range=QUANTISED,
        mod_range=MODULUS,
        nid_to_neighbours={node: set(nodes) for node in nodes},
        nid_to_publickeys=dict(masked.public),
        aggregate_ndarrays=masked.vector,
    )

    def replies(messages: Sequence[Any], timeout: float | None) -> list[Any]:
        answers = []
        for place, asked in enumerate(messages):
            revealed = [held[node not in active][place] for node in nodes]
            record = RecordDict({CONFIGS: ConfigRecord({"nids": nodes, "shares": revealed})})
            answers.append(Message(record, reply_to=asked))
        return answers

    context = LegacyContext(Context(1, 0, {}, RecordDict({"config": ConfigRecord({"current_round": 1})}), {}))
    workflow = SecAggPlusWorkflow(1.0, size.threshold)
    return seconds(lambda: workflow.unmask_stage(SimpleNamespace(send_and_receive=replies), context, state)), True


def seconds(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    began_s = perf_counter()
    action()
    return perf_counter() - began_s


def main() -> None:
    """Measure sessions of all sizes, and print the times."""
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    rows = []
    for size in (Size(*numbers) for numbers in json.loads(sys.argv[1])):
        masked = clients(size)
        spent_s, was_run = server(size, masked)
        row = {"clients": {f"{stage}_s": spent for stage, spent in masked.spent_s.items()}}
        rows.append({**row, "coordinator": {"unmasking_s": spent_s}, "was_run": was_run})
    print(json.dumps({"version": version("flwr"), "rows": rows}), flush=True)


if __name__ == "__main__":
    main()
