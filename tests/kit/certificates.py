"""Certificates for the servers of the tests, made on the spot."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Certificates:
    """PEM files: what brokers present (good for 127.0.0.1, expired, for another host),
    what clients trust.
    """

    authority: Path
    other_authority: Path
    broker: Path
    expired: Path
    other_host: Path


def make_certificates(folder: Path) -> Certificates:
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    other.cert_pem.write_to_path(folder / "other-ca.pem")
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    issued = {
        "broker": authority.issue_cert("127.0.0.1", "localhost"),
        "expired": authority.issue_cert(
            "127.0.0.1", not_before=yesterday - datetime.timedelta(days=9), not_after=yesterday
        ),
        "other-host": authority.issue_cert("kafka.example.com"),
    }
    for name, certificate in issued.items():
        key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
        pem = key.private_bytes(  # Java reads keys in PKCS 8 only
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        chain = b"".join(each.bytes() for each in certificate.cert_chain_pems)
        (folder / f"{name}.pem").write_bytes(pem + chain)
    return Certificates(folder / "ca.pem", folder / "other-ca.pem", *(folder / f"{name}.pem" for name in issued))


def new_pem() -> bytes:
    """A self-signed certificate with its key, like the one that a run makes, but without Java."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "run")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(days=1)
    ).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return secret + certificate.public_bytes(pem)
