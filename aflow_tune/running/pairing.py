"""Preference pairs from several answers of the policy to each task (`mode: pairs`), for DPO.

    <run folder>/
      evaluations/TASKSET/step_0.jsonl    every rollout, with its calls
      pairs.jsonl                         the pairs: `messages`, `tools`, `chosen`, `rejected`
      pairs.json                          how many there are, and why not more

Answers compete if they were given to the same prompt, messages and tools, in rollouts of the same
task: its first calls, and every call of a workflow that replays true histories. An answer is worth
its step reward, or else the reward of its rollout. Of each such group with different rewards the
best and the worst answer are a pair; of equal ones the first. Failed rollouts and answers that were
cut off take no part: neither has an end that could be learned. Sampling is that of `mode: bench`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from aflow_tune.errors import RunFailed
from aflow_tune.files import as_line, write_json, write_whole
from aflow_tune.report.records import EvalRecord

PAIRS_FILE, COUNTS_FILE = "pairs.jsonl", "pairs.json"


def pairs_of(records: Iterable[EvalRecord]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of `pairs.jsonl`, in the order of the tasks, and the counts of `pairs.json`."""
    groups: dict[tuple[str, int, str], list[tuple[float, dict[str, Any]]]] = {}
    tasks, failed, cut_off = set(), 0, 0
    for record in records:
        tasks.add((record.taskset, record.item))
        if record.reward is None:
            failed += 1
            continue
        for call in record.transcript:
            if call.get("truncated"):
                cut_off += 1
                continue
            asked = {"messages": call["messages"]}
            asked |= {"tools": call["tools"]} if call.get("tools") else {}
            key = record.taskset, record.item, json.dumps(asked, sort_keys=True)
            worth = call.get("reward", record.reward)
            groups.setdefault(key, []).append((worth, _message(call)))
    rows, single, equal = [], 0, 0
    for (taskset, item, prompt), answers in groups.items():
        (best, chosen), (worst, rejected) = (
            choose(answers, key=lambda answer: answer[0]) for choose in (max, min)
        )
        if len(answers) < 2:
            single += 1
        elif best == worst or chosen == rejected:
            equal += 1
        else:
            told = {"chosen": [chosen], "rejected": [rejected]}
            worth = {"chosen_reward": best, "rejected_reward": worst}
            source = {"taskset": taskset, "item": item, "samples": len(answers)}
            rows.append({**json.loads(prompt), **told, **worth, **source})
    counts = {
        "pairs": len(rows),
        "tasks": len(tasks),
        "prompts": len(groups),
        "answers": sum(map(len, groups.values())),
        "prompts_answered_once": single,
        "prompts_without_difference": equal,
        "failed_rollouts": failed,
        "answers_cut_off": cut_off,
        "chosen_reward": fmean(row["chosen_reward"] for row in rows) if rows else None,
        "rejected_reward": fmean(row["rejected_reward"] for row in rows) if rows else None,
    }
    return rows, counts


def write_pairs(folder: Path, records: Iterable[EvalRecord]) -> str:
    """Write both files, whole; returns a sentence about them. Raises RunFailed: there is no pair;
    OSError."""
    rows, counts = pairs_of(records)
    write_json(folder / COUNTS_FILE, counts)
    if not rows:
        told = ", ".join(f"{name.replace('_', ' ')}: {n}" for name, n in counts.items() if n)
        fix = "Raise algorithm.repeat_times or model.temperature, or take other tasks."
        raise RunFailed(f"no answer was better than another ({told}). {fix}")
    write_whole(folder / PAIRS_FILE, b"".join(map(as_line, rows)))
    means = f"{counts['chosen_reward']:.3f} against {counts['rejected_reward']:.3f}"
    left = counts["prompts_answered_once"] + counts["prompts_without_difference"]
    return (
        f"{len(rows)} pairs of {counts['answers']} answers to {counts['prompts']} prompts, reward "
        f"{means} on average ({left} prompts without a difference): {folder / PAIRS_FILE}"
    )


def _message(call: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a call as an assistant message of OpenAI's."""
    message = {"role": "assistant", "content": call["response"]}
    calls = [
        {"id": f"call_{number}", "type": "function", "function": dict(function)}
        for number, function in enumerate(call.get("calls", ()))
    ]
    return {**message, "tool_calls": calls} if calls else message
