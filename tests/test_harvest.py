"""What a harvest keeps: filtered by execution, balanced, without held-out problems, resumable."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_server import FaultyServer, Request, Step
from harvest_project import (
    ALWAYS,
    EVEN,
    KNOWN,
    RAISING,
    REFUSED,
    folder,
    pairs,
    rows,
    sums,
    write_project,
    write_rows,
)

from aflow_tune.errors import BudgetReached
from aflow_tune.harvest.harvest import Journal, Trial, TrialEnding, choose
from aflow_tune.report.records import Rollout, append_rollout
from aflow_tune.tuning import harvest_config
from aflow_tune.writer.form import as_text, read_written


@pytest.fixture
def executor() -> Iterator[FaultyServer]:
    with FaultyServer(sums) as server:
        yield server


def harvest(path: Path, *overrides: str, **more: Any) -> tuple[list[dict[str, Any]], Any]:
    """The pairs, and the counts."""
    summary = harvest_config(path, overrides, phase=lambda text: None, **more)
    counts = json.loads((summary.pairs.parent / "harvest.json").read_text())
    assert counts == json.loads(json.dumps(dict(summary.counts)))
    return pairs(summary.pairs), counts


def changed(**sections: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Updates sections of a configuration."""

    def change(content: dict[str, Any]) -> None:
        for name, values in sections.items():
            content.setdefault(name, {}).update(values)

    return change


def test_only_what_ran_clean_and_answered_rightly_is_kept_the_cheapest_first(
    tmp_path: Path, executor: FaultyServer
) -> None:
    kept, counts = harvest(write_project(tmp_path, executor.openai_url))
    # Even sums are solved by one call, the others by two; nothing else solves any.
    assert [row["name"] for row in kept] == ["even", "always"] * 4
    assert [row["problem"] for row in kept] == [row["question"] for row in rows(range(8))]
    for row in kept:
        written = read_written(row["messages"][-1]["content"])
        assert written.code == {"even": EVEN, "always": ALWAYS}[row["name"]]
        assert written.prompts == {"solve": row["name"].upper()}
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert row["problem"] in row["messages"][0]["content"]
        assert (row["score"], row["source"]) == (1.0, "templates")
    # Of 5 graphs on 8 problems: `refused` is refused; `raising` fails; `even` is wrong on four,
    # `wrong` on eight.
    assert counts["candidates"] == {"templates": 40}
    assert (counts["refused"], counts["failed"], counts["wrong"]) == (8, 8, 12)
    assert list(counts["refused_by_kind"]) == ["not_allowed"]
    assert (counts["solved"], counts["solved_problems"], counts["kept"]) == (12, 8, 8)
    assert "ValueError" in counts["failed_examples"][0]
    # 12 calls with 110 tokens for graphs that were right, 4 + 24 for wrong ones; the graphs that
    # raise call once, and so does each of their fallbacks that answers.
    assert counts["executor"]["calls"] == len(executor.requests)
    assert counts["executor"]["tokens"] == 110 * len(executor.requests)


def test_problems_that_are_held_out_too_are_dropped(tmp_path: Path, executor: FaultyServer) -> None:
    path = write_project(tmp_path, executor.openai_url, templates=["always"])
    tale = "Tom has a basket of red apples and picks more in the garden behind the old house. "
    near = {"question": tale + "What is 3 + 10?", "answer": "#### 13"}
    same = {**near, "question": near["question"].replace("red", "green")}
    write_rows(tmp_path / "train.jsonl", [*rows(range(4)), near])
    write_rows(tmp_path / "held_out.jsonl", [rows(range(2, 3))[0], same])
    kept, counts = harvest(path)
    assert counts["leaks"] == 2
    assert [row["problem"] for row in kept] == [f"What is {n} + 10?" for n in (0, 1, 3)]
    asked = "".join(str(request.body) for request in executor.requests)
    assert "2 + 10" not in asked
    assert "Tom" not in asked


