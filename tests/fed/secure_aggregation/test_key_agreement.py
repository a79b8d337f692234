import hashlib
import hmac
import os

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fed.errors import InvalidPayload
from fed.secure_aggregation.key_agreement import TAG_BYTES, AgreementKey, digest, is_signed, open_box, seal, sign


def _hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """HKDF with SHA-256 as sections 2.2 and 2.3 of RFC 5869 have it."""
    key, block, blocks = hmac.digest(salt, secret, "sha256"), b"", b""
    for number in range(1, -(-length // 32) + 1):
        block = hmac.digest(key, block + info + bytes([number]), "sha256")
        blocks += block
    return blocks[:length]


def test_agreement_is_the_standards() -> None:
    """RFC 7748, section 6.1, for X25519; the secret goes through HKDF (RFC 5869, A.1) with the session as its salt."""
    known = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    assert _hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42).hex() == known
    alice = AgreementKey(bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"))
    bob = AgreementKey(bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"))
    assert alice.public.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    secret = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    derived = _hkdf(secret, b"session", b"fed secure aggregation: mask", 32)
    assert alice.agree(bob.public, b"session", "mask") == derived
    assert bob.agree(alice.public, b"session", "mask") == derived


def test_keys_of_other_sessions_and_purposes_differ() -> None:
    one, other = AgreementKey.draw(os.urandom), AgreementKey.draw(os.urandom)
    named = [(b"a", "mask"), (b"b", "mask"), (b"a", "box")]
    assert len({one.agree(other.public, *name) for name in named}) == 3


@pytest.mark.parametrize("public", [bytes(32), b"short", b"\1" + bytes(31)])
def test_public_keys_that_are_none_are_refused(public: bytes) -> None:
    with pytest.raises(InvalidPayload, match="X25519"):
        AgreementKey.draw(os.urandom).agree(public, b"", "mask")


def test_signature_of_rfc_6979_is_taken_and_others_are_not() -> None:
    """RFC 6979, section A.2.5: P-256 and SHA-256, of the message "sample"."""
    private = 0xC9AFA9D845BA75166B5C215767B1D6934E50C3DB36E89B127B8A622B120F6721
    key = ec.derive_private_key(private, ec.SECP256R1()).public_key()
    signed = hashlib.sha256(b"sample").digest()
    signature = bytes.fromhex(
        "EFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716"
        "F7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8"
    )
    assert is_signed(key, signed, signature)
    assert not is_signed(key, hashlib.sha256(b"other").digest(), signature)
    longer = signature[:32] + b"\0" + signature[32:]  # the same two numbers
    for wrong in (longer, signature[:-1], signature + b"0", bytes(64), b"", signature[:-1] + b"0", b"\xff" * 64):
        assert not is_signed(key, signed, wrong)


def test_own_signatures_are_taken() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    signed = digest("test", b"content")
    assert is_signed(key.public_key(), signed, sign(key, signed))
    assert not is_signed(ec.generate_private_key(ec.SECP256R1()).public_key(), signed, sign(key, signed))


def test_boxes_hold_what_was_sealed() -> None:
    key = os.urandom(32)
    box = seal(key, b"content")
    assert len(box) == len(b"content") + TAG_BYTES
    assert open_box(key, box) == b"content"
    for wrong in (box[:-1], bytes([box[0] ^ 1]) + box[1:], b"", b"0" * 40):
        with pytest.raises(InvalidPayload, match="sealed"):
            open_box(key, wrong)
    with pytest.raises(InvalidPayload, match="sealed"):
        open_box(os.urandom(32), box)


def test_digests_tell_lists_of_parts_apart() -> None:
    found = {digest("a", b"1", b"23"), digest("a", b"12", b"3"), digest("a", b"123"), digest("b", b"123"), digest("a")}
    assert len(found) == 5
