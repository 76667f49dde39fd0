"""The driver's own library, asked carefully: what it will not say is None, never an error.

A device, a driver or a container answers only some of NVML's questions, and which ones differs
from machine to machine. The bindings are `pynvml` (the package nvidia-ml-py), imported when they
are used, so that a machine without them can still say so.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from aflow_tune.errors import AflowTuneError

_LIBRARY_NOT_FOUND = 12
_DRIVER_NOT_LOADED = 9
_NO_PERMISSION = 4
_VERSION_MISMATCH = 18
_NOT_SUPPORTED = 3
_NO_SUCH_FUNCTION = 13
_NOT_FOUND = 6
# nvmlReturn_t in nvml.h

_CURES = {
    _LIBRARY_NOT_FOUND: (
        "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)",
        "on a machine with an NVIDIA GPU install its driver and check it with `nvidia-smi`; in a "
        "container, start it with the GPUs (`docker run --gpus all`)",
    ),
    _DRIVER_NOT_LOADED: (
        "the NVIDIA driver is installed but not loaded",
        "check it with `nvidia-smi` and `lsmod | grep nvidia`; load it with `modprobe nvidia`",
    ),
    _NO_PERMISSION: (
        "this user may not talk to the NVIDIA driver",
        "check the rights of /dev/nvidiactl with `ls -l /dev/nvidia*`, and `nvidia-smi`",
    ),
    _VERSION_MISMATCH: (
        "the NVIDIA driver was updated while its older kernel module is loaded",
        "restart the machine (in a container: start the container anew); check with `nvidia-smi`",
    ),
}


class NvmlUnavailable(AflowTuneError):
    """There is no driver to ask. `reason` and `cure` are in the message."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason, cure)
        self.reason = reason
        self.cure = cure

    def __str__(self) -> str:
        return f"no NVIDIA GPU can be seen: {self.reason}\n    do: {self.cure}"


class Nvml:
    """An initialised library."""

    def __init__(self, library: Any) -> None:
        self._library = library
        names = ("NVMLError", "NVMLLibraryMismatchError")
        self.errors: tuple[type[BaseException], ...] = tuple(
            kind for name in names if isinstance(kind := getattr(library, name, None), type)
        )
        self.errors += (UnicodeDecodeError,)  # a name that is no text

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer of a function; None where it is missing, unsupported or forbidden."""
        return self.ask_or_why(name, *arguments)[0]

    def ask_or_why(self, name: str, *arguments: Any) -> tuple[Any, str | None]:
        """The answer and None, or None and why there is none."""
        function = getattr(self._library, name, None)
        if function is None:
            return None, "not offered by this version of pynvml"
        try:
            answer = function(*arguments)
        except self.errors as error:
            return None, str(error) or type(error).__name__
        return (answer.decode(errors="replace") if isinstance(answer, bytes) else answer), None

    def lacks(self, name: str, *arguments: Any) -> bool:
        """Whether there is nothing that this asks for; not, that it is kept from us."""
        function = getattr(self._library, name, None)
        try:
            return function is None or function(*arguments) is None
        except self.errors as error:
            # Without a number it is the bindings' own: a library older than they are.
            absent = (None, _NOT_SUPPORTED, _NO_SUCH_FUNCTION, _NOT_FOUND)
            return getattr(error, "value", None) in absent


@contextlib.contextmanager
def opened() -> Iterator[Nvml]:
    """The library for the block. May be nested and used from several threads: NVML counts.

    Raises:
        NvmlUnavailable: no bindings, no driver, or a driver that refuses.
    """
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        raise NvmlUnavailable(
            "the package nvidia-ml-py is not installed", "pip install nvidia-ml-py"
        ) from None
    nvml = Nvml(library)
    try:
        library.nvmlInit()
    except nvml.errors as error:
        known = _CURES.get(getattr(error, "value", -1))
        reason, cure = known or (str(error) or type(error).__name__, "check with `nvidia-smi`")
        raise NvmlUnavailable(reason, cure) from None
    try:
        yield nvml
    finally:
        nvml.ask("nvmlShutdown")
