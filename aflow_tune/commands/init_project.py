"""`aflow-tune init FOLDER`: a small project that validates, runs and passes its test.

Its files stand in `project/`; those in Python with `.txt` behind their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from aflow_tune.errors import BadInput

_FILES = Path(__file__).with_name("project")


def _rows(numbers: Iterable[int]) -> str:
    rows = ({"question": f"What is {n} + {n + 1}?", "answer": 2 * n + 1} for n in numbers)
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_project(folder: Path) -> list[Path]:
    """Write the files that are not there yet; returns those written.

    Raises:
        BadInput: `folder` cannot be a folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        title, expected = "The project cannot be written there.", "a folder, or a free name"
        raise BadInput.of(title, str(folder), expected, str(error), "name another folder") from None
    names = ("workflow.py.txt", "config.yaml", "test_workflow.py.txt", "README.md")
    files = {name.removesuffix(".txt"): (_FILES / name).read_text("utf-8") for name in names}
    # Every third sum is held out, so that both sets are equally hard.
    files["train.jsonl"] = _rows(n for n in range(1, 61) if n % 3)
    files["held_out.jsonl"] = _rows(range(3, 61, 3))
    written = [folder / name for name in files if not (folder / name).exists()]
    for path in written:
        path.write_text(files[path.name], encoding="utf-8")
    return written
