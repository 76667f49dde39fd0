"""The audit of the writer's records: what each check must tell, and what it must not."""

from __future__ import annotations

from pathlib import Path

from fake_writer import (
    GRAPHS,
    evaluated,
    loaded,
    read,
    record,
    refused,
    rollouts,
    write_writer_run,
)
from test_html_report import _page

from aflow_tune.report.evaluation import load_evaluations
from aflow_tune.report.html import summary_text
from aflow_tune.report.writer import (
    WriterRecords,
    WriterRun,
    audit_writer,
    earning_fallbacks,
    failing_calls,
    failing_defaults,
    fewer_valid_held_out,
    fewer_valid_in_training,
    one_structure,
    unrewarded_runs,
)

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
    assert "2 runs whose answer came from a fallback have a reward of up to 3" in found.found
    assert "while a clean run has one of -8" in found.found


def test_one_structure_for_everything_is_told() -> None:
    def runs(single: int, voting: int) -> list[WriterRun]:
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
    assert "8 of 12 runs of the default workflow had no answer (most often: raised)" in found.found
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


def test_runs_without_a_reward_are_told() -> None:
    found = unrewarded_runs([read(record(), reward=None)] * 5 + [read(record())] * 10)
    assert found is not None
    assert "At step 1 5 of 15 runs have no reward though the policy answered" in found.found
    # 3 of 15: the lower bound is 0.07.
    for failed, scored in ((9, 0), (3, 12), (0, 50)):
        runs = [read(record(), reward=None)] * failed + [read(record())] * scored
        assert unrewarded_runs(runs) is None


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
        "fallbacks that earn what clean runs earn",
        "one structure for everything",
        "an executor that fails",
        "an executor that fails",
    ]
    text = summary_text(bad, bad / "report.html")
    assert "In training 1 runs whose answer came from a fallback" in text
    assert "40 of 40 uses of operators failed" in _page(bad).text
