"""The report on workflows that the policy wrote: what is read, and its numbers by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_run import TASKSET, write_evaluation, write_fake_run
from fake_writer import (
    GRAPHS,
    REFUSED,
    UNKNOWN,
    UNREADABLE,
    evaluated,
    loaded,
    read,
    record,
    refused,
    rollouts,
)
from test_html_report import _page
from writer_samples import ONE, RAISES, TWO
from writer_samples import REFUSED as FORBIDDEN
from writer_samples import run as write_and_run
from writer_samples import text as reply

from aflow_tune.report.evaluation import load_evaluations
from aflow_tune.report.html import summary_text
from aflow_tune.report.records import Rollout, append_rollout, read_rollouts, rollout_path
from aflow_tune.report.statistics import wilson_interval
from aflow_tune.report.writer import (
    WriterRecords,
    WriterRun,
    audit_writer,
    count,
    load_writer,
    read_run,
    steps_told,
    writer_summary,
)
from aflow_tune.report.writer_section import summary_lines, writer_section

SECTION = "Workflows that the policy wrote"
SINGLE, VOTING, _ = GRAPHS


def test_a_record_is_read_whole() -> None:
    run = read(refused(level=2, usd=None, reason="line 9: KeyError"), step=4, item=7)
    assert (run.step, run.task, run.reward, run.valid, run.level) == (4, ("set", 7), 0.5, False, 2)
    assert run.refusals[0].kind == "unknown_operator"
    assert run.refusals[0].message.startswith("line 4, column 22: there is no operator Solver")
    assert (run.code, run.usd, run.tokens, run.reason) == (REFUSED, None, 400, "line 9: KeyError")
    assert read(refused(UNREADABLE)).refusals[0].message.startswith("neither a JSON object")
    assert read(refused(UNREADABLE)).text == "I would first think about the sum."


@pytest.mark.parametrize(
    "kept",
    [None, [], {}, {"writer": None}, {"writer": []}, {"writer": {}}, {"writer": {"valid": 1}}],
)
def test_what_is_no_record_is_passed_over(kept: Any) -> None:
    assert read_run(kept, 1, ("set", 0)) is None


def test_fields_of_another_type_count_as_absent() -> None:
    odd: list[Any] = [None, 3, -1, 1.5, True, "x", [], [1], ["x"], [{}], {}, {"a": {}}, 10**400]
    names = [name for name in record() if name != "valid"]
    for value in [*odd, float("nan"), float("inf")]:
        run = read({**dict.fromkeys(names, value), "valid": True}, reward=value)
        assert run.level in (None, 3)
        numbers = count([run])
        assert numbers.runs == 1
    run = read({"valid": False})
    assert (run.level, run.structure, run.nodes, run.score, run.usd, run.tokens) == (None,) * 6


def test_sizes_are_bounded() -> None:
    huge = "x" * 1_000_000
    run = read(
        record(
            code=huge, problem=huge, answer=huge, reason=huge, structure=huge, problem_type=huge,
            prompts={f"{number}{huge}": huge for number in range(100)},
            operators={f"{number}{huge}": 1 for number in range(100)},
            refusals=[{**UNKNOWN, "kind": huge, "message": huge}] * 100,
        )
    )  # fmt: skip
    assert len(str(run)) < 400_000
    assert read(record(structure=huge)).structure != read(record(structure=huge + "y")).structure


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    rollouts(tmp_path, 1, [(record(), 1.0), ("no record", 2.0)])
    path = rollout_path(tmp_path, 1)
    good = json.loads(path.read_text().splitlines()[0])
    damaged = [
        b"", b"torn", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000,
        json.dumps({**good, "task": [1]}).encode(),
        json.dumps({**good, "run": None}).encode(),
        json.dumps({**good, "kept": []}).encode(),
        json.dumps({"step": 1}).encode(),
    ]  # fmt: skip
    path.write_bytes(b"\n".join(damaged) + b"\n" + path.read_bytes())
    (path.parent / "step_x.jsonl").write_text("{}")
    (path.parent / "step_².jsonl").write_text("{}")
    assert [(run.task, run.run) for run in read_rollouts(tmp_path)] == [(0, 0), (0, 1)]
    assert len(loaded(tmp_path).training[1]) == 1


def test_a_run_without_records_has_no_section(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "run")
    assert load_writer(run_dir, load_evaluations(run_dir)) is None
    assert writer_summary(run_dir) is None
    page = _page(run_dir)
    assert SECTION not in page.text
    assert "fallbacks" not in page.text
    assert "Written graphs" not in summary_text(run_dir, run_dir / "report.html")


def test_what_the_writer_keeps_is_what_is_read(tmp_path: Path) -> None:
    """Real runs of the writer's workflow, between a scripted policy and a scripted executor."""
    texts = [reply(ONE), reply(TWO), reply(FORBIDDEN), reply(RAISES), "I do not know."]
    for number, written in enumerate(texts):
        ran = write_and_run([written], lambda _: "It is 3")
        assert ran.error is None
        append_rollout(tmp_path, Rollout(1, number, 0, ran.reward, None, ran.context.kept))
    records = loaded(tmp_path)
    one, two, forbidden, raises, nothing = records.training[1]
    assert [run.valid for run in records.every] == [True, True, False, True, False]
    assert [run.level for run in records.every] == [0, 0, 3, 2, 3]
    assert (one.operators, one.nodes, one.score, one.calls) == ({"Custom": 1}, 1, 1.0, 1)
    assert (two.operators, two.nodes, two.correct_clean) == ({"Custom": 2}, 2, 1.0)
    assert one.prompts == {"solve": "Solve it. "}
    assert one.structure not in (None, "", two.structure)
    assert one.parts["correctness"] == 1.0
    assert forbidden.refusals[0].message.startswith("line ")
    assert "ValueError" in raises.reason
    assert (nothing.code, nothing.text) == ("", "I do not know.")
    assert nothing.refusals[0].kind == "unreadable"
    numbers = count(records.every)
    assert numbers.valid.mean == pytest.approx(3 / 5)
    assert numbers.levels == {0: 2 / 5, 1: 0.0, 2: 1 / 5, 3: 2 / 5}
    assert audit_writer(records, {}) == []
    page = _page(tmp_path)
    assert "solve: Custom" in page.text
    assert "I do not know." not in page.text  # a refused graph that can be read is shown instead


def eight_runs() -> list[WriterRun]:
    """Two runs of each of four tasks."""
    kept = [
        record(SINGLE, score=1.0, usd=0.01, tokens=100),
        record(VOTING, score=0.0, usd=0.03, tokens=300),
        record(SINGLE, score=1.0, usd=0.01, tokens=100, prompts={"solve": "Think."}),
        record(SINGLE, level=2, score=1.0, usd=0.02, tokens=200),
        refused(UNKNOWN, usd=0.01, tokens=100, score=1.0),
        refused(UNREADABLE, usd=0.01, tokens=100),
        refused(UNREADABLE, usd=0.01, tokens=100, score=None),
        record(VOTING, usd=0.03, tokens=300, score=0.0, refusals=[UNKNOWN, UNKNOWN], valid=False),
    ]
    return [read(entry, item=index // 2) for index, entry in enumerate(kept)]


def test_numbers_by_hand() -> None:
    numbers = count(eight_runs())
    assert numbers.runs == 8
    # By task: 1, 1, 0, 0 are valid.
    assert numbers.valid.mean == 0.5
    assert (numbers.valid.low, numbers.valid.high) == wilson_interval(2, 4)
    assert numbers.levels == {0: 4 / 8, 1: 0.0, 2: 1 / 8, 3: 3 / 8}
    assert numbers.fallbacks == 0.5
    # Two runs are told each; a run that is told the same twice counts once.
    assert numbers.refusals == {"unknown_operator": 2 / 8, "unreadable": 2 / 8}
    # Five graphs were read: three SINGLE, two VOTING.
    assert numbers.operators == {"Custom": 1.0, "ScEnsemble": 2 / 5}
    assert numbers.nodes is not None
    assert (numbers.nodes.mean, numbers.nodes.low, numbers.nodes.high) == (7 / 5, 1, 2)
    # Of them one VOTING was refused.
    assert numbers.structures == {SINGLE: 3, VOTING: 1}
    assert numbers.dominance == 3 / 4
    assert numbers.prompts == 2
    # Tasks: (1 + 0) / 2, (1 + 1) / 2, (1 + 0) / 2, 0 (one run unscored).
    assert numbers.correct is not None
    assert numbers.correct.mean == pytest.approx(0.5)
    # Clean: (1 + 0) / 2, (1 + 0) / 2, 0, 0.
    assert numbers.correct_clean is not None
    assert numbers.correct_clean.mean == pytest.approx(0.25)
    # Four runs scored 1; all spent 0.13 dollars and 1300 tokens.
    assert numbers.usd_per_solved == pytest.approx(0.13 / 4)
    assert numbers.tokens_per_solved == pytest.approx(1300 / 4)


def test_what_is_not_known_is_not_zero() -> None:
    numbers = count([read(record(usd=None, tokens=None, score=None)), read(record())])
    assert (numbers.usd_per_solved, numbers.tokens_per_solved) == (None, None)
    nothing = count([read(refused(UNREADABLE, score=0.0))])
    assert (nothing.dominance, nothing.nodes, nothing.operators) == (None, None, {})
    assert nothing.usd_per_solved is None
    assert count([read(record(score=None))]).correct is None
    with pytest.raises(ValueError, match="no runs"):
        count([])


def test_phases_of_a_run(tmp_path: Path) -> None:
    for step in range(1, 13):
        rollouts(tmp_path, step, [(record(), 1.0)] * 2)
    for step in (0, 6, 12):
        evaluated(tmp_path, step, [record()] * 3)
    evaluated(tmp_path, 12, [record()], taskset="once")
    records = loaded(tmp_path)
    assert records.training_ends == ([1, 2, 3, 4, 5], [8, 9, 10, 11, 12])
    assert (steps_told(records.before), len(records.before)) == ("step 0", 3)
    assert (steps_told(records.after), len(records.after)) == ("step 12", 4)
    assert len(records.every) == 24 + 9 + 1
    section = writer_section(records)
    assert [phase.label for phase in section.phases] == [
        "training, steps 1 to 5", "training, steps 8 to 12", "held-out, step 0",
        "held-out, step 12",
    ]  # fmt: skip
    assert [side.taskset for side in section.held_out] == [TASKSET]


def test_short_trainings_have_ends_that_do_not_meet(tmp_path: Path) -> None:
    rollouts(tmp_path, 1, [(record(), 1.0)])
    assert loaded(tmp_path).training_ends == ([], [1])
    assert loaded(tmp_path).earliest == []
    rollouts(tmp_path, 2, [(record(), 1.0)])
    assert loaded(tmp_path).training_ends == ([1], [2])
    rollouts(tmp_path, 3, [(record(), 1.0)])
    assert loaded(tmp_path).training_ends == ([1], [3])


def test_an_evaluation_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    evaluated(tmp_path, 0, [record()] * 4)
    write_evaluation(tmp_path, 4, [1.0], finished=False)
    evaluated(tmp_path, 4, [record()] * 2, taskset="other")
    assert set(loaded(tmp_path).held_out) == {TASKSET, "other"}
    assert set(loaded(tmp_path).held_out[TASKSET]) == {0}


def test_the_summary_of_a_folder(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        rollouts(tmp_path, step, [(record(VOTING), 1.0), (refused(), -1.0)])
    summary = writer_summary(tmp_path)
    assert summary is not None
    assert summary.where == "training, steps 3 to 4"
    assert (summary.valid.mean, summary.structures) == (0.5, 1)
    evaluated(tmp_path, 4, [record(VOTING), record(SINGLE), refused(score=1.0), record(score=0.0)])
    summary = writer_summary(tmp_path)
    assert summary is not None
    assert summary.where == "held-out, step 4"
    assert (summary.valid.mean, summary.structures) == (0.75, 2)
    assert summary.correct_clean is not None
    assert summary.correct_clean.mean == 0.5


def test_the_two_lines_of_the_summary(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    evaluated(run_dir, 0, [record(), refused(), refused(), refused()])
    assert summary_lines(loaded(run_dir)) == [
        "Written graphs: 25% valid, 75% answered by a fallback (held-out, step 0).",
        "Distinct structures: 1 among 1 valid graphs, the most frequent in 100%.",
    ]
    evaluated(run_dir, 5, [record(), record(VOTING), record(VOTING), refused()])
    lines = [
        "Written graphs: 25% -> 75% valid, 75% -> 25% answered by a fallback (held-out, step 0 to "
        "step 5).",
        "Distinct structures: 2 among 3 valid graphs, the most frequent in 67%.",
    ]
    assert summary_lines(loaded(run_dir)) == lines
    assert lines == summary_text(run_dir, run_dir / "report.html").splitlines()[1:3]
    invalid = WriterRecords({}, {"set": {0: [read(refused())]}})
    assert summary_lines(invalid)[1] == "Distinct structures: 0 among 0 valid graphs."
