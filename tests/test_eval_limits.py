"""What bounds and shapes an evaluation: budgets, prices, prompts; and what is shown of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from eval_project import Run, numbers
from graph_samples import own_form, simple
from project import run_dir
from scripted_server import Reply, ScriptedServer

from aflow_tune.cli import main

pytest_plugins = ("eval_fixtures",)


def test_the_budget_of_time_ends_an_evaluation(
    config: Path, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda request: Reply("x", delay=60.0)
    endpoint = ["--endpoint", server.url, "--model", "small", "--limit", "2"]
    assert main(["eval", str(config), "budget.wall_seconds=2", *endpoint]) == 4
    assert "budget.wall_seconds (2) reached" in capsys.readouterr().err


def test_a_budget_of_calls_ends_an_evaluation_and_a_higher_one_goes_on(
    evaluate: Run, server: ScriptedServer, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = ["--endpoint", server.url, "--model", "small"]
    assert main(["eval", str(config), "budget.calls=4", *endpoint]) == 4
    told = capsys.readouterr().err
    assert len(server.requests) == 4
    assert "goes on from there" in " ".join(told.split())
    code, result = evaluate("budget.calls=40")
    assert code == 0
    # A run that ended when the budget was reached is made again.
    assert 10 <= len(server.requests) <= 14
    cell = result["columns"][0]["tasksets"]["held_out"]
    assert (cell["runs"], cell["failed_runs"]) == (10, 0)


def test_a_budget_of_money_needs_the_price_of_what_is_measured(
    evaluate: Run, server: ScriptedServer, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(config), "budget.usd=1"]
    for options in ([], ["--endpoint", server.url, "--model", "gpt-4o-mini"]):
        assert main([*command, *options]) == 2
        assert "budget.usd is set" in " ".join(capsys.readouterr().err.split())
    asked = [request for request in server.requests if "messages" in request]
    assert not asked
    code, result = evaluate("budget.usd=1", "models.policy.prices.listed=gpt-4o-mini")
    assert code == 0
    cell = result["columns"][0]["tasksets"]["held_out"]
    # 10 prompts of 12 tokens; five answers of 21 and five of 19: (120 * 0.15 + 200 * 0.6) / 1e6
    assert cell["cost_usd"]["total"] == pytest.approx(0.000138)
    code, _ = evaluate("budget.usd=0.001", "seed=2", "models.policy.prices.listed=gpt-4o")
    assert code == 4


def test_an_evaluation_in_which_every_run_failed_says_so(
    evaluate: Run, server: ScriptedServer, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda request: Reply("out of order", status=400)
    endpoint = ["--endpoint", server.url, "--model", "small", "--limit", "3"]
    assert main(["eval", str(config), *endpoint]) == 1
    printed = capsys.readouterr()
    assert "eval.html" in printed.out
    assert "none of 3 runs could be scored" in " ".join(printed.err.split())
    assert "out of order" in printed.err
    code, result = evaluate("--limit", "3")
    assert code == 1
    assert result["columns"][0]["tasksets"]["held_out"]["failed_runs"] == 3


def test_a_configured_price_makes_cost_known(evaluate: Run) -> None:
    code, result = evaluate(
        *("--limit", "4", "models.policy.prices.input=1000", "models.policy.prices.output=2000")
    )
    assert code == 0
    cell = result["columns"][0]["tasksets"]["held_out"]
    # 4 prompts of 12 tokens; two answers of 21 and two of 19: (48 * 1000 + 80 * 2000) / 1e6
    assert cell["cost_usd"]["total"] == pytest.approx(0.208)
    assert cell["cost_usd"]["per_solved_run"] == pytest.approx(0.104)


class Nesting(HTMLParser):
    """Fails where a tag is closed that is not the innermost open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)


