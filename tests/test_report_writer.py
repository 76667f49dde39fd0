"""The report on a policy that writes workflows: records, numbers, warnings, and what is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_writer import (
    GRAPHS,
    UNKNOWN,
    UNREADABLE,
    VOTE,
    evaluated,
    loaded,
    read,
    record,
    refused,
    rollouts,
    write_writer_run,
)
from test_html_report import HOSTILE, Page, page_of
from writer_samples import ONE, RAISES, TWO
from writer_samples import REFUSED as FORBIDDEN
from writer_samples import run as write_and_run
from writer_samples import text as reply

from aflow_tune.cli import main
from aflow_tune.report.evaluation import load_evaluations
from aflow_tune.report.html import summary_text, write_report
from aflow_tune.report.records import Rollout, append_rollout, read_rollouts
from aflow_tune.report.statistics import wilson_interval
from aflow_tune.report.writer import (
    MOST_NODES,
    WRITER_CHECKS,
    Numbers,
    WriterRecords,
    WriterRollout,
    audit_writer,
    drawing_of,
    examples,
    read_rollout,
)

SINGLE, VOTING = GRAPHS


def test_whatever_stands_in_a_record_is_read_or_absent() -> None:
    for kept in (None, [], {}, {"writer": None}, {"writer": []}, {"writer": {"valid": 1}}):
        assert read_rollout(kept, 1, ("set", 0)) is None
    odd: list[Any] = [None, 3, -1, 1.5, True, "x", [], [1], ["x"], [{}], {}, {"a": {}}, 10**400]
    names = [name for name in record() if name != "valid"]
    for value in [*odd, float("nan"), float("inf")]:
        run = read({**dict.fromkeys(names, value), "valid": True}, reward=value)
        assert run.level in (None, 3)
        assert Numbers([run]).rollouts == 1
    run = read({"valid": False})
    assert (run.level, run.structure, run.score, run.usd, run.tokens) == (None,) * 5
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
    assert run.structure != read(record(structure=huge + "y")).structure


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    rollouts(tmp_path, 1, [(record(), 1.0), ("no record", 2.0)])
    path = tmp_path / "rollouts" / "step_1.jsonl"
    good = json.loads(path.read_text().splitlines()[0])
    odd = [{**good, "task": [1]}, {**good, "run": None}, {**good, "kept": []}, {"step": 1}]
    damaged = [b"", b"torn", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000]
    damaged += [json.dumps(entry).encode() for entry in odd]
    path.write_bytes(b"\n".join(damaged) + b"\n" + path.read_bytes())
    (path.parent / "step_x.jsonl").write_text("{}")
    assert [(run.task, run.run) for run in read_rollouts(tmp_path)] == [(0, 0), (0, 1)]
    assert len(loaded(tmp_path).training[1]) == 1


def test_what_the_writer_keeps_is_what_is_read(tmp_path: Path) -> None:
    """Real runs of the writer's workflow, between a scripted policy and a scripted executor."""
    texts = [reply(ONE), reply(TWO), reply(FORBIDDEN), reply(RAISES), "I do not know."]
    for number, written in enumerate(texts):
        ran = write_and_run([written], lambda _: "It is 3")
        assert ran.error is None
        append_rollout(tmp_path, Rollout(1, number, 0, ran.reward, None, ran.context.kept))
    records = loaded(tmp_path)
    one, two, forbidden, raises, nothing = records.training[1]
    assert [run.valid for run in records.training[1]] == [True, True, False, True, False]
    assert [run.level for run in records.training[1]] == [0, 0, 3, 2, 3]
    assert (one.operators, one.score, two.operators) == ({"Custom": 1}, 1.0, {"Custom": 2})
    assert (one.prompts, one.parts["correctness"]) == ({"solve": "Solve it. "}, 1.0)
    assert one.structure not in (None, "", two.structure)
    assert forbidden.refusals[0][1].startswith("line ")
    assert "ValueError" in raises.reason
    assert (nothing.code, nothing.text) == ("", "I do not know.")
    assert nothing.refusals[0][0] == "unreadable"
    assert list(audit_writer(records, {})) == []
    assert "solve: Custom" in page_of(tmp_path).text


