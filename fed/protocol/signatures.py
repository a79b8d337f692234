"""Signatures of samples: which samples fit a model that is made for others."""

from fed.protocol.protocol_pb2 import Signature

__all__ = ["types_fit"]


def types_fit(said: Signature, asked: Signature) -> bool:
    """True if inputs of one type can be cast to another: any numbers to floating ones, else only the same type fits.

    Args:
        said: signature of a node's samples.
        asked: signature that the model is made for.

    Example:
        >>> types_fit(Signature(input_dtype="uint8"), Signature(input_dtype="float32"))
        True
        >>> types_fit(Signature(input_dtype="float32"), Signature(input_dtype="int64"))
        False
    """
    return said.input_dtype == asked.input_dtype or "float" in asked.input_dtype
