"""Evaluation records: one line a run, whole, whatever a model wrote into it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aflow_tune.report.records import EvalRecord, append_record, read_records, record_path

RECORD = EvalRecord(
    step=4, taskset="held_out", item=7, run=1, score=1.0, reward=0.5, metrics={"right": 1.0}
)


@pytest.mark.parametrize("text", ["two\nlines", "\u2028 \x85 \x1c", "\ud83d alone", "\x00", "数学"])
def test_a_record_is_one_line_whatever_it_holds(tmp_path: Path, text: str) -> None:
    call = {"caller": "a", "messages": [], "response": text, "tokens": 1}
    record = replace(RECORD, transcript=[call])
    append_record(tmp_path, record)
    append_record(tmp_path, RECORD)
    path = record_path(tmp_path, "held_out", 4)
    assert path.read_bytes().count(b"\n") == 2
    assert read_records(path) == [record, RECORD]


def test_a_torn_last_line_is_passed_over_and_another_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step_4.jsonl"
    line = RECORD.to_line()
    path.write_bytes(line + line[:-9])
    assert read_records(path) == [RECORD]
    path.write_bytes(line + line[:-9] + b"\n" + line)
    with pytest.raises(ValueError, match=r"step_4\.jsonl:2 is damaged"):
        read_records(path)
    path.write_bytes(b"")
    assert read_records(path) == []


def test_newer_keys_are_passed_over_and_missing_ones_are_an_error() -> None:
    line = RECORD.to_line().replace(b'"step": 4', b'"step": 4, "colour": "red"')
    assert EvalRecord.from_line(line) == RECORD
    with pytest.raises(ValueError, match="taskset"):
        EvalRecord.from_line(b'{"step": 4}')
    with pytest.raises(ValueError, match="object"):
        EvalRecord.from_line(b"[]")


def test_a_line_that_does_not_fit_on_the_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) - 1)
    with pytest.raises(OSError, match="bytes fitted"):
        append_record(tmp_path, RECORD)
