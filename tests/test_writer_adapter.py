"""A writer inside of the adapter and of whole runs: what is trained, and what stays frozen."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from project import run_dir, write_project
from scripted_server import ScriptedModel, ScriptedRunner, ScriptedServer, make_task
from writer_samples import ONE, RAISES, TWO, text, writer

from aflow_tune.engines.trinity.rollout.operators import CALLER_KEY, STATE_KEY, AnchorRate
from aflow_tune.writer.prompting import KEEP

# isort: split
from trinity.algorithm import ADVANTAGE_FN
from trinity.common.experience import Experience


def rollouts(
    texts: Any, answers: Any, *, runs: int = 1, folder: Path | None = None, **settings: Any
) -> tuple[list[Experience], list[dict[str, Any]], list[dict[str, Any]]]:
    """Experiences of the runs of one task, and what policy and executor were asked."""
    with ScriptedServer(texts) as policy, ScriptedServer(answers) as executor:
        frozen = ScriptedModel(executor.url, name="executor")
        runner = ScriptedRunner(ScriptedModel(policy.url), [frozen], "sequential")
        task = make_task(
            writer(**{**SETTINGS, **settings}), run_dir=None if folder is None else str(folder)
        )
        status, payload = asyncio.run(runner.run_task(task, "1", repeat_times=runs))
        assert status.ok, status.message
        assert frozen.history == []
        return Experience.deserialize_many(payload), policy.requests, executor.requests


def score(task: Any, answer: Any) -> float:
    return float(task["answer"] in str(answer))


SETTINGS: dict[str, Any] = {"benchmark": None, "problem_type": "math", "score": score}


def test_only_the_policys_calls_are_experiences(tmp_path: Path) -> None:
    exps, asked, executed = rollouts(lambda _: text(TWO), lambda _: "4", folder=tmp_path)
    assert (len(asked), len(executed)) == (1, 2)
    (exp,) = exps
    assert exp.info[CALLER_KEY] == "writer"
    assert bytes(exp.tokens[exp.prompt_length : -1].tolist()).decode() == text(TWO)
    assert exp.reward is not None
    assert 9.0 < exp.reward <= 10.0
    metrics = exp.metrics or {}
    assert (metrics["correct"], metrics["writer/valid"], metrics["writer/nodes"]) == (1.0, 1.0, 2.0)
    assert metrics["calls"] == 1.0
    (kept,) = [json.loads(line) for line in (tmp_path / "rollouts/step_1.jsonl").open()]
    assert kept["kept"]["writer"]["structure"] == "Custom Custom | P>0 P>1 0>1 1>A"
    assert kept["kept"]["writer"]["score"] == 1.0


def turning(request: dict[str, Any]) -> str:
    """Writes a workflow that fails; sees that and mends it; keeps what ran."""
    said = [message["content"] for message in request["messages"]]
    if len(said) == 1:
        return text(RAISES) if request["seed"] % 2 else text()
    return text(ONE) if "failed" in said[-1] else KEEP


def test_turns_are_steps_with_anchor_states_and_both_algorithms_take_them() -> None:
    exps, _, _ = rollouts(turning, lambda _: "4", runs=8, turns=3)
    runs: dict[str, list[Experience]] = {}
    for exp in exps:
        runs.setdefault(exp.eid.rid, []).append(exp)
    lengths = sorted(len(steps) for steps in runs.values())
    assert set(lengths) == {2, 3}  # both first texts were drawn: write, keep; write, mend, keep
    states = {exp.info[STATE_KEY] for exp in exps if exp.eid.step == 0}
    assert len(states) == 1
    later = {exp.info[STATE_KEY] for exp in exps if exp.eid.step > 0}
    assert len(later) == 2  # it ran; it raised: whatever the executor answered
    _, metrics = AnchorRate().process(exps)
    assert metrics["gigpo/anchor_hit_rate"] == 1.0
    for name in ("step_wise_grpo", "gigpo"):
        kind = ADVANTAGE_FN.get(name)
        advised, _ = kind(**kind.default_args()).process(exps)
        assert len(advised) == len(exps)
        assert all(exp.advantages is not None for exp in advised)


WATCHING = """
from typing import Dict

from aflow_tune import TrinityChatModel, text_of

from aflow_tune.context import keep


