"""The section `writer:` of a configuration: what it becomes, what is refused, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_validate import CONFIG, project  # noqa: F401  (a fixture)

import aflow_tune.engines.trinity  # noqa: F401  (the stand-in for vLLM)
from aflow_tune.config.file_rules import check_writer
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.validate import check_data, resolve_functions
from aflow_tune.contract.signature import check_functions
from aflow_tune.errors import BadInput
from aflow_tune.writer.types import CheckLimits
from aflow_tune.writer.workflow import WriterWorkflow

MODELS = (
    "models:\n"
    "  executor: {model: m, base_url: 'http://127.0.0.1:1/v1', max_tokens: 300,\n"
    "    prices: {input: 2.0, output: 8.0}}\n"
    "  judge: {model: n, base_url: 'http://127.0.0.1:1/v1', max_tokens: 200,\n"
    "    prices: {input: 1.0, output: 9.0}}\n"
)
AUXILIARY = (
    "explorer: {auxiliary_models: [{name: frozen, model_path: m, max_response_tokens: 24}]}\n"
)


def config_of(tmp_path: Path, section: str, more: str = MODELS) -> AflowConfig:
    text = CONFIG.replace("workflow: {root}/flow.py:two_calls\n", "")
    path = tmp_path / "config.yaml"
    path.write_text(text.format(root=tmp_path, model="model") + f"writer: {section}\n{more}")
    return load_config(path)


def writer_of(tmp_path: Path, section: str, more: str = MODELS) -> WriterWorkflow:
    config = config_of(tmp_path, section, more)
    workflow, judge = resolve_functions(config)
    assert isinstance(workflow, WriterWorkflow)
    assert judge is None
    check_functions(workflow, judge)
    return workflow


def test_everything_of_the_section_arrives(tmp_path: Path) -> None:
    (tmp_path / "tests.jsonl").write_text('{"entry_point": "f", "test": ["assert candidate()"]}\n')
    (tmp_path / "prompt.txt").write_text("{operators} {problem}")
    (tmp_path / "score.py").write_text("def score(task, answer):\n    return 1.0\n")
    section = (
        "{executor: executor, operators: [Custom, Test], score: score.py:score, problem: q, "
        "problem_type: code, entry_point: name, test_cases: tests.jsonl, prompt: prompt.txt, "
        "turns: 3, timeout: 20, max_calls: 7, max_tokens: 9000, max_usd: 0.5, retries: 1, "
        "models: {Test: judge}}"
    )
    workflow = writer_of(tmp_path, section)
    assert list(workflow.operators) == ["Custom", "Test"]
    assert workflow.models == {"Test": "judge"}
    assert workflow.score is not None
    assert workflow.score({}, "x") == 1.0
    assert (workflow.problem, workflow.entry_point, workflow.problem_type) == ("q", "name", "code")
    assert set(workflow.test_cases.sets) == {"f"}
    assert workflow.template == "{operators} {problem}"
    assert (workflow.turns, workflow.seconds) == (3, 20.0)
    # the dearer of the two models, and the longer answers
    assert workflow.check == CheckLimits(
        model_calls=7,
        tokens=9000,
        usd=0.5,
        retries=1,
        call_completion_tokens=300,
        usd_per_prompt_token=2e-6,
        usd_per_completion_token=9e-6,
    )
    assert workflow.limited == ("executor", "judge")


ADDRESS = "base_url: 'http://127.0.0.1:1/v1'"
ROLE, REVIEW = "writer.executor", "writer.models.Review"
OF_FROZEN = f"models: {{frozen: {{model: m, {ADDRESS}}}}}\n"
OF_MODELS = "models: {executor: {model: m, " + ADDRESS


@pytest.mark.parametrize(
    ("section", "more", "places", "words"),
    [
        ("executor: frozen", AUXILIARY + OF_FROZEN, ROLE, "rename one"),
        ("operators: [Custom, Xyz]", MODELS, "writer.operators", "Xyz"),
        ("max_calls: 0, retries: 99", MODELS, "writer.max_calls writer.retries", "1 or more"),
        ("executor: frozen, max_usd: 0.5", AUXILIARY, "writer.max_usd", "max_tokens instead"),
        ("max_usd: 0.5", f"{OF_MODELS}, max_tokens: 9}}}}\n", "models.executor.prices", "dollars"),
        ("max_tokens: 500", f"{OF_MODELS}}}}}\n", "models.executor.max_tokens", "is counted"),
        ("turns: 1", MODELS + "workflow: a.py:f\n", "workflow", "keep one"),
    ],
)
def test_faults_name_their_keys_and_cures(
    tmp_path: Path, section: str, more: str, places: str, words: str
) -> None:
    usual = {"executor": "executor", "benchmark": "gsm8k"}
    given = [f"{key}: {value}" for key, value in usual.items() if f"{key}:" not in section]
    config = config_of(tmp_path, f"{{{', '.join([*given, section])}}}", more)
    with pytest.raises(BadInput) as refused:
        resolve_functions(config)
    found = [fault.where for fault in refused.value.faults]
    assert len(found) == len(places.split()), found
    pairs = zip(found, places.split(), strict=True)
    assert all(where.endswith(place) for where, place in pairs), found
    assert all(where.startswith(f"{config.positions.file}:") for where in found)
    assert words in str(refused.value)


def test_rows_are_checked_before_a_run(tmp_path: Path) -> None:
    good = {"question": "q", "answer": "#### 1"}
    rows = [
        {**good, "benchmark": "gsm8k"},
        {**good, "benchmark": "gsm9k"},
        {**good, "benchmark": "drop"},
        {**good, "benchmark": "gsm8k", "problem_type": "poetry"},
    ]
    for name in ("train", "held_out"):
        text = "".join(json.dumps({**row, "of": name}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    config = config_of(tmp_path, "{executor: executor}")
    workflow, _ = resolve_functions(config)
    faults = check_data(config, workflow).faults
    assert len(faults) == 6
    train = [fault for fault in faults if "train.jsonl" in fault.where]
    assert [fault.where.split("train.jsonl:")[1].split(":")[0] for fault in train] == [
        "2",
        "3",
        "4",
    ]
    assert "without context, ref_text" in train[1].found
    assert "poetry" in train[2].found


def warnings_of(tmp_path: Path, section: str, *overrides: str) -> list[str]:
    config = load_config(config_of(tmp_path, section).positions.file, overrides)
    return [str(item) for item in check_writer(config, resolve_functions(config)[0])]


def test_what_the_rest_of_the_configuration_makes_doubtful(tmp_path: Path) -> None:
    section = "{executor: executor, benchmark: gsm8k, turns: 2, timeout: 100, operators: [Custom]}"
    assert warnings_of(tmp_path, section, "model.max_model_len=600") == []
    longer = "model.max_model_len=600"
    (late,) = warnings_of(tmp_path, section, longer, "rollout.run_timeout=150")
    assert "writer.turns x writer.timeout is 200 s" in late
    (short,) = warnings_of(tmp_path, section, "model.max_model_len=150")
    assert "model.max_prompt_tokens" in short
    assert "the model takes 150" in short
