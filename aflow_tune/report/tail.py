"""Following a file of lines that other processes append to.

Reads only what is new, keeps an unfinished last line for the next time, and notices when the
file was replaced or cut, which a resumed run does. Used by the panel, which looks twice a second
at files that grow for hours.
"""

from __future__ import annotations

import os
from pathlib import Path


class LineTail:
    """What was appended to `path` since the last look.

    Args:
        path: the file; it need not exist yet.
        at_end: begin with what is appended from now on instead of with the whole file.
    """

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        self.path = path
        self._inode: int | None = None
        self._offset = 0
        self._rest = b""
        if at_end and path.exists():
            status = path.stat()
            self._inode, self._offset = status.st_ino, status.st_size

    def read(self) -> tuple[list[bytes], bool]:
        """The new whole lines without their ends, and whether the file began anew.

        When it did, what earlier calls gave is void and the lines are those of the new file.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            anew = self._inode is not None
            self._inode, self._offset, self._rest = None, 0, b""
            return [], anew
        with file:
            status = os.fstat(file.fileno())
            anew = self._inode is not None and (
                status.st_ino != self._inode or status.st_size < self._offset
            )
            if anew:
                self._offset, self._rest = 0, b""
            self._inode = status.st_ino
            if status.st_size == self._offset:
                return [], anew
            file.seek(self._offset)
            new = file.read()
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [line for line in lines if line], anew
