"""Keeping keys out of everything that is printed, logged, traced or saved.

A server may repeat the key it was sent in the text of its refusal, and an exception of an SDK
holds the whole request. So no text of a server and no exception of an SDK leaves this room as
it is: texts pass `scrub`, exceptions are replaced by ours.

Not covered: what other code logs by itself, and secrets that stand in prompts.
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Iterable

HIDDEN = "[hidden]"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|CUSTOM_HEADERS", re.IGNORECASE)
_LEAST_LENGTH = 6
"""Shorter values of the environment are no keys, and hiding them would garble messages."""


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without `secrets`, nor values of environment variables that are named like keys."""
    found = {value for value in secrets if value}
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name):
            # A variable with custom headers holds several values, each after its name.
            parts = [value, *(line.partition(":")[2].strip() for line in value.splitlines())]
            found.update(part for part in parts if len(part) >= _LEAST_LENGTH)
    for value in sorted(found, key=len, reverse=True):
        for form in {value, json.dumps(value)[1:-1], urllib.parse.quote(value, safe="")}:
            text = text.replace(form, HIDDEN)
    return text


def short(text: str, secrets: Iterable[str] = (), limit: int = 300) -> str:
    """One scrubbed line of at most `limit` characters; scrubbed before it is cut."""
    line = " ".join(scrub(text, secrets).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
