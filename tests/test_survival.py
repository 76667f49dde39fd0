"""What a run meets on the way: a full disk, damaged files, an API that is away, a straggler.

Whole runs in one process on the tiny model. Kills at random moments: `benchmarks/kills.py`, and
`test_run.py` for one of each kind.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from project import WORKFLOW, run_dir, write_project

from aflow_tune import cli
from aflow_tune.engines.local.checkpoint import verify_checkpoint
from aflow_tune.errors import BadInput, RunFailed
from aflow_tune.runs.folder import read_state
from aflow_tune.runs.listing import State, describe
from aflow_tune.tuning import run_config, validate_config

QUIET = ["explorer.eval_on_startup=false", "buffer.explorer_input.eval_tasksets=[]"]
ONE_STEP = [*QUIET, "explorer.eval_interval=1"]  # no more than a run has steps
"""Without evaluations these runs take half the time."""


def steps_in(run: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in run.glob("global_step_*"))


def trained(root: Path) -> list[int]:
    """The steps that the trainer logged, in order."""
    lines = map(json.loads, (run_dir(root) / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["role"] == "trainer"]


# -- the disk ------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_written_stops_the_run_with_its_state_whole(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_project(tmp_path, tiny_model_dir, steps=1)
    run_config(config, ONE_STEP, inline=True)
    run = run_dir(tmp_path)
    largest = max(path.stat().st_size for path in (run / "global_step_1").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, hard))  # files may not grow so large
    try:
        with pytest.raises(RunFailed, match="global_step_2 could not be written") as caught:
            run_config(config, [*ONE_STEP, "buffer.total_steps=3"], inline=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "The state of step 1 of 3 is saved" in str(caught.value)
    assert steps_in(run) == [1]
    verify_checkpoint(run / "global_step_1")
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []
    state = describe(run)
    assert (state.state, state.saved) == (State.FAILED, 1)
    assert state.error is not None
    assert "global_step_2 could not be written" in state.error
    assert run_config(config, [*ONE_STEP, "buffer.total_steps=3"], inline=True).steps_done == 3


# -- damaged files -------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_project(tmp_path, tiny_model_dir, steps=2)
    run_config(config, QUIET, inline=True)
    run = run_dir(tmp_path)
    weights = run / "global_step_2" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert run_config(config, [*QUIET, "buffer.total_steps=3"], inline=True).steps_done == 3
    said = capsys.readouterr().out
    assert "the checkpoint of step 2 is damaged" in said
    assert "resuming" in said
    assert "from step 1 of 3" in said
    assert trained(tmp_path) == [1, 2, 3]
    assert (run / "damaged_global_step_2" / "weights.safetensors").read_bytes() == bytes(content)
    verify_checkpoint(run / "global_step_2")

    for step in (1, 2, 3):  # cut off, as a copy that was broken off leaves them
        path = run / f"global_step_{step}" / "optimizer.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadInput, match="No checkpoint of this run is sound") as caught:
        run_config(config, [*QUIET, "buffer.total_steps=4"], inline=True)
    assert len(caught.value.faults) == 3
    assert steps_in(run) == [1, 2, 3]  # left where they are


def test_a_state_file_that_is_damaged_is_a_clear_stop(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = write_project(tmp_path, tiny_model_dir)
    run_dir(tmp_path).mkdir(parents=True)
    (run_dir(tmp_path) / "run.json").write_text('{"status": "run')
    with pytest.raises(BadInput, match="state of this run cannot be read"):
        run_config(config, QUIET, inline=True)


# -- what stays ----------------------------------------------------------------------------


def test_best_and_newest_stay_and_runs_resume_goes_on(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rewards that say how well a step did: the held-out score is best at step 2.
    scored = WORKFLOW.replace(
        "    record_metrics(letters=share)",
        "    import json, pathlib\n"
        f"    lines = pathlib.Path({str(run_dir(tmp_path))!r}) / 'metrics.jsonl'\n"
        "    steps = [json.loads(x) for x in lines.read_text().splitlines()] if lines.exists() "
        "else []\n"
        "    done = max([x['step'] for x in steps if x['role'] == 'trainer'], default=0)\n"
        "    record_metrics(letters={2: 0.9}.get(done, 0.1 * done))",
    )
    write_project(tmp_path, tiny_model_dir, workflow=scored)
    monkeypatch.chdir(tmp_path)
    words = ["buffer.total_steps=5", "explorer.eval_interval=1"]
    words += ["trainer.max_checkpoints_to_keep=1", "budget.wall_seconds=1000"]
    assert cli.main(["config.yaml", "--inline", *words]) == 0
    run = run_dir(tmp_path)
    assert steps_in(run) == [2, 5]
    assert describe(run).best == (2, pytest.approx(0.9))
    assert describe(run).step == 5

    monkeypatch.chdir("/")
    assert cli.main(["runs", "resume", str(run)]) == 5  # it has reached its target
    assert cli.main(["runs", "resume", str(run), "buffer.total_steps=6"]) == 0
    assert steps_in(run) == [2, 6]
    state = read_state(run)
    assert state is not None
    assert state.command is not None
    assert state.command["cwd"] == str(tmp_path)
    assert state.summary["scores"]["2"] == {"held_out": pytest.approx(0.9)}


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["trainer.save_interval=2", "explorer.eval_interval=4"], False),
        (["trainer.save_interval=3", "explorer.eval_interval=4"], True),
    ],
)
def test_a_best_checkpoint_that_may_never_be_saved_is_warned_of(
    tmp_path: Path, tiny_model_dir: Path, words: list[str], warned: bool
) -> None:
    config = write_project(tmp_path, tiny_model_dir, steps=8)
    report = validate_config(config, [*words, "checkpoints.keep_best=2"])
    assert not report.faults
    assert any("both saved and evaluated" in text for text in report.warnings) is warned
    (fault,) = validate_config(config, ["checkpoints.keep_best=-1"]).faults
    assert "checkpoints.keep_best" in fault.where


# -- what others do ------------------------------------------------------------------------

ASKING = WORKFLOW.replace(
    "    share = sum",
    "    from aflow_tune import client_for\n"
    '    await client_for("executor").complete([{"role": "user", "content": "hello"}])\n'
    "    share = sum",
)


class Answering(BaseHTTPRequestHandler):
    """An OpenAI-compatible API that says ok."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "usage": usage}
        content = json.dumps({**body, "choices": [{**choice, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Api:
    """An API at an address of its own that can be up or down."""

    def __init__(self) -> None:
        self.server: ThreadingHTTPServer | None = None
        self.held = socket.socket()  # while it is down, nobody else gets the port
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.held.bind(("127.0.0.1", 0))
        self.port = self.held.getsockname()[1]

    def up(self) -> None:
        kind = type("Server", (ThreadingHTTPServer,), {"allow_reuse_port": True})
        self.server = kind(("127.0.0.1", self.port), Answering)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def down(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None


@pytest.fixture
def api() -> Iterator[Api]:
    found = Api()
    yield found
    found.down()
    found.held.close()


def asking(api: Api, retries: int) -> list[str]:
    model = f"{{model: m, base_url: 'http://127.0.0.1:{api.port}/v1', retries: {retries}, "
    return [*QUIET, f"models={{executor: {model} backoff: 0.1}}}}", "trainer.save_interval=10"]


def test_an_api_that_is_down_stops_the_run_with_what_it_learned(
    tmp_path: Path, tiny_model_dir: Path, api: Api
) -> None:
    # Down from the second step on: the run counts its own calls, and waits for that.
    leaving = ASKING.replace(
        "    await client_for",
        "    import asyncio, pathlib\n"
        f"    place = pathlib.Path({str(tmp_path)!r})\n"
        "    with (place / 'calls').open('a') as log:\n"
        "        log.write('.')\n"
        "    while (place / 'calls').stat().st_size > 8 and not (place / 'down').exists():\n"
        "        await asyncio.sleep(0.01)\n"
        "    await client_for",
    )
    config = write_project(tmp_path, tiny_model_dir, steps=6, workflow=leaving)
    api.up()

    def leave() -> None:
        while not (tmp_path / "calls").exists() or len((tmp_path / "calls").read_text()) < 9:
            time.sleep(0.01)  # a step has 8 runs
        api.down()
        (tmp_path / "down").touch()

    watcher = threading.Thread(target=leave)
    watcher.start()
    with pytest.raises(RunFailed, match="m gave no answer") as caught:
        run_config(config, asking(api, 1), inline=True)
    watcher.join()
    # Nothing had been saved before: what the first steps taught is saved because of the failure.
    (saved,) = steps_in(run_dir(tmp_path))
    assert f"The state of step {saved} of 6 is saved" in str(caught.value)
    assert saved >= 1
    api.up()
    assert run_config(config, asking(api, 1), inline=True).steps_done == 6
    assert trained(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_with_enough_retries_an_outage_is_waited_out(
    tmp_path: Path, tiny_model_dir: Path, api: Api
) -> None:
    config = write_project(tmp_path, tiny_model_dir, steps=2, workflow=ASKING)

    def come_back() -> None:
        while not (run_dir(tmp_path) / "taskset_state" / "step_1.json").exists():
            time.sleep(0.05)
        time.sleep(3)
        api.up()

    watcher = threading.Thread(target=come_back)
    watcher.start()
    assert run_config(config, asking(api, 30), inline=True).steps_done == 2
    watcher.join()
    text = (run_dir(tmp_path) / "metrics.jsonl").read_text()
    assert "rollout/failure" not in text


@pytest.mark.slow
def test_a_straggler_costs_only_itself(tmp_path: Path, tiny_model_dir: Path) -> None:
    hanging = WORKFLOW.replace(
        "    share = sum",
        "    import asyncio, pathlib\n"
        f"    mark = pathlib.Path({str(tmp_path)!r}) / 'hung'\n"
        "    try:\n"
        "        mark.touch(exist_ok=False)\n"
        "        await asyncio.sleep(3600)\n"
        "    except FileExistsError:\n"
        "        pass  # another run hangs\n"
        "    share = sum",
    )
    config = write_project(tmp_path, tiny_model_dir, steps=2, workflow=hanging)
    assert run_config(config, [*QUIET, "rollout.run_timeout=20"], inline=True).steps_done == 2
    lines = map(json.loads, (run_dir(tmp_path) / "metrics.jsonl").read_text().splitlines())
    counts = [line["metrics"].get("rollout/failure/timed_out/sum", 0) for line in lines]
    assert sum(counts) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_workflow_that_ends_its_process_stops_the_run(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    ending = WORKFLOW.replace(
        "    share = sum", "    import os\n\n    os._exit(3)\n    share = sum"
    )
    config = write_project(tmp_path, tiny_model_dir, workflow=ending)
    words = [sys.executable, "-m", "aflow_tune.cli", str(config), *QUIET]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=1000)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "died 3 times in a row in step 1" in ran.stderr
