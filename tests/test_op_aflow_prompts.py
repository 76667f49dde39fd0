"""AFlow's prompts as a preset, read from files laid out as AFlow has them ."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aflow_tune.config.load import load_config
from aflow_tune.errors import BadInput
from aflow_tune.models import ScriptedModel
from aflow_tune.operators import OPERATORS, check_prompts, use_prompts

PROMPTS = '''
import os
SC_ENSEMBLE_PROMPT = """
Of {problem}
these: {solutions}
which? Use {{letter}}.
"""
ANSWER_GENERATION_PROMPT = """
Answer {input}
"""
PYTHON_CODE_VERIFIER_PROMPT = """
Compute {problem} with {analysis}.
{feedback}
Now."""
REFLECTION_ON_PUBLIC_TEST_PROMPT = "{problem}{solution}{exec_pass}: {test_fail}"
os.mkdir("never_run")
'''
FIELDS = """
class ScEnsembleOp(BaseModel):
    solution_letter: str = Field(default="", description="the {letter}")
class AnswerGenerateOp(BaseModel):
    thought: str = Field(default="", description="why")
    answer: str = Field(default="", description="what")
"""
FORMATTER = """
class XmlFormatter(BaseFormatter):
    def prepare_prompt(self, prompt: str) -> str:
        lines = []
        for name in self.names():
            lines.append(f"<{name}>{self.about(name)}</{name}>")
        shown = "\\n".join(lines)
        return_value = prompt + f"\\n# As elements:\\n{shown}"
        return return_value
class CodeFormatter(BaseFormatter):
    def prepare_prompt(self, prompt: str) -> str:
        code = (
            "\\n\\n"
            "Write Python. "
        )
        if self.function_name:
            code += (
                f"\\nIt has a '{self.function_name}' in it. "
                f"That is called."
            )
        return prompt + code
"""
REPLIES = {
    "ScEnsemble": "<solution_letter>B</solution_letter>",
    "AnswerGenerate": "<thought>t</thought><answer>4</answer>",
    "CustomCodeGenerate": "```python\ndef f():\n    return 4\n```",
    "Custom": "x",
}


def checkout(root: Path, *, formatter: bool = True) -> Path:
    template = root / "workspace" / "GSM8K" / "workflows" / "template"
    template.mkdir(parents=True)
    (template / "op_prompt.py").write_text(PROMPTS)
    (template / "operator_an.py").write_text(FIELDS)
    if formatter:
        (root / "scripts").mkdir()
        (root / "scripts" / "formatter.py").write_text(FORMATTER)
    return template / "op_prompt.py"


def prompts_of(tmp_path: Path, file: Path, more: str = "") -> dict[str, Any]:
    config = tmp_path / "run.yaml"
    config.write_text(f"prompts:\n  preset: {file}\n{more}")
    prompts = load_config(config).prompts
    check_prompts(prompts)
    return prompts


def asked(name: str, prompts: Any, *arguments: Any) -> str:
    model = ScriptedModel([REPLIES[name]])
    with use_prompts(prompts):
        asyncio.run(OPERATORS[name](model)(*arguments))
    return str(model.asked[0].messages[0]["content"])


ASKED = [
    ("Custom", ("in", "Do: "), "Do: in"),
    ("AnswerGenerate", ("1+1 {no_form}?",), "\nAnswer 1+1 {no_form}?\n\n# As elements:\n"
     "<thought>why</thought>\n<answer>what</answer>"),
    ("ScEnsemble", (["a", "b"], "p"), "\nOf p\nthese: A: \na\n\n\nB: \nb\n\n\n\nwhich? "
     "Use {letter}.\n\n# As elements:\n<solution_letter>the {letter}</solution_letter>"),
    ("CustomCodeGenerate", ("p", "f", "Code: "),
     "Code: p\n\nWrite Python. \nIt has a 'f' in it. That is called."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "expected"), ASKED)
def test_a_question_is_put_together_as_aflow_does_it(
    tmp_path: Path, name: str, arguments: tuple[Any, ...], expected: str
) -> None:
    prompts = prompts_of(tmp_path, checkout(tmp_path / "AFlow"))
    assert asked(name, prompts, *arguments) == expected
    assert not Path("never_run").exists()


def test_without_the_other_files_our_own_words_ask_for_the_form(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, checkout(tmp_path / "AFlow", formatter=False))
    text = asked("AnswerGenerate", prompts, "1+1?")
    assert text.startswith("\nAnswer 1+1?\n")
    assert "<answer>the final answer and nothing else</answer>" in text


@pytest.mark.parametrize("text", [None, "X = 1", "X = (", "SC_ENSEMBLE_PROMPT = '{solutions'"])
def test_what_is_no_file_of_prompts_is_refused_with_its_place(
    tmp_path: Path, text: str | None
) -> None:
    file, config = tmp_path / "op_prompt.py", tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    config.write_text(f"prompts:\n  preset: {file}\n")
    with pytest.raises(BadInput) as caught:
        load_config(config)
    (fault,) = caught.value.faults
    assert fault.where.startswith(f"{config}:2")
