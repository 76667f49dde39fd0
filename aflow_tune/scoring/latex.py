"""SymPy's own LaTeX parser on whichever ANTLR runtime is installed.

`sympy.parsing.latex.parse_latex` refuses every ANTLR runtime but 4.11, and OmegaConf, which
Trinity needs, pins 4.9. The generated parser works with both; only the serialised form of its
tables changed in 4.10: plain integers, no format UUID, one list of character sets. This module
reads that form with the 4.9 runtime. It changes the ANTLR of the process that it is used in, so
only our own child processes use it.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

_TABLES_VERSION = 4


@functools.cache
def latex_parser() -> Callable[[str], Any]:
    """A function from LaTeX to a SymPy expression that raises what `parse_latex` raises."""
    if version("antlr4-python3-runtime").startswith("4.9."):
        _read_new_tables()
    from sympy.parsing.latex import _parse_latex_antlr

    _parse_latex_antlr.version = lambda _: "4.11"

    def parse(text: str) -> Any:
        # The runtime prints that its version is not the generated code's.
        with contextlib.redirect_stdout(io.StringIO()):
            return _parse_latex_antlr.parse_latex(text)

    return parse


def _read_new_tables() -> None:
    """Let the 4.9 runtime read parser tables of ANTLR 4.10 and later."""
    import antlr4
    from antlr4.atn import ATNDeserializer as old

    class TableReader(old.ATNDeserializer):
        def reset(self, data: list[int]) -> None:
            # Where the old form has 0xFFFF for 'none', the new one has -1.
            self.data = [0xFFFF if value < 0 else value for value in data]
            self.pos = 0

        def checkVersion(self) -> None:
            found = self.readInt()
            if found != _TABLES_VERSION:
                raise ValueError(f"parser tables of version {found}, not {_TABLES_VERSION}")

        def checkUUID(self) -> None:
            self.uuid = old.BASE_SERIALIZED_UUID

    # The generated modules take the name from the package when they are imported.
    antlr4.ATNDeserializer = TableReader
