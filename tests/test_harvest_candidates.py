"""Candidates from a user's templates and from earlier runs; the journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aflow_tune.errors import BadInput
from aflow_tune.harvest.candidates import (
    PastRun,
    past_candidates,
    read_templates,
    template_candidates,
)
from aflow_tune.harvest.harvest import Problem, canonical
from aflow_tune.harvest.trials import Journal, Lesson, Trial, TrialEnding
from aflow_tune.operators import OPERATORS
from aflow_tune.writer.form import read_written
from aflow_tune.writer.templates import TEMPLATES

CODE = """class Workflow:
    def __init__(self, name, llm_config, dataset):
        self.llm = create_llm_instance(llm_config)
        self.solve = operator.Custom(self.llm)

    async def __call__(self, problem):
        return (await self.solve(input=problem))["response"]
"""


def problem(key: str, text: str, kind: Any = "math") -> Problem:
    return Problem(key, text, kind, {"question": text})


def kept(text: str, structure: str = "Custom", **changed: Any) -> dict[str, Any]:
    """A record as a run of the writer keeps it."""
    return {
        "problem": text,
        "prompts": {"solve": "Add."},
        "code": CODE,
        "structure": structure,
        "level": 0,
        "score": 1.0,
        **changed,
    }


def test_templates_that_fit_a_problems_type_and_the_operators() -> None:
    names = {
        item.name: item.text
        for item in template_candidates(problem("p", "2 + 2"), TEMPLATES.values(), OPERATORS)
    }
    assert set(names) == {name for name, held in TEMPLATES.items() if "math" in held.problem_types}
    assert read_written(names["one_call"]).code == TEMPLATES["one_call"].code
    only = template_candidates(problem("p", "2 + 2"), TEMPLATES.values(), ["Custom"])
    assert {item.name for item in only} == {
        name
        for name, held in TEMPLATES.items()
        if "math" in held.problem_types and held.operators == ("Custom",)
    }
    assert [item.name for item in only] != []


def test_templates_of_a_folder(tmp_path: Path) -> None:
    indented = "".join(f"  {line}\n" for line in CODE.splitlines())
    text = f"problem_types: [qa]\nprompts: {{solve: Look it up.}}\ngraph_code: |\n{indented}"
    (tmp_path / "look.yaml").write_text(text)
    found = read_templates(tmp_path, "harvest.templates")
    assert [(item.name, item.problem_types, item.operators) for item in found] == [
        ("look", ("qa",), ("Custom",))
    ]
    assert found[0].code == CODE
    assert template_candidates(problem("p", "2 + 2"), found, OPERATORS) == []
    assert len(template_candidates(problem("p", "Who?", "qa"), found, OPERATORS)) == 1


def test_every_fault_of_a_folder_of_templates_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("problem_types: [mathematics]\nprompts: [solve]\n")
    (tmp_path / "b.yaml").write_text("just: {a, b: [")
    (tmp_path / "c.yaml").write_text("- a list")
    with pytest.raises(BadInput) as caught:
        read_templates(tmp_path, "harvest.templates")
    places = [fault.where.rpartition("/")[2] for fault in caught.value.faults]
    expected = ["a.yaml: problem_types", "a.yaml: prompts", "a.yaml: graph_code", "b.yaml"]
    assert places == [*expected, "c.yaml"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"no \.yaml file there"):
        read_templates(tmp_path / "empty", "harvest.templates")


def test_the_best_rollout_of_each_structure() -> None:
    past = [
        PastRun("first", 3.0, kept("2 + 2", prompts={"solve": "Add them."})),
        PastRun("first", 8.0, kept("2 + 2", prompts={"solve": "Add."})),
        PastRun("second", 5.0, kept("2 + 2", structure="Custom Custom")),
        PastRun("second", 9.0, kept("1 + 1")),
    ]
    found, strangers = past_candidates(past, [problem("p", "2 + 2")], 1.0)
    assert [(item.name, read_written(item.text).prompts) for item in found["p"]] == [
        ("first", {"solve": "Add."}),
        ("second", {"solve": "Add."}),
    ]
    assert strangers == 1


def test_fallbacks_wrong_answers_and_torn_notes_of_runs_are_no_candidates() -> None:
    bad = [
        kept("2 + 2", level=1),
        kept("2 + 2", level=None),
        kept("2 + 2", score=0.4),
        kept("2 + 2", score=None),
        kept("2 + 2", code=None),
        kept("2 + 2", prompts={"solve": 3}),
        {"problem": "2 + 2", "level": 0, "score": 1.0},
    ]
    past = [PastRun("run", 9.0, item) for item in bad]
    assert past_candidates(past, [problem("p", "2 + 2")], 1.0) == ({}, 0)


def test_long_problems_that_begin_alike_both_get_what_fits_either() -> None:
    start = "x" * 2000
    problems = [problem("p", start + " one"), problem("q", start + " two")]
    found, strangers = past_candidates([PastRun("run", 1.0, kept(start))], problems, 1.0)
    assert (set(found), strangers) == ({"p", "q"}, 0)


def test_the_canonical_form_of_what_a_teacher_says() -> None:
    said = f"Here it is:\n```python\n{CODE}```\nGood luck!"
    text = canonical(said)
    assert read_written(text).code.strip() == CODE.strip()
    assert canonical(text) == text
    assert canonical("no graph at all") == "no graph at all"


def test_a_journal_gives_back_what_was_kept_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "trials" / "one.jsonl"
    first = Trial("p", "text \ud800 ü", TrialEnding.SCORED, structure="Custom", score=1.0)
    second = Trial("q", "text", TrialEnding.REFUSED, refusals=("syntax",))
    journal = Journal(path, Trial)
    journal.add(first)
    journal.add(second)
    with path.open("ab") as file:
        file.write(b'{"problem": "r", "tex')
    again = Journal(path, Trial)
    assert list(again.entries.values()) == [first, second]
    again.add(Trial("r", "text", TrialEnding.FAILED, reason="boom"))
    third = Journal(path, Trial)
    assert [item.problem for item in third.entries.values()] == ["p", "q", "r"]


def test_lines_that_are_no_entries_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "lessons.jsonl"
    journal = Journal(path, Lesson)
    journal.add(Lesson("asked", 0, "said", tokens=5, usd=0.5))
    path.write_bytes(b'[1]\n"x"\n{"question": "q"}\nnot json\n' + path.read_bytes())
    journal = Journal(path, Lesson)
    assert list(journal.entries.values()) == [Lesson("asked", 0, "said", tokens=5, usd=0.5)]
