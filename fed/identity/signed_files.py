"""Files of two lines: a JSON object, and the authority's signature of that line, in hexadecimal digits.

Whoever has the authority's certificate can check such a file, wherever it comes from.
"""

import json
from collections.abc import Mapping
from typing import Any

from fed.errors import InvalidCredentials
from fed.identity.certificates import private_key_of, public_key_of
from fed.secure_aggregation.key_agreement import digest, is_signed, sign

__all__ = ["read_signed", "signed"]


def read_signed(kind: str, content: bytes, authority_pem: bytes, most_bytes: int) -> dict[str, Any]:
    """The object in a file that the authority has signed.

    Args:
        kind: kind of the file; a signature counts for one kind alone.
        content: untrusted content of the file.
        authority_pem: the authority's certificate.
        most_bytes: largest size of such a file.

    Raises:
        InvalidCredentials: if the authority has not signed it.
    """
    first, _, second = content.partition(b"\n")
    try:
        signature = bytes.fromhex(second.decode())
    except ValueError:
        signature = b""
    # The size first: a hash over a hostile file of gigabytes would take long.
    if len(content) > most_bytes or not is_signed(public_key_of(authority_pem), digest(kind, first), signature):
        raise InvalidCredentials(
            f"the {kind} must be signed by this node's authority, got others: copy {kind}.json anew from the "
            "authority's folder"
        )
    said: dict[str, Any] = json.loads(first)  # the authority is trusted: nothing more is checked
    return said


def signed(kind: str, said: Mapping[str, Any], authority_key_pem: bytes) -> bytes:
    """The content of a file that the authority signs.

    Args:
        kind: the kind of file.
        said: object that is signed.
        authority_key_pem: the authority's private key.

    Raises:
        InvalidCredentials: if the key cannot be used.
    """
    # One line: what is signed are these bytes, which are never written again in another form.
    line = json.dumps(said).encode()
    return line + b"\n" + sign(private_key_of(authority_key_pem), digest(kind, line)).hex().encode()
