"""Keeps keys out of everything that is printed, logged, traced or saved.

A server may repeat a key in its error message, and an SDK's exception holds the whole request. So
texts go through `scrub`, and exceptions are replaced by ours. Not covered: what other code logs,
and secrets in prompts.
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Iterable
from typing import Any

HIDDEN = "[hidden]"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|CUSTOM_HEADERS", re.IGNORECASE)
_LEAST_LENGTH = 6  # shorter values of environment variables are not taken for keys
_SECRET_SETTING = re.compile(
    r"(^|_)(api_?key|secret(_key)?|password|passwd|credentials?|(access|auth|hf|bearer)_?token)$"
    r"|^token$",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(r"^[A-Z0-9_]*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)$")
_URL_PASSWORD = re.compile(r"(://[^/@:\s]*:)[^/@\s]+@")


def masked(key: str, value: Any) -> Any:
    """The value of the setting `key` with secrets replaced by `***`. EMPTY is not a secret."""
    if not isinstance(value, str) or not value:
        return value
    name = key.rpartition(".")[2]
    if (_SECRET_SETTING.search(name) or _SECRET_VARIABLE.match(name)) and value != "EMPTY":
        return "***"
    return _URL_PASSWORD.sub(r"\1***@", value)


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` with `secrets`, and values of variables that are named like keys, replaced."""
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
    """`text` as one line of at most `limit` characters, scrubbed before it is cut."""
    line = " ".join(scrub(text, secrets).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