def test_numbers_by_hand() -> None:
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
    numbers = Numbers([read(entry, item=index // 2) for index, entry in enumerate(kept)])
    assert numbers.rollouts == 8
    # By task: 1, 1, 0, 0 are valid.
    assert (numbers.valid.mean, numbers.valid.low, numbers.valid.high) == (
        0.5, *wilson_interval(2, 4),
    )  # fmt: skip
    assert numbers.levels == {0: 4 / 8, 1: 0.0, 2: 1 / 8, 3: 3 / 8}
    assert numbers.fallbacks == 0.5
    # Two runs are told each; a run that is told the same twice counts once.
    assert numbers.refusals == {"unknown_operator": 2 / 8, "unreadable": 2 / 8}
    assert numbers.structures == {SINGLE: 3, VOTING: 1}
    assert numbers.shares == {SINGLE: 3 / 4, VOTING: 1 / 4}
    # Tasks: (1 + 0) / 2, (1 + 1) / 2, (1 + 0) / 2, 0 (one run unscored).
    assert numbers.score is not None
    assert numbers.score.mean == pytest.approx(0.5)
    # Clean: (1 + 0) / 2, (1 + 0) / 2, 0, 0.
    assert numbers.clean_score is not None
    assert numbers.clean_score.mean == pytest.approx(0.25)
    # Four runs scored 1; all spent 0.13 dollars and 1300 tokens.
    assert numbers.usd_per_solved == pytest.approx(0.13 / 4)
    assert numbers.tokens_per_solved == pytest.approx(1300 / 4)


def valid_of(step: int, valid: int, items: int) -> list[WriterRollout]:
    """Items of which so many have a valid graph."""
    return [
        read(record() if item < valid else refused(), step=step, item=item) for item in range(items)
    ]


def trained(*valid: int) -> WriterRecords:
    """Steps of ten tasks of which so many have a valid graph."""
    return WriterRecords({step: valid_of(step, n, 10) for step, n in enumerate(valid, 1)}, {})


def held_out(before: int, after: int) -> WriterRecords:
    """Two evaluations of twenty tasks."""
    return WriterRecords({}, {"set": {0: valid_of(0, before, 20), 8: valid_of(8, after, 20)}})


def newest(*groups: tuple[int, Any], reward: Any = 0.5) -> WriterRecords:
    """One step of so many rollouts with each record."""
    runs = [read(kept, reward=reward) for number, kept in groups for _ in range(number)]
    return WriterRecords({1: runs}, {})


def beside_clean(*others: tuple[Any, Any]) -> WriterRecords:
    """Records with their rewards, beside two clean ones with -8 and 9."""
    rewarded = [(record(), -8.0), (record(), 9.0), *others]
    return WriterRecords({1: [read(kept, reward=reward) for kept, reward in rewarded]}, {})


FAILED = refused(ending="raised", reason="the executor has no answer")


@pytest.mark.parametrize(
    ("check", "records", "words"),
    [
        (0, trained(9, 8, 9, 8, 3, 2, 3, 2), "60%"),  # halves: 0.85 and 0.25
        (0, trained(2, 3, 8, 9), None),
        (0, trained(9, 2, 8, 3, 9, 1), None),
        (0, held_out(18, 6), "60%"),
        (0, held_out(6, 18), None),
        (0, held_out(18, 17), None),
        (1, beside_clean((refused(), -8.0), (record(level=1), 3.0)), "up to 3"),
        (1, beside_clean((refused(), -8.1)), None),
        (1, beside_clean((refused(), None), (refused(level=None), 9.0)), None),
        # 19 of 19 are too few; 40 of 44 are no certainty.
        (2, newest((60, record(SINGLE)), (1, record(VOTING))), "60 of 61"),
        (2, newest((19, record(SINGLE))), None),
        (2, newest((40, record(SINGLE)), (4, record(VOTING))), None),
        (3, newest((20, FAILED)), None),
        (3, newest((20, FAILED), reward=None), "20 of 20 rollouts have no reward"),
    ],
)
def test_what_is_warned_of(check: int, records: WriterRecords, words: str | None) -> None:
    found = [one.found for one in audit_writer(records, {}) if one.check == WRITER_CHECKS[check]]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_the_audit_of_a_run_folder(tmp_path: Path) -> None:
    good = write_writer_run(tmp_path / "good", steps=6, items=12)
    assert list(audit_writer(loaded(good), load_evaluations(good))) == []
    bad = tmp_path / "bad"
    use = {"operator": "Custom", "instance": "solve", "outcome": "model_failed", "attempts": 1}
    evaluated(bad, 0, [record(VOTING)] * 40)
    evaluated(bad, 4, [record(level=3, ending="raised")] * 40, operators=[use])
    rollouts(bad, 4, [(record(), 1.0), (refused(), 2.0)])
    found = list(audit_writer(loaded(bad), load_evaluations(bad)))
    assert [finding.check for finding in found] == list(WRITER_CHECKS[1:])
    assert str(found[0]) in summary_text(bad, bad / "report.html")
    assert "40 of 40 uses of operators failed" in page_of(bad).text


def test_the_examples_are_the_most_frequent_ones() -> None:
    runs = [
        *(read(record(VOTING), reward=reward) for reward in (8.0, 9.0, 7.0)),
        *(read(record(SINGLE), reward=reward) for reward in (10.0, 9.5)),
        *(read(refused(), reward=reward) for reward in (-9.0, None)),
        read(refused(UNREADABLE), reward=-10.0),
    ]
    valid, bad = examples(runs)
    assert (valid["rollout"].structure, valid["rollout"].reward) == (VOTING, 8.0)
    assert "solve: Custom" in valid["drawing"]
    assert bad["rollout"].refusals[0][0] == UNKNOWN["kind"]
    assert "solve: Solver" in bad["drawing"]
    (unreadable,) = examples(runs[-1:])
    assert unreadable["drawing"] == ""


def test_drawings() -> None:
    drawing = drawing_of(VOTE, name="a")
    assert "repeats: for turn in range(3)" in drawing
    assert "<style" not in drawing
    assert "url(#a-head)" in drawing
    assert "Mine" in drawing_of(VOTE.replace("ScEnsemble", "Mine"), ["Mine"])
    calls = "".join(f"        await self.solve(input=problem)  # {n}\n" for n in range(MOST_NODES))
    many = VOTE.replace("        drafts = []\n", calls)
    nested = ["x = " + "(" * 500, "x = " + "-" * 19_000 + "1", VOTE + "\0", VOTE + "#" * 20_000]
    for code in ("", "no Python at all", "class Workflow: pass", *nested, many):
        assert drawing_of(code) == ""


@pytest.mark.parametrize("hostile", [*HOSTILE[:3], "</script>", "\x1b[31m\u202e\ud83d"])
def test_what_a_model_wrote_stays_text(tmp_path: Path, hostile: str) -> None:
    quoted = repr(hostile)
    code = VOTE.replace("solutions=drafts", f"solutions=[{quoted}]").replace("range(3)", quoted)

    def runs(text: str, graph: str) -> list[tuple[Any, float]]:
        names = ("problem", "problem_type", "text", "ending", "reason", "answer", "structure")
        said = dict.fromkeys(names, text)
        refusals = [{**UNKNOWN, "kind": text, "message": text}]
        mappings = {"prompts": {text: text}, "operators": {text: 1}, "parts": {text: 0.5}}
        written = {**said, **mappings, "code": graph}
        return [
            (record(VOTING, **written), 1.0),
            (record(VOTING, **{**written, "code": graph + "# 2\n"}), 0.0),
            (refused(**{**written, "refusals": refusals}), -1.0),
            (refused(**{**said, "code": text, "refusals": refusals}), -1.0),
        ]

    pages = []
    for name, text, graph in (("clean", "plain", VOTE), ("run", hostile, code)):
        run_dir = tmp_path / name
        for step in (1, 2):
            rollouts(run_dir, step, runs(text, graph))
        evaluated(run_dir, 0, [kept for kept, _ in runs(text, graph)])
        page = write_report(run_dir).read_text(encoding="utf-8")
        assert not {"\x1b", "\u202e"} & set(page)
        pages.append(Page(page))
    clean, page = pages
    assert {*page.tags} == {*clean.tags}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    if hostile.isprintable():
        assert " ".join(hostile.split()) in page.text


def test_the_best_workflows_are_exported(tmp_path: Path) -> None:
    run_dir = write_writer_run(tmp_path / "run", steps=8)
    command = ["export", "--run", str(run_dir), "--what", "workflows", "--out"]
    assert main([*command, str(tmp_path / "out"), "--dataset", "MATH"]) == 0
    index = json.loads((tmp_path / "out" / "index.json").read_text())["workflows"]
    rewards = [best["reward"] for best in index]
    assert rewards == sorted(rewards, reverse=True)
    records, kind = loaded(run_dir), (index[0]["structure"], index[0]["problem_type"])
    sets = [records.training, *records.held_out.values()]
    every = [run for of in sets for runs in of.values() for run in runs if run.valid]
    earned = [run.reward or 0.0 for run in every if (run.structure, run.problem_type) == kind]
    assert index[0]["uses"] == len(earned)
    assert rewards[0] == pytest.approx(sum(earned) / len(earned))
    assert (tmp_path / "out" / "round_1" / "graph.py").is_file()
    assert main([*command, str(tmp_path / "out")]) == 2  # nothing is written over