def test_a_teacher_is_asked_with_the_policys_own_prompt(
    tmp_path: Path, executor: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "not-to-be-found-anywhere")
    said = as_text({"solve": "ALWAYS"}, ALWAYS)

    def lessons(number: int, request: Request) -> Step:
        text = request.body["messages"][-1]["content"]
        if "What is 1 + 10" in text:
            return Step(text=as_text({"solve": "ALWAYS"}, REFUSED))
        if "What is 0 + 10" in text:
            return Step(text=as_text({"solve": "ALWAYS"}, KNOWN))  # right, and no workflow
        if "What is 2 + 10" in text:
            return Step(text="I would rather not.")
        if "What is 3 + 10" in text:
            return Step(status=500)
        return Step(text=f"Sure!\n```json\n{said}\n```")

    with FaultyServer(lessons) as teacher:
        settings = {
            "model": "strong",
            "base_url": teacher.openai_url,
            "api_key_env": "TEACHER_KEY",
            "retries": 0,
            "prices": {"input": 10.0, "output": 100.0},
        }
        change = changed(
            harvest={"sources": ["teacher"], "teacher": "teacher"}, models={"teacher": settings}
        )
        path = write_project(tmp_path, executor.openai_url, change=change, problems=6)
        kept, counts = harvest(path)
        asked = len(teacher.requests)
        again, _ = harvest(path)
    assert [row["problem"] for row in kept] == [f"What is {n} + 10?" for n in (4, 5)]
    assert {row["messages"][-1]["content"] for row in kept} == {said}
    assert {(row["source"], row["name"]) for row in kept} == {("teacher", "strong")}
    questions = [one.body["messages"][-1]["content"] for one in teacher.requests]
    assert [row["messages"][0]["content"] in questions for row in kept] == [True] * 2
    refused = {"shape": 1, "not_allowed": 1, "unreadable": 1}
    assert counts["refused_by_kind"] == refused
    assert counts["teacher_failures"] == {"server_error": 1}
    # Five answers of 100 and 10 tokens: 5 * (100 * 10 + 10 * 100) millionths of a dollar.
    assert counts["teacher"] == {"tokens": 550, "usd": pytest.approx(0.01)}
    # Asked again is only what was not answered.
    assert (asked, len(teacher.requests), again) == (6, 7, kept)
    files = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"not-to-be-found-anywhere" not in files


def test_the_best_rollouts_of_an_earlier_run_are_tried_again(
    tmp_path: Path, executor: FaultyServer
) -> None:
    def kept_of(number: int, code: str, word: str, **more: Any) -> dict[str, Any]:
        prompts = {"solve": word}
        return note(f"What is {number} + 10?", code, code=code, prompts=prompts, **more)

    past = [
        (9.0, kept_of(1, EVEN, "EVEN")),  # had luck: it is wrong when it is tried again
        (8.0, kept_of(1, ALWAYS, "ALWAYS")),
        (9.5, kept_of(2, EVEN, "WRONG", score=0.0)),
        (7.0, kept_of(2, EVEN, "EVEN")),
        (9.9, kept_of(100, EVEN, "EVEN")),  # a held-out problem: nothing to be learned from
        (None, kept_of(3, EVEN, "EVEN")),
        (9.0, kept_of(4, RAISING, "EVEN", level=2)),
        # torn, or of a scorer that could not tell
        (9.0, kept_of(4, EVEN, "EVEN", score=None)),
        (9.0, {**kept_of(4, EVEN, "EVEN"), "code": None}),
        (9.0, {**kept_of(4, EVEN, "EVEN"), "prompts": {"solve": 3}}),
        (9.0, {"problem": "What is 4 + 10?", "level": 0, "score": 1.0}),
    ]
    run = tmp_path / "runs" / "tests" / "first"
    for number, (reward, record) in enumerate(past):
        append_rollout(run, Rollout(1, number, 0, reward, kept={"writer": record}))
    append_rollout(run, Rollout(2, 0, 0, 1.0, kept={"other": {"level": 0}}))
    path = write_project(tmp_path, executor.openai_url)
    kept, counts = harvest(path, sources=["runs"], runs=[run])
    assert [(row["problem"], row["source"], row["name"]) for row in kept] == [
        ("What is 1 + 10?", "runs", "first"),
        ("What is 2 + 10?", "runs", "first"),
    ]
    assert read_written(kept[0]["messages"][-1]["content"]).code == ALWAYS
    assert counts["candidates"] == {"runs": 3}
    assert (counts["wrong"], counts["rollouts_of_other_problems"]) == (1, 1)


def test_what_was_executed_is_not_executed_again(tmp_path: Path, executor: FaultyServer) -> None:
    path = write_project(tmp_path, executor.openai_url, templates=["even", "always"])
    kept, counts = harvest(path, "harvest.limit=3")
    asked = len(executor.requests)
    assert asked == 9
    again, counted = harvest(path, "harvest.limit=3")
    assert (len(executor.requests), again, counted) == (asked, kept, counts)
    # More problems, and another choice, take up what is there.
    harvest(path, "harvest.limit=null", "harvest.per_structure=0.5", "harvest.min_score=0.5")
    assert len(executor.requests) == 24
    # Another executor answers otherwise: nothing of it is known.
    harvest(path, "models.executor.model=other", "harvest.limit=3")
    assert len(executor.requests) == 33


