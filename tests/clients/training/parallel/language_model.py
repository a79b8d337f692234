"""A model of ``transformers`` in a process that may not load torchvision, which need not fit the build of torch."""

import sys
from typing import Any

sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # None: it cannot be imported

import transformers  # noqa: E402  # behind that

__all__ = ["LanguageModel"]

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
    "use_cache": False,
}


class LanguageModel(transformers.Qwen3ForCausalLM):  # type: ignore[misc]  # it has no types
    """A small one, with norms within heads, and an output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__(transformers.Qwen3Config(**SMALL))
