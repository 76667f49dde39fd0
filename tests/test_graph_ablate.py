"""`aflow-tune graph ablate`: a graph without each of its parts, against a scripted server and the
local model.

Problem n is 'What is n + 10?'. `solve` answers all but every fourth rightly, `polish` repeats the
last number that it is given: without `solve` nothing is right, without `polish` all is as before.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_server import FaultyServer, Request, Step
from graph_samples import own_form, simple
from harvest_project import rows, write_rows

from aflow_tune.cli import main
from aflow_tune.errors import ExitCode
from aflow_tune.graph.graph import Graph
from aflow_tune.search.ablation import (
    BETTER,
    EARNS,
    NO_DIFFERENCE,
    STUCK,
    UNMEASURED,
    Measured,
    Part,
    effect_of,
    operator_parts,
    prompt_parts,
)
from aflow_tune.search.pool import Trial

TWO = """\
class Workflow:
    def __init__(self, name, llm_config, dataset):
        self.llm = create_llm_instance(llm_config)
        self.solve = operator.Custom(self.llm)
        self.polish = operator.Custom(self.llm)
        self.review = operator.Review(self.llm)

    async def __call__(self, problem):
        first = await self.solve(input=problem, instruction=prompt_custom.ASK)
        answer = await self.polish(input=first["response"], instruction="Repeat. ")
        if len(problem) > 1000:
            await self.review(problem=problem, solution=answer["response"])
        return answer["response"], 0
"""
PROMPTS = {"ASK": "Solve. "}
CONFIG = """
project: tests
name: ablated
checkpoint_root_dir: {root}/runs
seed: 3
graph: {{benchmark: gsm8k, timeout: 120}}
model: {{model_path: nobody/no-such-model, max_model_len: 4096, max_response_tokens: 512}}
models:
  executor:
    {{model: frozen, base_url: {url}, retries: 0, prices: {{input: 1.0, output: 10.0}}}}
buffer:
  explorer_input:
    eval_tasksets: [{{name: held_out, path: {root}/held_out.jsonl}}]
"""


def answers(number: int, request: Request) -> Step:
    text = request.body["messages"][-1]["content"]
    last = int(re.findall(r"\d+", text)[-1])
    asked = re.search(r"What is (\d+) \+ 10", text)
    if "Solve" not in text or asked is None:
        return Step(text=f"It is {last}")
    right = int(asked[1]) + 10
    return Step(text=f"It is {right if right % 4 else right + 1}")


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer(answers) as running:
        yield running


@pytest.fixture
def config(tmp_path: Path, server: FaultyServer) -> Path:
    write_rows(tmp_path / "held_out.jsonl", rows(range(101, 113)))
    own_form(tmp_path / "mine", TWO, json.dumps(PROMPTS))
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(root=tmp_path, url=server.openai_url))
    return path


@pytest.fixture
def ablate(config: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs the command; its exit code and what it printed."""

    def run(*arguments: str, graph: str = "mine") -> tuple[int, str, str]:
        capsys.readouterr()
        path = str(config.parent / graph)
        code = main(["graph", "ablate", path, str(config), "--executor", "executor", *arguments])
        return code, *capsys.readouterr()

    return run


def test_the_operator_that_answers_earns_its_calls(
    ablate: Callable[..., Any], server: FaultyServer, tmp_path: Path
) -> None:
    code, printed, _ = ablate("--json")
    assert code == ExitCode.DONE
    found = json.loads(printed)
    assert (found["problems"], found["unscored"], found["model"]) == (12, 0, "executor")
    assert (found["score"]["mean"], found["calls"], found["tokens"]) == (0.75, 2.0, 220.0)
    # 2 calls of 100 prompt tokens at 1 and 10 completion tokens at 10 dollars a million.
    assert found["usd"] == pytest.approx(2 * 200e-6)
    parts = {part["name"]: part for part in found["parts"]}
    assert [*parts] == ["solve", "polish", "review"]
    solve = parts["solve"]
    assert (solve["verdict"], solve["difference"], solve["score_without"]) == (EARNS, 0.75, 0.0)
    assert solve["low"] == pytest.approx(0.75 - 2.2010 * 0.45227 / 12**0.5, abs=1e-4)
    assert solve["p_value"] == pytest.approx(2 / 2**9)
    polish = parts["polish"]
    assert (polish["verdict"], polish["low"], polish["high"]) == (NO_DIFFERENCE, 0.0, 0.0)
    assert (polish["calls_saved"], polish["tokens_saved"]) == (1.0, 110.0)
    assert polish["usd_saved"] == pytest.approx(200e-6)
    assert not parts["review"]["removable"]
    kept = tmp_path / "runs" / "tests" / "ablated" / "ablation" / "ablation.json"
    assert json.loads(kept.read_text()) == found
    asked = len(server.requests)
    assert asked == 12 * (2 + 1 + 1)
    again = json.loads(ablate("--json")[1])
    assert (again, len(server.requests)) == (found, asked)


