"""`aflow-tune search`: whole searches, against a scripted server and the local model.

Problem n is 'What is n + 10?'; `search_project.adds` says which instructions help the executor.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from faulty_server import FaultyServer, Request, Step
from graph_samples import own_form, simple
from harvest_project import rows, write_rows
from search_project import adds, write_project
from tiny import write_tiny_model

from aflow_tune.cli import main
from aflow_tune.errors import ExitCode
from aflow_tune.graph.graph import load_graph
from aflow_tune.search import SharedExperiencePool
from aflow_tune.search.pool import Trial

Search = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer(adds) as running:
        yield running


@pytest.fixture
def config(tmp_path: Path, server: FaultyServer) -> Path:
    return write_project(tmp_path, server.openai_url)


@pytest.fixture
def search(config: Path, capsys: pytest.CaptureFixture[str]) -> Search:
    """Runs the command; its exit code and what it printed."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["search", str(config), *words])
        return code, *capsys.readouterr()

    return run


def folder_of(config: Path, name: str = "searched") -> Path:
    return config.parent / "runs" / "tests" / name / "search"


def record_of(config: Path, name: str = "searched") -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder_of(config, name) / "search.json").read_text())
    return record


def decided(record: dict[str, Any]) -> Any:
    """What must not depend on how often a search was interrupted, or where its trials ran."""
    trees = [{**tree, "best": None} for tree in record["trees"]]
    rest = {name: record[name] for name in ("spent", "proposers", "comparison", "why")}
    return {"trees": trees, **rest}


def test_a_better_workflow_is_found_kept_and_compared(
    search: Search, config: Path, server: FaultyServer
) -> None:
    code, printed, _ = search()
    assert code == ExitCode.DONE
    assert "the seed workflow scores 0.000" in printed
    assert "The winner is better than the seed" in printed
    record, folder = record_of(config), folder_of(config)
    (tree,) = record["trees"]
    columns = record["comparison"]["sums"]["columns"]
    means = {name: sum(one["scores"]) / 12 for name, one in columns.items()}
    assert means == {"winner": 1.0, "seed": 0.0, "single call": 0.75}
    assert record["spent"]["rollouts"] <= 80
    assert record["spent"]["usd"] == pytest.approx(record["spent"]["tokens"] / 110 * 200e-6)
    winner = load_graph(folder / "best" / "sums")
    assert "twice" not in winner.sources["graph.py"]
    assert any("Look twice" in text for text in winner.instructions.values())
    assert "<html" in (folder / "report.html").read_text()
    results = json.loads((folder / "workspace/GSM8K/workflows/results.json").read_text())
    assert len(results) > 2
    assert max(row["score"] for row in results) == 1.0
    # What it found can be named as the graph of a run.
    found = f"graph.path={folder / 'best' / 'sums'}"
    assert main(["validate", str(config), found, "model.model_path=smollm2-135m"]) == ExitCode.DONE
    asked = len(server.requests)
    code, printed, _ = search("--json")
    assert code == ExitCode.DONE
    assert decided(json.loads(printed)) == decided(record)
    assert len(server.requests) == asked
    assert tree["winner"] != tree["seed"]


