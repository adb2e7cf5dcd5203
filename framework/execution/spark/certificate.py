"""A certificate for one run. The run's processes on several hosts recognise each other by it.

The driver's JVM makes it: every Java has ``keytool``, and Python's standard library cannot make
certificates.
"""

from __future__ import annotations

import base64
import os
import secrets
import subprocess
import tempfile
import textwrap
from pathlib import Path

from py4j.java_gateway import JavaGateway

from framework.errors import ConfigError

_ALIAS = "run"
#: Clocks of hosts may differ, and a run may be long.
_VALID = ("-startdate", "-1d", "-validity", "3650")
_TIMEOUT_S = 60


def new_certificate(gateway: JavaGateway) -> bytes:
    """Make a new key and a certificate signed with it; return both as PEM. Takes about a second.
    Raises ``ConfigError`` when this Java has no ``keytool``."""
    jvm = gateway.jvm
    keytool = Path(jvm.System.getProperty("java.home")) / "bin" / "keytool"
    password = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="ratchet-certificate-") as folder:
        file = f"{folder}/run.p12"

        def call(*arguments: str) -> bytes:
            store = ("-alias", _ALIAS, "-storetype", "PKCS12", "-keystore", file, "-storepass:env", "STOREPASS")
            return subprocess.run(
                [keytool, *arguments, *store],
                check=True,
                capture_output=True,
                timeout=_TIMEOUT_S,
                env={**os.environ, "STOREPASS": password},
            ).stdout

        try:
            call("-genkeypair", "-keyalg", "EC", "-groupname", "secp256r1", "-dname", "CN=ratchet", *_VALID)
            certificate = call("-exportcert", "-rfc")
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"{keytool} makes no certificate for what crosses hosts: {error}; Java's own bin/keytool is needed on the driver"
            ) from None
        letters = gateway.new_array(jvm.char, len(password))
        for place, letter in enumerate(password):
            letters[place] = letter
        key = jvm.java.security.KeyStore.getInstance(jvm.java.io.File(file), letters).getKey(_ALIAS, letters)
    specification = jvm.java.lang.Class.forName("java.security.spec.PKCS8EncodedKeySpec")
    encoded = bytes(jvm.java.security.KeyFactory.getInstance("EC").getKeySpec(key, specification).getEncoded())
    lines = "\n".join(textwrap.wrap(base64.b64encode(encoded).decode(), 64))
    return f"-----BEGIN PRIVATE KEY-----\n{lines}\n-----END PRIVATE KEY-----\n".encode() + certificate