def test_the_table_says_what_can_go(ablate: Callable[..., Any]) -> None:
    code, printed, _ = ablate("graph.max_calls=9", "--limit", "6", "seed=4")
    assert code == ExitCode.DONE
    lines = printed.splitlines()
    assert "3 graphs on 6 problems: 18 rollouts" in lines
    assert any(line.startswith("whole graph: 0.667 (") for line in lines)
    rows_of = {line.split("  ")[0]: re.split(r"  +", line) for line in lines}
    assert rows_of["polish"][2:] == [
        "0.667", "+0.000 (+0.000 to +0.000)", "1.0", "110", "0.00020", "no difference seen"
    ]  # fmt: skip
    # Four of six problems changed: too few for the sign test.
    assert rows_of["solve"][2:4][0] == "0.000"
    assert rows_of["solve"][-1] == "no difference seen"
    assert rows_of["review"][2].startswith("cannot be removed: nothing that Review is given")


def test_prompts_are_taken_out_instead(ablate: Callable[..., Any]) -> None:
    code, printed, _ = ablate("--prompts", "--json")
    assert code == ExitCode.DONE
    (part,) = json.loads(printed)["parts"]
    assert (part["name"], part["kind"], part["verdict"]) == ("ASK", "prompt", "helps")
    assert (part["score_without"], part["calls_saved"]) == (0.0, 0.0)


def test_a_server_that_is_down_is_no_wrong_answer(
    ablate: Callable[..., Any], server: FaultyServer
) -> None:
    server.steps = lambda number, request: Step(status=500)
    code, _, said = ablate("--limit", "2")
    assert code == ExitCode.FAILED
    assert "the whole graph was not scored on any problem: calls of the model failed" in said
    server.steps = answers
    found = json.loads(ablate("--limit", "2", "--json")[1])
    assert (found["problems"], found["unscored"]) == (2, 0)


def test_a_limit_of_the_budget_ends_it_and_a_higher_one_goes_on(
    ablate: Callable[..., Any], server: FaultyServer
) -> None:
    code, _, said = ablate("budget.tokens=3000")
    assert code == ExitCode.BUDGET
    assert "budget.tokens" in said
    assert "The same command goes on from there." in said
    before = len(server.requests)
    assert 0 < before < 48
    code, printed, _ = ablate("budget.tokens=100000")
    assert code == ExitCode.DONE
    assert "are there from an earlier command" in printed
    assert len(server.requests) <= 48 + 4


WRONG = [
    (("--executor", "nobody"), "a role of `models` or an auxiliary model (executor)"),
    (("judge=mine.py:judge",), "a benchmark or a score function"),
    (("graph.benchmark=null",), "one that scores"),
]


@pytest.mark.parametrize(("arguments", "expected"), WRONG)
def test_what_cannot_be_measured_is_refused(
    ablate: Callable[..., Any], server: FaultyServer, arguments: tuple[str, ...], expected: str
) -> None:
    code, _, said = ablate(*arguments)
    assert (code, len(server.requests)) == (ExitCode.BAD_INPUT, 0)
    assert expected in said


def test_a_graph_of_one_operator_has_nothing_to_do_without(
    ablate: Callable[..., Any], server: FaultyServer, tmp_path: Path
) -> None:
    asks = 'return (await self.custom(input=problem, instruction=""))["response"], 0'
    own_form(tmp_path / "one", simple(asks))
    code, _, said = ablate(graph="one")
    assert (code, len(server.requests)) == (ExitCode.BAD_INPUT, 0)
    assert "one: custom" in said
    code, _, said = ablate("--prompts", graph="one")
    assert (code, "no instruction or prompt" in said) == (ExitCode.BAD_INPUT, True)


