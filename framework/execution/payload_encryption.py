"""Encryption of data that the processes of a run exchange through Spark.

Spark keeps tasks, broadcasts and results in blocks: in memory, on disk, and in transit between
hosts. Components contain passwords, so they are encrypted. The key is only in the environment of
the driver and the executors, under ``KEY_VARIABLE``: no block, closure, command line or event log
contains it.

Decryption also authenticates (AES-GCM): bytes that were not encrypted with the key are refused
before they are unpickled.
"""

from __future__ import annotations

import os
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from framework.errors import ConfigError, InvariantViolation

#: 64 hexadecimal digits. The driver draws a key if the variable is not set.
KEY_VARIABLE = "RATCHET_SECRET_KEY"

_KEY_BYTES = 32
_NONCE_BYTES = 12


def shared_key() -> str:
    """Return the key of this process and its children, in hexadecimal digits; draw one on the first
    call. Called on the driver."""
    return os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(_KEY_BYTES))


def encrypt(data: bytes) -> bytes:
    """Return ``data`` encrypted with the shared key: a nonce, then the ciphertext with its tag."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + _cipher(shared_key()).encrypt(nonce, data, None)


def decrypt(data: bytes) -> bytes:
    """Return the decrypted data.

    Raises ``ConfigError`` when the environment has no key, and ``InvariantViolation`` when another
    key was used or the bytes were changed.
    """
    key = os.environ.get(KEY_VARIABLE)
    if key is None:
        raise ConfigError(
            f"{KEY_VARIABLE} is not in the environment of this Spark executor: let Ratchet start Spark, or set the variable "
            "to the same 64 hexadecimal digits for the driver and for the executors (spark.executorEnv)"
        )
    try:
        return _cipher(key).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], None)
    except InvalidTag:
        raise InvariantViolation("what Spark delivered was not encrypted with the key of this run") from None


def _cipher(key: str) -> AESGCM:
    try:
        decoded = bytes.fromhex(key)
    except ValueError:
        decoded = b""
    if len(decoded) != _KEY_BYTES:
        raise ConfigError(f"{KEY_VARIABLE} is not a key: set it to {2 * _KEY_BYTES} hexadecimal digits, or to nothing")
    return AESGCM(decoded)
