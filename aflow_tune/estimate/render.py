"""An estimate as text for a terminal and as plain data for `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aflow_tune.estimate.types import GIB, Change, Estimate, Known, Need, Number

_VERDICT = {True: "fits", False: "does not fit", None: "not known whether it fits"}
_MONEY = "usd"


def render(estimates: Sequence[Estimate]) -> str:
    """All stages as text, with the verdict last."""
    blocks = [_render(one) for one in estimates]
    return "\n\n".join([*blocks, verdict(estimates)])


def verdict(estimates: Sequence[Estimate]) -> str:
    """One line over all stages."""
    found = overall(estimates)
    text = f"verdict: {_VERDICT[found]}"
    if found is None:
        text += "; give --gpu-memory (such as 24GB)"
    return text


def overall(estimates: Sequence[Estimate]) -> bool | None:
    """Whether all stages fit; None if that is not known of one."""
    found = [one.fits for one in estimates]
    if False in found:
        return False
    return None if None in found else True


def as_json(estimates: Sequence[Estimate]) -> dict[str, Any]:
    """Everything as plain data; sizes in bytes."""
    return {
        "fits": overall(estimates),
        "peak_bytes": {
            place: max((_most(one, place) for one in estimates), default=0.0)
            for place in ("memory", "GPU")
        },
        "runs": [_run(one) for one in estimates],
    }


def _most(one: Estimate, place: str) -> float:
    """The fullest place of its kind; needs that share the machine's memory add up."""
    sizes = [need.size for need in one.needs if need.place == place]
    if not sizes:
        return 0.0
    return sum(sizes) if place == "memory" else max(sizes)


def _run(one: Estimate) -> dict[str, Any]:
    return {
        "stage": one.name or None,
        "engine": one.engine,
        "model": one.model,
        "fits": one.fits,
        "needs": [_need(need) for need in one.needs],
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


def _need(need: Need) -> dict[str, Any]:
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
            {
                "name": part.name,
                "bytes": part.size,
                "note": part.note,
                "allowance": part.allowance,
            }
            for part in need.parts
        ],
    }


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
    if one.fits is False:
        lines += ["", *_change_lines(one.changes)]
    return "\n".join(lines)


def _need_lines(need: Need) -> list[str]:
    each = "GPU" if need.place == "GPU" else "machine's memory"
    count = f", {need.count} x {each}" if need.count > 1 else f", {each}"
    lines = [f"{need.role}{count}:"]
    lines += [f"  {_size(part.size):>11}  {part.name}{_note(part.note)}" for part in need.parts]
    total = f"  {_size(need.size):>11}  together"
    if need.limit is not None:
        usable = need.limit * need.share
        share = "" if need.share == 1 else f" ({need.share:.0%} of {_size(need.limit)})"
        total += f", of {_size(usable)} usable{share}: {_VERDICT[need.fits]}"
    lines.append(total)
    if need.refusal:
        lines.append(f"  {need.refusal}")
    lines += [f"  {note}" for note in need.notes]
    return lines


def _quantity_line(name: str, number: Number) -> str:
    if number.value is None:
        return f"  {name:22} unknown{_note(number.how)}"
    how = [] if number.known is Known.COUNTED else [number.known.value]
    how += [number.how] if number.how else []
    return f"  {name:22} {_value(name, number.value)}{_note('; '.join(how))}"


def _value(name: str, value: float) -> str:
    if name.startswith(_MONEY):
        return f"${value:,.4f}" if 0 < value < 1 else f"${value:,.2f}"
    if name.startswith("seconds"):
        return f"{value:,.1f} s"
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:,.1f}"


def _change_lines(changes: Sequence[Change]) -> list[str]:
    if not changes:
        return ["no single setting that is tried here makes it fit: take a smaller model, or more"]
    lines = ["what makes it fit, each checked by estimating again:"]
    for change in changes:
        settings = " ".join(_assignment(key, value) for key, value in change.settings)
        saved = f"saves {_size(change.saved)}" if change.saved > 0 else "moves it elsewhere"
        lines.append(f"  {settings}")
        lines.append(f"      {saved}, leaves {_size(change.size)}; {change.cost}")
    return lines


def _assignment(key: str, value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"'{key}={text}'" if " " in text else f"{key}={text}"


def _note(text: str) -> str:
    return f"  ({text})" if text else ""


def _size(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if abs(size) < 100 * GIB else f"{size / GIB:,.0f} GiB"
