"""The command line: help, exit codes, flags anywhere; what `aflow-tune init` writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aflow_tune import cli
from aflow_tune.commands.run import write_project
from aflow_tune.errors import AlreadyFinished, BadInput, ExitCode, Interrupted, RunFailed


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from aflow_tune.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'torch', 'ray', 'trinity', 'transformers', 'rich', 'agentscope'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for exit_code in ExitCode:
        assert f"\n  {int(exit_code)}  " in result.stdout


def test_a_script_that_imported_trinity_first_prints_nothing_of_it() -> None:
    code = (
        "from trinity.utils.log import get_logger\n"
        "made = get_logger('before')\n"
        "from aflow_tune.config.quiet import quiet\n"
        "quiet()\n"
        "made.warning('told')\nget_logger('after').warning('told')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


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
    ("given", "expected"),
    [
        ("c.yaml seed=1 --inline name=x", {"overrides": ["seed=1", "name=x"], "inline": True}),
        ("run c.yaml --inline seed=1", {"overrides": ["seed=1"], "inline": True}),
        ("--inline c.yaml seed=1", {"overrides": ["seed=1"], "inline": True}),
        (
            "eval c.yaml --checkpoint last seed=1 --json",
            {"overrides": ["seed=1"], "checkpoints": ["last"], "json": True},
        ),
        ("eval c.yaml --vary top_p=1 x[0].y=2", {"overrides": ["x[0].y=2"], "vary": ["top_p=1"]}),
        ("eval c.yaml --out a=b --limit 3", {"overrides": [], "out": Path("a=b"), "limit": 3}),
        ("eval --json c.yaml --compare a b d=1", {"compare": ["a", "b"], "overrides": ["d=1"]}),
        (
            "sweep c.yaml --space b.c=1,2 d=5 --seeds 0,1 --space s.yaml",
            {"overrides": ["d=5"], "space": ["b.c=1,2", "s.yaml"], "seeds": (0, 1)},
        ),
        ("submit c.yaml a=1 --address x b=2", {"overrides": ["a=1", "b=2"], "address": "x"}),
        ("c.yaml --answers a.jsonl seed=1", {"overrides": ["seed=1"], "answers": Path("a.jsonl")}),
    ],
)
def test_settings_and_flags_may_stand_anywhere(given: str, expected: dict[str, object]) -> None:
    parser, commands = cli._parsers()
    found = vars(parser.parse_args(cli._arranged(commands, given.split())))
    assert {name: found[name] for name in expected} == expected
    assert found["config"] == Path("c.yaml")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["infer", "--problme", "2?"], "--problme"),
        (["my.yaml", "--in-line"], "--in-line"),
        (["sweep", "c.yaml", "--space", "a=1,2", "--seeds", "1,1"], "--seeds"),
        (["sweep", "c.yaml", "--space", "a=1,2", "--trials", "0"], "--trials"),
        (["estimate", "c.yaml", "--gpu-memory", "24"], "24GB"),
    ],
)
def test_an_unknown_option_or_value_is_bad_input(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == ExitCode.BAD_INPUT
    assert meant in capsys.readouterr().err.splitlines()[-1]
    assert cli.main([]) == ExitCode.BAD_INPUT


# --- a new project ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_new_project_validates_and_its_test_passes(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert cli.main(["init", str(folder)]) == 0
    for command in (
        ["aflow_tune.cli", "validate", "config.yaml"],
        ["pytest", "-q", "-p", "no:cacheprovider"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_project_to_search_in_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert cli.main(["init", "--search", str(folder)]) == 0
    written = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    config = (folder / "config.yaml").read_text()
    assert "workflows/" not in config
    assert {"graph/graph.py", "score.py", "train.jsonl", "held_out.jsonl"} < written
    readme = (folder / "README.md").read_text()
    assert [name for name in written - {"README.md"} if f"`{name}`" not in readme] == []
    done = subprocess.run(
        [sys.executable, "-m", "aflow_tune.cli", "validate", "config.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_project_overwrites_nothing_and_describes_its_files(tmp_path: Path) -> None:
    (tmp_path / "workflow.py").write_text("mine")
    written = {path.name for path in write_project(tmp_path)}
    assert written | {"workflow.py"} == {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "workflow.py").read_text() == "mine"
    readme = (tmp_path / "README.md").read_text()
    assert [name for name in written - {"README.md"} if f"`{name}`" not in readme] == []
    assert cli.main(["init", str(tmp_path)]) == 2
    with pytest.raises(BadInput):
        write_project(tmp_path / "workflow.py" / "mine")