async def watching(task: Dict, model: TrinityChatModel, auxiliary_models: Dict) -> float:
    texts = []
    for asked in (auxiliary_models["executor"], model):
        reply = await asked([{"role": "user", "content": "Say something."}])
        texts.append(text_of(reply.content))
    keep("said", texts)
    return sum(c.isalpha() for c in texts[1]) / max(1, len(texts[1]))
"""
AUXILIARY = """
  auxiliary_models:
    - {{name: executor, model_path: {model}, temperature: {temperature}, max_response_tokens: 12}}
"""


def with_auxiliary(config: Path, model: Path, temperature: float) -> str:
    more = AUXILIARY.format(model=model, temperature=temperature)
    return config.read_text().replace(
        "explorer: {eval_interval: 2}\n", f"explorer:\n  eval_interval: 2{more}"
    )


@pytest.mark.slow
def test_an_auxiliary_model_keeps_its_weights_while_the_policy_is_trained(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Greedy answers to one question: the executor's stay, although it began as the policy."""
    from aflow_tune.report.records import read_records
    from aflow_tune.tuning import run_config

    config = write_project(tmp_path, tiny_model_dir, workflow=WATCHING)
    written = with_auxiliary(config, tiny_model_dir, 0.0)
    written = written.replace("flow.py:two_calls", "flow.py:watching")
    config.write_text(written.replace("score: letters", "score: reward"))
    overrides = ["algorithm.optimizer.lr=0.05", "deterministic=true"]
    assert run_config(config, overrides, inline=True).steps_done == 2
    said = []
    for at in (0, 2):
        file = run_dir(tmp_path) / "evaluations" / "held_out" / f"step_{at}.jsonl"
        said.append([record.kept["said"] for record in read_records(file)])
    frozen = [{executor for executor, _ in texts} for texts in said]
    assert frozen[0] == frozen[1]
    assert len(frozen[0]) == 1
    assert {policy for _, policy in said[0]} != {policy for _, policy in said[1]}


@pytest.mark.slow
def test_a_writer_is_tuned_and_evaluated(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The whole loop on a random model, which writes rubbish: every fallback's run is a run."""
    from aflow_tune.cli import main
    from aflow_tune.report.records import read_records
    from aflow_tune.tuning import run_config

    config = write_project(tmp_path, tiny_model_dir)
    (tmp_path / "prompt.txt").write_text("{problem}")
    (tmp_path / "letters.py").write_text(
        "def letters(task, answer):\n"
        "    return sum(c.isalpha() for c in answer) / max(1, len(answer))\n"
    )
    section = (
        "writer: {executor: executor, operators: [Custom], score: letters.py:letters, "
        "problem_type: math, prompt: prompt.txt, turns: 2, timeout: 30}"
    )
    written = with_auxiliary(config, tiny_model_dir, 1.0)
    written = written.replace("max_prompt_tokens: 200", "max_prompt_tokens: 900")
    written = written.replace("max_model_len: 256", "max_model_len: 1000")
    written = written.replace(f"workflow: {tmp_path}/flow.py:two_calls", section)
    written = written.replace("algorithm_type: multi_step_grpo", "algorithm_type: gigpo")
    config.write_text(written.replace("score: letters,", "score: correct_clean,"))
    assert main(["validate", str(config)]) == 0
    assert run_config(config, inline=True).steps_done == 2
    folder = run_dir(tmp_path)
    lines = [json.loads(line) for path in folder.glob("rollouts/*") for line in path.open()]
    assert len(lines) == 16
    kept = [line["kept"]["writer"] for line in lines]
    assert {record["level"] for record in kept} == {3}
    assert {record["turns"] for record in kept} <= {1, 2}  # 1 where the second did not fit
    assert all(line["failure"] is None and line["reward"] <= -9.0 for line in lines)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    names = {name for row in rows for name in row.get("metrics", row)}
    assert any(name.endswith("gigpo/anchor_hit_rate") for name in names), sorted(names)
    for at in (0, 2):
        records = read_records(folder / "evaluations" / "held_out" / f"step_{at}.jsonl")
        assert {record.failure for record in records} == {None}
        assert all(record.kept["writer"]["problem"].startswith("What is") for record in records)
    assert main(["eval", str(config), "--compare", "base", "last"]) == 0
    result = json.loads((folder / "eval" / "eval.json").read_text())
    assert [column["name"] for column in result["columns"]] == ["base", "step 2 (last)"]
