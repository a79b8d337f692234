"""Plans of tensor parallelism: which modules share their work out, and how.

Shapes: see :mod:`fed.vectors.layout`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from fed.config.parallel import Style
from fed.errors import InvalidExperiment, InvalidModel
from fed.vectors.tensors import nn

__all__ = ["plan_for"]

_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU),
    *(nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Dropout, nn.Identity),
)
_OF_TRANSFORMERS: dict[str, Style | None] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "gather",
    "colwise_gather_output": "gather",
    "embedding_rowwise": "row",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "partial",
    "gather": None,
}


def plan_for(module: "nn.Module", given: Mapping[str, Style] | None) -> dict[str, Style]:
    """Style of each module that is shared out, by its name.

    Args:
        module: the model.
        given: shell pattern of names → style, as the experiment says; None: what the model says itself, as those of
            ``transformers`` do, or else what its layers of PyTorch allow.

    Raises:
        InvalidExperiment: if a pattern fits no module, or a module cannot be shared out so.
        InvalidModel: if nothing is to be shared out.

    Example:
        >>> plan_for(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)), None)
        {'0': 'column', '2': 'row', '3': 'gather'}
    """
    if given is not None:
        plan = _named(module, given, "local.parallel.plan")
    else:
        plan = _named(module, _of_transformers(module), "tp_plan of the model")
        plan = plan or _without_ties(module, dict(_found(module, "")))
    if not plan:
        raise InvalidModel(
            "a model must have linear layers, embeddings or attention of PyTorch to be shared out by local.parallel: "
            "tensor, or a plan, got neither: write local.parallel.plan, or use another local.parallel"
        )
    _check_ties(module, plan)
    return plan


def _named(module: "nn.Module", given: Mapping[str, Style], key: str) -> dict[str, Style]:
    """Style of each module whose name fits a pattern."""
    plan: dict[str, Style] = {}
    layers = dict(module.named_modules())
    for pattern, style in given.items():
        names = [name for name in layers if name and fnmatchcase(name, pattern)]
        if not names:
            raise InvalidExperiment(
                f"{key} must have patterns that fit names of the model's modules, got {pattern!r}, which fits none of "
                f"{', '.join(list(layers)[1:9])}"
            )
        for name in names:
            _check_style(name, layers[name], style)
            plan[name] = style
    return plan


def _check_style(name: str, layer: "nn.Module", style: Style) -> None:
    takes: dict[Style, tuple[Any, str]] = {
        "column": (nn.Linear, "a linear layer"),
        "row": ((nn.Linear, nn.Embedding), "a linear layer or an embedding"),
        "gather": (nn.Linear, "a linear layer"),
        "heads": (nn.MultiheadAttention, "a torch.nn.MultiheadAttention"),
        "sequence": (nn.Module, "a module"),
        "partial": (nn.Module, "a module"),
    }
    kinds, words = takes[style]
    fits = isinstance(layer, kinds)
    if fits and isinstance(layer, nn.Embedding):
        fits = _is_plain_embedding(layer)
        words = "an embedding without padding_idx, max_norm, sparse or scale_grad_by_freq"
    if fits and isinstance(layer, nn.MultiheadAttention):
        fits = _is_plain_attention(layer)
        words = "attention with one width for queries, keys and values, and without bias_k and add_zero_attn"
    if not fits:
        raise InvalidExperiment(
            f"local.parallel.plan must name {words} for {style}, got {name}, a {type(layer).__name__}: choose another "
            "style, or leave it out"
        )


def _of_transformers(module: "nn.Module") -> dict[str, Style]:
    """Plan that a model of ``transformers`` says; empty for any other."""
    said: dict[str, Any] = {}
    config = getattr(module, "config", None)
    prefix = getattr(module, "base_model_prefix", "")
    of_base = getattr(config, "base_model_tp_plan", None) or {}
    has_base = bool(prefix) and isinstance(getattr(module, prefix, None), nn.Module)
    said |= {f"{prefix}.{pattern}" if has_base else pattern: style for pattern, style in of_base.items()}
    for attribute in ("_tp_plan", "tp_plan"):
        of_model = getattr(module, attribute, None)
        said |= dict(of_model) if isinstance(of_model, Mapping) else {}
    layers = [name for name, _ in module.named_modules() if name]
    plan: dict[str, Style] = {}
    for pattern, style in said.items():
        if style not in _OF_TRANSFORMERS:
            raise InvalidModel(
                f"the model's tp_plan must have the styles {', '.join(_OF_TRANSFORMERS)}, got {style!r} for {pattern}: "
                "write local.parallel.plan"
            )
        ours = _OF_TRANSFORMERS[style]
        # Such a plan names modules, too, that a version of the model does not have.
        if ours is not None and any(fnmatchcase(name, pattern) for name in layers):
            plan[pattern] = ours
    return plan


def _found(module: "nn.Module", prefix: str) -> Iterator[tuple[str, Style]]:
    """Styles of PyTorch's own layers."""
    if isinstance(module, nn.MultiheadAttention):
        if _is_plain_attention(module):
            yield prefix.removesuffix("."), "heads"
        return
    if isinstance(module, nn.Embedding):
        if _is_plain_embedding(module):
            yield prefix.removesuffix("."), "row"
        return
    if isinstance(module, nn.Linear):
        yield prefix.removesuffix("."), "gather"
        return
    pairs = dict(_pairs(module))
    for name, child in module.named_children():
        if name in pairs:
            yield f"{prefix}{name}", pairs[name]
        else:
            yield from _found(child, f"{prefix}{name}.")


