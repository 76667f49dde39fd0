"""A sweep that runs: real Optuna, real processes, and a stand-in for what one run does in hours.

The stand-in writes a run folder through our own writers (`stand_in_run.py`); two real trials come
last.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from project import write_project

from aflow_tune.cli import main
from aflow_tune.config.load import load_config
from aflow_tune.errors import AlreadyFinished, BadInput, Interrupted, RunFailed
from aflow_tune.runs.folder import locked, read_state
from aflow_tune.runs.listing import State, describe, find_runs
from aflow_tune.runs.process import RunProcess, last_words
from aflow_tune.sweeps import Request
from aflow_tune.sweeps import sweep as sweep_module
from aflow_tune.sweeps.plan import Plan, grid, parse_space
from aflow_tune.sweeps.study import SweepStudy
from aflow_tune.sweeps.sweep import Ended, carry_out

STAND_IN = [sys.executable, str(Path(__file__).with_name("stand_in_run.py"))]
REPEAT = "algorithm.repeat_times"


def start(arguments: Sequence[str], output: Path) -> RunProcess:
    return RunProcess([*STAND_IN, *arguments], output)


class CheckedPlan(Plan):
    """A plan whose values need no further check: `test_sweep_plan.py` has those."""

    def refusal(self, number: int, values: dict[str, str]) -> BadInput | None:
        return None


class Place:
    """A project, and the commands of one sweep in it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = write_project(root, Path("no-model-is-loaded"))
        self.folder = root / "runs" / "tests" / "tiny-sweep"
        self.monkeypatch = monkeypatch
        self.said: list[str] = []

    def stand_in(self, **wanted: Any) -> None:
        """What the stand-in does from now on."""
        told = {"root": str(self.folder.parent), **wanted}
        self.monkeypatch.setenv("STAND_IN", json.dumps(told))

    def plan(self, *space: str, **changed: Any) -> Plan:
        request = Request(
            self.config, space or (f"{REPEAT}=2,4,8",), **{"sampler": "grid", **changed}
        )
        axes = parse_space(request.space)
        config = load_config(request.config, request.overrides)
        trials = request.trials or len(grid(axes, request.seed))
        return CheckedPlan(request, config, axes, trials, self.folder, 1)

    def run(self, plan: Plan, stop: Callable[[], bool] = lambda: False, **wanted: Any) -> Ended:
        """One command."""
        self.stand_in(**wanted)
        with locked(plan.folder):
            return carry_out(plan, start, stop=stop, say=self.said.append)

    def run_folder(self, number: int, ending: str = "") -> Path:
        return self.folder / f"tiny-{number:03d}{ending}"

    def begun(self, number: int) -> list[int]:
        """The steps that a trial's run began from, one for each process."""
        return [int(line) for line in (self.run_folder(number) / "begun.txt").read_text().split()]

    def content(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "sweep.json").read_text())
        return found

    def states(self) -> dict[int, str]:
        return {trial["number"]: trial["state"] for trial in self.content()["trials"]}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(sweep_module, "POLL_SECONDS", 0.05)
    return Place(tmp_path, monkeypatch)


def test_trials_are_runs_and_the_best_stands_first(place: Place) -> None:
    plan = place.plan(parallel=3)
    ended = place.run(plan, scores={"0": 0.2, "1": 0.9, "2": 0.4})
    rows = ended.content["trials"]
    assert [(row["number"], row["score"]) for row in rows] == [(1, 0.9), (2, 0.4), (0, 0.2)]
    assert [row["values"] for row in rows] == [grid(plan.axes, 0)[n] for n in (1, 2, 0)]
    # Wilson's interval of 9 right answers of 10.
    assert [rows[0]["low"], rows[0]["high"]] == pytest.approx([0.5958, 0.9821], abs=1e-4)
    assert (ended.content["best_trial"], rows[0]["runs"]) == (1, [str(place.run_folder(1))])
    found = {path.name: describe(path) for path in find_runs([place.folder.parents[1]])}
    assert sorted(found) == ["tiny-000", "tiny-001", "tiny-002"]
    state = read_state(place.run_folder(1))
    assert state is not None
    assert state.fingerprint["settings"] == sorted(plan.settings(1, None, rows[0]["values"]))
    assert f"{REPEAT}={rows[0]['values'][REPEAT]}" in ended.text
    assert place.content()["trials"] == rows
    page = (place.folder / "sweep.html").read_text()
    assert (page.count("<circle"), page.count("<script")) == (3, 0)
    assert "trial 1: 0.9 (0.596 to 0.982)" in page


