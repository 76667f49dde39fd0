"""A graph as a workflow function: contract, configuration, scoring, travelling by value."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from graph_samples import MATH, MATH_PROMPTS, own_form, simple, write_round
from project import run_dir, write_project
from test_validate import CONFIG

import aflow_tune.engines.trinity  # noqa: F401  (the stand-in for vLLM)
from aflow_tune.config.load import load_config
from aflow_tune.config.validate import resolve_functions
from aflow_tune.context import RolloutContext
from aflow_tune.contract.signature import check_functions
from aflow_tune.errors import BadInput
from aflow_tune.graph.graph import load_graph
from aflow_tune.graph.workflow import GraphFailed, GraphResponse, GraphWorkflow
from aflow_tune.models import ScriptedModel

ROW = {"question": "What is 1+2?", "answer": "It is 3.\n#### 3"}
CALL = 'return (await self.custom(input=problem, instruction=""))["response"], 0.0'
LETTER = "<thought>t</thought><solution_letter>B</solution_letter>"


def reward(
    workflow: GraphWorkflow, task: dict[str, Any], model: ScriptedModel
) -> tuple[float, dict[str, float]]:
    async def work() -> tuple[float, dict[str, float]]:
        with RolloutContext().activate() as run:
            return await workflow(task=task, model=model), dict(run.metrics)

    return asyncio.run(work())


def config_of(tmp_path: Path, graph: str, more: str = "") -> Any:
    text = CONFIG.replace("workflow: {root}/flow.py:two_calls\n", "")
    path = tmp_path / "config.yaml"
    path.write_text(text.format(root=tmp_path, model="model") + f"graph: {graph}\n{more}")
    return load_config(path)


def test_an_answer_is_scored_by_both_rules(tmp_path: Path) -> None:
    folder = write_round(tmp_path, "GSM8K", 2, MATH, MATH_PROMPTS)
    workflow = GraphWorkflow(load_graph(folder), benchmark="gsm8k")
    got, metrics = reward(workflow, ROW, ScriptedModel(["It is 4", "It is 3", LETTER]))
    assert got == 1.0
    assert (metrics["strict"], metrics["published"], metrics["graph/calls"]) == (1.0, 1.0, 3.0)
    assert reward(workflow, ROW, ScriptedModel(["It is 3", "It is 4", LETTER]))[0] == 0.0


def test_no_answer_is_a_wrong_answer_and_a_failure_is_none(tmp_path: Path) -> None:
    nothing = load_graph(own_form(tmp_path / "a", simple("return ''")), trust=True)
    assert reward(GraphWorkflow(nothing, "gsm8k"), ROW, ScriptedModel([]))[0] == 0.0
    broken = load_graph(own_form(tmp_path / "b", simple("return {}['x']")), trust=True)
    with pytest.raises(GraphFailed, match=r"graph\.py:9: KeyError"):
        reward(GraphWorkflow(broken, "gsm8k"), ROW, ScriptedModel([]))
    scored = GraphWorkflow(nothing, score=lambda task, answer: 0.5, problem="text")
    assert reward(scored, {"text": "q"}, ScriptedModel([]))[0] == 0.5
    with pytest.raises(BadInput, match="no text under text"):
        reward(scored, {"problem": "q"}, ScriptedModel([]))


def test_a_configuration_names_a_graph(tmp_path: Path) -> None:
    prompts = json.dumps({"SOLVE": "Solve: "})
    body = simple(CALL + "\nprompt_custom.SOLVE", "self.review = operator.Review(self.llm)")
    own_form(tmp_path / "mine", body, prompts)
    (tmp_path / "tests.jsonl").write_text('{"entry_point": "f", "test": ["assert candidate()"]}\n')
    section = (
        "{path: mine, benchmark: gsm8k, timeout: 20, max_calls: 7, trust: true, "
        "prompts: {SOLVE: 'Other: '}, models: {Review: judge}, test_cases: tests.jsonl}"
    )
    judge = "models: {judge: {model: m, base_url: 'http://127.0.0.1:1/v1'}}\n"
    config = config_of(tmp_path, section, judge)
    workflow, found_judge = resolve_functions(config)
    assert isinstance(workflow, GraphWorkflow)
    assert found_judge is None
    assert workflow.graph.trust
    assert workflow.graph.constants == {"SOLVE": "Other: "}
    assert (workflow.limits.seconds, workflow.limits.calls) == (20.0, 7)
    assert workflow.clients["judge"].model == "m"
    assert set(workflow.test_cases.sets) == {"f"}


def test_a_judge_scores_the_answer_of_a_graph(tmp_path: Path) -> None:
    own_form(tmp_path / "mine", simple(CALL))
    (tmp_path / "graph_judge.py").write_text(
        "from typing import Any, Dict\n\nfrom aflow_tune import JudgeOutput\n\n\n"
        "async def judge(task: Dict, response: Any) -> JudgeOutput:\n"
        "    return JudgeOutput(reward=float(response == task['answer']))\n"
    )
    config = config_of(tmp_path, "{path: mine, trust: true}", "judge: graph_judge.py:judge\n")
    workflow, judge = resolve_functions(config)
    assert isinstance(workflow, GraphResponse)
    assert judge is not None
    contract, _ = check_functions(workflow, judge)
    assert contract.returns == "WorkflowOutput"
    output = asyncio.run(workflow(task={"question": "q"}, model=ScriptedModel(["a"])))
    assert (output.response, output.reward) == ("a", None)


@pytest.mark.parametrize(
    ("section", "more", "places"),
    [
        ("{path: mine}", "", ["graph.benchmark"]),
        ("{path: mine, benchmark: gsm9k, timeout: -1, max_calls: 0}", "",
         ["graph.benchmark", "graph.timeout", "graph.max_calls"]),
        ("{path: mine, benchmark: gsm8k, models: {Custom: judge, Review: policy}}", "",
         ["graph.models.Custom", "graph.models.Review"]),
        ("{path: mine, benchmark: gsm8k}", "workflow: a.py:f\n", ["workflow"]),
        ("{path: nowhere, benchmark: gsm8k}", "", ["nowhere"]),
        ("{path: mine, benchmark: gsm8k, prompts: {SOLVE: x}}", "", ["mine"]),
    ],
)  # fmt: skip
def test_faults_of_the_section_name_their_keys(
    tmp_path: Path, section: str, more: str, places: list[str]
) -> None:
    own_form(tmp_path / "mine", simple(CALL))
    config = config_of(tmp_path, section, more)
    with pytest.raises(BadInput) as refused:
        resolve_functions(config)
    found = [fault.where for fault in refused.value.faults]
    assert len(found) == len(places)
    assert all(where.endswith(place) for where, place in zip(found, places, strict=True))
    assert all(where.startswith(f"{config.positions.file}:") for where in found)


LETTERS = "def letters(task, answer):\n    return sum(c.isalpha() for c in answer) / len(answer)\n"
TWO_OPERATORS = """\
draft = await self.custom(input=problem, instruction=prompt_custom.DRAFT)
final = await self.again(input=problem + draft['response'][:8], instruction='')
return draft['response'] + final['response'] + '.', self.llm.get_usage_summary()['total_cost']"""


@pytest.mark.slow
def test_a_graph_of_two_operators_is_tuned(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The whole run: each operator's calls become experiences under its name."""
    from aflow_tune.report.records import read_records
    from aflow_tune.tuning import run_config

    config = write_project(tmp_path, tiny_model_dir)
    body = simple(TWO_OPERATORS, "self.again = operator.Custom(self.llm)")
    own_form(tmp_path / "mine", body, '{"DRAFT": "Say: "}')
    (tmp_path / "reward.py").write_text(LETTERS)
    section = "graph: {path: mine, score: reward.py:letters}"
    text = config.read_text().replace(f"workflow: {tmp_path}/flow.py:two_calls", section)
    config.write_text(text.replace("score: letters", "score: reward"))
    result = run_config(config, inline=True)
    assert result.steps_done == 2
    files = [path for path in (run_dir(tmp_path) / "evaluations").rglob("*") if path.is_file()]
    records = [record for path in files for record in read_records(path)]
    assert records
    assert {record.failure for record in records} == {None}
    callers = [call["caller"] for record in records for call in record.transcript]
    assert set(callers) == {"Custom.custom", "Custom.again"}
