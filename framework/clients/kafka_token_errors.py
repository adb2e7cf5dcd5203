"""The reasons why an identity provider issued no token for OAUTHBEARER, in librdkafka's words: a
refusal, which no repetition changes, or an outage.

librdkafka reports the answer of the token endpoint without its status. After a status such as 503,
it repeats the request for 50 s before it reports anything.

Source: librdkafka 2.16, rdkafka_sasl_oauthbearer_oidc.c and rdhttp.c; RFC 6749, 5.2.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from framework.errors import ConfigError, RetryableError, reason_of

_FAILED = re.compile(r"(?:Failed to acquire SASL OAUTHBEARER token|no token available; last error): (.*)", re.DOTALL)
#: The words of confluent-kafka and of the native reader for an ``oauth_cb`` that raised an error.
_FUNCTION = re.compile(r"OAuth callback|oauth_cb")
#: The length up to which an answer is shown. It may be a whole page.
_SHOWN_MAX = 200
_METHOD = "sasl.oauthbearer"
_URL = f"{_METHOD}.token.endpoint.url"
_CREDENTIALS = f"{_METHOD}.client.id", f"{_METHOD}.client.secret"
#: Answers of the protocol after which waiting helps.
_LATER = frozenset({"temporarily_unavailable", "server_error", "slow_down"})
#: The settings to correct after other answers of the protocol; by default, the credentials.
_WRONG = {
    "invalid_scope": (f"{_METHOD}.scope",),
    "unsupported_grant_type": (f"{_METHOD}.grant.type",),
    "invalid_request": (f"{_METHOD}.grant.type", f"{_METHOD}.scope"),
}
#: Texts of libcurl about a server that is not the server of the settings, or no such server.
_DISTRUSTED = re.compile(r"certificate|SSL: no alternative", re.IGNORECASE)
_NO_URL = re.compile(r"URL rejected|illegal format|Unsupported protocol|Protocol .* not supported", re.IGNORECASE)
_REFUSED = re.compile(r"\b40[13]\b|unauthori[sz]ed|forbidden|denied|invalid.client", re.IGNORECASE)
#: Answers that are not tokens, from another server at this address.
_ELSEWHERE = re.compile(r"\b40[45]\b|not found|not JSON encoded|Expected JSON|Failed to parse JSON", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TokenFailure:
    """``reason``: one line. ``settings``: the settings to check; none if a function issues tokens.
    ``refused``: no repetition changes the answer."""

    reason: str
    settings: tuple[str, ...]
    refused: bool

    def __str__(self) -> str:
        if not self.settings:
            return self.reason
        names = " and ".join(repr(each) for each in self.settings)
        return f"{self.reason}; check {names}" + ("" if self.refused else ", and that the identity provider answers")

    def error(self, what: str, *, connected: bool) -> RetryableError | ConfigError:
        """The error of ``what``. A refusal before the first working connection is a mistake in the
        settings."""
        return (ConfigError if self.refused and not connected else RetryableError)(f"{what}: {self}")


def token_failure(text: str) -> TokenFailure | None:
    """The failure that an error of librdkafka reports; None if it is about something else."""
    found = _FAILED.search(text)
    if found is None:
        return None
    answer = " ".join(found[1].split())
    brief = answer if len(answer) <= _SHOWN_MAX else f"{answer[:_SHOWN_MAX]} ..."
    shown = f"no token for OAUTHBEARER: {reason_of(brief)}"
    if _FUNCTION.match(answer):
        return TokenFailure(shown, (), refused=False)
    try:
        code = json.loads(answer)["error"]
    except (ValueError, KeyError, TypeError):
        code = None
    if isinstance(code, str):
        return TokenFailure(shown, _WRONG.get(code, (_URL,) if code in _LATER else _CREDENTIALS), code not in _LATER)
    if _DISTRUSTED.search(answer):
        return TokenFailure(shown, ("https.ca.location", _URL), refused=True)
    if _REFUSED.search(answer):
        return TokenFailure(shown, _CREDENTIALS, refused=True)
    return TokenFailure(shown, (_URL,), refused=bool(_NO_URL.search(answer) or _ELSEWHERE.search(answer)))
