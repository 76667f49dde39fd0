"""The result of an estimate: memory by part, quantities, changes; as text and as plain data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aflow_tune.estimate.quantities import Known, Number

GIB = 2**30
"""In bytes; also the unit that vendors' tools count GPU memory in."""
_VERDICT = {True: "fits", False: "does not fit", None: "not known whether it fits"}


@dataclass(frozen=True)
class Part:
    """One item of a need, in bytes. `allowance`: a measured constant instead of a formula."""

    name: str
    size: float
    note: str = ""
    allowance: bool = False


@dataclass(frozen=True)
class Need:
    """The memory that one role takes on each of `count` equal places.

    `place` is 'GPU' or 'memory' (of the machine). `limit`: bytes of the place, None if unknown, of
    which the fraction `share` may be used. `refusal`: why the role cannot work even if the sum
    fits.
    """

    role: str
    place: str
    parts: tuple[Part, ...]
    count: int = 1
    limit: float | None = None
    share: float = 1.0
    refusal: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> float:
        return sum(part.size for part in self.parts)

    @property
    def fits(self) -> bool | None:
        if self.refusal is not None:
            return False
        return None if self.limit is None else self.size <= self.limit * self.share


@dataclass(frozen=True)
class Change:
    """One setting that makes everything fit. `size`: bytes that the fullest place then holds,
    `saved` fewer than before. `cost`: its drawback, as text."""

    settings: dict[str, Any]
    saved: float
    size: float
    cost: str


@dataclass
class Estimate:
    """One run, or one stage of a chain. `quantities`: tokens, seconds and US dollars of a step, by
    name. `changes`: alternatives, each of which is enough to make it fit."""

    name: str
    engine: str
    model: str
    needs: list[Need]
    quantities: dict[str, Number] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    @property
    def fits(self) -> bool | None:
        return fits(self.needs)


def fits(needs: Sequence[Need]) -> bool | None:
    """False if a need does not fit, else None if one is unknown, else True. Where there are GPUs,
    machine memory of unknown size is ignored."""
    on_gpus = any(need.place == "GPU" for need in needs)
    asked = [n for n in needs if not on_gpus or n.place == "GPU" or n.limit is not None]
    found = [need.fits for need in asked]
    return False if False in found else None if None in found or not found else True


def overall(estimates: Sequence[Estimate]) -> bool | None:
    """False if a stage does not fit, else None if one is unknown, else True."""
    found = [one.fits for one in estimates]
    return False if False in found else None if None in found else True


def as_json(estimates: Sequence[Estimate]) -> dict[str, Any]:
    # Needs that share a machine's memory add up; of GPUs the fullest counts.
    memory = [sum(n.size for n in one.needs if n.place == "memory") for one in estimates]
    gpus = [need.size for one in estimates for need in one.needs if need.place == "GPU"]
    runs = []
    for one in estimates:
        run = asdict(one)
        for plain, need in zip(run["needs"], one.needs, strict=True):
            plain |= {"bytes": need.size, "fits": need.fits}
            plain |= {"limit_bytes": plain.pop("limit"), "usable_share": plain.pop("share")}
            plain["parts"] = [part | {"bytes": part.pop("size")} for part in plain["parts"]]
        for change in run["changes"]:
            change |= {"saved_bytes": change.pop("saved"), "bytes": change.pop("size")}
        runs.append(run | {"stage": run.pop("name") or None, "fits": one.fits})
    peak = {"memory": max(memory, default=0.0), "GPU": max(gpus, default=0.0)}
    return {"fits": overall(estimates), "peak_bytes": peak, "runs": runs}


def render(estimates: Sequence[Estimate]) -> str:
    """All stages as text, the verdict last."""
    found = overall(estimates)
    hint = "; give --gpu-memory (such as 24GB)" if found is None else ""
    verdict = f"verdict: {_VERDICT[found]}{hint}"
    return "\n\n".join([*(_render(one) for one in estimates), verdict])


def _render(one: Estimate) -> str:
    head = f"stage {one.name}: " if one.name else ""
    lines = [f"{head}engine {one.engine}, {one.model}"]
    for need in one.needs:
        lines += ["", f"{need.role}, {need.count} x {need.place}:"]
        lines += [f"  {_size(part.size)}  {part.name}{_note(part.note)}" for part in need.parts]
        total = f"  {_size(need.size)}  together"
        if need.limit is not None:
            usable = _size(need.limit * need.share).strip()
            total += f", of {usable} usable: {_VERDICT[need.fits]}"
        lines += [total, *(f"  {text}" for text in (need.refusal, *need.notes) if text)]
    if one.quantities:
        lines += ["", "each training step:"]
    for name, number in one.quantities.items():
        digits = 4 if name.startswith("usd") else 1
        value = "unknown" if number.value is None else f"{number.value:,.{digits}f}"
        known = number.known if number.known in (Known.BOUND, Known.GIVEN, Known.MEASURED) else ""
        lines.append(f"  {name:22} {value}{_note('; '.join(filter(None, (known, number.how))))}")
    if one.notes:
        lines += ["", *(f"note: {note}" for note in one.notes)]
    if one.fits is False:
        text = "any of these makes it fit:" if one.changes else "a smaller model, or more memory"
        lines += ["", f"what to change: {text}"]
    for change in one.changes:
        words = " ".join(shlex.quote(setting(*item)) for item in change.settings.items())
        lines += [f"  {words}", f"      leaves {_size(change.size).strip()}; {change.cost}"]
    return "\n".join(lines)


def setting(key: str, value: object) -> str:
    """A setting as typed after a command, before shell quoting."""
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _note(text: str) -> str:
    return f"  ({text})" if text else ""


def _size(size: float) -> str:
    return f"{size / GIB:>7,.2f} GiB"
