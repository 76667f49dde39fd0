"""What a run gives to other tools: adapter, merged model, best workflows."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from project import write_project
from scripted_server import ScriptedServer
from transformers import AutoModelForCausalLM
from writer_servers import executor, policy, write_config

from aflow_tune.cli import main
from aflow_tune.graph.graph import load_graph
from aflow_tune.report.records import EvalRecord, Rollout, append_record, append_rollout
from aflow_tune.using.export import best_of, uses_in

ONCE = """\
class Workflow:
    def __init__(self, name, llm_config, dataset):
        self.llm = create_llm_instance(llm_config)
        self.solve = operator.Custom(self.llm)

    async def __call__(self, problem):
        got = await self.solve(input=problem)
        return got["response"], self.llm.get_usage_summary()["total_cost"]
"""
TWICE = ONCE.replace(
    "        got = await self.solve(input=problem)\n",
    "        got = await self.solve(input=problem)\n"
    '        got = await self.solve(input=got["response"])\n',
)
LONG_PROMPT = "Think step by step. " * 400


def kept(
    code: str, structure: str, *, kind: str = "math", level: int = 0, prompt: str = "Solve it.",
    valid: bool = True, score: float | None = 1.0, usd: float | None = 0.001,
) -> dict[str, Any]:  # fmt: skip
    """What a run of the writer keeps."""
    return {
        "writer": {
            "problem": "2 + 3?", "problem_type": kind, "valid": valid, "level": level,
            "code": code, "prompts": {"solve": prompt}, "structure": structure,
            "operators": {"Custom": 1}, "score": score, "usd": usd, "tokens": 100,
            "refusals": [], "ending": "answered",
        }
    }  # fmt: skip


def write_run(run: Path) -> None:
    """Rollouts and evaluations: `once` is rewarded 6, 2 and 7 (mean 5) in two texts, `twice` 4."""
    rows = [
        (1, 0, 6.0, kept(ONCE, "once")),
        (1, 1, 2.0, kept(ONCE, "once", score=0.0, level=2)),
        (1, 2, 4.0, kept(TWICE, "twice", usd=None)),
        (2, 0, 4.0, kept(TWICE, "twice", usd=0.003)),
        (2, 1, 4.0, kept(TWICE, "twice", usd=0.003)),
        (2, 2, 9.0, kept(ONCE, "lucky")),
        (2, 3, 99.0, kept(ONCE, "refused", valid=False)),
        (2, 4, None, kept(ONCE, "once")),
        (3, 0, -8.0, kept("class Never", "never", level=3)),
        (3, 1, -8.0, kept("class Never", "never", level=3)),
        (3, 2, -8.0, kept("class Never", "never", level=3)),
    ]
    for step, number, reward, what in rows:
        append_rollout(run, Rollout(step, number, 0, reward, kept=what))
    record = EvalRecord(
        step=2, taskset="held_out", item=0, run=0, score=1.0, reward=7.0,
        kept=kept(ONCE, "once", prompt=LONG_PROMPT, usd=0.002),
    )  # fmt: skip
    append_record(run / "evaluations", record)


def test_the_best_of_each_structure_by_its_mean_reward(tmp_path: Path) -> None:
    write_run(tmp_path)
    found = best_of(uses_in(tmp_path), least_uses=3, top=10)
    assert [(best.structure, best.uses, best.reward) for best in found] == [
        ("once", 3, 5.0),
        ("twice", 3, 4.0),
    ]
    once, twice = found
    # The evaluation's text earned 7, the two runs of the other one 4 on average.
    assert once.prompts == {"solve": LONG_PROMPT}
    assert (once.text_uses, once.text_reward) == (1, 7.0)
    assert once.score == pytest.approx(2 / 3)
    assert once.clean == pytest.approx(2 / 3)
    assert once.usd == pytest.approx((0.001 + 0.001 + 0.002) / 3)
    assert twice.usd is None  # one price is not known
    by_luck = best_of(uses_in(tmp_path), least_uses=1, top=1)
    assert [best.structure for best in by_luck] == ["lucky"]


def test_rounds_results_and_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    out = tmp_path / "workspace" / "GSM8K" / "workflows"
    command = ["export", "--run", str(tmp_path / "run"), "--what", "workflows", "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    names = ("round_1", "round_2", "results.json", "index.json")
    assert [str(out / name) for name in names] == printed[:4]

    results = json.loads((out / "results.json").read_text())
    assert [(row["round"], row["score"], row["avg_cost"]) for row in results] == [
        (1, pytest.approx(2 / 3), pytest.approx(0.004 / 3)),
        (2, 1.0, None),
    ]
    assert set(results[0]) == {"round", "score", "avg_cost", "total_cost", "time"}
    index = json.loads((out / "index.json").read_text())["workflows"]
    assert [(row["round"], row["problem_type"], row["uses"], row["reward"]) for row in index] == [
        (1, "math", 3, 5.0),
        (2, "math", 3, 4.0),
    ]

    source = (out / "round_1" / "graph.py").read_text()
    assert "import workspace.GSM8K.workflows.round_1.prompt as prompt_custom" in source
    prompts = ast.parse((out / "round_1" / "prompt.py").read_text())
    texts = [node.value for node in ast.walk(prompts) if isinstance(node, ast.Constant)]
    assert LONG_PROMPT in texts  # whole, although the report cuts what it shows
    for number in (1, 2):
        assert load_graph(out / f"round_{number}").shape.instances == {"solve": "Custom"}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["of the run", "its own folder"])
def test_what_an_evaluation_recorded_counts(
    elsewhere: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"question": f"{n} * 23?", "answer": f"#### {n * 23}"}) for n in (17, 5, 6)]
    (tmp_path / "held_out.jsonl").write_text("\n".join(rows) + "\n")
    with ScriptedServer(policy) as writes, ScriptedServer(executor) as runs:
        config = write_config(tmp_path, runs.url)
        asked = ["--endpoint", writes.url, "--model", "tuned"]
        out = ["--out", str(tmp_path / "measured")] if elsewhere else []
        assert main(["eval", str(config), *asked, *out]) == 0
    run = tmp_path / "measured" if elsewhere else tmp_path / "runs" / "tests" / "writer"
    (best,) = best_of(uses_in(run), least_uses=3, top=5)
    assert (best.uses, best.score, best.clean) == (3, pytest.approx(1 / 3), 1.0)
    exported = tmp_path / "rounds"
    command = ["export", "--run", str(run), "--what", "workflows", "--config", str(config)]
    assert main([*command, "--out", str(exported)]) == 0
    assert load_graph(exported / "round_1").shape.instances == {"solve": "Custom"}
    assert "workspace.gsm8k." in (exported / "round_1" / "graph.py").read_text().lower()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--what", "workflows"], "a structure with 3 or more"),
        (["--what", "workflows", "--checkpoint", "best"], "--checkpoint"),
        (["--what", "merged", "--top", "3"], "--top"),
        (["--what", "merged"], "a run folder with checkpoints"),
        (["--what", "workflows", "--least-uses", "0"], "1 or more"),
    ],
)
def test_what_cannot_be_exported(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert main(["export", "--run", str(run), "--out", str(tmp_path / "out"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A run folder with two different checkpoints of an adapter, and the configuration."""
    from dataclasses import replace

    from aflow_tune.engines.local.lora_spec import LoraSpec
    from aflow_tune.engines.local.trainer import LocalTrainer, TrainerSettings

    root = tmp_path_factory.mktemp("export")
    run = root / "run"
    run.mkdir()
    shutil.copy(write_project(root, tiny_model_dir), run / "resolved.yaml")
    settings = TrainerSettings(lora=LoraSpec(4, 8))
    for step in (1, 2):
        trainer = LocalTrainer(tiny_model_dir, replace(settings, seed=step))
        assert trainer.peft is not None
        with torch.no_grad():  # B is zero at first, which would change nothing
            for name, parameter in trainer.peft.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.05 * step)
        trainer.save(run / f"global_step_{step}")
    return run


def logits(model: Any) -> Any:

    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(12)[None]).logits


def test_adapter_and_merged_model_compute_the_same(
    trained: Path, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    for what in ("adapter", "merged"):
        out = tmp_path / what
        command = ["export", "--run", str(trained), "--what", what, "--out", str(out)]
        assert main([*command, "--checkpoint", "1"]) == 0
        assert "run/global_step_1" in capsys.readouterr().out
        assert main(command) == 2  # it is there now
        assert "it exists" in capsys.readouterr().err
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    plain = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, tmp_path / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert torch.allclose(adapted, merged, atol=1e-4)
    assert not torch.allclose(adapted, plain, atol=1e-2)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model_dir)
    main(["export", "--run", str(trained), "--what", "merged", "--out", str(tmp_path / "last")])
    last = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "last"))
    assert not torch.allclose(last, merged, atol=1e-2)
