"""Compares the redactor with detect-secrets: secrets that its detectors find in a log line must not
appear in the guard's output."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest

from miner_guard.record.redaction import Redactor
from tests.support import requires

A, D, H = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dF", "1234567890", "0123456789abcdef"

SAMPLES = {
    "ArtifactoryDetector": [f"jfrog login AKCp8{A}", f" AP6{A}{A} "],
    "AWSKeyDetector": [
        "AKIAIOSFODNN7EXAMPLE",
        "ABIAIOSFODNN7EXAMPLE",
        f"aws_key = '{(A + A)[:40]}'",
    ],
    "AzureStorageKeyDetector": [f"AccountKey={(A * 3)[:86]}=="],
    "BasicAuthDetector": ["https://miner:hunter2x@hub.example/repo"],
    "CloudantDetector": [f"cloudant_password = '{H * 4}'", f"cl_key={H * 4}"],
    "DiscordBotTokenDetector": [f"M{A[:23]}.{A[:6]}.{A[:27]}"],
    "GitHubTokenDetector": [f"ghp_{(A + A)[:36]}", f"ghs_{(A + A)[:36]}"],
    "GitLabTokenDetector": [
        f"glpat-{A[:20]}",
        f"gldt-{A[:20]}",
        f"GR1348941{A[:20]}",
        f"glcbt-{A[:20]}",
    ],
    "IbmCloudIamDetector": [
        f"ibm_cloud_iam_api_key = '{(A + A)[:44]}'",
        f"iam_password={(A + A)[:44]}",
    ],
    "IbmCosHmacDetector": [f"cos_hmac_secret_access_key: '{H * 3}'"],
    "JwtTokenDetector": [
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
    ],
    "MailchimpDetector": [f"{H}{H}-us12"],
    "NpmDetector": [f"//npm.example/:_authToken=npm_{(A + A)[:36]}"],
    "OpenAIDetector": [f"sk-{A[:20]}T3BlbkFJ{A[:20]}"],
    "PrivateKeyDetector": [
        f"-----BEGIN RSA PRIVATE KEY-----\n{A}{A}\n-----END RSA PRIVATE KEY-----"
    ],
    "PypiTokenDetector": [f"pypi-AgEIcHlwaS5vcmc{(A * 3)[:70]}"],
    "SendGridDetector": [f"SG.{A[:22]}.{(A + A)[:43]}"],
    "SlackDetector": [
        f"xoxb-{D}-{D}-{A.lower()}",
        "https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXX",
    ],
    "SoftlayerDetector": [f"softlayer_api_key = '{H * 4}'"],
    "SquareOAuthDetector": [f"sq0csp-{(A + A)[:43]}"],
    "StripeDetector": [f"sk_live_{A[:24]}", f"rk_live_{A[:24]}"],
    "TelegramBotTokenDetector": [f"{D}:AA{(A + A)[:33]}"],
    "TwilioKeyDetector": [f"AC{H}{H}", f"SK{H}{H}"],
}
NO_SECRETS = {
    "IPPublicDetector": "an address is no secret, and the guard's messages name nodes by theirs"
}


def detectors() -> dict[str, Any]:
    """Every detector that recognises secrets by their shape; the others guess by entropy or by
    words."""
    requires.module("detect_secrets")
    import detect_secrets.plugins as plugins
    from detect_secrets.plugins.base import RegexBasedDetector

    found = {}
    for each in pkgutil.iter_modules(plugins.__path__):
        module = importlib.import_module(f"{plugins.__name__}.{each.name}")
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, RegexBasedDetector) and not inspect.isabstract(kind):
                found[name] = kind()
    return found


def test_every_detector_has_a_sample() -> None:
    """A new version of detect-secrets may add detectors that have no sample yet."""
    assert set(detectors()) == SAMPLES.keys() | NO_SECRETS.keys()


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_what_a_detector_finds_in_a_line_it_does_not_find_in_the_redacted_line(name: str) -> None:
    detector = detectors()[name]
    for sample in SAMPLES[name]:
        line = f"2026-01-02 INFO upload failed: {sample} was refused"
        assert list(detector.analyze_string(line)), f"no sample of {name}: {sample}"
        redacted = Redactor().text(line)
        left = set(detector.analyze_string(redacted)) - {"[redacted]"}
        secret = set(detector.analyze_string(line))
        assert not [found for found in left if found in secret], redacted
        assert "upload failed" in redacted
        assert "was refused" in redacted
