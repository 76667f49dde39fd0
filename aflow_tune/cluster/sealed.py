"""Keys for a submitted job: sealed for its process alone, since the way there is public.

All that a client can send to a Ray cluster through its job server (the job's environment, its
metadata, its packages) is logged, shown in the dashboard or kept on disk. So the job makes a
key pair in memory and prints the public half; the client seals the keys for it and uploads the
result; the job opens it, and deletes it.

X25519, HKDF-SHA256 and ChaCha20-Poly1305 of the library `cryptography`, with a key pair of the
sender's that is used once. Who can read or change the cluster's storage learns nothing from it,
but who can change what the job prints could put a key of their own there: the job server's token
guards that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from aflow_tune.errors import RunFailed

_PUBLIC_BYTES, _NONCE_BYTES = 32, 12


class Receiver:
    """One key pair; `public` is what a sender needs."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()

    @property
    def public(self) -> str:
        """The public half in hexadecimal."""
        return self._private.public_key().public_bytes_raw().hex()

    def open(self, sealed: bytes) -> dict[str, str]:
        """The keys by name.

        Raises:
            RunFailed: it was not sealed for this receiver, or was changed.
        """
        sender = X25519PublicKey.from_public_bytes(sealed[:_PUBLIC_BYTES])
        nonce = sealed[_PUBLIC_BYTES : _PUBLIC_BYTES + _NONCE_BYTES]
        cipher = _cipher(self._private, sender, self.public)
        try:
            content = cipher.decrypt(nonce, sealed[_PUBLIC_BYTES + _NONCE_BYTES :], None)
        except InvalidTag as error:
            raise RunFailed("the keys that arrived were not sealed for this job") from error
        keys: dict[str, str] = json.loads(content)
        return keys


def seal(keys: Mapping[str, str], public: str) -> bytes:
    """Seal keys for the receiver with this public half: sender's public key, nonce, content."""
    own = X25519PrivateKey.generate()
    receiver = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
    nonce = os.urandom(_NONCE_BYTES)
    content = _cipher(own, receiver, public).encrypt(nonce, json.dumps(dict(keys)).encode(), None)
    return own.public_key().public_bytes_raw() + nonce + content


def _cipher(own: X25519PrivateKey, other: X25519PublicKey, public: str) -> ChaCha20Poly1305:
    derived = HKDF(SHA256(), 32, None, b"aflow-tune keys for " + public.encode())
    return ChaCha20Poly1305(derived.derive(own.exchange(other)))
