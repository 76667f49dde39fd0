"""What an estimate found: needs by part, quantities and changes, as text and as plain data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
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
        """Bytes on each place."""
        return sum(part.size for part in self.parts)

    @property
    def fits(self) -> bool | None:
        """None where the memory at hand is not known."""
        if self.refusal is not None:
            return False
        return None if self.limit is None else self.size <= self.limit * self.share


@dataclass(frozen=True)
class Change:
    """Settings that make everything fit, checked by estimating again. `size`: bytes on the place
    that was fullest, `saved` fewer than before. `cost`: what is lost by it, in words."""

    settings: tuple[tuple[str, object], ...]
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
    if False in found:
        return False
    return None if None in found else True


def as_json(estimates: Sequence[Estimate]) -> dict[str, Any]:
    """Everything as plain data; sizes in bytes."""
    # Needs that share a machine's memory add up; of GPUs the fullest counts.
    memory = [sum(n.size for n in one.needs if n.place == "memory") for one in estimates]
    gpus = [need.size for one in estimates for need in one.needs if need.place == "GPU"]
    return {
        "fits": overall(estimates),
        "peak_bytes": {"memory": max(memory, default=0.0), "GPU": max(gpus, default=0.0)},
        "runs": [
            {
                "stage": one.name or None,
                "engine": one.engine,
                "model": one.model,
                "fits": one.fits,
                "needs": [_need_json(need) for need in one.needs],
                "quantities": {
                    name: {"value": number.value, "known": number.known.value, "how": number.how}
                    for name, number in one.quantities.items()
                },
                "notes": one.notes,
                "changes": [
                    {
                        "settings": dict(change.settings),
                        "saved_bytes": change.saved,
                        "bytes": change.size,
                        "cost": change.cost,
                    }
                    for change in one.changes
                ],
            }
            for one in estimates
        ],
    }


def _need_json(need: Need) -> dict[str, Any]:
    return {
        "role": need.role,
        "place": need.place,
        "count": need.count,
        "bytes": need.size,
        "limit_bytes": need.limit,
        "usable_share": need.share,
        "fits": need.fits,
        "refusal": need.refusal,
        "notes": list(need.notes),
        "parts": [
            {"name": p.name, "bytes": p.size, "note": p.note, "allowance": p.allowance}
            for p in need.parts
        ],
    }


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
        lines += ["", *_need_lines(need)]
    if one.quantities:
        lines += ["", "each training step:"]
        lines += [_quantity_line(name, number) for name, number in one.quantities.items()]
    if one.notes:
        lines += ["", *(f"note: {note}" for note in one.notes)]
    if one.fits is False and not one.changes:
        lines += [
            "",
            "no single setting that is tried here makes it fit: take a smaller model, or more",
        ]
    elif one.fits is False:
        lines += ["", "what makes it fit, each checked by estimating again:"]
        for change in one.changes:
            saved = f"saves {_size(change.saved)}" if change.saved > 0 else "moves it elsewhere"
            lines.append("  " + " ".join(shlex.quote(setting(*item)) for item in change.settings))
            lines.append(f"      {saved}, leaves {_size(change.size)}; {change.cost}")
    return "\n".join(lines)


def _need_lines(need: Need) -> list[str]:
    each = "GPU" if need.place == "GPU" else "machine's memory"
    lines = [f"{need.role}, {f'{need.count} x ' if need.count > 1 else ''}{each}:"]
    lines += [f"  {_size(part.size):>11}  {part.name}{_note(part.note)}" for part in need.parts]
    total = f"  {_size(need.size):>11}  together"
    if need.limit is not None:
        share = "" if need.share == 1 else f" ({need.share:.0%} of {_size(need.limit)})"
        usable = _size(need.limit * need.share)
        total += f", of {usable} usable{share}: {_VERDICT[need.fits]}"
    said = [need.refusal, *need.notes] if need.refusal else need.notes
    return [*lines, total, *(f"  {text}" for text in said)]


def _quantity_line(name: str, number: Number) -> str:
    if number.value is None:
        return f"  {name:22} unknown{_note(number.how)}"
    if name.startswith("usd"):
        value = f"${number.value:,.{4 if 0 < number.value < 1 else 2}f}"
    elif name.startswith("seconds"):
        value = f"{number.value:,.1f} s"
    else:
        whole = number.value == int(number.value) or number.value >= 100
        value = f"{number.value:,.{0 if whole else 1}f}"
    known = "" if number.known is Known.COUNTED else number.known.value
    return f"  {name:22} {value}{_note('; '.join(filter(None, (known, number.how))))}"


def setting(key: str, value: object) -> str:
    """As it is typed behind a command, before the shell's quotes."""
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _note(text: str) -> str:
    return f"  ({text})" if text else ""


def _size(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if abs(size) < 100 * GIB else f"{size / GIB:,.0f} GiB"
