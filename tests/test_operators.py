"""The run filter: what is kept, in which order, what it says, when it stops."""

from __future__ import annotations

import pickle

import pytest
from trinity.common.experience import EID, Experience

from aflow_tune.engines.trinity.rollout.operators import (
    FAILURE_KEY,
    STATE_KEY,
    STEP_SIZE_KEY,
    TRACE_KEY,
    AnchorRate,
    RunFilter,
    StepStamp,
)
from aflow_tune.errors import RunFailed


def step(task: int, run: int, reward: float, number: int = 0) -> Experience:
    """A call of a run that succeeded."""
    eid = EID(batch=1, task=task, run=run, step=number)
    return Experience(eid=eid, tokens=[1, 2, 3], prompt_length=1, reward=reward)


def failure(task: int, run: int, kind: str = "raised", why: str = "Traceback: no") -> Experience:
    """A placeholder."""
    placeholder = step(task, run, 0.0)
    placeholder.action_mask[:] = False
    placeholder.info.update({FAILURE_KEY: kind, TRACE_KEY: why})
    return placeholder


def test_failures_go_and_the_rest_is_ordered_and_counted() -> None:
    exps = [step(1, 1, 0.5, 1), step(1, 0, 1.0), failure(0, 2), step(0, 10, 0.0)]
    exps += [step(1, 1, 0.5, 0), step(0, 9, 1.0)]
    kept, metrics = RunFilter().process(exps)
    order = [(exp.eid.task, exp.eid.run, exp.eid.step) for exp in kept]
    assert order == [(0, 9, 0), (0, 10, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)]
    stamped, _ = StepStamp().process(kept)
    assert [exp.info[STEP_SIZE_KEY] for exp in stamped] == [5] * 5
    with pytest.raises(RunFailed, match="left nothing"):
        StepStamp().process([])
    assert metrics["group/failed_runs"] == 1.0
    assert metrics["group/lone_runs"] == 0.0


def health(*groups: list[float], run_filter: RunFilter | None = None) -> tuple[float, ...]:
    """(mixed, all best, all worst) of task groups with these rewards."""
    exps = [
        step(task, run, reward, number)
        for task, rewards in enumerate(groups)
        for run, reward in enumerate(rewards)
        for number in range(2)
    ]
    _, metrics = (run_filter or RunFilter()).process(exps)
    return tuple(metrics[f"group/frac_{name}"] for name in ("mixed", "all_best", "all_worst"))


def test_group_health_is_the_share_of_groups() -> None:
    assert health([0, 1], [1, 1], [0, 0], [0.25, 0.25]) == (0.25, 0.25, 0.5)
    assert health([0, 1], [0, 0.5]) == (1.0, 0.0, 0.0)
    # A step that is all alike is judged by what was seen before.
    assert health([0, 0], [0, 0]) == (0.0, 0.0, 1.0)
    assert health([1, 1], [1, 1]) == (0.0, 1.0, 0.0)
    seen = RunFilter()
    health([0.2, 1.0], run_filter=seen)
    assert health([0.2, 0.2], run_filter=seen) == (0.0, 0.0, 1.0)
    assert health([1.0, 1.0], run_filter=seen) == (0.0, 1.0, 0.0)


def test_a_run_left_alone_in_its_group_is_not_trained() -> None:
    exps = [step(0, 0, 1.0), failure(0, 1), step(1, 0, 0.0), step(1, 1, 1.0)]
    kept, metrics = RunFilter().process(exps)
    assert [exp.eid.task for exp in kept] == [1, 1]
    assert metrics["group/lone_runs"] == 1.0
    kept, metrics = RunFilter().process([step(0, 0, 1.0), step(1, 0, 0.0), step(1, 1, 1.0)])
    assert len(kept) == 3  # a group of one by configuration is none of its business
    alone = RunFilter().process([step(0, 0, 1.0), step(1, 0, 0.0)])[1]
    assert "group/frac_mixed" not in alone  # there is no group to be mixed
    kept, metrics = RunFilter().process([step(0, 0, 1.0), failure(0, 1)])
    assert len(kept) == 1  # one failed run must not cost the whole step
    assert metrics["group/lone_runs"] == 0.0


def test_a_step_without_a_surviving_run_ends_training_with_its_first_traceback() -> None:
    exps = [failure(0, 0, "timed_out", "it hung"), failure(0, 1), failure(1, 0)]
    with pytest.raises(RunFailed) as caught:
        RunFilter().process(exps)
    message = str(caught.value)
    assert "(3 of 3: 2 raised, 1 timed_out)" in message
    assert message.endswith("it hung")
    assert "Traceback: no" not in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message  # it leaves a Ray actor
    with pytest.raises(RunFailed, match="no experience at all"):
        RunFilter().process([])


def test_the_share_of_failed_runs_has_a_limit() -> None:
    exps = [failure(0, 0), step(0, 1, 1.0), step(0, 2, 0.0), step(0, 3, 0.0)]
    assert len(RunFilter(max_failed_fraction=0.25).process(exps)[0]) == 3
    with pytest.raises(RunFailed, match="too many"):
        RunFilter(max_failed_fraction=0.2).process(exps)


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
    # One call a run has no later ones, and tasks do not mix.
    exps = calls(["start"], ["start"]) + calls(["start"], task=1)
    assert AnchorRate().process(exps)[1] == {ALL: pytest.approx(2 / 3)}
    assert AnchorRate().process([]) == ([], {})