def test_a_trial_that_fails_costs_itself_only(place: Place) -> None:
    ended = place.run(place.plan(), codes={"0": 1}, scores={"1": 0.3, "2": 0.6})
    assert place.states() == {2: "complete", 1: "complete", 0: "failed"}
    failed = ended.content["trials"][2]
    assert failed["score"] is None
    assert "told to end with 1" in failed["reason"]
    with pytest.raises(AlreadyFinished):
        place.run(place.plan())


def test_three_failures_at_the_beginning_end_it(place: Place) -> None:
    plan = place.plan(f"{REPEAT}=2,4,8,16,32")
    with pytest.raises(RunFailed, match="told to end with 1"):
        place.run(plan, codes={"0": 1, "1": 1, "2": 1})
    assert place.states() == {0: "failed", 1: "failed", 2: "failed"}
    # The cause was cured: the same command goes on with the rest.
    ended = place.run(plan)
    assert [row["state"] for row in ended.content["trials"]] == ["complete"] * 2 + ["failed"] * 3


def test_stopped_saved_and_gone_on_with(place: Place) -> None:
    plan = place.plan()

    def when_it_waits() -> bool:
        state = read_state(place.run_folder(1))
        return state is not None and state.step == 1

    with pytest.raises(Interrupted):
        place.run(plan, when_it_waits, steps=2, wait=[1])
    assert place.states() == {0: "complete", 1: "unfinished"}
    assert describe(place.run_folder(1)).state is State.INTERRUPTED
    ended = place.run(plan, steps=2, wait=[1], scores={"1": 0.7})
    assert [row["state"] for row in ended.content["trials"]] == ["complete"] * 3
    assert (place.begun(0), place.begun(1), place.begun(2)) == ([0], [0, 1], [0])


def test_a_second_interrupt_tells_runs_to_stop_at_once(place: Place) -> None:
    class Stubborn:
        """Saves its state until it is told a second time, which somebody does."""

        asked = 0

        def poll(self) -> int | None:
            if self.asked == 1:
                raise KeyboardInterrupt
            return -int(signal.SIGKILL) if self.asked else None

        def stop(self) -> None:
            self.asked += 1

    plan, process = place.plan(), Stubborn()
    begun: list[Sequence[str]] = []

    def start_it(arguments: Sequence[str], output: Path) -> Stubborn:
        begun.append(arguments)
        return process

    with locked(plan.folder), pytest.raises(KeyboardInterrupt):
        carry_out(plan, start_it, stop=lambda: bool(begun), say=place.said.append)
    assert (process.asked, place.states()) == (2, {0: "unfinished"})


def test_a_killed_run_leaves_its_trial_to_the_next_command(place: Place) -> None:
    plan = place.plan(f"{REPEAT}=2,4")
    with pytest.raises(Interrupted, match=": 0"):
        place.run(plan, steps=2, codes={"0": -int(signal.SIGKILL)})
    assert place.states() == {1: "complete", 0: "unfinished"}
    assert describe(place.run_folder(0)).state is State.KILLED
    ended = place.run(plan, steps=2)
    assert [row["state"] for row in ended.content["trials"]] == ["complete"] * 2
    assert place.begun(0) == [0, 1]


def test_several_seeds_are_averaged(place: Place) -> None:
    plan = place.plan(f"{REPEAT}=2,4", trials=1, seeds=(0, 1), parallel=2)
    ended = place.run(plan, scores={"0": 0.4}, by_seed={"1": 0.2})
    (row,) = ended.content["trials"]
    assert row["by_seed"] == [pytest.approx(0.4), pytest.approx(0.6)]
    assert row["score"] == pytest.approx(0.5)
    # s = 0.1414, s / sqrt(2) = 0.1, t(0.975; 1) = 12.706
    assert [row["low"], row["high"]] == pytest.approx([0.5 - 1.2706, 0.5 + 1.2706], abs=1e-3)
    assert row["runs"] == [str(place.run_folder(0, f"-seed{seed}")) for seed in (0, 1)]


def test_a_trial_behind_the_median_is_stopped_with_its_state_saved(place: Place) -> None:
    plan = place.plan(f"{REPEAT}=2,4,8,16", prune="median")
    scores = {"0": [0.5, 0.6], "1": [0.6, 0.7], "2": [0.7, 0.8], "3": [0.1, 0.9]}
    ended = place.run(plan, steps=2, scores=scores, wait=[3])
    assert place.states() == {0: "complete", 1: "complete", 2: "complete", 3: "pruned"}
    assert [row["score"] for row in ended.content["trials"]] == [0.8, 0.7, 0.6, 0.1]
    assert describe(place.run_folder(3)).state is State.INTERRUPTED


