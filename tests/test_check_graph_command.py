"""`aflow-tune check-graph`: what it reads, prints and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from written_samples import PLAIN, workflow

from aflow_tune.cli import main
from aflow_tune.errors import ExitCode
from aflow_tune.writer.form import as_text

BROKEN = workflow('r = await self.solve(input=problem)\nreturn r["respones"]')


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["check-graph", *arguments])
    return code, capsys.readouterr().out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "written.txt"
    file.write_text(f"Here:\n```json\n{as_text({}, BROKEN)}\n```")
    code, out = run([str(file), "--json"], capsys)
    assert code == ExitCode.BAD_INPUT
    told = json.loads(out)
    shown = "ok form notes refusals bound structure operators mermaid"
    assert set(told) == set(shown.split())
    assert told["ok"] is False
    assert told["form"] == "repaired"
    assert told["notes"] == ["the object stood among other text"]
    (refusal,) = told["refusals"]
    assert (refusal["kind"], refusal["line"], refusal["column"]) == ("unknown_name", 10, 16)
    assert told["bound"]["model_calls"] == 1
    assert told["bound"]["tokens"] == 4096 + 1024
    assert told["structure"] == "Custom | P>0 0>A"
    assert told["operators"] == {"Custom": 1}
    assert told["mermaid"].startswith("flowchart TD\n")


def test_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.py"
    file.write_text(workflow("r = await self.pick(['a'])\n" * 3 + 'return r["response"]'))
    assert run([str(file), "--max-calls", "3"], capsys)[0] == ExitCode.DONE
    code, out = run([str(file), "--max-calls", "2"], capsys)
    assert code == ExitCode.BAD_INPUT
    assert "over_budget" in out
    assert run([str(file), "--max-tokens", "15000"], capsys)[0] == ExitCode.BAD_INPUT
    assert run([str(file), "--max-tokens", "15360"], capsys)[0] == ExitCode.DONE


def test_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.py"
    file.write_text(PLAIN)
    assert run([str(file), "--operators", "Custom,ScEnsemble,Review"], capsys)[0] == 0
    code, out = run([str(file), "--operators", "Custom"], capsys)
    assert code == ExitCode.BAD_INPUT
    assert "there is no operator ScEnsemble; a graph may use Custom" in out
    assert main(["check-graph", str(file), "--operators", "Costum"]) == ExitCode.BAD_INPUT
    assert "did you mean Custom?" in capsys.readouterr().err
    own = tmp_path / "own.py"
    own.write_text(
        "from aflow_tune.operators import Field, Operator, Prompt\n\n\n"
        "class Twice(Operator):\n    'Asks twice.'\n\n    fields = (Field('text'),)\n"
        "    asks = {'main': Prompt(needs=('text',), text='{text}')}\n\n"
        "    @classmethod\n    def most_calls(cls, *, retries=2, **settings):\n        return 2\n\n"
        "    async def run(self, text):\n        return await self.ask({'text': text})\n"
    )
    file.write_text(
        workflow('r = await self.x(problem)\nreturn r["text"]', "self.x = operator.Twice(self.llm)")
    )
    assert run([str(file)], capsys)[0] == ExitCode.BAD_INPUT
    code, out = run([str(file), "--operators", f"{own}:Twice"], capsys)
    assert code == ExitCode.DONE
    assert "operator calls 1, model calls 2" in out


def test_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "ran"
    file = tmp_path / "g.py"
    file.write_text(f"open({str(mark)!r}, 'w').close()\n{PLAIN}")
    code, out = run([str(file)], capsys)
    assert code == ExitCode.BAD_INPUT
    assert "1. [not_allowed] line 1, column 1: `open(" in out
    assert not mark.exists()


@pytest.mark.parametrize(
    ("given", "fine"),
    [
        ('{"solve": prompt_custom.solve}', True),
        ('{"solve": prompt_custom.other}', False),
        ("dict(solve=prompt_custom.solve)", True),
    ],
)
def test_self_prompts_is_set_in_the_constructor(
    given: str, fine: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the rounds that we save set it, since AFlow does not; and as others write it."""
    code = PLAIN.replace("self.llm =", f"self.prompts = {given}\n        self.llm =", 1)
    file = tmp_path / "written.json"
    file.write_text(as_text({"solve": "Be exact."}, code))
    status, out = run([str(file)], capsys)
    assert ("prompt_custom.other has no text" in out) is not fine
    assert (status == ExitCode.DONE) is fine
