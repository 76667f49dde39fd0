"""One turn of an agent against the gold one: measures and reward by hand, tasks from dialogues, and
the workflow that asks for them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from project import run_dir, write_project
from scripted_server import Reply, ScriptedModel, ScriptedRunner, ScriptedServer, make_task
from trinity.common.experience import Experience

from aflow_tune.cli import main
from aflow_tune.contract.plugins import resolve
from aflow_tune.errors import BadInput
from aflow_tune.scoring.rewards import Unscored, reward_faults
from aflow_tune.scoring.turns import as_tasks, calls_of, measures, prompt_of, turn_reward
from aflow_tune.scoring.use_tools import use_tools
from aflow_tune.sections import RewardsSection, TurnRewardSection

ROOT = Path(__file__).parents[1]
ASK = {"role": "user", "content": "Book a table for two, and tell me the weather."}


def tool(name: str, **defaults: Any) -> dict[str, Any]:
    properties = {key: {"type": "string", "default": value} for key, value in defaults.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def said(*calls: Any, text: str = "") -> dict[str, Any]:
    """An assistant message; a call is a name, or a name with arguments."""
    made = [(call, {}) if isinstance(call, str) else call for call in calls]
    functions = [{"name": name, "arguments": json.dumps(given)} for name, given in made]
    told = [{"id": f"c{n}", "type": "function", "function": f} for n, f in enumerate(functions)]
    return {"role": "assistant", "content": text, "tool_calls": told}


def row(answer: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [ASK, answer], "tools": [tool("book"), tool("weather", unit="C")], **more}


TABLE, ROME = {"for": 2, "at": "8 pm"}, {"city": "Rome"}
TWO = row(said(("book", TABLE), ("weather", ROME)))
ALL_RIGHT = {
    "tool_selection_accuracy": 1.0, "step_efficiency": 1.0, "timing_precision": 1.0,
    "argument_correctness": 1.0, "end_to_end_success": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        # Order does not matter, 2 is 2.0, and a default that is spelt out changes nothing.
        (said(("weather", {**ROME, "unit": "C"}), ("book", {"for": 2.0, "at": "8 pm"})), {}),
        # "2" is not 2: one of two arguments of one of two calls.
        (said(("book", {"for": "2", "at": "8 pm"}), ("weather", ROME)),
         {"argument_correctness": 0.75, "end_to_end_success": 0.0}),
        # An argument too many: one of two counted ones of the second call.
        (said(("book", TABLE), ("weather", {**ROME, "unit": "F"})),
         {"argument_correctness": 0.75, "end_to_end_success": 0.0}),
        # One of two: F1 2 * 1 / (2 + 1).
        (said(("weather", ROME)),
         {"tool_selection_accuracy": 2 / 3, "argument_correctness": 0.5,
          "end_to_end_success": 0.0}),
        # One again without arguments, and one unknown: F1 2 * 2 / (2 + 4), 2 of 4 steps.
        (said("book", ("book", TABLE), "pay", ("weather", ROME)),
         {"tool_selection_accuracy": 2 / 3, "step_efficiency": 0.5, "end_to_end_success": 0.0}),
        (said(text="At eight."),
         {"tool_selection_accuracy": 0.0, "step_efficiency": 0.0, "timing_precision": 0.0,
          "argument_correctness": 0.0, "end_to_end_success": 0.0}),
    ],
)  # fmt: skip
def test_calls_against_two_gold_ones(answer: dict[str, Any], found: dict[str, float]) -> None:
    assert measures(answer, TWO) == pytest.approx({**ALL_RIGHT, **found})


def test_calls_in_hermes_tags_are_calls_and_broken_ones_are_calls_of_nothing() -> None:
    good = "<think>It is Rome.</think>\n<tool_call>\n"
    good += json.dumps({"name": "weather", "arguments": ROME})
    tagged = {"role": "assistant", "content": good}
    assert [(call.name, call.arguments) for call in calls_of(tagged)] == [("weather", ROME)]
    one = row(said(("weather", ROME)))
    assert measures(tagged, one) == ALL_RIGHT
    for broken in ('{"name": "weather", "arguments": "Rome"}', '{"name": weather}', "[]", ""):
        text = f"{good}</tool_call><tool_call>{broken}</tool_call>"
        found = measures({"role": "assistant", "content": text}, one)
        # The good call is there, but so is a second one: F1 2 / (1 + 2).
        assert found == pytest.approx(
            {**ALL_RIGHT, "tool_selection_accuracy": 2 / 3, "step_efficiency": 0.5,
             "timing_precision": 0.0, "end_to_end_success": 0.0}
        )  # fmt: skip
    quiet = row(said(text="Hello!"))
    assert measures({"content": "<tool_call>{"}, quiet) == {
        "timing_precision": 0.0, "end_to_end_success": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "timing", "success"),
    [
        (said(text="Whatever it says."), 1.0, 1.0),
        (said("book", text="Let me."), 0.0, 0.0),
        (said(text="<think>Nothing to say."), 1.0, 0.0),
    ],
)
def test_where_no_call_is_wanted_timing_and_success_alone_apply(
    answer: dict[str, Any], timing: float, success: float
) -> None:
    wanted = {"timing_precision": timing, "end_to_end_success": success}
    assert measures(answer, row(said(text="Which day?"))) == wanted
    assert measures(answer, {"messages": [ASK], "gold": {"call": False, "calls": []}}) == wanted


def test_possible_answers_as_bfcl_has_them() -> None:
    wanted = {"name": "book", "arguments": {
        "at": ["8 p.m.", "20:00"], "for": [2], "seats": [["A1", "A2"]], "note": ["", "none"],
        "menu": [{"main": ["fish", "meat"], "wine": ["", "red"]}],
    }}  # fmt: skip
    menu = tool("book", tip=5, at="20:00")  # BFCL knows no defaults
    task = {"messages": [ASK], "tools": [menu], "gold": {"calls": [[wanted]]}}
    right = {"at": "8 PM", "for": 2, "seats": ["a-1", "A2"], "menu": {"main": "Fish"}}
    assert measures(said(("book", right)), task) == ALL_RIGHT
    for key, value in [
        ("at", "9 pm"), ("for", "2"), ("for", True), ("seats", ["A2", "A1"]), ("seats", ["A1"]),
        ("menu", {"main": "soup"}), ("menu", {"wine": "red"}), ("menu", {"main": "fish", "x": 1}),
        ("note", "some"), ("tip", 5),
    ]:  # fmt: skip
        found = measures(said(("book", {**right, key: value})), task)
        counted = 4 + (key in ("note", "tip"))
        assert found["argument_correctness"] == pytest.approx((counted - 1) / counted), (key, value)
    late = {key: value for key, value in right.items() if key != "at"}
    assert measures(said(("book", late)), task)["argument_correctness"] == 0.75
    # Parallel calls are paired so that as many as possible are exact.
    pair = [[{"name": "f", "arguments": {"x": [1, 2]}}], [{"name": "f", "arguments": {"x": [1]}}]]
    task = {"messages": [ASK], "gold": {"calls": pair}}
    assert measures(said(("f", {"x": 1}), ("f", {"x": 2})), task) == ALL_RIGHT
    either = [[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": [1]}}]]
    task = {"messages": [ASK], "gold": {"calls": either}}
    assert measures(said(("g", {"x": 1})), task) == measures(said("f"), task) == ALL_RIGHT


def test_plans_have_an_order_and_names_alone_have_no_arguments() -> None:
    plan = {"plan": ["find", "book", "pay"], "names_only": True}
    task = row(said("find", "book", "pay"), gold=plan)
    right = {**ALL_RIGHT, "plan_success_rate": 1.0}
    del right["argument_correctness"]
    assert measures(said(("find", {"x": 1}), "book", "pay"), task) == right
    # The tools of the plan in another order: the calls are right, the plan is not.
    assert measures(said("book", "find", "pay"), task) == {
        **right, "plan_success_rate": 0.0, "end_to_end_success": 0.0,
    }  # fmt: skip
    # A detour: 3 of 4 steps, F1 2 * 3 / (3 + 4).
    assert measures(said("find", "ask", "book", "pay"), task) == pytest.approx(
        {**right, "step_efficiency": 0.75, "tool_selection_accuracy": 6 / 7,
         "end_to_end_success": 0.0}
    )  # fmt: skip
    best = {"messages": [ASK], "gold": {"top_k": ["find", "book"], "names_only": True}}
    assert measures(said("book"), best)["tool_selection_accuracy"] == pytest.approx(2 / 3)
    # To call, but not what: SAGE's timing.
    when = row(said(text="?"), gold={"call": True})
    assert measures(said("pay"), when) == {"timing_precision": 1.0, "end_to_end_success": 1.0}
    assert measures(said(text="No."), when) == {"timing_precision": 0.0, "end_to_end_success": 0.0}


def test_the_reward_spreads_the_weight_of_what_does_not_apply() -> None:
    found = measures(said(("weather", ROME)), TWO)
    # (0.4 * 0 + 0.2 * 2/3 + 0.2 * 0.5 + 0.1 * 1 + 0.05 * 1) / 0.95, without the plan's 0.05
    assert turn_reward(found) == pytest.approx((0.4 / 3 + 0.25) / 0.95)
    assert turn_reward(measures(TWO["messages"][-1], TWO)) == 1.0
    judged = asyncio.run(
        resolve(f"{ROOT}/rewards/agent.py:turn_judge")(TWO, said(("weather", ROME)))
    )
    assert (judged.reward, judged.metrics) == (turn_reward(found), found)
    # 0.1 of 0.1 + 0.4
    assert turn_reward({"timing_precision": 1.0, "end_to_end_success": 0.0}) == pytest.approx(0.2)
    names = dict.fromkeys(vars(TurnRewardSection()), 0.0)
    only_plans = TurnRewardSection(**{**names, "plan_success_rate": 1.0})
    with pytest.raises(Unscored):
        turn_reward(found, only_plans)
    (fault,) = reward_faults(RewardsSection(turns=TurnRewardSection(step_efficiency=0.5)))
    assert (fault.where, fault.found.split()[0]) == ("rewards.turns", "1.45")


DIALOGUE = {
    "id": "d1", "task_type": "planning", "tools": [tool("find"), tool("book")],
    "messages": [
        {"role": "system", "content": "You book."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "A table?"},
        said(("find", {"n": 2})),
        {"role": "tool", "tool_call_id": "c0", "content": "At eight."},
        said(text="At eight?"),
        {"role": "user", "content": "Yes."},
        said("book"),
        {"role": "tool", "tool_call_id": "c0", "content": "Booked."},
    ],
}  # fmt: skip


def test_every_turn_of_a_dialogue_is_a_task_with_the_true_history_before_it() -> None:
    tasks = as_tasks([DIALOGUE])
    assert [task["id"] for task in tasks] == ["d1/3", "d1/5", "d1/7"]  # the greeting answers nobody
    assert [len(prompt_of(task)) for task in tasks] == [3, 5, 7]
    assert prompt_of(tasks[2]) == DIALOGUE["messages"][:7]
    assert as_tasks(tasks) == tasks
    named = as_tasks([{**DIALOGUE, "gold": {"names_only": True}}])  # as SAGE's dialogues are
    assert [task["answer_at"] for task in named] == [3, 5, 7]
    assert measures(said(("find", {"n": 9})), named[0])["end_to_end_success"] == 1
    assert all(turn_reward(measures(task["messages"][-1], task)) == 1 for task in tasks)
    benchmark = {**DIALOGUE, "messages": DIALOGUE["messages"][:8], "gold": {"call": True}}
    assert [task["answer_at"] for task in as_tasks([benchmark])] == [7]
    with pytest.raises(BadInput, match="d1: messages"):
        as_tasks([{**DIALOGUE, "messages": DIALOGUE["messages"][:3]}], must=True)
    with pytest.raises(BadInput, match="a list of messages with roles"):
        as_tasks([{"messages": [{"content": "?"}]}])


def test_the_workflow_asks_for_each_turn_and_records_its_measures() -> None:
    """Of three turns the first is right, the second calls where it should not, the third tells its
    call in tags: rewards 1, 0 and 1."""

    def answer(request: dict[str, Any]) -> Reply:
        number = len(request["messages"])
        if number == 3:
            return Reply(tool_calls=[("find", {"n": 2})])
        return Reply("<tool_call>" + json.dumps({"name": "book", "arguments": {}}) + "</tool_call>")

    with ScriptedServer(answer) as server:
        runner = ScriptedRunner(ScriptedModel(server.url))
        task = replace(make_task(use_tools), raw_task=json.loads(json.dumps(DIALOGUE)))
        status, payload = asyncio.run(runner.run_task(task, "1", repeat_times=1))
        assert status.ok, status.message
    assert [len(request["messages"]) for request in server.requests] == [3, 5, 7]
    assert server.requests[2]["messages"] == [
        {"content": "", **message} for message in DIALOGUE["messages"][:7]
    ]
    assert server.requests[0]["tools"] == DIALOGUE["tools"]
    experiences = Experience.deserialize_many(payload)
    assert [one.reward for one in experiences] == [pytest.approx(2 / 3)] * 3
    metrics = experiences[-1].metrics
    assert metrics["tool_selection_accuracy"] == metrics["planning/argument_correctness"] == 1
    assert metrics["timing_precision"] == metrics["end_to_end_success"] == pytest.approx(2 / 3)
    assert "plan_success_rate" not in metrics


def test_eval_tells_the_measures_of_each_task_type_and_pairs_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four tasks; `small` never calls with the right argument, `tuned` always where a plan is
    wanted. The tools of the rows differ, and so do the arguments of their calls."""
    rows = []
    for number in range(4):
        kind, name = ("planning", "book") if number < 2 else ("selection", "find")
        task = row(said((name, {f"for_{number}": number})), task_type=kind)
        task["messages"] = [{"role": "user", "content": f"task {number}"}, task["messages"][1]]
        task["tools"] = [tool(name, **{f"for_{number}": number + 1})]
        rows.append(task)

    def answer(request: dict[str, Any]) -> Reply:
        number = int(request["messages"][-1]["content"].split()[1])
        (offered,) = request["tools"]
        assert list(offered["function"]["parameters"]["properties"]) == [f"for_{number}"]
        right = request["model"] == "tuned" and number < 2
        name = offered["function"]["name"]
        return Reply("", tool_calls=[(name, {f"for_{number}": number if right else -1})])

    config = write_project(tmp_path, Path("nobody/no-such-model"))
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = config.read_text().replace("score: letters", "score: end_to_end_success")
    config.write_text(
        text.replace(f"workflow: {tmp_path}/flow.py:two_calls", "dialogues: {as_tasks: true}")
    )
    with ScriptedServer(answer) as server:
        asked = ["--endpoint", server.url, "--model", "small", "tuned", "--samples", "2"]
        assert main(["eval", str(config), *asked, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert main(["eval", str(config), *asked]) == 0
    cells = [column["tasksets"]["held_out"] for column in result["columns"]]
    # 0, 0 and 1, 1: mean 0.5, standard deviation sqrt(4 * 0.25 / 3), Wilson's interval of 2 of 4.
    assert cells[1]["agents"]["argument_correctness"] == {
        "mean": 0.5, "std": pytest.approx(3**-0.5), "count": 4,
        "low": pytest.approx(0.1500, abs=1e-4), "high": pytest.approx(0.8500, abs=1e-4),
    }  # fmt: skip
    by_type = [cell["agents_by_type"] for cell in cells]
    means = [[of[kind]["end_to_end_success"]["mean"] for kind in of] for of in by_type]
    assert means == [[0.0, 0.0], [1.0, 0.0]]
    assert list(by_type[0]) == ["planning", "selection"]
    assert "plan_success_rate" not in cells[0]["agents"]
    paired = result["comparisons"][0]["agents"]
    assert paired["argument_correctness, planning"]["difference"]["mean"] == 1.0
    # 1, 1, 0, 0: 0.5 +- t(3) 3.182446 * 0.577350 / 2
    difference = paired["argument_correctness"]["difference"]
    assert difference["low"] == pytest.approx(0.5 - 3.182446 * 3**-0.5 / 2, abs=1e-6)
    assert paired["tool_selection_accuracy"]["difference"]["mean"] == 0.0
    shown = capsys.readouterr().out
    page = (run_dir(tmp_path) / "eval" / "eval.html").read_text()
    assert page.count("<td>argument_correctness, planning</td>") == 2  # the pair, and the table
    assert "argument_correctness, planning went from 0.000 to 1.000" in shown
    assert "0.500 ± 0.577 (0.150 to 0.850, n = 4)" in shown