@pytest.mark.slow
def test_options_are_settings(search: Search, config: Path) -> None:
    words = ("--budget", "rollouts=40", "--rounds", "2", "--select", "aflow", "name=short")
    code, printed, _ = search(*words)
    assert code == ExitCode.DONE
    record = record_of(config, "short")
    assert record["select"] == "aflow"
    assert max(edge["round"] for edge in record["trees"][0]["edges"]) <= 2
    code, printed, _ = search("--budget", "usd=0.006", "--budget", "tokens=9000", "name=paid")
    assert code == ExitCode.DONE
    assert 0.006 <= record_of(config, "paid")["spent"]["usd"] < 0.02
    assert "ended by: its limits are reached" in printed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--budget", "rollouts=20"], "which buys the seed on 8 problems and 2 proposals"),
        (["--budget", "hours=2"], "rollouts=N, tokens=N or usd=X"),
        (["--propose", "oracle"], "one of edits, policy, teacher"),
        (["--propose", "teacher"], "search.teacher"),
        (["search.executor=nobody"], "search.executor"),
        (["graph.path=nowhere"], "nowhere"),
        (["search.tasksets={other: {path: seed}}"], "a training task set"),
        (["buffer.explorer_input.eval_tasksets=[]"], "held-out problems"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_paid(
    search: Search, server: FaultyServer, words: Sequence[str], told: str
) -> None:
    code, printed, errors = search(*words)
    assert code == ExitCode.BAD_INPUT
    assert told in printed + errors
    assert not server.requests


def test_a_limit_that_buys_too_little_says_what_it_buys(
    search: Search, server: FaultyServer
) -> None:
    code, printed, errors = search("--budget", "usd=0.002")
    assert code == ExitCode.FAILED
    assert "buys its 8 problems and 0 proposals" in printed + errors
    assert len(server.requests) == 6


def test_no_better_workflow_is_no_failure(
    config: Path, search: Search, server: FaultyServer
) -> None:
    server.steps = lambda number, request: Step(text="I do not know")
    code, printed, _ = search("search.rollouts=40")
    assert code == ExitCode.DONE
    assert "No better than the seed" in printed
    assert record_of(config)["trees"][0]["winner"] == record_of(config)["trees"][0]["seed"]


def test_a_server_that_is_down_is_never_a_wrong_answer(
    search: Search, config: Path, server: FaultyServer
) -> None:
    def half(number: int, request: Request) -> Step:
        return Step(status=503) if number % 2 else adds(number, request)

    server.steps = half
    code, _, _ = search()
    assert code == ExitCode.DONE
    kept = list(trials_of(config).values())
    endings = Counter(trial.ending for trial in kept)
    assert endings["unscored"] > 5
    assert all((trial.score is None) == (trial.ending == "unscored") for trial in kept)
    server.steps = lambda number, request: Step(status=503)
    code, printed, errors = search("name=down")
    assert code == ExitCode.FAILED
    assert "the seed workflow was not scored on any problem" in printed + errors


def trials_of(config: Path, name: str = "searched") -> dict[Any, Trial]:
    """Every trial in the pool of a search."""
    pool = SharedExperiencePool(folder_of(config, name) / "pool.sqlite")
    with pool._open() as connection:
        places = connection.execute("SELECT DISTINCT taskset, executor FROM trial").fetchall()
    return {
        (taskset, *key): trial
        for taskset, executor in places
        for key, (_, trial) in pool.trials(taskset, executor).items()
    }


@pytest.mark.slow
def test_a_second_search_over_the_pool_starts_warm(
    search: Search, config: Path, server: FaultyServer
) -> None:
    shared = f"search.pool={config.parent / 'pool.sqlite'}"
    assert search(shared)[0] == ExitCode.DONE
    first = record_of(config)
    code, printed, _ = search(shared, "name=second", "seed=4")
    assert code == ExitCode.DONE
    assert "took over" in printed
    second = record_of(config, "second")
    assert second["spent"]["reused"] > 20
    assert second["spent"]["rollouts"] < first["spent"]["rollouts"]
    assert second["trees"][0]["winner"] == first["trees"][0]["winner"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["garbage", "repeats itself", "chooses"])
def test_a_teacher_that_misbehaves_does_not_stop_edits(
    search: Search, config: Path, server: FaultyServer, kind: str
) -> None:
    said = {
        "garbage": Step(text="I'd rather\x00 not. {"),
        "repeats itself": Step(text='{"edit": 1}'),
        "chooses": Step(text='{"edit": 2}'),
    }[kind]

    server.steps = with_teacher(said)
    code, _, _ = search(*teacher(server))
    assert code == ExitCode.DONE
    record = record_of(config)
    told = record["proposers"]
    assert told["teacher"]["proposed"] > 0
    assert told["edits"]["won"] > 0
    if kind == "garbage":
        assert told["teacher"]["refused"] == told["teacher"]["proposed"]
    assert told["teacher"]["tokens"] > 0
    scores = record["comparison"]["sums"]["columns"]["winner"]["scores"]
    assert sum(scores) >= 9


def with_teacher(said: Step) -> Callable[[int, Request], Step]:
    """The executor, and a teacher that says always the same."""

    def both(number: int, request: Request) -> Step:
        asked = "Propose one change" in request.body["messages"][-1]["content"]
        return said if asked else adds(number, request)

    return both


def teacher(server: FaultyServer) -> list[str]:
    model = f"model: big, base_url: '{server.openai_url}', retries: 0"
    model += ", prices: {input: 1.0, output: 1.0}"
    return ["--propose", "edits", "teacher", "search.teacher=big", f"models.big={{{model}}}"]


@pytest.mark.slow
def test_a_teacher_that_is_down_ends_the_search_which_then_goes_on(
    search: Search, config: Path, server: FaultyServer
) -> None:
    server.steps = with_teacher(Step(status=500))
    code, printed, errors = search(*teacher(server), "search.patience=null", "search.rollouts=400")
    assert code == ExitCode.FAILED
    assert "teacher failed 12 times in a row" in printed + errors
    ran = trials_of(config)
    asked = sum("Propose" not in str(request.body) for request in server.requests)
    assert asked == len(ran)
    server.steps = with_teacher(Step(text='{"edit": 2}'))
    assert search(*teacher(server), "search.patience=null", "search.rollouts=400")[0] == 0
    assert {key: trials_of(config)[key] for key in ran} == ran


def test_a_hostile_seed_runs_in_the_sandbox_and_no_edit_of_it_does(
    search: Search, config: Path
) -> None:
    escaped = config.parent / "escaped"
    own_form(
        config.parent / "seed",
        simple(
            f'open("{escaped}", "w").close()\n'
            'answer = await self.custom(input=problem, instruction="")\n'
            'return answer["response"], 0'
        ),
    )
    code, printed, _ = search()
    assert code == ExitCode.DONE
    assert "warning: no edit of the seed workflow may run" in printed
    assert not escaped.exists()
    edges = record_of(config)["trees"][0]["edges"]
    raced = [edge for edge in edges if not edge["refusal"]]
    assert {
        edge["kind"] for edge in raced if edge["parent"] == record_of(config)["trees"][0]["seed"]
    } == {"adopt"}


# Interrupted, killed, on Ray


def command(config: Path, *words: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "aflow_tune.cli", "search", str(config), *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def slowly(number: int, request: Request) -> Step:
    step = adds(number, request)
    step.seconds = 0.05
    return step


def paid(config: Path, name: str) -> int:
    """Calls of all trials that a search has kept."""
    pool = folder_of(config, name) / "pool.sqlite"
    return sum(trial.calls for trial in trials_of(config, name).values()) if pool.exists() else 0


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(
    search: Search, config: Path, server: FaultyServer
) -> None:
    assert search("name=whole")[0] == ExitCode.DONE
    server.steps = slowly
    process = command(config)
    while paid(config, "searched") < 20:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == ExitCode.INTERRUPTED, printed
    assert "The same command goes on from there" in printed
    assert (folder_of(config) / "report.html").exists()
    assert not record_of(config)["finished"]
    assert search()[0] == ExitCode.DONE
    assert decided(record_of(config)) == decided(record_of(config, "whole"))


@pytest.mark.slow
def test_killed_at_random_moments_it_comes_to_the_same(
    search: Search, config: Path, server: FaultyServer
) -> None:
    """No finished trial is run twice: more is asked only for what was under way at a kill."""
    assert search("name=whole")[0] == ExitCode.DONE
    asked = len(server.requests)
    chance = random.Random(5)
    server.steps = slowly
    for point in range(2):
        name, lost = f"killed{point}", 0
        server.requests.clear()
        for _ in range(2):
            before, known = len(server.requests), paid(config, name)
            until = known + chance.randrange(1, 40)
            process = command(config, f"name={name}")
            while paid(config, name) < until and process.poll() is None:
                time.sleep(0.01)
            process.kill()
            process.communicate()
            kept = paid(config, name)
            lost += len(server.requests) - before - (kept - known)
        assert search(f"name={name}")[0] == ExitCode.DONE
        assert decided(record_of(config, name)) == decided(record_of(config, "whole"))
        assert len(server.requests) == asked + lost


def with_two_tasksets(config: Path) -> None:
    content = yaml.safe_load(config.read_text())
    root, inputs = config.parent, content["buffer"]["explorer_input"]
    sets = {"sums": range(40), "more": range(40, 80)}
    for name, numbers in sets.items():
        write_rows(root / f"{name}.jsonl", rows(numbers))
    inputs.pop("taskset")
    inputs["tasksets"] = [{"name": name, "path": str(root / f"{name}.jsonl")} for name in sets]
    content["graph"].pop("path")
    own = {"path": str(root / "seed"), "held_out": "held_out"}
    content["search"] |= {"rollouts": 130, "tasksets": {name: own for name in sets}}
    config.write_text(yaml.safe_dump(content, sort_keys=False))


@pytest.mark.slow
def test_two_task_sets_share_a_pool_and_have_a_winner_each(search: Search, config: Path) -> None:
    with_two_tasksets(config)
    assert main(["validate", str(config)]) == ExitCode.DONE
    code, printed, _ = search()
    assert code == ExitCode.DONE
    record = record_of(config)
    assert [tree["taskset"] for tree in record["trees"]] == ["sums", "more"]
    for name in ("sums", "more"):
        assert f"{name}: The winner is better than the seed" in printed
        assert (folder_of(config) / "best" / name / "graph.py").exists()
        assert (folder_of(config) / "workspace" / name / "GSM8K/workflows/results.json").exists()
    assert record["spent"]["rollouts"] <= 130


@pytest.mark.slow
def test_on_ray_and_inline_the_trials_are_the_same(search: Search, config: Path) -> None:
    with_two_tasksets(config)
    assert search("name=inline")[0] == ExitCode.DONE
    process = command(config, "name=ray", "inline=false")
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == ExitCode.DONE, printed
    assert "workers on Ray run the trials" in printed
    assert decided(record_of(config, "ray")) == decided(record_of(config, "inline"))


# The policy


def with_policy(config: Path) -> None:
    """A tiny model proposes, which answers with any number from 1 to 8."""
    content = yaml.safe_load(config.read_text())
    model = write_tiny_model(config.parent / "model", says="12345678")
    template = "{{ messages[-1]['content'] }}"
    lora = [{"lora_rank": 4, "lora_alpha": 8}]
    content["model"] = {"model_path": str(model), "max_model_len": 1024, "max_prompt_tokens": 960}
    content["model"] |= {"custom_chat_template": template, "lora_configs": lora}
    content["search"] |= {"propose": ["policy"], "train_every": 1, "rollouts": 90, "rounds": 3}
    config.write_text(yaml.safe_dump(content, sort_keys=False))


@pytest.mark.slow
def test_the_policy_is_asked_and_trained_and_goes_on(search: Search, config: Path) -> None:
    with_policy(config)
    code, printed, errors = search()
    assert code == ExitCode.DONE, printed + errors
    record = record_of(config)
    told = record["proposers"]["policy"]
    assert told["proposed"] > told["refused"]
    versions = [step["version"] for step in record["trained"]]
    assert max(versions) >= 2
    assert search()[0] == ExitCode.DONE
    assert decided(record_of(config)) == decided(record)
    assert record_of(config)["trained"] == record["trained"]
    assert search("--no-train", "name=plain")[0] == ExitCode.DONE
    assert record_of(config, "plain")["trained"] == []
