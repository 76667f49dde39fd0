"""How our pages are made: templates of this folder, rendered whole and written whole.

Self-contained: style and charts are inline, there is no script, and a content policy in the page
forbids loading or running anything. Everything that a model or a user wrote is escaped by the
templates, which share their head and the view of a run.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any


def render(template: str, **content: Any) -> str:
    """The text of a page."""
    import jinja2

    folder = resources.files("aflow_tune.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**content)


def write_page(path: Path, text: str) -> Path:
    """Write a page whole or not at all; returns its path."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # Half a surrogate pair, which a model can write, has no UTF-8: a question mark stands for it.
    temporary.write_text(text, encoding="utf-8", errors="replace")
    temporary.rename(path)
    return path
