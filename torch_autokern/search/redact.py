"""Secrets are taken out of whatever is kept or shown: a server may send a key back in an answer or in an error."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from urllib.parse import quote, urlsplit, urlunsplit

from torch_autokern.errors import InvalidInputError

HIDDEN = "[secret removed]"
SHORTEST_SECRET = 8
_BEARER = re.compile(r"(?i)(bearer\s+)[A-Za-z0-9._~+/=-]{8,}")


class Redactor:
    """Replaces known secrets, as they are, percent-encoded, in base64 or as JSON writes them, and any bearer token."""

    def __init__(self, secrets: Sequence[str]) -> None:
        forms: set[str] = set()
        for secret in secrets:
            if len(secret) < SHORTEST_SECRET:
                raise InvalidInputError(
                    f"the key of the model's server has {len(secret)} characters: too short to be told from other text in the "
                    f"transcript; expected {SHORTEST_SECRET} or more"
                )
            encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
            forms |= {secret, quote(secret, safe=""), encoded, secret.replace("\\", "\\\\").replace('"', '\\"')}
        self._forms = sorted(forms, key=len, reverse=True)

    def clean(self, text: str) -> str:
        """The text without secrets."""
        for form in self._forms:
            text = text.replace(form, HIDDEN)
        return _BEARER.sub(rf"\1{HIDDEN}", text)


def without_password(url: str) -> str:
    """A server's address without user, password and query."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    netloc = host if parts.port is None else f"{host}:{parts.port}"
    return urlunsplit((parts.scheme, netloc, parts.path, "", ""))
