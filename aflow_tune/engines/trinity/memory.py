"""Which rows a `mode: train` run learns from, beside what its data set says: the coreset of its own
rows (`data/coreset.py`), and old rows of earlier rounds (`data/replay.py`).

    <run folder>/coreset.json              the rows chosen, with their losses
    <run folder>/replay.json               the rounds that may be rehearsed
    <run folder>/data/replay/train.jsonl   their rows, as they were when the run began

Both are settled once, before the first step: a resumed run reads these files, whatever the policy
or the buffer is by then. Old rows are read as the data set's own are, from the copy.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from trinity.common.experience import Experience, split_dpo_experience_to_single_turn

from aflow_tune.config.load import AflowConfig
from aflow_tune.data.coreset import choose, count_of
from aflow_tune.data.replay import Kept, Row, eligible, join, old_rows
from aflow_tune.engines.trinity.readers import Experiences, open_experiences
from aflow_tune.errors import BadInput, RunFailed
from aflow_tune.files import as_line, write_json, write_whole
from aflow_tune.report.html import CORESET_FILE, REPLAY_FILE

if TYPE_CHECKING:
    from aflow_tune.engines.local.trainer import LocalTrainer

REPLAYED = "replayed"
"""Key of `Experience.info` of a row of an earlier round."""


def choose_coreset(config: AflowConfig, reader: Experiences, trainer: LocalTrainer) -> None:
    """Let `reader` read the coreset only: the recorded one, or else that of the trainer's policy.
    Raises BadInput: the record is gone though training began, or is of another data set."""
    run_dir, rows = Path(config.checkpoint_job_dir), len(reader)
    path, section = run_dir / CORESET_FILE, config.coreset
    assert section.size is not None
    if not path.exists():
        if trainer.step_count:
            title, fix = "This run cannot be resumed.", "put it back, or give another `name=`"
            expected, found = "the rows that were chosen before the first step", "no such file"
            raise BadInput.of(title, str(path), expected, found, fix)
        losses, states = None, None
        if section.strategy != "random":
            losses, states = _appraised(trainer, _formatted(reader, range(rows)))
        size, seed = count_of(section.size, rows), section.seed
        seed = config.seed if seed is None else seed
        chosen = choose(section.strategy, size, rows, seed, losses, states)
        told = f"{size} of {rows} rows by {section.strategy}"
        if losses is not None:
            means = float(np.nanmean(losses[chosen])), float(np.nanmean(losses))
            told += f", mean loss per learned token {means[0]:.3f} (all rows: {means[1]:.3f})"
        kept = [_noted(reader, at, losses) for at in chosen]
        write_json(path, {"told": told, "of": rows, "rows": kept})
    record = json.loads(path.read_text(encoding="utf-8"))
    if record["of"] != rows:
        title, fix = "The data set has changed since its rows were chosen.", "give another `name=`"
        raise BadInput.of(title, str(path), f"{record['of']} rows", str(rows), fix)
    print(f"coreset: {record['told']}", flush=True)
    reader.keep([one["row"] for one in record["rows"]])


def _formatted(reader: Experiences, places: Sequence[int]) -> list[Experience]:
    """The experiences of these of the rows that are read."""
    found: list[Experience] = reader._convert_batch(
        [reader.dataset.dataset[at] for at in places], list(places)
    )
    return found


def _appraised(trainer: LocalTrainer, exps: list[Experience]) -> tuple[Any, Any]:
    """`appraise` of the rows, as arrays; a pair is judged by both of its answers."""
    from aflow_tune.engines.local.appraisal import appraise
    from aflow_tune.engines.trinity.training.algorithm import to_sample

    paired = exps[0].experience_type == "dpo"
    rows = [split_dpo_experience_to_single_turn([exp]) if paired else [exp] for exp in exps]
    losses, states = appraise(trainer, [[to_sample(exp) for exp in row] for row in rows])
    return losses.numpy(), states.numpy()


def _noted(reader: Experiences, at: int, losses: Any) -> dict[str, Any]:
    """What the record says of the row at this place among those that are read."""
    place = reader.table.places[reader.numbers[at]]
    loss = None if losses is None else float(losses[at])
    known = loss is not None and math.isfinite(loss)
    return {"row": at, "place": place, "loss": loss if known else None}


class Rehearsal:
    """`own` batches, in which an exact share of the rows are old ones of `old` (None: there are
    none). As many rows a batch as without; a position is `own`'s and the number of batches."""

    def __init__(self, config: AflowConfig, own: Experiences, old: Experiences | None) -> None:
        self.own, self.old = own, old
        self.size, self.ratio = config.buffer.train_batch_size, config.replay.ratio
        self.seed, self.batches = config.seed, 0

    async def read(self) -> list[Experience]:
        rows = 0 if self.old is None else len(self.old)
        drawn = old_rows(self.batches, self.size, self.ratio, rows, self.seed)
        found = list(await self.own.read(self.size - len(drawn))) if len(drawn) < self.size else []
        for exp in _formatted(self.old, drawn) if self.old is not None else ():
            exp.info[REPLAYED] = True
            found.append(exp)
        self.batches += 1
        return found

    def state_dict(self) -> dict[str, Any]:
        return {**self.own.state_dict(), "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.own.load_state_dict(state)
        self.batches = state["batches"]


def open_rehearsal(config: AflowConfig, own: Experiences) -> Rehearsal:
    """The reader of a run that rehearses. Raises BadInput: the buffer cannot be read, has not the
    rounds asked for, or has a row that cannot be learned from; RunFailed as `_joined`."""
    run_dir, section = Path(config.checkpoint_job_dir), config.replay
    folder, path = run_dir / "data" / "replay", buffer_path(config)
    record, old = run_dir / REPLAY_FILE, None
    if not record.exists():
        kind, mine = config.algorithm.algorithm_type, own.table.rows
        held = _joined(config, [])  # nothing: it is there, and can be written at the end
        kept = eligible(held, kind, mine, section.rounds) if section.ratio else []
        shutil.rmtree(folder, ignore_errors=True)
        if kept:
            write_whole(folder / "train.jsonl", b"".join(as_line(one.row) for one in kept))
            places = [one.place for one in kept]
            try:
                old = _open_old(config, folder)
            except BadInput as error:
                faults = [replace(one, where=_in_buffer(one.where, places)) for one in error.faults]
                title = "A row to rehearse cannot be learned from."
                raise BadInput(title, faults) from error
        rounds = dict(Counter(one.round for one in kept))
        told = f"no rows of earlier rounds in {path}" if section.ratio else "this run only joins"
        if old is not None:
            told = f"{section.ratio:g} of what is learned are old rows, drawn from the {len(old)} "
            told += f"of {len(rounds)} earlier round{'s' if len(rounds) > 1 else ''} in {path}"
            if old.left_out:
                told += f" ({len(old.left_out)} more are longer than model.max_model_len)"
        write_json(record, {"told": told, "rounds": rounds})
    settled = json.loads(record.read_text(encoding="utf-8"))
    print(f"replay: {settled['told']}", flush=True)
    if settled["rounds"] and old is None:
        old = _open_old(config, folder)
    return Rehearsal(config, own, old)


def _open_old(config: AflowConfig, folder: Path) -> Experiences:
    """A reader of the copied rows, which are of the data set's form."""
    config, inputs = copy.copy(config), config.buffer.trainer_input
    buffer = inputs.experience_buffer
    assert buffer is not None
    buffer = replace(buffer, path=str(folder), split="train", subset_name=None)
    config.buffer = replace(config.buffer, trainer_input=replace(inputs, experience_buffer=buffer))
    config.dialogues = replace(config.dialogues, task_weights={})  # the weights are of own rows
    reader = open_experiences(config)
    assert isinstance(reader, Experiences)
    return reader


def _in_buffer(where: str, places: Sequence[str]) -> str:
    """The line of the buffer that a line of the copy comes from."""
    line = where.rpartition(":")[2]
    return places[int(line) - 1] if line.isdigit() and int(line) <= len(places) else where


def join_buffer(config: AflowConfig, own: Experiences) -> None:
    """Add the rows that a finished run learned from to the buffer. Raises as `_joined`."""
    held = _joined(config, _own_rows(own), config.replay.capacity)
    rounds = Counter(kept.round for kept in held)
    told = f"{rounds[_round(config)]} rows of this round, {len(held)} of {len(rounds)} in all"
    print(f"replay: {buffer_path(config)} has {told}", flush=True)


def _joined(config: AflowConfig, rows: Iterable[Row], capacity: int | None = None) -> list[Kept]:
    """`join` of the run. Raises BadInput as that; RunFailed: the buffer cannot be written."""
    path, kind = buffer_path(config), config.algorithm.algorithm_type
    try:
        return join(path, _round(config), kind, rows, capacity)
    except OSError as error:
        cure = "Make room or make it writable; the same command goes on."
        raise RunFailed(f"replay.buffer: {path} cannot be written: {error}. {cure}") from error


def _round(config: AflowConfig) -> str:
    run_dir = Path(config.checkpoint_job_dir)
    return run_dir.relative_to(config.checkpoint_root_dir).as_posix()


def buffer_path(config: AflowConfig) -> Path:
    """As `checkpoint_root_dir`, relative to the current folder: runs write it."""
    return Path(str(config.replay.buffer)).expanduser().absolute()


def _own_rows(reader: Experiences) -> Sequence[Row]:
    """The rows that are read, as they stand in their files."""
    return [reader.table.rows[number] for number in dict.fromkeys(reader.numbers)]
