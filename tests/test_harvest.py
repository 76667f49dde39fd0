"""What a harvest keeps: filtered by execution, balanced, without held-out problems, resumable."""

from __future__ import annotations

import json
from collections import Counter
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

from aflow_tune.config.load import load_config
from aflow_tune.errors import BadInput, BudgetReached, Interrupted, RunFailed
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


def said_to(request: Request) -> str:
    """What the last message of a request says."""
    content = request.body["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


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


def test_a_cap_brings_in_the_second_best(tmp_path: Path, executor: FaultyServer) -> None:
    path = write_project(
        tmp_path, executor.openai_url, templates=["even", "always"], change=changed(harvest={})
    )
    write_rows(tmp_path / "train.jsonl", rows(range(0, 16, 2)))  # all even
    free, _ = harvest(path, "harvest.per_structure=null")
    assert Counter(row["name"] for row in free) == {"even": 8}
    capped, counts = harvest(path, "harvest.per_structure=0.5")
    assert Counter(row["name"] for row in capped) == {"even": 4, "always": 4}
    assert (counts["share_in_force"], counts["dropped_for_balance"]) == (0.5, 0)
    assert len(set(counts["kept_by_structure"])) == 2


def test_several_pairs_of_a_problem(tmp_path: Path, executor: FaultyServer) -> None:
    path = write_project(tmp_path, executor.openai_url, templates=["even", "always"])
    kept, _ = harvest(path, "harvest.per_problem=2", "harvest.limit=4")
    assert len({row["problem"] for row in kept}) == 4
    assert len(kept) == 4 + sum(row["name"] == "even" for row in kept)


def test_a_limit_draws_problems_by_the_seed(tmp_path: Path, executor: FaultyServer) -> None:
    path = write_project(tmp_path, executor.openai_url, templates=["always"], problems=30)
    drawn = {
        seed: [row["problem"] for row in harvest(path, f"seed={seed}", "harvest.limit=5")[0]]
        for seed in (1, 2)
    }
    again = [row["problem"] for row in harvest(path, "seed=1", "harvest.limit=5")[0]]
    assert again == drawn[1] != drawn[2]
    assert len(again) == 5


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


def test_rows_that_occur_twice_are_tried_once(tmp_path: Path, executor: FaultyServer) -> None:
    path = write_project(tmp_path, executor.openai_url, templates=["always"])
    write_rows(tmp_path / "train.jsonl", [*rows(range(2)), *rows(range(2))])
    kept, counts = harvest(path)
    assert (len(kept), counts["problems"], len(executor.requests)) == (2, 2, 4)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_teacher_is_asked_with_the_policys_own_prompt(
    tmp_path: Path, executor: FaultyServer, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "not-to-be-found-anywhere")
    said = as_text({"solve": "ALWAYS"}, ALWAYS)

    def lessons(number: int, request: Request) -> Step:
        text = said_to(request)
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
            "provider": provider,
            "model": "strong",
            "base_url": teacher.openai_url if provider == "openai" else teacher.url,
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
    questions = [said_to(request) for request in teacher.requests]
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


def test_several_tries_of_a_teacher_have_different_seeds(
    tmp_path: Path, executor: FaultyServer
) -> None:
    with FaultyServer(lambda n, r: Step(text=as_text({"solve": "ALWAYS"}, ALWAYS))) as teacher:
        change = changed(
            harvest={"sources": ["teacher"], "teacher": "teacher", "teacher_tries": 3},
            models={"teacher": {"model": "strong", "base_url": teacher.openai_url}},
        )
        path = write_project(tmp_path, executor.openai_url, change=change, problems=2)
        _, counts = harvest(path)
    assert len({request.body["seed"] for request in teacher.requests}) == 6
    # Equal answers are one candidate, run once.
    assert (counts["teacher_answers"], counts["candidates"]) == (6, {"teacher": 2})
    assert len(executor.requests) == 4


def test_the_best_rollouts_of_an_earlier_run_are_tried_again(
    tmp_path: Path, executor: FaultyServer
) -> None:
    def kept_of(number: int, code: str, word: str, **more: Any) -> dict[str, Any]:
        return {
            "problem": f"What is {number} + 10?",
            "prompts": {"solve": word},
            "code": code,
            "structure": code,
            "level": 0,
            "score": 1.0,
            **more,
        }

    past = [
        (9.0, kept_of(1, EVEN, "EVEN")),  # had luck: it is wrong when it is tried again
        (8.0, kept_of(1, ALWAYS, "ALWAYS")),
        (9.5, kept_of(2, EVEN, "WRONG", score=0.0)),
        (7.0, kept_of(2, EVEN, "EVEN")),
        (9.9, kept_of(100, EVEN, "EVEN")),  # a held-out problem: nothing to be learned from
        (None, kept_of(3, EVEN, "EVEN")),
        (9.0, kept_of(4, RAISING, "EVEN", level=2)),
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


@pytest.mark.parametrize("trouble", [Step(status=500), Step(kind="hang")], ids=["error", "slow"])
def test_what_failed_for_want_of_an_answer_is_tried_again(
    tmp_path: Path, executor: FaultyServer, trouble: Step
) -> None:
    path = write_project(
        tmp_path, executor.openai_url, templates=["always"], change=changed(writer={"timeout": 20})
    )
    executor.steps = lambda number, request: (
        trouble if "What is 5" in str(request.body) else sums(number, request)
    )
    kept, counts = harvest(path)
    assert (len(kept), counts["untried"], counts["failed"]) == (7, 1, 0)
    executor.steps = sums
    kept, counts = harvest(path)
    assert (len(kept), counts["untried"]) == (8, 0)


def test_a_scorer_that_crashes_is_no_wrong_answer(tmp_path: Path, executor: FaultyServer) -> None:
    (tmp_path / "score.py").write_text(
        "def score(row, answer):\n"
        "    number = int(row['question'].split()[2])\n"
        "    if number == 2:\n"
        "        raise LookupError('no such planet')\n"
        "    return 0.75 if number % 2 else 0.25\n"
    )

    def change(content: dict[str, Any]) -> None:
        del content["writer"]["benchmark"]
        content["writer"] |= {"score": f"{tmp_path}/score.py:score", "problem_type": "math"}

    path = write_project(tmp_path, executor.openai_url, templates=["always"], change=change)
    kept, counts = harvest(path, "harvest.min_score=0.5")
    assert [row["score"] for row in kept] == [0.75] * 4
    assert (counts["unscored"], counts["wrong"]) == (1, 3)


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


def test_stopping_keeps_what_was_tried(tmp_path: Path, executor: FaultyServer) -> None:
    path = write_project(tmp_path, executor.openai_url, templates=["always"])
    from aflow_tune.config.harvest_settings import lay_out, prepare_harvest
    from aflow_tune.running.harvesting import run_harvest

    executor.steps = lambda number, request: (
        Step(kind="hang") if number >= 4 else sums(number, request)
    )
    config = load_config(path, ["local.max_batch=1"])
    workflow, where = prepare_harvest(config)
    lay_out(config, where)

    def stop() -> bool:
        return len(executor.requests) >= 5

    with pytest.raises(Interrupted, match="The same command goes on"):
        run_harvest(config, where, stop, lambda text: None, workflow)
    executor.steps = sums
    kept, _ = harvest(path)
    assert (len(kept), len(executor.requests)) == (8, 5 + 12)


def test_nothing_kept_is_a_failure_with_a_cure(tmp_path: Path, executor: FaultyServer) -> None:
    path = write_project(tmp_path, executor.openai_url, templates=["wrong", "refused"])
    with pytest.raises(RunFailed, match=r"8 refused, 8 wrong") as caught:
        harvest(path)
    assert "do: " in str(caught.value)
    assert not (folder(tmp_path) / "sft.jsonl").exists()
    assert json.loads((folder(tmp_path) / "harvest.json").read_text())["wrong"] == 8
    with pytest.raises(RunFailed, match="is the executor running"):
        harvest(path, "models.executor.base_url=http://127.0.0.1:9/v1", "harvest.limit=2")


def test_a_mix_tells_the_benchmark_of_its_sources(tmp_path: Path, executor: FaultyServer) -> None:
    def change(content: dict[str, Any]) -> None:
        del content["writer"]["benchmark"]
        content["mix"] = {"train": {"ratio": 1.0, "benchmark": "gsm8k"}}
        del content["buffer"]["explorer_input"]["eval_tasksets"]

    path = write_project(tmp_path, executor.openai_url, templates=["always"], change=change)
    kept, _ = harvest(path)
    assert len(kept) == 8


def test_every_fault_at_once(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["writer"]["executor"] = None
        content["harvest"] |= {
            "sources": ["teacher", "runs", "template"],
            "teacher_tries": 0,
            "per_problem": 0,
            "per_structure": 1.5,
            "min_score": 0,
            "limit": 0,
            "runs": [str(tmp_path / "nowhere")],
        }
        content["buffer"]["explorer_input"]["taskset"]["path"] = str(tmp_path / "missing.jsonl")

    path = write_project(tmp_path, "http://127.0.0.1:9/v1", change=change)
    with pytest.raises(BadInput) as caught:
        harvest(path)
    places = {fault.where.split(": ", 1)[1] for fault in caught.value.faults}
    assert places == {
        "writer.executor",
        "harvest.sources[2]",
        "harvest.teacher",
        "harvest.runs[0]",
        "harvest.teacher_tries",
        "harvest.per_problem",
        "harvest.per_structure",
        "harvest.min_score",
        "harvest.limit",
        "buffer.explorer_input.taskset.path",
    }
    assert not (tmp_path / "runs").exists()
