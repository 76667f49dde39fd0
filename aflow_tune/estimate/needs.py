"""What an estimate found: needs by part, quantities and changes, as text and as plain data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aflow_tune.estimate.quantities import Known, Number

GIB = 2**30
"""Bytes. GPU memory is counted in GiB by every vendor's tool, whatever it calls them."""
_VERDICT = {True: "fits", False: "does not fit", None: "not known whether it fits"}


@dataclass(frozen=True)
class Part:
    """One item of a memory bill, in bytes. `allowance`: set from measurements, no formula."""

    name: str
    size: float
    note: str = ""
    allowance: bool = False


@dataclass(frozen=True)
class Need:
    """What one role takes on each of `count` equal places.

    `place` is 'GPU' or 'memory' (of the machine). `limit` is what the place offers, in bytes;
    None if that is not known. `share` of it may be used. `refusal` says why a role cannot work
    even where the sum fits.
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
    """Settings that make everything fit, checked by estimating again. `size`: bytes on the place
    that was fullest, `saved` fewer than before. `cost`: what is lost by it, in words."""

    settings: dict[str, Any]
    saved: float
    size: float
    cost: str


@dataclass
class Estimate:
    """One run, or one stage of a chain. `quantities`: tokens, seconds and US dollars of a step, by
    name. `changes`: alternatives, the mildest first; any one of them is enough."""

    name: str
    engine: str
    model: str
    needs: list[Need]
    quantities: dict[str, Number] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    @property
    def fits(self) -> bool | None:
        """False if anything does not fit; None if that cannot be told of something.

        The memory of machines that nobody described is not asked for where GPUs decide.
        """
        on_gpus = any(need.place == "GPU" for need in self.needs)
        asked = [n for n in self.needs if not on_gpus or n.place == "GPU" or n.limit is not None]
        return _all_fit([need.fits for need in asked] or [None])

    @property
    def fullest(self) -> Need:
        """The need that goes furthest beyond its place."""
        return max(self.needs, key=lambda need: need.size / need.limit if need.limit else 0.0)


def overall(estimates: Sequence[Estimate]) -> bool | None:
    """Whether all stages fit; None if that is not known of one."""
    return _all_fit([one.fits for one in estimates])


def _all_fit(found: Sequence[bool | None]) -> bool | None:
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
    """All stages as text, with the verdict last."""
    found = overall(estimates)
    hint = "; give --gpu-memory (such as 24GB)" if found is None else ""
    verdict = f"verdict: {_VERDICT[found]}{hint}"
    return "\n\n".join([*(_render(one) for one in estimates), verdict])


def _render(one: Estimate) -> str:
    head = f"stage {one.name}: " if one.name else ""
    lines = [f"{head}engine {one.engine}, {one.model}"]
    for need in one.needs:
        each = "GPU" if need.place == "GPU" else "machine's memory"
        lines += ["", f"{need.role}, {f'{need.count} x ' if need.count > 1 else ''}{each}:"]
        lines += [f"  {_size(part.size):>11}  {part.name}{_note(part.note)}" for part in need.parts]
        total = f"  {_size(need.size):>11}  together"
        if need.limit is not None:
            total += f", of {_size(need.limit * need.share)} usable: {_VERDICT[need.fits]}"
        lines += [total, *(f"  {text}" for text in (need.refusal, *need.notes) if text)]
    if one.quantities:
        lines += ["", "each training step:"]
        lines += [_quantity(name, number) for name, number in one.quantities.items()]
    if one.notes:
        lines += ["", *(f"note: {note}" for note in one.notes)]
    if one.fits is False and not one.changes:
        text = "no single setting that is tried here makes it fit: take a smaller model, or more"
        lines += ["", text]
    elif one.fits is False:
        lines += ["", "what makes it fit, each checked by estimating again:"]
    for change in one.changes:
        saved = f"saves {_size(change.saved)}" if change.saved > 0 else "moves it elsewhere"
        lines.append(
            "  " + " ".join(shlex.quote(setting(*item)) for item in change.settings.items())
        )
        lines.append(f"      {saved}, leaves {_size(change.size)}; {change.cost}")
    return "\n".join(lines)


def _quantity(name: str, number: Number) -> str:
    if number.value is None:
        return f"  {name:22} unknown{_note(number.how)}"
    digits = 4 if name.startswith("usd") else 0 if number.value >= 100 else 1
    unit = " s" if name.startswith("seconds") else ""
    known = "" if number.known is Known.COUNTED else number.known.value
    note = _note("; ".join(filter(None, (known, number.how))))
    return f"  {name:22} {number.value:,.{digits}f}{unit}{note}"


def setting(key: str, value: object) -> str:
    """As it is typed behind a command, before the shell's quotes."""
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _note(text: str) -> str:
    return f"  ({text})" if text else ""


def _size(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if abs(size) < 100 * GIB else f"{size / GIB:,.0f} GiB"
