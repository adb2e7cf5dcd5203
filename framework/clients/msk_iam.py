"""Amazon MSK with IAM: the mechanism ``AWS_MSK_IAM`` of the Java client, which librdkafka does not
have. MSK accepts the same identity as a token of OAUTHBEARER (ADR 108).

A process signs its own tokens with the credentials that boto3 finds in it. The settings name the
function and the region, never a credential.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from framework.errors import ConfigError

MECHANISM = "AWS_MSK_IAM"
#: Ratchet's own setting: the region, if the brokers' addresses do not contain it.
REGION = "aws.region"
_ADDRESS = re.compile(r"\.kafka(?:-serverless)?\.([a-z]{2}(?:-[a-z]+)+-\d+)\.amazonaws\.com(?:\.cn)?(?=$|[:,])")


def wants_iam(settings: Mapping[str, Any]) -> bool:
    """Whether settings of a client name the mechanism."""
    return MECHANISM in (settings.get("sasl.mechanism"), settings.get("sasl.mechanisms"))


def with_tokens(settings: Mapping[str, Any], bootstrap_servers: str, region: str | None) -> dict[str, Any]:
    """The settings for librdkafka. Raises ``ConfigError`` without a region, without Amazon's
    package, and for settings that contradict the mechanism."""
    for name in ("oauth_cb", "sasl.oauthbearer.method", "sasl.oauthbearer.config"):
        if name in settings:
            raise ConfigError(f"Kafka setting {name!r} contradicts {MECHANISM}, which signs tokens itself: remove one")
    found = set(_ADDRESS.findall(bootstrap_servers)) if region is None else {region}
    if len(found) != 1:
        raise ConfigError(
            f"{MECHANISM}: the region is not in the addresses {bootstrap_servers}: give it as kafka.{REGION}, such as 'eu-west-1'"
        )
    if importlib.util.find_spec("aws_msk_iam_sasl_signer") is None:
        raise ConfigError(
            f"{MECHANISM} needs the package aws-msk-iam-sasl-signer-python: pip install 'ratchet-pipelines[msk]', on the driver "
            "and the executors"
        )
    rest = {key: value for key, value in settings.items() if key not in ("sasl.mechanism", "sasl.mechanisms")}
    added = {"sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.config": found.pop(), "oauth_cb": token}
    return {"security.protocol": "SASL_SSL", **rest, **added}


def token(region: str) -> tuple[str, float]:
    """A token, and the second since 1970 at which it expires. librdkafka calls it in each process,
    again before the token expires. Raises ``RuntimeError`` without credentials."""
    from aws_msk_iam_sasl_signer import MSKAuthTokenProvider

    try:
        signed, expires_ms = MSKAuthTokenProvider.generate_auth_token(region)
    except AttributeError as error:  # the package's answer to missing credentials
        raise RuntimeError("boto3 finds no AWS credentials in this process") from error
    return signed, expires_ms / 1_000
