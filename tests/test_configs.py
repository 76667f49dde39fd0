"""Every shipped YAML is valid from any folder, and says what its comments claim."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from aflow_tune.config import AflowSections
from aflow_tune.engines.trinity.config import load_config
from aflow_tune.engines.trinity.validate import validate

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
CLUSTER = ["cluster.ray_address=10.0.0.1:6379"]
OVERRIDES = {"react_gsm8k_qwen.yaml": CLUSTER, "writer_qwen7b.yaml": CLUSTER}
OUR_SECTIONS = {
    field.name for field in fields(AflowSections) if field.default_factory is not MISSING
}
OURS = {field.name for field in fields(AflowSections)} - OUR_SECTIONS


def write_mixed(path: Path, numbers: range) -> None:
    """Rows of the sources of the writer's recipes, as `aflow-tune data prepare` writes them."""
    rows: list[dict[str, str]] = []
    for n in numbers:
        own = {
            "gsm8k": {"question": f"What is {n} + 3?", "answer": f"Add.\n#### {n + 3}"},
            "mbpp": {
                "prompt": f"Write add(x) that adds {n}.",
                "entry_point": "add",
                "code": f"def add(x):\n    return x + {n}",
                "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}",
            },
            "drop": {"context": f"Passage: {n} cats. Question: how many?", "ref_text": str(n)},
        }
        rows += [{"source": name, "benchmark": name, **row} for name, row in own.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_is_valid_from_any_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("WRITER_DATA", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "not-a-key")
    write_mixed(tmp_path / "train.jsonl", range(8))
    write_mixed(tmp_path / "validation.jsonl", range(8, 12))
    report = validate(path, OVERRIDES.get(path.name, []))
    assert not report.faults, report.render()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_exactly_our_own_keys_are_marked(path: Path) -> None:
    section = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        key = re.match(r"( *)(\w+):(.*)", line)
        if not key:
            continue
        if not key[1]:
            section = key[2]
        opens_a_section = not key[3].split("#")[0].strip()
        ours = section in OURS or (section in OUR_SECTIONS and not opens_a_section)
        assert ("# *" in key[3]) == ours, f"{path.name}:{number}: {line}"


def test_the_quickstart_leaves_room_for_its_longest_prompt() -> None:
    from aflow_tune.engines.local.models import is_cached, load_tokenizer, resolve_model
    from aflow_tune.plugins import resolve

    config = load_config(ROOT / "configs" / "quickstart.yaml", [])
    name = config.model.model_path
    if not is_cached(name):
        pytest.skip(f"{name} is not in the cache; run the quickstart first")
    tokenizer = load_tokenizer(resolve_model(name))
    messages = resolve(f"{ROOT}/workflows/three_terms.py:messages_for")("999 + 9")
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tokens = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    assert tokens <= config.model.max_prompt_tokens
    assert tokens + config.model.max_response_tokens <= config.model.max_model_len
    longest = tokenizer("<answer>999</answer><|im_end|>", add_special_tokens=False)["input_ids"]
    assert len(longest) <= config.model.max_response_tokens
