"""GiGPO's anchor states: how often another run met one, said in the log where it stays low."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from test_operators import step
from test_validate import CONFIG

from aflow_tune.config.load import load_config
from aflow_tune.config.quiet import quiet
from aflow_tune.config.rules.adaptations import ANCHOR_RATE, RUN_FILTER, adapt
from aflow_tune.engines.trinity.rollout.operators import STATE_KEY, AnchorRate

# isort: split
from trinity.buffer.operators import EXPERIENCE_OPERATORS
from trinity.common.experience import Experience

ALL, LATER = "gigpo/anchor_hit_rate", "gigpo/anchor_hit_rate_later"


def calls(*runs: list[str], task: int = 0) -> list[Experience]:
    """A step of runs of one task, each the states of its calls in order."""
    found = []
    for run, states in enumerate(runs):
        for number, state in enumerate(states):
            exp = step(task, run, 1.0, number)
            exp.info[STATE_KEY] = f"{task}/{state}"
            found.append(exp)
    return found


def test_a_hit_is_a_state_that_another_run_met() -> None:
    exps = calls(["start", "a"], ["start", "b", "a"], ["start", "c", "c"])
    kept, metrics = AnchorRate().process(exps)
    assert [id(exp) for exp in kept] == [id(exp) for exp in exps]
    # start three times and a twice of eight; c twice, but in one run only
    assert metrics == {ALL: pytest.approx(5 / 8), LATER: pytest.approx(2 / 5)}


def test_one_call_a_run_has_no_later_ones_and_tasks_do_not_mix() -> None:
    exps = calls(["start"], ["start"]) + calls(["start"], task=1)
    assert AnchorRate().process(exps)[1] == {ALL: pytest.approx(2 / 3)}
    assert AnchorRate().process([]) == ([], {})


def test_the_choices_of_one_call_are_one_run() -> None:
    assert AnchorRate().process(calls(["x"]) + calls(["x"]))[1] == {ALL: 0.0}


def test_a_rate_that_stays_low_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    quiet()
    low = calls(["start", "a"], ["start", "b"])
    high = calls(["start", "a"], ["start", "a"])
    rate = AnchorRate()
    logger = logging.getLogger("trinity")
    logger.addHandler(caplog.handler)
    try:
        for exps in (low, low, high, low, low):
            rate.process(exps)
        assert not caplog.records
        for _ in range(4):
            rate.process(low)
    finally:
        logger.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records if "anchor" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"{LATER} is 0.00, 0.00, 0.00 in the last 3 steps")


@pytest.mark.parametrize(
    ("algorithm", "there"),
    [
        ("{algorithm_type: gigpo, repeat_times: 4}", True),
        ("{algorithm_type: multi_step_grpo, repeat_times: 4}", False),
        ("{algorithm_type: multi_step_grpo, advantage_fn: gigpo, repeat_times: 4}", True),
    ],
)
def test_it_comes_with_the_algorithm_behind_the_run_filter(
    tmp_path: Path, algorithm: str, there: bool
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(root=tmp_path, model="model"))
    config = load_config(path, [f"algorithm={algorithm}"])
    for _ in range(2):  # a second time changes nothing
        adapt(config, {})
        names = [item.name for item in config.data_processor.experience_pipeline.operators]
        assert names == ([RUN_FILTER, ANCHOR_RATE] if there else [RUN_FILTER])
    assert EXPERIENCE_OPERATORS.get(ANCHOR_RATE) is AnchorRate
