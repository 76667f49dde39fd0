"""`aflow-tune graph`: what it prints, writes and refuses. It runs nothing of a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
from graph_samples import MATH, MATH_PROMPTS, own_form, simple, write_round

from aflow_tune.cli import main
from aflow_tune.errors import ExitCode
from aflow_tune.report.records import EvalRecord, append_record


@pytest.fixture
def math(tmp_path: Path) -> Path:
    return write_round(tmp_path, "MATH", 2, MATH, MATH_PROMPTS)


def test_show(math: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "show", str(math)]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "(MATH, round 2)" in shown
    assert "called with: problem" in shown
    assert "  sc_ensemble: ScEnsemble, line 21" in shown
    assert "  DRAFT_PROMPT: Solve the problem. Put the answer into a box." in shown
    assert "  custom (line 27) feeds sc_ensemble (line 32)" in shown
    assert "  sc_ensemble (line 32) feeds the answer" in shown
    assert "faults" not in shown


def test_show_lists_faults_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "ran"
    head = f"open({str(mark)!r}, 'w').close()"
    folder = own_form(tmp_path / "g", simple("return prompt_custom.NOPE", head=head))
    assert main(["graph", "show", str(folder)]) == ExitCode.BAD_INPUT
    assert "found:    prompt_custom.NOPE" in capsys.readouterr().out
    assert not mark.exists()


def test_draw_with_the_numbers_of_a_run(
    math: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(item: int, reward: float | None) -> EvalRecord:
        chosen = [{"caller": "ScEnsemble.sc_ensemble", "prompt_tokens": 30, "tokens": 5}]
        lost = {"caller": "Custom.custom", "prompt_tokens": None, "tokens": None, "failed": True}
        drafts = [{"caller": "Custom.custom", "prompt_tokens": 10, "tokens": 20}] * 3
        return EvalRecord(
            step=4,
            taskset="held_out",
            item=item,
            run=0,
            score=reward,
            reward=reward,
            calls=[*drafts, *chosen] if reward is not None else [lost],
            operators=[
                {
                    "operator": "Custom",
                    "instance": "custom",
                    "outcome": "answered" if reward is not None else "model_failed",
                    "attempts": 1,
                }
            ],
        )

    for item, reward in enumerate([1.0, 0.0, None]):
        append_record(tmp_path / "run" / "evaluations", record(item, reward))
    command = ["graph", "draw", str(math), "--run", str(tmp_path / "run")]
    assert main(command) == ExitCode.DONE
    drawn = capsys.readouterr().out
    custom = next(line for line in drawn.splitlines() if "custom: Custom" in line)
    ensemble = next(line for line in drawn.splitlines() if "sc_ensemble: ScEnsemble" in line)
    assert "180 tokens" in custom  # two runs of three drafts, thirty tokens each
    assert "75#37; of the reward" in custom
    assert "1 failures" in custom
    assert "70 tokens" in ensemble
    assert "25#37; of the reward" in ensemble

    assert main([*command[:-1], str(tmp_path / "nowhere")]) == ExitCode.BAD_INPUT
    assert "no such folder" in capsys.readouterr().err


def test_export_says_what_aflow_does_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_form(tmp_path / "g", simple("return 'x'"), '{"Custom": "{instruction} {input}"}')
    target = tmp_path / "round_1"
    arguments = ["graph", "export", str(folder), "--round", str(target), "--dataset", "GSM8K"]
    assert main(arguments) == ExitCode.DONE
    assert "AFlow will not use the prompts of Custom: " in capsys.readouterr().out