def test_what_a_model_writes_stays_text_on_the_page(
    evaluate: Run, server: ScriptedServer, tmp_path: Path
) -> None:
    server.answer = lambda request: Reply("<script>alert(1)</script> [red]x[/red] \\boxed{<b>}")
    code, _ = evaluate(
        "--limit", "2", "--compare", "base", f"workflow:{tmp_path}/flow.py:always_wrong"
    )
    assert code == 0
    page = (run_dir(tmp_path) / "eval" / "eval.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert not list(re.finditer(r'(src|href)="', page))
    nesting = Nesting()
    nesting.feed(page)
    assert nesting.open == []
    assert {"svg", "table", "section"} <= nesting.seen


def test_the_text_names_the_columns_and_where_things_are(
    server: ScriptedServer, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = ["--endpoint", server.url, "--model", "small", "tuned"]
    assert main(["eval", str(config), *endpoint]) == 0
    printed = capsys.readouterr().out
    header = next(line for line in printed.splitlines() if "base" in line and "tuned" in line)
    assert header.index("base") < header.index("tuned")
    assert "0.500 (0.237 to 0.763)" in printed  # Wilson, 5 of 10
    assert "base -> tuned: " in printed
    assert str(run_dir(tmp_path) / "eval" / "eval.html") in printed


OPERATOR_WORKFLOW = """
from typing import Dict

from agentscope.model import TrinityChatModel

from aflow_tune import record_metrics
from aflow_tune.operators import Custom


async def by_operator(task: Dict, model: TrinityChatModel) -> float:
    solve = Custom(model, name="solve")
    result = await solve(input=task["question"], instruction="Answer: ")
    right = float(task["answer"] in result["response"])
    record_metrics(right=right)
    return right
"""


def test_prompts_of_operators_are_columns(
    evaluate: Run, server: ScriptedServer, tmp_path: Path
) -> None:
    (tmp_path / "by_operator.py").write_text(OPERATOR_WORKFLOW)
    (tmp_path / "plain.yaml").write_text('Custom: "{instruction}{input}"\n')
    (tmp_path / "marked.yaml").write_text(
        'prompts: {Custom.solve: {main: "MARK {instruction} {input}"}}\n'
    )
    server.answer = lambda request: (
        numbers(request) if "MARK" in str(request["messages"]) else Reply("nothing")
    )
    code, result = evaluate(
        *("--limit", "4", f"workflow={tmp_path}/by_operator.py:by_operator"),
        *("--prompts", str(tmp_path / "plain.yaml"), str(tmp_path / "marked.yaml")),
    )
    assert code == 0
    plain, marked = (column["tasksets"]["held_out"] for column in result["columns"])
    assert [column["name"] for column in result["columns"]] == [
        "base, plain.yaml",
        "base, marked.yaml",
    ]
    assert (plain["score"]["mean"], marked["score"]["mean"]) == (0.0, 0.5)
    # Prompts of the configuration lie below those of the files.
    code, result = evaluate(
        *("--limit", "4", f"workflow={tmp_path}/by_operator.py:by_operator"),
        'prompts={Custom: "MARK {instruction} {input}"}',
        *("--checkpoint", "base", "--prompts", str(tmp_path / "plain.yaml")),
    )
    assert code == 0
    assert result["columns"][0]["tasksets"]["held_out"]["score"]["mean"] == 0.0
    (use,) = marked["callers"]
    assert (use["caller"], use["outcomes"]) == ("Custom.solve", {"answered": 4})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a list", "a list"),
        ("", "nothing"),
        ("{", "line 1, column 2"),
        ("Custon: x", "did you mean Custom?"),
        ("Custom: {mian: x}", "did you mean `main`?"),
    ],
)
def test_prompts_that_fit_nothing_are_refused_before_anything_runs(
    evaluate: Run, server: ScriptedServer, config: Path, tmp_path: Path, text: str, expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "prompts.yaml").write_text(text)
    endpoint = ["--endpoint", server.url, "--model", "small"]
    assert main(["eval", str(config), "--prompts", str(tmp_path / "prompts.yaml"), *endpoint]) == 2
    assert expected in capsys.readouterr().err
    assert server.requests == []


def test_operator_graphs_are_compared(
    evaluate: Run, server: ScriptedServer, config: Path, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        own_form(tmp_path / name, simple(f"return await self.llm('{name}: ' + problem), 0"))
    scoring = "def right(row, answer):\n    return float(row['answer'] in answer)\n"
    (tmp_path / "score.py").write_text(scoring)
    graph = f"graph: {{path: {tmp_path}/first, trust: true, score: {tmp_path}/score.py:right}}"
    text = config.read_text().replace(f"workflow: {tmp_path}/flow.py:ask_once", graph)
    config.write_text(text.replace("score: right", "score: reward"))
    server.answer = lambda request: (
        numbers(request) if "second" in str(request["messages"]) else Reply("nothing")
    )
    code, result = evaluate("--compare", "base", str(tmp_path / "second"), "--limit", "4")
    assert code == 0
    assert [column["name"] for column in result["columns"]] == ["base", "base, second"]
    first, second = (column["tasksets"]["held_out"] for column in result["columns"])
    assert (first["score"]["mean"], second["score"]["mean"]) == (0.0, 0.5)
