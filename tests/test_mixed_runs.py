"""Mixed task sets in whole runs: shares of every batch, resume, quick evaluations, refusals."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from data_project import write_rows
from project import WORKFLOW, run_dir, write_project

from aflow_tune.config.load import load_config
from aflow_tune.config.validate import validate
from aflow_tune.tuning import run_config

# Every run of the workflow leaves what it was given behind.
LOGGING = WORKFLOW.replace(
    "    share = sum",
    """    if "Held out" not in task["question"]:
        import json

        with open(LOG, "a") as file:
            file.write(json.dumps({key: task.get(key) for key in KEPT}) + "\\n")
    share = sum""",
)


def write_sources(root: Path) -> None:
    """Rows of two kinds that no single table holds: `answer` is a text here, a list there."""
    sums = [{"n": n, "question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(9)]
    code = [
        {"n": n, "question": f"Write f{n}.", "answer": [n], "tests": {"a": n}, "source": f"url{n}"}
        for n in range(4)
    ]
    write_rows(root / "sums.jsonl", sums)
    write_rows(root / "code.jsonl", code)


def mixed_project(root: Path, model: Path, **settings: Any) -> Path:
    """The tests' project with a mix of two sources in batches of five: 3 sums and 2 of code."""
    names = f'KEPT = ("source", "benchmark", "n")\nLOG = "{root}/seen.jsonl"\n'
    config = write_project(root, model, workflow=names + LOGGING)
    rows = [
        {"n": n, "question": f"Held out {n}?", "answer": "x", "source": "sums", "benchmark": "b"}
        for n in range(6)
    ]
    rows += [{**row, "answer": [1], "source": "code"} for row in rows[:3]]
    write_rows(root / "held_out.jsonl", rows)
    write_sources(root)
    content = yaml.safe_load(config.read_text())
    buffer = content["buffer"]
    buffer["batch_size"] = 5
    buffer["explorer_input"].pop("taskset")
    buffer["explorer_input"]["tasksets"] = [
        {"name": "sums", "path": f"{root}/sums.jsonl"},
        {"name": "code", "path": f"{root}/code.jsonl"},
    ]
    content["mix"] = {"sums": {"ratio": 0.6}, "code": {"ratio": 0.4, "benchmark": "mbpp"}}
    content["algorithm"]["repeat_times"] = 2
    content["explorer"] = {"eval_interval": 1}
    config.write_text(yaml.safe_dump({**content, **settings}, sort_keys=False))
    return config


def evaluated(root: Path, step: int) -> list[int]:
    path = run_dir(root) / "evaluations" / "held_out" / f"step_{step}.jsonl"
    return sorted(json.loads(line)["item"] for line in path.read_text().splitlines())


def batches(root: Path, per_step: int = 10) -> list[Counter[tuple[str, int]]]:
    """What each training batch held: every task is run twice."""
    seen = [json.loads(line) for line in (root / "seen.jsonl").read_text().splitlines()]
    lines = [(row["source"], row["n"]) for row in seen]
    return [Counter(lines[start : start + per_step]) for start in range(0, len(lines), per_step)]