@pytest.mark.parametrize(
    ("objective", "codes", "best"),
    [("last", {}, (1, "complete", 0.4)), ("best", {"0": 4}, (0, "budget", 0.9))],
)
def test_which_evaluation_counts(
    place: Place, objective: str, codes: dict[str, int], best: tuple[int, str, float]
) -> None:
    """The last one where it is asked for; of a run that reached its budget what it came to."""
    scores = {"0": [0.9, 0.2], "1": [0.3, 0.4]}
    plan = place.plan(f"{REPEAT}=2,4", objective=objective, parallel=2)
    first = place.run(plan, steps=2, scores=scores, codes=codes).content["trials"][0]
    assert (first["number"], first["state"], first["score"]) == best


def test_another_sweep_in_the_same_folder_is_refused_with_every_difference(place: Place) -> None:
    place.run(place.plan(trials=1))
    changed = place.plan(
        f"{REPEAT}=2,4", seed=1, overrides=("buffer.batch_size=3", "local.threads=2")
    )
    with pytest.raises(BadInput) as refused:
        place.run(changed)
    assert {fault.where: fault.found for fault in refused.value.faults} == {
        "--seed": "1",
        f"--space {REPEAT}": "'2,4'",
        "buffer.batch_size": "3",
    }
    ended = place.run(place.plan(trials=3, parallel=2, overrides=("local.threads=2",)))
    assert len(ended.content["trials"]) == 3
    assert place.begun(0) == [0]


def test_what_was_pruned_stays_pruned_if_the_sweep_is_killed(place: Place) -> None:
    """The study is left as by a command that was killed while the run still saved its state."""
    plan = place.plan(f"{REPEAT}=2,4", prune="median")
    study = SweepStudy(plan)
    record = study.next()
    assert record is not None
    study.report(record.number, 1, 0.3)
    study.note(record.number, pruned=True)
    study.close()
    place.run(plan)
    assert place.states() == {0: "pruned", 1: "complete"}
    assert not place.run_folder(0).exists()


def test_what_must_not_be_shown_is_in_no_file(place: Place) -> None:
    secret = "algorithm.advantage_fn_args.api_key=sk-0123456789"
    plan = place.plan(f"{REPEAT}=2,4", trials=1, overrides=(secret,))
    ended = place.run(plan)
    assert ended.content["settings"] == ["algorithm.advantage_fn_args.api_key=***"]
    for path in (*place.folder.glob("*.json"), *place.folder.glob("*.html")):
        assert "sk-0123456789" not in path.read_text()
    assert "sk-0123456789" not in ended.text


def test_a_killed_sweep_lets_its_runs_save(place: Place, tmp_path: Path) -> None:
    """On Linux the kernel tells the run that whoever started it is gone."""
    if sys.platform != "linux":
        pytest.skip("the parent's death is only told on Linux")
    place.stand_in(steps=2, wait=[0])
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from aflow_tune.runs.process import RunProcess\n"
        "RunProcess(sys.argv[2:], Path(sys.argv[1]))\n"
        "time.sleep(600)\n"
    )
    command = [*STAND_IN, "config.yaml", "group=tiny-sweep", "name=tiny-000"]
    starter = RunProcess(
        [sys.executable, "-c", code, str(tmp_path / "run.log"), *command], tmp_path / "sweep.log"
    )
    folder = place.run_folder(0)

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert condition(), last_words(tmp_path / "run.log") + last_words(tmp_path / "sweep.log")

    def state_is(status: str) -> bool:
        state = read_state(folder)
        return state is not None and (state.status, state.step) == (status, 1)

    until(lambda: state_is("running"))
    os.kill(starter._process.pid, signal.SIGKILL)
    until(lambda: state_is("interrupted"))
    assert starter.poll() == -signal.SIGKILL


@pytest.mark.slow
def test_two_real_trials(
    tmp_path: Path, tiny_model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = write_project(tmp_path, tiny_model_dir)
    command = ["sweep", str(config), "inline=true", "--json", "--space"]
    command += ["algorithm.optimizer.lr=0.003,0.0003", "--sampler", "grid"]
    assert main(command) == 0
    content = json.loads(capfd.readouterr().out)
    trials = content["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "complete"]
    assert {trial["values"]["algorithm.optimizer.lr"] for trial in trials} == {"0.003", "0.0003"}
    assert trials[0]["score"] >= trials[1]["score"]
    for trial in trials:
        run = describe(Path(trial["runs"][0]))
        assert (run.state, run.step, run.score) == (State.FINISHED, 2, "letters")
        assert trial["step"] == 2  # before training does not count
        assert trial["low"] <= trial["score"] <= trial["high"]
        assert run.command is not None
        lr = f"algorithm.optimizer.lr={trial['values']['algorithm.optimizer.lr']}"
        assert lr in run.command["overrides"]
    assert (tmp_path / "runs" / "tests" / "tiny-sweep" / "sweep.html").is_file()
    assert main(command) == 5