@pytest.mark.slow
def test_stopped_it_goes_on_where_it_was(config: Path, server: FaultyServer) -> None:
    server.steps = lambda number, request: (
        Step(kind="hang") if number == 30 else answers(number, request)
    )
    graph = str(config.parent / "mine")
    command = [sys.executable, "-m", "aflow_tune.cli", "graph", "ablate", graph, str(config)]
    command += ["--executor", "executor"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while len(server.requests) < 47:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == ExitCode.INTERRUPTED
    assert b"The same command goes on from there." in said
    before = len(server.requests)
    assert main(command[3:]) == ExitCode.DONE
    assert len(server.requests) - before <= 4


LOCAL = """
project: tests
name: {name}
checkpoint_root_dir: {root}/runs
seed: 3
local: {{dtype: float32, threads: 1, max_batch: 8}}
graph: {{score: "{root}/score.py:letters", timeout: 120}}
model: {{model_path: {model}, max_prompt_tokens: 200, max_response_tokens: 8, max_model_len: 256}}
explorer:
  auxiliary_models:
    - {{name: frozen, model_path: {model}, temperature: 0.0, max_response_tokens: 8}}
buffer:
  explorer_input:
    eval_tasksets: [{{name: held_out, path: {root}/held_out.jsonl}}]
"""
SCORE = """\
def letters(task, answer):
    return sum(c.isalpha() for c in answer) / max(1, len(answer))
"""


@pytest.mark.parametrize("executor", [(), ("--executor", "frozen")])
def test_a_local_model_answers_both_with_the_same_random_numbers(
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    executor: tuple[str, ...],
) -> None:
    (tmp_path / "score.py").write_text(SCORE)
    write_rows(tmp_path / "held_out.jsonl", rows(range(4)))
    body = (
        'first = await self.custom(input=problem, instruction="")\n'
        'await self.unread(input=problem, instruction="")\n'
        'return first["response"], 0'
    )
    graph = simple(body, "self.unread = operator.Custom(self.llm)")
    mine = str(own_form(tmp_path / "mine", graph))
    found = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(LOCAL.format(root=tmp_path, model=tiny_model_dir, name=name))
        assert main(["graph", "ablate", mine, str(path), *executor, "--json"]) == ExitCode.DONE
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["model"] == ("frozen" if executor else str(tiny_model_dir))
    assert (found[0]["failed"], found[0]["unscored"], found[0]["calls"]) == (0, 0, 2.0)
    unread = next(part for part in found[0]["parts"] if part["name"] == "unread")
    assert (unread["problems"], unread["difference"], unread["calls_saved"]) == (4, 0.0, 1.0)
    assert unread["low"] == unread["high"] == 0.0


# What is taken out, and how it is judged


def parts_of(source: str, refused: Callable[[Graph], set[str]] = lambda graph: set()) -> list[Part]:
    return operator_parts(Graph("mine", {"graph.py": source}), refused)


def test_what_the_whole_graph_is_refused_for_counts_for_no_part() -> None:
    def refused(graph: Graph) -> set[str]:
        return {"old", "new"} if "self.polish" not in graph.sources["graph.py"] else {"old"}

    parts = {part.name: part for part in parts_of(TWO, refused)}
    assert parts["solve"].graph is not None
    assert (parts["polish"].graph, parts["polish"].why) == (None, "new")


def test_each_text_is_taken_out_alone() -> None:
    graph = Graph(
        "mine",
        {"graph.py": TWO, "prompt.py": 'ASK = "Solve. "\nUNUSED = "x"\n'},
        {"Review": "{solution}"},
        instructions={"solve": "One.", "polish": "Two."},
    )
    parts = {part.name: part.graph for part in prompt_parts(graph)}
    assert [*parts] == ["solve", "polish", "ASK", "Review"]
    assert parts["solve"] is not None
    assert parts["solve"].instructions == {"polish": "Two."}
    assert parts["ASK"] is not None
    assert parts["ASK"].prompts == {"Review": "{solution}", "ASK": ""}
    assert parts["Review"] is not None
    assert parts["Review"].prompts == {}


def measured(scores: str, ending: str = "scored") -> Measured:
    """Trials of these scores: 1, 0, or - where there is none."""
    values = [None if mark == "-" else float(mark) for mark in scores]
    trials = [Trial(v, ending if v == 0 else "scored", "KeyError: 'x'", 1, 10) for v in values]
    return Measured({str(number): trial for number, trial in enumerate(trials)})


JUDGED = [
    ("11111111", "00000000", EARNS),
    ("00000000", "11111111", BETTER),
    ("11110000", "11110000", NO_DIFFERENCE),
    ("11111---", "00000111", NO_DIFFERENCE),
    ("--", "11", UNMEASURED),
]


@pytest.mark.parametrize(("whole", "without", "verdict"), JUDGED)
def test_a_part_is_judged_on_the_problems_that_both_were_scored_on(
    whole: str, without: str, verdict: str
) -> None:
    part = Part("solve", "Custom", Graph("mine", {"graph.py": TWO}))
    assert effect_of(part, measured(whole), measured(without)).verdict == verdict


def test_a_graph_that_fails_without_a_part_was_not_shown_to_need_it() -> None:
    part = Part("solve", "Custom", Graph("mine", {"graph.py": TWO}))
    effect = effect_of(part, measured("11111111"), measured("00000000", "failed"))
    assert (effect.verdict, effect.why, effect.failed) == (STUCK, "KeyError: 'x'", 8)
    both = effect_of(part, measured("00000000", "failed"), measured("00000000", "failed"))
    assert both.verdict == NO_DIFFERENCE