@pytest.mark.slow
def test_every_batch_has_the_shares_and_a_resumed_run_goes_on_exactly(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for root in (whole, parts):
        root.mkdir()
    steps = "buffer.total_steps=4"
    run_config(mixed_project(whole, tiny_model_dir), [steps, "quick_eval=4"], inline=True)
    config = mixed_project(parts, tiny_model_dir)
    quiet = ["explorer.eval_on_startup=false", "explorer.eval_interval=2"]
    run_config(config, ["buffer.total_steps=2", *quiet], inline=True)
    assert len(batches(parts)) == 2
    run_config(config, [steps, *quiet], inline=True)

    assert len(batches(whole)) == 4
    for batch in batches(whole):
        # Two runs of each item; where code begins a new pass, an item may come twice.
        assert sum(batch.values()) == 10
        assert Counter(source for source, _ in batch.elements()) == {"sums": 6, "code": 4}
    assert batches(parts) == batches(whole)
    sums = [n for batch in batches(whole)[:3] for source, n in batch if source == "sums"]
    assert sorted(sums) == list(range(9))
    seen = [json.loads(line) for line in (whole / "seen.jsonl").read_text().splitlines()]
    assert {(row["source"], row["benchmark"]) for row in seen} == {("sums", None), ("code", "mbpp")}
    again = load_config(run_dir(whole) / "resolved.yaml")
    assert [taskset.name for taskset in again.buffer.explorer_input.tasksets] == ["sums", "code"]

    # First and last evaluation: all 9 rows; between them the same 3 of 6 sums and 1 of 3 of code.
    drawn = evaluated(whole, 1)
    assert [evaluated(whole, step) for step in (0, 4)] == [list(range(9))] * 2
    assert [evaluated(whole, step) for step in (2, 3)] == [drawn] * 2
    assert [sum(item < 6 for item in drawn), sum(item >= 6 for item in drawn)] == [3, 1]


def tasks_of(config: Any) -> list[list[Any]]:
    """The batches that Trinity's scheduler reads of a configuration that is laid out."""
    from trinity.buffer.task_scheduler import get_taskset_scheduler

    async def read() -> list[list[Any]]:
        scheduler = get_taskset_scheduler(explorer_state={}, config=config)
        found = []
        while True:
            try:
                found.append(await scheduler.read())
            except StopAsyncIteration:
                return found

    return asyncio.run(read())


def laid_out(config: Path, *overrides: str) -> Any:
    from aflow_tune.config.prepare import prepare
    from aflow_tune.config.tasksets import materialise_tasksets, merge_mix

    loaded = load_config(config, overrides)
    prepare(loaded)
    materialise_tasksets(loaded)
    merge_mix(loaded, Path(loaded.checkpoint_job_dir))
    return loaded


def test_rows_tell_their_source_and_lose_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = laid_out(mixed_project(tmp_path, tiny_model_dir), "buffer.total_steps=4")
    batches = tasks_of(config)
    assert [len(batch) for batch in batches] == [5] * 4
    rows = [task.raw_task for batch in batches for task in batch]
    expected = {
        "sums": lambda n: {"question": f"What is {n} + {n}?", "answer": str(2 * n)},
        "code": lambda n: (
            {"question": f"Write f{n}.", "answer": [n], "tests": {"a": n}}
            | {"original_source": f"url{n}", "benchmark": "mbpp"}
        ),
    }
    for row in rows:
        n, source = row["n"], row["source"]
        assert row == {"n": n, "source": source, **expected[source](n)}
    assert {task.index["taskset_id"] for task in batches[0]} == {0, 1}
    assert all(task.index["index"] == task.raw_task["n"] for task in batches[0])


def test_the_scheduler_resumes_from_its_state(tmp_path: Path, tiny_model_dir: Path) -> None:
    from trinity.buffer.task_scheduler import get_taskset_scheduler

    config = laid_out(mixed_project(tmp_path, tiny_model_dir), "buffer.total_steps=6")
    straight = [[task.raw_task for task in batch] for batch in tasks_of(config)]

    async def resumed(step: int) -> list[Any]:
        first = get_taskset_scheduler(explorer_state={}, config=config)
        for _ in range(step):
            await first.read()
        state = {"latest_iteration": step, "taskset_states": first.state_dict()}
        state = json.loads(json.dumps(state))
        second = get_taskset_scheduler(explorer_state=state, config=config)
        return [task.raw_task for task in await second.read()]

    assert [asyncio.run(resumed(step)) for step in range(6)] == straight
    other = laid_out(mixed_project(tmp_path / "other", tiny_model_dir), "seed=4")
    assert [task.raw_task for task in tasks_of(other)[0]] != straight[0]


def test_one_prepared_file_is_mixed_by_the_sources_of_its_rows(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = mixed_project(tmp_path, tiny_model_dir)
    rows = [
        {"n": n, "question": f"Q{n}?", "answer": "x" if n % 4 else [n]}
        | {"source": "sums" if n % 4 else "code", "benchmark": "gsm8k" if n % 4 else "mbpp"}
        for n in range(20)
    ]
    write_rows(tmp_path / "train.jsonl", rows)
    content = yaml.safe_load(config.read_text())
    content["buffer"]["explorer_input"]["tasksets"] = [{"path": f"{tmp_path}/train.jsonl"}]
    config.write_text(yaml.safe_dump(content, sort_keys=False))
    assert validate(config).faults == []
    for batch in tasks_of(laid_out(config, "buffer.total_steps=3")):
        sources = Counter(task.raw_task["source"] for task in batch)
        assert sources == {"sums": 3, "code": 2}
        assert all(task.raw_task == rows[task.raw_task["n"]] for task in batch)


SUMS = {"ratio": 0.6}
TASKSET = "buffer.explorer_input.tasksets[0]"


@pytest.mark.parametrize(
    ("mix", "overrides", "places"),
    [
        (None, ["buffer.batch_size=50", "buffer.total_steps=3"], []),
        ({"sums": SUMS, "code": {"ratio": 0.3}}, [], ["mix"]),
        ({"sums": {"ratio": 1.2}, "code": SUMS}, [], ["mix.sums.ratio"]),
        ({"sums": SUMS, "cod": {"ratio": 0.4}}, [], ["tasksets[1].name", "mix.cod"]),
        ({"sums": {}, "code": {}}, [], ["mix.sums"]),
        ({"sums": {"share": 0.6}, "code": {"ratio": 0.4}}, [], ["mix.sums.share"]),
        (None, [f"{TASKSET}.data_selector.selector_type=shuffle"], ["selector_type=shuffle"]),
        (None, ["quick_eval=0"], ["quick_eval=0"]),
    ],
)
def test_what_is_wrong_with_a_mix_is_said_with_its_key(
    tmp_path: Path,
    tiny_model_dir: Path,
    mix: dict[str, Any] | None,
    overrides: list[str],
    places: list[str],
) -> None:
    settings = {} if mix is None else {"mix": mix}
    faults = validate(mixed_project(tmp_path, tiny_model_dir, **settings), overrides).faults
    assert len(faults) == len(places), faults
    for fault, place in zip(faults, places, strict=True):
        assert fault.where.endswith(place), fault
