"""`aflow-tune runs`: what is listed, what is kept, what is taken away, what is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_run import write_evaluation
from run_folders import BYTES, write_run, write_saved

from aflow_tune import cli
from aflow_tune.commands.runs import one_line
from aflow_tune.errors import BadInput
from aflow_tune.models.spend import Spend, Spent
from aflow_tune.report.evaluation import ranked
from aflow_tune.runs.clean import carry_out, kept_in_run, plan
from aflow_tune.runs.folder import command_of, locked, write_json
from aflow_tune.runs.listing import State, describe, find_runs


def steps_in(run_dir: Path) -> list[int]:
    return sorted(int(p.name.rpartition("_")[2]) for p in run_dir.glob("global_step_*"))


# -- what is kept --------------------------------------------------------------------------


def test_several_task_sets_count_the_same_and_the_earlier_of_equals_wins() -> None:
    scores = {2: {"a": 0.2, "b": 0.8}, 4: {"a": 0.5, "b": 0.5}, 6: {"a": 1.0}}
    assert ranked(scores, [2, 4, 6]) == [(2, 0.5), (4, 0.5)]  # 6 was evaluated on one only
    assert ranked(scores, [6]) == [(6, 1.0)]
    assert ranked(scores, []) == []


def test_a_checkpoint_waits_for_the_evaluation_that_is_still_to_come(tmp_path: Path) -> None:
    for step, share in ((0, 0.0), (2, 0.3)):
        right = round(10 * share)
        write_evaluation(tmp_path, step, [1.0] * right + [0.0] * (10 - right))
    steps = [1, 2, 3, 4, 5]
    found = kept_in_run(tmp_path, steps, keep_last=1, keep_best=1, eval_interval=2)
    assert found == {2: "best", 4: "waits for its evaluation", 5: "newest"}
    write_evaluation(tmp_path, 4, [1.0] * 10)
    found = kept_in_run(tmp_path, steps, keep_last=1, keep_best=1, eval_interval=2)
    assert found == {4: "best", 5: "newest"}


# -- what is listed ------------------------------------------------------------------------


def test_every_state_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "p" / "done", saved=[4, 8], shares={0: 0.2, 4: 0.9, 8: 0.6})
    write_run(
        tmp_path / "p" / "broken", "failed", saved=[2], error="every run failed\n  why\nX: no"
    )
    write_run(tmp_path / "p" / "gone", "running", saved=[2], trained=3)
    write_run(tmp_path / "p" / "busy", "running", saved=[2])
    write_run(tmp_path / "p" / "far", "running", host="another-machine")
    (tmp_path / "p" / "odd").mkdir()
    (tmp_path / "p" / "odd" / "run.json").write_text("[1")
    (tmp_path / "p" / "foreign" / "global_step_3").mkdir(parents=True)
    with locked(tmp_path / "p" / "busy"):
        found = {path.name: describe(path) for path in find_runs([tmp_path])}
    assert {name: run.state for name, run in found.items()} == {
        "done": State.FINISHED,
        "broken": State.FAILED,
        "gone": State.KILLED,
        "busy": State.RUNNING,
        "far": State.ELSEWHERE,
        "odd": State.UNREADABLE,
    }
    done = found["done"]
    assert (done.step, done.target, done.saved, done.best) == (8, 8, 8, (4, 0.9))
    assert (found["gone"].step, found["gone"].saved) == (3, 2)
    assert found["broken"].error == "every run failed\n  why\nX: no"
    assert one_line(found["broken"].error) == "every run failed X: no"


def test_the_cost_is_what_was_counted(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    assert describe(tmp_path / "a").usd is None
    spend = Spend(path=tmp_path / "a" / "account.sqlite")
    spend.settle(1, "judge", "m", Spent(pico=1_500_000_000_000))  # 1.5 dollars
    found = describe(tmp_path / "a")
    assert (found.usd, found.about) == (1.5, False)
    spend.close()
    (tmp_path / "a" / "account.sqlite").write_bytes(b"no database")
    assert describe(tmp_path / "a").usd is None


def test_a_chain_is_one_run_with_its_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = tmp_path / "p" / "c"
    write_run(chain / "warm_up", saved=[4], shares={4: 0.4}, target=4)
    write_run(chain / "learn", "failed", saved=[2], shares={2: 0.7}, error="no money")
    names = [("warm_up", "train"), ("learn", "both"), ("test", "bench")]
    write_json(chain / "chain.json", {"stages": [{"name": n, "mode": m} for n, m in names]})
    assert list(find_runs([tmp_path])) == [chain]
    found = describe(chain)
    assert (found.state, found.step, found.best) == (State.FAILED, 2, (2, 0.7))
    states = [stage.state for stage in found.stages]
    assert states == [State.FINISHED, State.FAILED, State.WAITING]
    assert cli.main(["runs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    words = [line.split()[0] for line in printed]
    assert words == ["state", "failed", "finished", "failed", "no", "waiting"]


def test_the_list_as_json_and_sorted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "b", shares={4: 0.3})
    write_run(tmp_path / "a", "failed", shares={4: 0.8}, error="x")
    write_run(tmp_path / "c")

    def listed(*words: str) -> list[str]:
        assert cli.main(["runs", "list", str(tmp_path), "--json", *words]) == 0
        return [Path(run["path"]).name for run in json.loads(capsys.readouterr().out)]

    assert listed("--sort", "name") == ["a", "b", "c"]
    assert listed("--sort", "score") == ["a", "b", "c"]
    assert listed("--state", "failed") == ["a"]
    assert cli.main(["runs", "list", str(tmp_path), "--state", "odd"]) == 2
    assert cli.main(["runs", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert cli.main(["runs", str(tmp_path / "empty")]) == 0
    assert "no runs" in capsys.readouterr().out


# -- what is taken away --------------------------------------------------------------------


def many(root: Path, status: str = "finished") -> Path:
    run = root / "p" / "n"
    write_run(run, status, saved=[2, 4, 6, 8], shares={2: 0.1, 4: 0.9, 6: 0.5, 8: 0.6})
    return run


def test_clean_keeps_best_and_last_and_says_what_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = many(tmp_path)
    (run / "export" / "merged").mkdir(parents=True)
    (run / "export" / ".merged.old-5").mkdir()
    (run / "export" / ".adapter.old-5").mkdir()  # the only copy
    (run / ".global_step_9.tmp-77").mkdir()
    (run / ".global_step_9.tmp-77" / "half").write_bytes(b"x" * 500)
    (run / "damaged_global_step_7").mkdir()
    outside = tmp_path / "outside"
    write_saved(outside, 1)
    (run / "global_step_1").symlink_to(outside / "global_step_1")
    (run / "global_step_3").mkdir()  # not in our form
    assert cli.main(["runs", "clean", str(tmp_path), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "4 (best), 8 (newest)" in told
    assert "together 2.8 kB" in told  # two checkpoints of 1,000 bytes and 149 of manifest; 500
    assert steps_in(run) == [1, 2, 3, 4, 6, 8]
    assert cli.main(["runs", "clean", str(tmp_path)]) == 2  # nobody to ask
    assert cli.main(["runs", "clean", str(tmp_path), "--yes"]) == 0
    assert steps_in(run) == [1, 3, 4, 8]
    assert (outside / "global_step_1" / "weights.safetensors").stat().st_size == BYTES
    assert sorted(p.name for p in run.iterdir() if p.name.startswith((".", "damaged"))) == []
    assert sorted(path.name for path in (run / "export").iterdir()) == [".adapter.old-5", "merged"]
    assert cli.main(["runs", "clean", str(tmp_path), "--yes"]) == 0
    assert "nothing to take away" in capsys.readouterr().out


def test_clean_never_touches_a_run_that_goes_on(tmp_path: Path) -> None:
    run = many(tmp_path, "running")
    with locked(run):
        (told,) = plan(run)
        assert told.untouched == "it is going on"
    (made,) = plan(run)  # killed
    assert [item.path.name for item in made.doomed] == ["global_step_2", "global_step_6"]
    with locked(run):  # it was resumed since the plan was made
        gone, problems = carry_out([made])
    assert (gone, len(problems)) == ([], 1)
    assert steps_in(run) == [2, 4, 6, 8]
    write_run(tmp_path / "far", "running", saved=[2, 4], host="another-machine")
    (told,) = plan(tmp_path / "far")
    assert told.doomed == ()


def test_clean_keeps_what_a_damaged_newest_would_go_back_to(tmp_path: Path) -> None:
    run = many(tmp_path)
    (run / "global_step_8" / "weights.safetensors").write_bytes(b"0" * BYTES)
    (told,) = plan(run)
    assert told.untouched is not None
    assert "SHA-256" in told.untouched


def test_clean_goes_through_the_stages_of_a_chain(tmp_path: Path) -> None:
    chain = tmp_path / "c"
    write_run(chain / "warm_up", saved=[1, 2, 3])
    write_run(chain / "learn", "interrupted", saved=[1, 2])
    stages = [{"name": "warm_up"}, {"name": "learn"}, {"name": "test"}]
    write_json(chain / "chain.json", {"stages": stages})
    plans = plan(chain)
    assert [[item.path.name for item in part.doomed] for part in plans] == [
        ["global_step_1", "global_step_2"],
        ["global_step_1"],
    ]
    with locked(chain):
        assert carry_out(plans)[0] == []
        assert plan(chain)[0].untouched == "it is going on"
    assert len(carry_out(plans)[0]) == 3
    assert steps_in(chain / "warm_up") == [3]


def test_clean_refuses_to_keep_nothing(tmp_path: Path) -> None:
    run = many(tmp_path)
    assert cli.main(["runs", "clean", str(run), "--keep-last", "0", "--yes"]) == 2
    words = ["--keep-last", "3", "--keep-best", "0", "--yes"]
    assert cli.main(["runs", "clean", str(run), *words]) == 0
    assert steps_in(run) == [4, 6, 8]


# -- locks, and what is resumed ------------------------------------------------------------


@pytest.mark.parametrize("file", ["runs", "runs/n/run.lock"])
def test_a_run_folder_that_cannot_be_made_or_held_is_refused(tmp_path: Path, file: str) -> None:
    run = tmp_path / "runs" / "n"
    if file == "runs":
        (tmp_path / file).write_text("a file where the folders should be")
    else:
        (tmp_path / file).mkdir(parents=True)
    with pytest.raises(BadInput, match="cannot be written to") as caught, locked(run):
        pass
    assert str(tmp_path / file) in caught.value.faults[0].found


def test_the_command_that_began_a_run(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("")
    told = {"config": str(config), "overrides": ["seed=2"], "inline": True, "cwd": str(tmp_path)}
    write_run(tmp_path / "n", "failed", command=told)
    assert command_of(tmp_path / "n") == (config, ["seed=2"], True, tmp_path)
    write_run(tmp_path / "m", "failed", command={**told, "renamed": True})
    again = ["seed=2", "name=m", "continue_from_checkpoint=true"]
    assert command_of(tmp_path / "m")[1] == again
    write_json(tmp_path / "c" / "chain.json", {"stages": [{"name": "learn"}], "command": told})
    write_run(tmp_path / "c" / "learn", "failed")
    assert command_of(tmp_path / "c" / "learn")[1] == ["seed=2"]
    # A secret is kept nowhere and has to be given again.
    key = "monitor.monitor_args.api_key"
    write_run(tmp_path / "s", "failed", command={**told, "secret": [key]})
    with pytest.raises(BadInput, match="holds a secret"):
        command_of(tmp_path / "s")
    assert command_of(tmp_path / "s", [f"{key}=sk-1"])[1] == ["seed=2"]


def test_a_run_that_no_command_began_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "n", "failed")
    told = {"config": "/nowhere/c.yaml", "overrides": [], "inline": None, "cwd": str(tmp_path)}
    write_run(tmp_path / "m", "failed", command=told)
    for name, found in (("n", r"tune\(\)"), ("nowhere", "no run.json"), ("m", "it is gone")):
        with pytest.raises(BadInput, match=found):
            command_of(tmp_path / name)
    assert cli.main(["runs", "resume", str(tmp_path / "m")]) == 2
