"""An identity provider of OpenID Connect, and a listener of Kafka that accepts its tokens."""

from __future__ import annotations

import base64
import contextlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from integration import TcpProxy
from integration.kafka import Listener
from tests.kit.registry_answers import answering, send

CLIENT, SECRET = "orders", "canary-0idc-5eed"
AUDIENCE, ISSUER = "kafka", "ratchet-tests"
_KEY_ID = "key-1"
_OAUTH = "org.apache.kafka.common.security.oauthbearer"


class IdentityProvider:
    """Issues tokens for client credentials (RFC 6749, 4.4), signed with RS256.

    * ``lifetime_s``: how long a token is valid.
    * ``audience``: for whom a token is.
    * ``refusal``: the status and the body of every answer; None to answer the credentials.
    * ``tokens``: all that were issued.
    * ``answers``: status -> number of answers.
    * ``link``: the way of Kafka's clients to the token endpoint, which can be cut. The broker
      fetches the keys without it.
    """

    def __init__(self, url: str, link: TcpProxy) -> None:
        self.keys_url = f"{url}/keys"
        self.link = link
        self.reset()
        self._key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)

    def reset(self) -> None:
        """Forget what a test has set and counted."""
        self.link.heal()
        self.lifetime_s = 300
        self.audience = AUDIENCE
        self.refusal: tuple[int, bytes] | None = None
        self.tokens: list[str] = []
        self.answers: Counter[int] = Counter()

    @property
    def token_url(self) -> str:
        return f"http://{self.link.address}/token"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.path == "/keys":
            send(request, 200, json.dumps({"keys": [self._public_key()]}).encode())
            return
        status, body = self._answer(request)
        self.answers[status] += 1
        send(request, status, body)

    def _answer(self, request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        if self.refusal is not None:
            return self.refusal
        expected = "Basic " + base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        if request.headers["Authorization"] != expected:
            return 401, b'{"error": "invalid_client", "error_description": "no such client"}'
        self.tokens.append(self._token())
        given = {"access_token": self.tokens[-1], "token_type": "Bearer", "expires_in": self.lifetime_s}
        return 200, json.dumps(given).encode()

    def _token(self) -> str:
        now_s = int(time.time())
        claims = {
            "iss": ISSUER,
            "aud": self.audience,
            "sub": CLIENT,
            "scope": "kafka",
            "jti": uuid.uuid4().hex,
            "iat": now_s,
            "exp": now_s + self.lifetime_s,
        }
        parts = ({"alg": "RS256", "typ": "JWT", "kid": _KEY_ID}, claims)
        signed = ".".join(_encoded(json.dumps(each).encode()) for each in parts)
        return f"{signed}.{_encoded(self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    def _public_key(self) -> dict[str, str]:
        numbers = self._key.public_key().public_numbers()
        modulus = numbers.n.to_bytes((numbers.n.bit_length() + 7) // 8)
        exponent = numbers.e.to_bytes(3)
        return {
            "kty": "RSA",
            "use": "sig",
            "alg": "RS256",
            "kid": _KEY_ID,
            "n": _encoded(modulus),
            "e": _encoded(exponent),
        }


@contextlib.contextmanager
def identity_provider() -> Iterator[IdentityProvider]:
    found: list[IdentityProvider] = []
    with answering(lambda request, _: found[0].answer(request)) as (url, _), TcpProxy(url[len("http://") :]) as link:
        found.append(IdentityProvider(url, link))
        yield found[0]


@dataclass(frozen=True)
class TokenListener(Listener):
    """A listener for TLS with OAUTHBEARER, whose tokens Kafka's own validator checks. A connection
    ends with its token, unless the client signs in again."""

    certificate: Path
    keys_url: str
    port: int = 0

    @property
    def java_options(self) -> tuple[str, ...]:  # type: ignore[override]
        return (f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={self.keys_url}",)

    def settings(self) -> dict[str, str]:
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.certificate),
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            "oauthbearer.sasl.jaas.config": f"{_OAUTH}.OAuthBearerLoginModule required;",
            "oauthbearer.sasl.server.callback.handler.class": f"{_OAUTH}.OAuthBearerValidatorCallbackHandler",
            "oauthbearer.connections.max.reauth.ms": "3600000",
            "sasl.oauthbearer.jwks.endpoint.url": self.keys_url,
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "sasl.oauthbearer.expected.issuer": ISSUER,
            "sasl.oauthbearer.clock.skew.seconds": "0",
        }

    def reads(self) -> tuple[Path, ...]:
        return (self.certificate,)


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