def test_what_failed_for_want_of_an_answer_is_tried_again(
    tmp_path: Path, executor: FaultyServer
) -> None:
    path = write_project(tmp_path, executor.openai_url, templates=["always"])
    executor.steps = lambda number, request: (
        Step(status=500) if "What is 5" in str(request.body) else sums(number, request)
    )
    kept, counts = harvest(path)
    assert (len(kept), counts["untried"], counts["failed"]) == (7, 1, 0)
    executor.steps = sums
    kept, counts = harvest(path)
    assert (len(kept), counts["untried"]) == (8, 0)


def test_a_budget_ends_it_and_the_same_command_goes_on(
    tmp_path: Path, executor: FaultyServer
) -> None:
    path = write_project(tmp_path, executor.openai_url, templates=["always"])
    with pytest.raises(BudgetReached, match="The same command goes on"):
        harvest(path, "budget.calls=7", "local.max_batch=1")
    assert len(executor.requests) == 7
    assert not (folder(tmp_path) / "sft.jsonl").exists()
    kept, _ = harvest(path, "budget.calls=20", "local.max_batch=1")
    # Three problems were done; the call of the fourth was lost.
    assert (len(kept), len(executor.requests)) == (8, 6 + 1 + 10)


def note(text: str, structure: str = "Custom", **changed: Any) -> dict[str, Any]:
    """A record as a run of the writer keeps it."""
    return {
        "problem": text,
        "prompts": {"solve": "Add."},
        "structure": structure,
        "level": 0,
        "score": 1.0,
        **changed,
    }


def scored(problem: str, structure: str, text: str, reward: float) -> Trial:
    ending = TrialEnding.SCORED
    return Trial(problem, text, ending, structure=structure, score=1.0, reward=reward)


def solved(table: dict[str, dict[str, float]]) -> list[Trial]:
    """From problem to structure to reward."""
    return [
        scored(problem, structure, f"graph {structure}", reward)
        for problem, of_problem in table.items()
        for structure, reward in of_problem.items()
    ]


def by_problem(pairs: list[Trial]) -> dict[str, str | None]:
    return {item.problem: item.structure for item in pairs}


def test_a_crowded_structure_hands_over_the_problems_that_lose_least() -> None:
    # A wins all four; at most half may be A's. B costs 0.5, 4.0, 0.1 and 3.0 of reward.
    table = {
        "p": {"A": 9.0, "B": 8.5},
        "q": {"A": 9.0, "B": 5.0},
        "r": {"A": 9.0, "B": 8.9},
        "s": {"A": 9.0, "B": 6.0},
    }
    chosen = choose(solved(table), per_structure=0.5, seed=0)
    assert by_problem(chosen[0]) == {"p": "B", "q": "A", "r": "B", "s": "A"}
    assert chosen[1:] == (0, 0.5)


def test_what_nobody_can_take_over_is_dropped_lowest_reward_first() -> None:
    # Only A solves p to s; B solves t and u. Of A two may stay beside two of B.
    table = {name: {"A": reward} for name, reward in zip("pqrs", (4.0, 7.0, 6.0, 5.0), strict=True)}
    chosen = choose(solved({**table, "t": {"B": 1.0}, "u": {"B": 1.0}}), per_structure=0.5, seed=0)
    assert by_problem(chosen[0]) == {"q": "A", "r": "A", "t": "B", "u": "B"}
    assert chosen[1] == 2


def test_the_seed_decides_between_equals_and_nothing_else() -> None:
    table = {f"p{number}": {"A": 1.0, "B": 1.0} for number in range(40)}
    first = choose(solved(table), seed=1)[0]
    assert set(first) == set(choose(list(reversed(solved(table))), seed=1)[0])
    assert {item.structure for item in first} == {"A", "B"}
    assert first != choose(solved(table), seed=2)[0]


def test_a_journal_outlives_a_kill_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    done = Trial("first", "graph", TrialEnding.SCORED, score=1.0)
    Journal(path, Trial).add(done)
    earlier = {"problem": "second", "text": "graph", "ending": "failed", "seconds": 3.0}
    with path.open("a") as file:
        file.write(json.dumps(earlier) + "\n" + '{"problem": "third", "te')  # killed here
    again = Journal(path, Trial)
    assert again.entries[done.key] == done
    assert sorted(problem for problem, _ in again.entries) == ["first", "second"]
    again.add(Trial("third", "graph", TrialEnding.SCORED, score=0.0))
    assert len(Journal(path, Trial).entries) == 3
