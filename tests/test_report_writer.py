"""The report on a policy that writes workflows: records, numbers, warnings, and what is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_run import TASKSET, write_evaluation
from fake_writer import (
    GRAPHS,
    REFUSED,
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
from test_html_report import _HOSTILE, _Page, _page
from writer_samples import ONE, RAISES, TWO
from writer_samples import REFUSED as FORBIDDEN
from writer_samples import run as write_and_run
from writer_samples import text as reply

from aflow_tune.report.evaluation import load_evaluations
from aflow_tune.report.html import summary_text, write_report
from aflow_tune.report.records import Rollout, append_rollout, read_rollouts, rollout_path
from aflow_tune.report.statistics import wilson_interval
from aflow_tune.report.writer import (
    WriterRecords,
    WriterRollout,
    audit_writer,
    count,
    earning_fallbacks,
    failing_calls,
    failing_defaults,
    fewer_valid_held_out,
    fewer_valid_in_training,
    one_structure,
    read_rollout,
)
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
    assert read_rollout(kept, 1, ("set", 0)) is None


def test_fields_of_another_type_count_as_absent() -> None:
    odd: list[Any] = [None, 3, -1, 1.5, True, "x", [], [1], ["x"], [{}], {}, {"a": {}}, 10**400]
    names = [name for name in record() if name != "valid"]
    for value in [*odd, float("nan"), float("inf")]:
        run = read({**dict.fromkeys(names, value), "valid": True}, reward=value)
        assert run.level in (None, 3)
        numbers = count([run])
        assert numbers.rollouts == 1
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


def eight_runs() -> list[WriterRollout]:
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
    assert numbers.rollouts == 8
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


def test_an_evaluation_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    evaluated(tmp_path, 0, [record()] * 4)
    write_evaluation(tmp_path, 4, [1.0], finished=False)
    evaluated(tmp_path, 4, [record()] * 2, taskset="other")
    assert set(loaded(tmp_path).held_out) == {TASKSET, "other"}
    assert set(loaded(tmp_path).held_out[TASKSET]) == {0}


SINGLE, VOTING, _ = GRAPHS


def steps_with(shares: list[float]) -> WriterRecords:
    """Training with this share of valid graphs a step, of ten tasks with one run each."""
    return WriterRecords(
        {
            step: [
                read(record() if item < round(share * 10) else refused(), step=step, item=item)
                for item in range(10)
            ]
            for step, share in enumerate(shares, 1)
        },
        {},
    )


def test_fewer_valid_graphs_in_training_are_told() -> None:
    found = fewer_valid_in_training(steps_with([0.9, 0.8, 0.9, 0.8, 0.3, 0.2, 0.3, 0.2]))
    assert found is not None
    # Halves: 0.85 and 0.25.
    assert "fell by 60% from the first to the second half of 8 training steps" in found.found
    for shares in ([0.2, 0.3, 0.8, 0.9], [0.5] * 8, [0.9, 0.2, 0.8, 0.3, 0.9, 0.1], [0.9, 0.1]):
        assert fewer_valid_in_training(steps_with(shares)) is None


def held_out(first: int, last: int, items: int = 20) -> WriterRecords:
    """Held-out tasks of which so many have a valid graph, before and after."""
    return WriterRecords(
        {},
        {
            "set": {
                step: [
                    read(record() if item < valid else refused(), step=step, item=item)
                    for item in range(items)
                ]
                for step, valid in ((0, first), (8, last))
            }
        },
    )


def test_fewer_valid_graphs_held_out_are_told() -> None:
    found = fewer_valid_held_out(held_out(18, 6))
    assert found is not None
    assert "On 20 held-out tasks the share of valid graphs fell by 60% from step 0" in found.found
    for first, last in ((6, 18), (18, 17), (18, 18)):
        assert fewer_valid_held_out(held_out(first, last)) is None


def test_fallbacks_that_earn_are_told() -> None:
    clean = [read(record(), reward=reward) for reward in (-8.0, 9.0)]
    assert earning_fallbacks([*clean, read(refused(), reward=-8.1)], "training") is None
    assert earning_fallbacks([read(refused(), reward=9.0)], "training") is None
    unknown = [read(refused(), reward=None), read(refused(level=None), reward=9.0)]
    assert earning_fallbacks([*clean, *unknown], "training") is None
    earning = [*clean, read(refused(), reward=-8.0), read(record(level=1), reward=3.0)]
    found = earning_fallbacks(earning, "training")
    assert found is not None
    assert "2 rollouts whose answer came from a fallback have a reward of up to 3" in found.found
    assert "while a clean one has one of -8" in found.found


def test_one_structure_for_everything_is_told() -> None:
    def runs(single: int, voting: int) -> list[WriterRollout]:
        names = [SINGLE] * single + [VOTING] * voting
        return [
            read(record(name, problem_type=("qa", "math")[n % 2])) for n, name in enumerate(names)
        ]

    found = one_structure(runs(60, 1))
    assert found is not None
    assert "60 of 61 valid graphs on 2 problem types have the same structure" in found.found
    # 19 of 19 are too few; 20 of 20 have a lower bound of 0.84; 40 of 44 are no certainty.
    for single, voting in ((19, 0), (20, 0), (40, 4), (0, 0)):
        assert one_structure(runs(single, voting)) is None


def test_a_failing_executor_is_told() -> None:
    failed = refused(ending="raised", reason="the executor has no answer")
    found = failing_defaults([read(failed)] * 8 + [read(refused())] * 4)
    assert found is not None
    assert (
        "8 of 12 rollouts of the default workflow had no answer (most often: raised)" in found.found
    )
    assert failing_defaults([read(failed)] * 9) is None
    assert failing_defaults([read(failed, reward=None)] * 20) is None
    assert failing_defaults([read(failed)] * 2 + [read(refused())] * 10) is None
    assert failing_defaults([read(record(ending="raised"))] * 20) is None
    uses = [{"outcome": "model_failed"}] * 6 + [{"outcome": "read"}] * 14
    found = failing_calls(uses)
    assert found is not None
    assert "6 of 20 uses of operators failed" in found.found
    assert failing_calls(uses[:9]) is None
    assert failing_calls([{"outcome": "read"}] * 50 + uses[:1]) is None


def test_the_audit_of_a_run_folder(tmp_path: Path) -> None:
    good = write_writer_run(tmp_path / "good")
    assert audit_writer(loaded(good), load_evaluations(good)) == []
    bad = tmp_path / "bad"
    use = {"operator": "Custom", "instance": "solve", "outcome": "model_failed", "attempts": 1}
    evaluated(bad, 0, [record(VOTING)] * 40)
    evaluated(bad, 4, [record(level=3, ending="raised")] * 40, operators=[use])
    rollouts(bad, 4, [(record(), 1.0), (refused(), 2.0)])
    found = audit_writer(loaded(bad), load_evaluations(bad))
    assert [finding.check for finding in found] == [
        "fallbacks that earn what clean rollouts earn",
        "one structure for everything",
        "an executor that fails",
        "an executor that fails",
    ]
    text = summary_text(bad, bad / "report.html")
    assert "In training 1 rollouts whose answer came from a fallback" in text
    assert "40 of 40 uses of operators failed" in _page(bad).text


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
    assert [(row["problem_type"], row["graphs"], row["distinct"], row["most"]) for row in rows] == [
        ("math", 3, 1, "S1"),
        ("qa", 3, 2, "S2"),
    ]
    assert rows[1]["shares"] == pytest.approx([1 / 3, 2 / 3])
    section = writer_section(records)
    assert section["types_sentence"].startswith("Types differ")
    assert "math: S1, qa: S2" in section["types_sentence"]
    alike = [read(record(problem_type=kind)) for kind in ("math", "code", "qa")]
    section = writer_section(WriterRecords({}, {"set": {0: alike}}))
    assert section["types_sentence"] == "All types have the same most frequent structure, S1."


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
    assert (best["title"], best["uses"], best["reward"], best["rollout"].reward) == (
        "Best graph",
        3,
        8.0,
        9.0,
    )
    assert best["rollout"].structure == VOTING
    assert (worst["uses"], worst["reward"], worst["rollout"].reward) == (3, 5.5, 2.0)
    assert worst["rollout"].structure == PROGRAM
    assert (bad["title"], bad["uses"], bad["reward"]) == ("Worst refused graph", 3, -8.5)
    assert "solve: Solver" in bad["drawing"].svg
    # Where nothing was used often, all are looked at; what cannot be read only if alone.
    few = [read(record(SINGLE), reward=1.0), read(refused(UNREADABLE), reward=-10.0)]
    best, bad = best_and_worst(WriterRecords({1: few}, {}))
    assert (best["uses"], bad["drawing"].why_not) == (1, "No graph could be read.")
    assert best_and_worst(WriterRecords({1: [read(record(), reward=None)]}, {})) == []


def test_how_prompts_changed() -> None:
    first, second = marked("Solve it now.", "Solve it step by step.")
    assert first == [("", "Solve it "), ("del", "now.")]
    assert second == [("", "Solve it "), ("ins", "step by step.")]
    for before, after in (("", "a b"), (" a\n\nb ", "b"), ("x " * 900, "y " * 900)):
        first, second = marked(before, after)
        assert "".join(text for _, text in first) == before
        assert "".join(text for _, text in second) == after

    def run(step: int, **prompts: str) -> WriterRollout:
        return read(record(prompts=prompts), step=step)

    training = {
        1: [run(1, solve="Old."), run(1, solve="Odd."), run(1, solve="Old.", vote="Choose.")],
        2: [run(2, solve="Else.", check="Look.")],
        3: [run(3, solve="New."), run(3, vote="Choose.")],
    }
    changes = prompt_changes(training)
    solve, vote = changes
    assert (solve["instance"], vote["instance"]) == ("solve", "vote")
    assert solve["before"] == {"step": 1, "text": "Old.", "count": 2, "of": 3}
    assert solve["pieces"][0] == [("del", "Old.")]
    assert (solve["after"]["step"], solve["after"]["count"], solve["after"]["of"]) == (3, 1, 1)
    assert (solve["same"], vote["same"]) == (False, True)


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


SECTION = "Workflows that the policy wrote"
_, VOTING, _ = GRAPHS


@pytest.mark.parametrize(
    "kept",
    [
        {"valid": True},
        {"valid": False, "level": 7},
        record(None),
        record(code="no Python", score=None),
        refused(UNREADABLE, text="", problem=""),
        record(operators={}, nodes=None, prompts={"": ""}, parts={"": 0}),
    ],
)
def test_records_with_little_in_them_never_break_the_page(tmp_path: Path, kept: Any) -> None:
    rollouts(tmp_path, 1, [(kept, None), (kept, 1.0)])
    rollouts(tmp_path, 2, [(kept, 1.0)])
    evaluated(tmp_path, 0, [kept])
    assert SECTION in _page(tmp_path).text
    assert "Written graphs" in summary_text(tmp_path, tmp_path / "report.html")


@pytest.mark.parametrize(
    "hostile", [*_HOSTILE, "</script>", "<svg onload=x>", "\x1b[31m\u202e\ud83d"]
)
def test_what_a_model_wrote_stays_text(tmp_path: Path, hostile: str) -> None:
    quoted = repr(hostile)
    code = VOTE.replace("solutions=drafts", f"solutions=[{quoted}]").replace("range(3)", quoted)

    def runs(text: str, graph: str) -> list[tuple[Any, float]]:
        said = {
            name: text for name in ("problem", "problem_type", "text", "ending", "reason", "answer")
        }
        refusal = {**UNKNOWN, "kind": text, "message": text}
        written = {
            **said,
            "code": graph,
            "prompts": {text: text},
            "operators": {text: 1},
            "parts": {text: 0.5},
            "structure": text,
        }
        return [
            (record(VOTING, **written), 1.0),
            (record(VOTING, **{**written, "code": graph + "# 2\n"}), 0.0),
            (refused(**{**written, "refusals": [refusal]}), -1.0),
            (refused(**{**said, "code": text, "refusals": [refusal]}), -1.0),
        ]

    pages = []
    for name, text, graph in (("clean", "plain", VOTE), ("run", hostile, code)):
        run_dir = tmp_path / name
        for step in (1, 2):
            rollouts(run_dir, step, runs(text, graph))
        evaluated(run_dir, 0, [kept for kept, _ in runs(text, graph)])
        page = write_report(run_dir).read_text(encoding="utf-8")
        assert "\x1b" not in page
        assert "\u202e" not in page
        pages.append(_Page(page))
    clean, page = pages
    assert {*page.tags} == {*clean.tags}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    if hostile.isprintable():
        assert " ".join(hostile.split()) in page.text
