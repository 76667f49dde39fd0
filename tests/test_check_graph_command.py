"""`aflow-tune check-graph`: what it reads, prints and returns."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from graph_samples import MATH, MATH_PROMPTS, own_form, write_round
from written_samples import PLAIN, workflow

from aflow_tune.cli import main
from aflow_tune.errors import ExitCode
from aflow_tune.graph.save import save_round
from aflow_tune.operators import OPERATORS
from aflow_tune.writer.check import check_written
from aflow_tune.writer.form import as_text

BROKEN = workflow('r = await self.solve(input=problem)\nreturn r["respones"]')


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["check-graph", *arguments])
    return code, capsys.readouterr().out


def test_a_graph_that_may_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "written.json"
    file.write_text(as_text({"solve": "Be exact. "}, PLAIN))
    code, out = run([str(file)], capsys)
    assert code == ExitCode.DONE
    lines = out.splitlines()
    assert lines[:3] == ["fine: it may run", "form: hybrid", "call sites: Custom 1"]
    assert "operator calls 1, model calls 1 (20 allowed), 4,096 prompt and 1,024" in lines[3]
    assert "flowchart TD" in out


def test_a_graph_that_may_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "graph.py"
    file.write_text(BROKEN)
    code, out = run([str(file)], capsys)
    assert code == ExitCode.BAD_INPUT
    assert out.startswith("refused\nform: code\n")
    assert "1. [unknown_name] line 10, column 16: Custom returns response, not 'respones'" in out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "written.txt"
    file.write_text(f"Here:\n```json\n{as_text({}, BROKEN)}\n```")
    code, out = run([str(file), "--json"], capsys)
    assert code == ExitCode.BAD_INPUT
    told = json.loads(out)
    assert set(told) == {
        "ok",
        "form",
        "notes",
        "refusals",
        "bound",
        "structure",
        "operators",
        "mermaid",
    }
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


def test_nothing_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reply.txt"
    file.write_text("I would rather not.")
    code, out = run([str(file), "--json"], capsys)
    assert code == ExitCode.BAD_INPUT
    told = json.loads(out)
    assert (told["form"], told["bound"], told["mermaid"]) == (None, None, None)
    assert [refusal["kind"] for refusal in told["refusals"]] == ["unreadable"]


def test_a_round_of_aflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = MATH_PROMPTS + '\nNEVER_USED = "x"\n'
    folder = write_round(tmp_path, "MATH", 2, MATH, prompts)
    for place in (folder, folder / "graph.py"):
        code, out = run([str(place), "--problem-type", "math"], capsys)
        assert code == ExitCode.DONE, out
        assert "model calls 3 " in out
    without = write_round(tmp_path / "other", "MATH", 2, MATH, "DRAFT_PROMPT = 'x'\n")
    code, out = run([str(without)], capsys)
    assert code == ExitCode.BAD_INPUT
    assert "[prompt] line 30, column 25: prompt_custom.AGAIN_PROMPT has no text" in out


def test_our_own_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = own_form(tmp_path / "g", PLAIN, '{"solve": "Be exact. ", "solv": "x"}')
    code, out = run([str(folder)], capsys)
    assert code == ExitCode.BAD_INPUT
    assert "the prompt 'solv' belongs to no operator of the graph (did you mean solve?)" in out


def test_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.py"
    file.write_text(workflow("r = await self.pick(['a'])\n" * 3 + 'return r["response"]'))
    assert run([str(file), "--max-calls", "3"], capsys)[0] == ExitCode.DONE
    code, out = run([str(file), "--max-calls", "2"], capsys)
    assert code == ExitCode.BAD_INPUT
    assert "3 calls of models, and 2 are allowed" in out
    code, out = run([str(file), "--max-tokens", "15000"], capsys)
    assert code == ExitCode.BAD_INPUT
    assert "15,360 tokens, and 15,000 are allowed" in out


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


def test_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stdin:
        buffer = io.BytesIO(as_text({}, PLAIN).encode() + b"\xff")

    monkeypatch.setattr(sys, "stdin", Stdin())
    code, out = run(["-"], capsys)
    assert code == ExitCode.DONE
    assert "form: repaired" in out


def test_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "ran"
    file = tmp_path / "g.py"
    file.write_text(f"open({str(mark)!r}, 'w').close()\n{PLAIN}")
    code, out = run([str(file)], capsys)
    assert code == ExitCode.BAD_INPUT
    assert "1. [not_allowed] line 1, column 1: `open(" in out
    assert not mark.exists()


def test_no_codes_for_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.json"
    file.write_text(as_text({"x\x1b[2J": "y"}, PLAIN.replace("problem)", "'\x1b]0;x\x07')")))
    _, out = run([str(file)], capsys)
    assert "\x1b" not in out
    assert "\x07" not in out


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-graph", str(tmp_path / "none.json")]) == ExitCode.BAD_INPUT
    assert "found:    No such file or directory" in capsys.readouterr().err
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    assert main(["check-graph", str(tmp_path / "bytes.json")]) == ExitCode.BAD_INPUT
    assert main(["check-graph", str(tmp_path)]) == ExitCode.BAD_INPUT


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["check-graph", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for word in ("--max-calls", "--problem-type", "round_5", "exit codes", "docs/graph_code.md"):
        assert word in shown


@pytest.mark.parametrize(
    ("given", "fine"),
    [
        ('{"solve": prompt_custom.solve}', True),
        ('{"solve": prompt_custom.other}', False),
        ('{"solve": "Be quick.", "more": "x"}', True),
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


def test_a_saved_round_that_reads_its_prompts_may_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = workflow(
        'r = await self.solve(input=problem, instruction=self.prompts["solve"])\n'
        'return r["response"]'
    )
    graph = check_written(as_text({"solve": "Be exact."}, code), operators=OPERATORS).graph
    assert graph is not None
    saved = save_round(graph, tmp_path / "round_1", dataset="Mine")
    assert "self.prompts = {" in (saved.folder / "graph.py").read_text()
    assert run([str(saved.folder)], capsys)[0] == ExitCode.DONE