def _pairs(module: "nn.Module") -> Iterator[tuple[str, Style]]:
    """Two linear layers with nothing but functions of single numbers between them: one by columns, one by rows."""
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        yield "linear1", "column"
        yield "linear2", "row"
    first: str | None = None
    for name, child in module.named_children() if isinstance(module, nn.Sequential) else ():
        if isinstance(child, nn.Linear):
            if first is None:
                first = name
                continue
            yield first, "column"
            yield name, "row"
            first = None
        elif not isinstance(child, _ELEMENTWISE):
            first = None


def _without_ties(module: "nn.Module", plan: dict[str, Style]) -> dict[str, Style]:
    """Plan without those modules whose parameters others use in another way."""
    while True:
        tied = _tied_otherwise(module, plan)
        if not tied:
            return plan
        plan = {name: style for name, style in plan.items() if name not in tied}


def _check_ties(module: "nn.Module", plan: Mapping[str, Style]) -> None:
    if tied := sorted(_tied_otherwise(module, plan)):
        raise InvalidExperiment(
            f"a module that is shared out by local.parallel: tensor must share no parameter with one that is not, got "
            f"{tied[0]}: leave it out of the plan, or name both, an embedding as row and its output layer as gather"
        )


def _tied_otherwise(module: "nn.Module", plan: Mapping[str, Style]) -> set[str]:
    """Names of modules of a plan with a parameter that others cut along another dimension, or not at all."""
    cuts: dict[int, Counter[object]] = {}
    holders: dict[int, set[str]] = {}
    for name, layer in module.named_modules():
        # The output layer of attention goes with it.
        owner = name.removesuffix(".out_proj")
        style = plan.get(owner if plan.get(owner) == "heads" else name)
        for key, part in layer.named_parameters(recurse=False):
            cuts.setdefault(id(part), Counter())[_cut_of(layer, style, key)] += 1
            holders.setdefault(id(part), set()).add(name)
    return {name for part, kinds in cuts.items() if len(kinds) > 1 for name in holders[part] if name in plan}


def _cut_of(layer: "nn.Module", style: Style | None, key: str) -> object:
    """Form in which a style cuts a parameter: two modules must cut one that they share alike."""
    if style is None or style in ("sequence", "partial"):
        return style
    if style == "heads":
        return "heads"
    by_rows = isinstance(layer, nn.Embedding) or style in ("column", "gather")
    return 0 if by_rows else (1 if key == "weight" else None)


def _is_plain_embedding(layer: "nn.Embedding") -> bool:
    return layer.padding_idx is None and layer.max_norm is None and not (layer.sparse or layer.scale_grad_by_freq)


def _is_plain_attention(layer: "nn.MultiheadAttention") -> bool:
    return layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn
