"""The report's best and worst written graphs, their drawings, and how prompts changed."""

from __future__ import annotations

import pytest
from fake_writer import (
    GRAPHS,
    UNREADABLE,
    VOTE,
    read,
    record,
    refused,
)

from aflow_tune.report.writer import WriterRecords, WriterRun
from aflow_tune.report.writer_section import (
    MOST_NODES,
    best_and_worst,
    by_type,
    draw,
    marked,
    prompt_changes,
    structures,
    writer_section,
)

SINGLE, VOTING, PROGRAM = GRAPHS


def test_structures_and_their_types() -> None:
    latest = [
        *(read(record(VOTING, problem_type="math")) for _ in range(3)),
        *(read(record(SINGLE, problem_type="qa")) for _ in range(2)),
        read(record(VOTING, problem_type="qa")),
        read(record(PROGRAM, problem_type="qa", valid=False)),
    ]
    records = WriterRecords({}, {"set": {0: [read(record(SINGLE))], 9: latest}})
    shown = structures(records)
    assert [(s.name, s.key, s.share, s.earlier) for s in shown] == [
        ("S1", VOTING, 4 / 6, 0.0),
        ("S2", SINGLE, 2 / 6, 1.0),
    ]
    assert shown[0].operators == "1 Custom, 1 ScEnsemble"
    assert "solve: Custom" in shown[0].drawing.svg
    rows = by_type(records.latest, shown)
    assert [(row.problem_type, row.graphs, row.distinct, row.most) for row in rows] == [
        ("math", 3, 1, "S1"),
        ("qa", 3, 2, "S2"),
    ]
    assert rows[1].shares == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    section = writer_section(records)
    assert section.types_sentence.startswith("Types differ")
    assert "math: S1, qa: S2" in section.types_sentence
    alike = [read(record(problem_type=kind)) for kind in ("math", "code", "qa")]
    section = writer_section(WriterRecords({}, {"set": {0: alike}}))
    assert section.types_sentence == "All types have the same most frequent structure, S1."


def test_best_and_worst_by_mean_reward() -> None:
    runs = [
        read(record(SINGLE), reward=10.0),
        *(read(record(VOTING), reward=reward) for reward in (8.0, 9.0, 7.0)),
        *(read(record(PROGRAM), reward=reward) for reward in (5.0, 9.5, 2.0)),
        *(read(refused(), reward=reward) for reward in (-9.0, -8.0, -8.5)),
        read(refused(UNREADABLE), reward=-10.0),
        read(record(SINGLE), reward=None),
    ]
    best, worst, bad = best_and_worst(WriterRecords({1: runs}, {}))
    # SINGLE was used once with a reward: too few. Means: VOTING 8, PROGRAM 5.5.
    assert (best.title, best.uses, best.reward, best.run.reward) == ("Best graph", 3, 8.0, 9.0)
    assert best.run.structure == VOTING
    assert (worst.uses, worst.reward, worst.run.reward) == (3, 5.5, 2.0)
    assert worst.run.structure == PROGRAM
    assert (bad.title, bad.uses, bad.reward) == ("Worst refused graph", 3, -8.5)
    assert "solve: Solver" in bad.drawing.svg
    # Where nothing was used often, all are looked at; what cannot be read only if alone.
    few = [read(record(SINGLE), reward=1.0), read(refused(UNREADABLE), reward=-10.0)]
    best, bad = best_and_worst(WriterRecords({1: few}, {}))
    assert (best.uses, bad.drawing.why_not) == (1, "No graph could be read.")
    assert best_and_worst(WriterRecords({1: [read(record(), reward=None)]}, {})) == []


def test_how_prompts_changed() -> None:
    first, second = marked("Solve it now.", "Solve it step by step.")
    assert first == [("", "Solve it "), ("del", "now.")]
    assert second == [("", "Solve it "), ("ins", "step by step.")]
    for before, after in (("", "a b"), (" a\n\nb ", "b"), ("x " * 900, "y " * 900)):
        first, second = marked(before, after)
        assert "".join(text for _, text in first) == before
        assert "".join(text for _, text in second) == after

    def run(step: int, **prompts: str) -> WriterRun:
        return read(record(prompts=prompts), step=step)

    training = {
        1: [run(1, solve="Old."), run(1, solve="Odd."), run(1, solve="Old.", vote="Choose.")],
        2: [run(2, solve="Else.", check="Look.")],
        3: [run(3, solve="New."), run(3, vote="Choose.")],
    }
    changes = prompt_changes(training)
    assert [change.instance for change in changes] == ["solve", "vote"]
    solve, vote = changes
    assert (solve.before.step, solve.before.runs, solve.before.of) == (1, 2, 3)
    assert solve.before.pieces == (("del", "Old."),)
    assert (solve.after.step, solve.after.runs, solve.after.of) == (3, 1, 1)
    assert (solve.same, vote.same) == (False, True)


def test_drawings() -> None:
    drawing = draw(VOTE, name="a")
    assert drawing.why_not == ""
    assert "repeats: for turn in range(3)" in drawing.svg
    assert "<style" not in drawing.svg
    assert 'id="a-head"' in drawing.svg
    assert "url(#a-head)" in drawing.svg
    assert "Mine" in draw(VOTE.replace("ScEnsemble", "Mine"), ["Mine"]).svg
    for code, why in (
        ("", "No graph could be read."),
        ("no Python at all", "Nothing to draw: its code is no Python."),
        ("class Workflow: pass", "Nothing to draw: no call of an operator was found in its code."),
        ("x = " + "(" * 500, "Nothing to draw: its code is no Python."),
        ("x = " + "-" * 19_000 + "1", "Nothing to draw: its code is no Python."),
        (VOTE + "#" * 20_000, "Its code is too long to be drawn."),
        (VOTE + "\0", "Nothing to draw: its code is no Python."),
    ):
        found = draw(code)
        assert found.svg == ""
        assert found.why_not.startswith(why), found.why_not
    calls = "".join(f"        await self.solve(input=problem)  # {n}\n" for n in range(MOST_NODES))
    large = VOTE.replace("        drafts = []\n", calls)
    assert draw(large).why_not == f"Too large to be drawn: {MOST_NODES + 2} calls."
