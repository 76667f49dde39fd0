"""The command line: help, exit codes, flags anywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aflow_tune import cli
from aflow_tune.errors import AlreadyFinished, BadInput, ExitCode, Interrupted, RunFailed


def test_help_teaches_without_importing_anything_heavy() -> None:
    code = (
        "import sys; from aflow_tune.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'torch', 'ray', 'trinity', 'transformers', 'rich', 'agentscope'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for word in ("validate", "init", "exit codes", "key=value", "resumes"):
        assert word in result.stdout


def test_every_exit_code_is_in_the_help() -> None:
    text = cli._EPILOG
    for code in ExitCode:
        assert f"\n  {int(code)}  " in text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("no"), 2),
        (RunFailed("no"), 1),
        (Interrupted("no"), 3),
        (AlreadyFinished("no"), 5),
        (KeyboardInterrupt(), 1),
    ],
)
def test_each_ending_has_its_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("aflow_tune.tuning.run_config", fail)
    assert cli.main(["config.yaml"]) == code
    assert "aflow-tune:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["c.yaml", "seed=1", "--inline", "name=x"],
        ["run", "c.yaml", "--inline", "seed=1", "name=x"],
        ["--inline", "c.yaml", "seed=1", "name=x"],
    ],
)
def test_flags_may_stand_anywhere(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def run(config: Path, overrides: list[str], inline: bool | None) -> None:
        seen.update(config=config, overrides=overrides, inline=inline)

    monkeypatch.setattr("aflow_tune.tuning.run_config", run)
    assert cli.main(words) == 0
    assert seen == {"config": Path("c.yaml"), "overrides": ["seed=1", "name=x"], "inline": True}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "eval c.yaml --checkpoint last seed=1 --json",
            {"overrides": ["seed=1"], "checkpoint": ["last"], "json": True},
        ),
        ("eval c.yaml --vary top_p=1 x[0].y=2", {"overrides": ["x[0].y=2"], "vary": ["top_p=1"]}),
        ("eval c.yaml --out a=b --limit 3", {"overrides": [], "out": Path("a=b"), "limit": 3}),
        ("eval --json c.yaml --compare a b d=1", {"compare": ["a", "b"], "overrides": ["d=1"]}),
        (
            "sweep c.yaml --space b.c=1,2 d=5 --trials 3 --space s.yaml",
            {"overrides": ["d=5"], "space": ["b.c=1,2", "s.yaml"], "trials": 3},
        ),
        ("submit c.yaml a=1 --address x b=2", {"overrides": ["a=1", "b=2"], "address": "x"}),
        ("c.yaml --answers a.jsonl seed=1", {"overrides": ["seed=1"], "answers": Path("a.jsonl")}),
    ],
)
def test_settings_may_stand_anywhere(given: str, expected: dict[str, object]) -> None:
    parser, commands = cli._parsers()
    found = vars(parser.parse_args(cli._arranged(commands, given.split())))
    assert {name: found[name] for name in expected} == expected
    assert found["config"] == Path("c.yaml")


def test_options_of_a_dry_run_are_refused_without_it(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["c.yaml", "--tasks", "4", "seed=1", "--stage", "learn"]) == 2
    told = capsys.readouterr().err
    assert "command line: --tasks" in told
    assert "command line: --stage" in told


def test_without_arguments_the_help_is_shown_and_nothing_succeeds(
    capsys: pytest.CaptureFixture,
) -> None:
    assert cli.main([]) == 2
    assert "usage: aflow-tune" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["infer", "--problme", "2?"], "--problem"),
        (["infer", "--right-truth=391"], "--truth"),
        (["check-graph", "g.json", "--max-call-count", "3"], "--max-calls"),
        (["runs", "list", "--jsno"], "--json"),
        (["my.yaml", "--in-line"], "--inline"),
        (
            ["data", "check", "a.jsonl", "b.jsonl", "--nothing-like-it"],
            "aflow-tune data check --help",
        ),
    ],
)
def test_an_unknown_option_is_told_what_it_may_mean(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert "unrecognized" in said
    assert meant in said.rpartition("(")[2]


def test_unknown_options_are_bad_input() -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "c.yaml", "--fast"])
    assert stop.value.code == 2
