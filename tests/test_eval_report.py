"""The numbers of an evaluation: pass@k, answers, tokens, cost, callers; by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fake_run import TASKSET, write_evaluation

from aflow_tune.files import drop_torn_line
from aflow_tune.report.charts import Estimate, interval_chart
from aflow_tune.report.evaluation import load_evaluations
from aflow_tune.report.records import (
    MOST_CHARACTERS,
    EvalRecord,
    answer_key,
    append_record,
    read_records,
)
from aflow_tune.report.statistics import (
    Interval,
    pass_at_k,
    rise,
    share_or_mean_interval,
    standard_deviation,
)
from aflow_tune.report.usage import callers, cost, per_solved, usage


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)  # C(3,2) / C(5,2)
    assert pass_at_k(5, 2, 4) == 1.0
    assert pass_at_k(3, 0, 3) == 0.0
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)
    for samples, solved, k in ((3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)):
        with pytest.raises(ValueError, match="no pass@"):
            pass_at_k(samples, solved, k)


def test_pass_at_k_is_unbiased() -> None:
    """Over all outcomes of 6 samples at p = 0.3 its mean is 1 - 0.7^3."""
    from math import comb

    p, n, k = 0.3, 6, 3
    expected = sum(
        comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert expected == pytest.approx(1 - 0.7**3)


def test_pass_at_k_of_an_evaluation(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [1.0, 0.0, None])
    write_evaluation(tmp_path, 0, [0.0, 0.0, 1.0], run=1)
    evaluation = load_evaluations(tmp_path)[TASKSET][0]
    one, two = evaluation.pass_at(1), evaluation.pass_at(2)
    assert one is not None
    assert two is not None
    assert (one.mean, one.count) == (pytest.approx((0.5 + 0 + 1) / 3), 3)
    assert (two.mean, two.count) == (0.5, 2)  # item 2 has one scored run
    both = evaluation.pass_at(2, failed_as_unsolved=True)
    assert both is not None
    assert (both.mean, both.count) == (pytest.approx(2 / 3), 3)
    assert evaluation.pass_at(3) is None
    assert evaluation.solved_runs() == 2
    assert evaluation.solved_runs(0.0) == 5


def test_bounds_of_shares_end_at_zero_and_one(tmp_path: Path) -> None:
    found = share_or_mean_interval([0.0, 0.5, 0.0], shares=True)
    free = share_or_mean_interval([0.0, 0.5, 0.0])
    assert found is not None
    assert free is not None
    assert found.low == 0.0
    # mean 1/6, s = 0.288675, t(2) = 4.302653, half = 0.717109
    assert free.low == pytest.approx(1 / 6 - 0.717109, abs=1e-5)
    assert share_or_mean_interval([]) is None


def test_deviation_and_rise_by_hand() -> None:
    assert standard_deviation([1.0, 2.0, 3.0]) == pytest.approx(1.0)
    assert standard_deviation([1.0]) is None
    found = rise([0.0, 2.0, 9.0, 4.0, 6.0])
    assert found is not None
    # halves (0, 2) and (4, 6): both s = sqrt 2, s / sqrt n = 1, together sqrt 2; t(1) = 12.7062
    assert found.mean == 4.0
    assert found.high == pytest.approx(4 + 12.7062 * 2**0.5, abs=1e-3)
    assert rise([1.0, 2.0, 3.0]) is None


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("I think.\n<answer> 4 </answer> or <answer>5</answer>", "5"),
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("  two \n words ", "two words"),
        (" \n\t", ""),
    ],
)
def test_the_key_of_an_answer(text: str, key: str) -> None:
    assert answer_key(text) == key


def test_long_answers_are_told_apart_by_their_end() -> None:
    first, second = answer_key("a" * 500 + "b"), answer_key("a" * 500 + "c")
    assert first != second
    assert len(first) < MOST_CHARACTERS + 20
    assert answer_key("\\boxed{" * 20_000) == answer_key("\\boxed{" * 20_000)


def call(caller: str, prompt: int | None, drawn: int | None, **more: object) -> dict[str, object]:
    return {"caller": caller, "prompt_tokens": prompt, "tokens": drawn, **more}


def record(item: int = 0, run: int = 0, **fields: object) -> EvalRecord:
    return EvalRecord(
        step=0, taskset=TASKSET, item=item, run=run, score=1.0, reward=1.0, **fields
    )  # fmt: skip


TWO = [
    record(calls=[call("plan", 10, 4), call("solve", 20, 12, truncated=True)]),
    record(1, calls=[call("solve", 30, 4), call("plan", None, None, failed=True)]),
]


def test_usage_by_caller() -> None:
    used = usage(TWO)
    assert (used.runs, used.calls, used.failed_calls, used.truncated_calls) == (2, 4, 1, 1)
    assert (used.prompt_tokens, used.tokens, used.total_tokens) == (60, 20, 80)
    solve, plan = callers(TWO)
    assert (solve.caller, solve.usage.calls, solve.usage.tokens) == ("solve", 2, 16)
    assert solve.token_share == pytest.approx(0.8)
    assert (plan.usage.failed_calls, plan.usage.tokens) == (1, 4)
    assert per_solved(80, 2) == 40.0
    assert per_solved(80, 0) is None
    assert per_solved(None, 2) is None


def test_tokens_that_one_server_did_not_count_are_unknown() -> None:
    uncounted = [*TWO, record(2, calls=[call("solve", None, None)])]
    assert usage(uncounted).total_tokens is None
    assert usage(uncounted).calls == 5
    assert [use.token_share for use in callers(uncounted)] == [None, None]


def test_outcomes_of_operators_stand_beside_their_callers() -> None:
    uses = [
        {"operator": "Custom", "instance": "solve", "outcome": "ok"},
        {"operator": "Custom", "instance": "solve", "outcome": "unreadable"},
        {"operator": "Test", "instance": "Test", "outcome": "ok"},
    ]
    found = callers([record(calls=[call("g/Custom.solve", 1, 2)], operators=uses)])
    assert [(use.caller, use.outcomes) for use in found] == [
        ("g/Custom.solve", {"ok": 1, "unreadable": 1}),
        ("Test", {"ok": 1}),
    ]


def test_cost_is_known_only_where_every_price_is() -> None:
    judged = [record(metrics={"cost/judge": 0.25}), record(1, metrics={"cost/judge": 0.5})]
    assert cost(judged, None).total == 0.75
    assert cost(TWO, None).total is None
    assert cost(TWO, None).unknown == ("policy",)
    found = cost([*TWO, *judged], lambda prompt, drawn: prompt * 0.001 + drawn * 0.01)
    assert found.by_role == pytest.approx({"judge": 0.75, "policy": 0.06 + 0.2})
    assert found.total == pytest.approx(1.01)
    unpriced = [*judged, record(2, metrics={"unpriced_calls/judge": 1.0, "cost/executor": 1.0})]
    assert (cost(unpriced, None).total, cost(unpriced, None).by_role) == (None, {"executor": 1.0})
    # The policy's own notes are not counted a second time.
    noted = [replace(TWO[0], metrics={"cost/policy": 9.0, "unpriced_calls/policy": 1.0})]
    assert cost(noted, lambda prompt, drawn: 1.0).total == 2.0


def test_a_torn_line_is_cut_before_more_is_appended(tmp_path: Path) -> None:
    append_record(tmp_path, record())
    path = tmp_path / TASKSET / "step_0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 0, "tas')
    drop_torn_line(path)
    append_record(tmp_path, record(1))
    assert [found.item for found in read_records(path)] == [0, 1]
    drop_torn_line(tmp_path / "missing")
    path.write_bytes(b"torn")
    drop_torn_line(path)
    assert path.read_bytes() == b""


def test_old_records_have_the_new_fields_empty() -> None:
    line = b'{"step":0,"taskset":"t","item":1,"run":0,"score":1.0,"reward":1.0}'
    found = EvalRecord.from_line(line)
    assert (found.calls, found.operators, found.answer) == ([], [], None)
    again = EvalRecord.from_line(TWO[0].to_line())
    assert again == TWO[0]


def test_the_interval_chart_is_well_formed_and_in_scale() -> None:
    rows = [
        Estimate("base <&>", Interval(0.25, 0.0, 0.5, 10)),
        Estimate("one item", Interval(1.0, None, None, 1), 1),
        Estimate("nothing", None, 2),
    ]
    svg = ElementTree.fromstring(interval_chart("scores", rows, (0.0, 1.0)))
    circles = [element for element in svg if element.tag == "circle"]
    whiskers = [element for element in svg if element.get("class") == "line c0"]
    assert len(circles) == 2
    (whisker,) = whiskers
    left, right = float(whisker.get("x1", 0)), float(whisker.get("x2", 0))
    assert left == pytest.approx(160.0)  # 0 is where the axis begins
    assert float(circles[0].get("cx", 0)) == pytest.approx((left + right) / 2, abs=0.1)
    assert "base <&>" in "".join(svg.itertext())
