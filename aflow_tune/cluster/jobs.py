"""`aflow-tune submit`: a run as a job of Ray's job server; sending, following, stopping, listing.

The client needs only the address of the cluster's dashboard. It checks the run as far as it can,
and sends the user's code with a payload: the configuration as it was read, and the functions. Paths
of files that travel are relative to the current folder, and the job starts in a copy of that. The
job asks for its keys by printing a public key; its last line gives its exit code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import requests
from ray.job_submission import JobStatus, JobSubmissionClient

from aflow_tune.cluster import keys
from aflow_tune.cluster.machines import PYTHON_VARIABLE
from aflow_tune.cluster.ray_for_run import (
    NAME_IT,
    READ_INSIDE,
    code_of,
    refuse_open_server,
    refuse_secrets,
    runtime_env_of,
)
from aflow_tune.cluster.sent_function import dumps
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.stages import parts_of
from aflow_tune.config.tasksets import experience_buffer, locate, user_tasksets
from aflow_tune.config.validate import check_run_prompts, functions_of
from aflow_tune.contract.signature import check_functions
from aflow_tune.engines.local.models import BUNDLED
from aflow_tune.errors import BadInput, ExitCode, Fault, RunFailed
from aflow_tune.find_ray import answers, running_here, use_token
from aflow_tune.models.redaction import masked
from aflow_tune.operators import load_operators
from aflow_tune.shipping import MOST_FILE_BYTES, LeftOut, arrive, files_below, holds_keys

Function = Callable[..., Any]
ENDED = "aflow-tune: ended with exit code "
_WANTED = "aflow-tune: send the keys sealed for "
_PAYLOAD, _NAMES = "job.pickle", "keys.txt"
_STOP_SECONDS = 240  # for the run to save its state before Ray kills the job
_ASKED_SECONDS = 900.0  # until the job asks for keys: `runtime_env.pip` is installed first
_KEYS_SECONDS, _AWAY_SECONDS, _ANSWER_SECONDS = 120.0, 120.0, 15.0
_POLL_SECONDS = 1.0


def prepare_submission(
    config_path: Path, overrides: Sequence[str], folder: Path
) -> tuple[AflowConfig, dict[str, Any], list[str], list[str]]:
    """Check a configuration as far as this machine can, and write what travels into `folder`.
    Returns the configuration, the job's `runtime_env`, the names of the variables to hand over to
    the job, and warnings. Raises BadInput with every fault."""
    config = load_config(config_path, overrides)
    functions = workflow, judge = functions_of(config)
    if workflow is not None:
        check_functions(workflow, judge)
    check_run_prompts(config)
    base = config.positions.base
    code, _ = code_of(config, functions, load_operators(config.operators, base).values())
    for file in _data_of(config, config_path):
        if file.stat().st_size <= MOST_FILE_BYTES and not holds_keys(file.name):
            code.files.add(file)
        else:
            code.warnings.append(f"{file} does not travel: every node must see it where it is here")
    if faults := list(_not_to_be_sent(config)):
        raise BadInput("This run cannot be submitted.", faults)
    names = keys.names_of_keys(config, code)
    config.positions.file = os.path.relpath(config_path)
    config.positions.base = None if base is None else Path(os.path.relpath(base))
    config.note_command(config_path, overrides)
    payload = dumps((config, functions))
    secrets = keys.secrets_of(config, code)
    refuse_secrets(payload, secrets, "the functions and settings", READ_INSIDE)
    waits = {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_SECONDS)}
    extra = {_PAYLOAD: payload, _NAMES: "\n".join(names).encode()}
    # No keys variable in its environment: the job gets them here and hands them to its workers.
    environment = runtime_env_of(config, code, folder, waits, False, extra)
    return config, environment, names, code.warnings


def _not_to_be_sent(config: AflowConfig) -> Iterator[Fault]:
    """Settings that mean something else on another machine, and keys in clear: the YAML travels."""
    where, root = config.positions.where, config.checkpoint_root_dir
    seen = "an absolute path that every node of the cluster sees"
    if not root or not os.path.isabs(root):
        cure = "checkpoint_root_dir: /shared/runs"
        yield Fault(where("checkpoint_root_dir"), seen, repr(root), cure)
    if config.cluster.ray_address == "local":
        expected, cure = "a run on the cluster that it is submitted to", "take it out"
        yield Fault(where("cluster.ray_address"), expected, "local: a Ray of its own", cure)
    models: dict[str, str] = {}
    for _, part in parts_of(config)[0]:
        models.setdefault(str(part.model.model_path), part.positions.where("model.model_path"))
        for number, auxiliary in enumerate(part.explorer.auxiliary_models):
            key = f"explorer.auxiliary_models.{number}.model_path"
            models.setdefault(str(auxiliary.model_path), part.positions.where(key))
    for name, place in models.items():
        local = name.startswith((".", "~")) or os.path.isdir(os.path.expanduser(name))
        if local and name not in BUNDLED and not os.path.isabs(name):
            cure = "put the model on a shared disk: model.model_path=/shared/models/NAME"
            yield Fault(place, f"a hub id, or {seen}", repr(name), cure)
    for key, value in config.flatten().items():
        if ".headers_env." not in key and masked(key, value) != value:
            place = where(key).partition("=")[0]  # an override contains the value
            cure = f"take it out and export it, or {NAME_IT}"
            yield Fault(place, "no keys: clusters keep what is sent", "a key in clear", cure)


def _data_of(config: AflowConfig, config_path: Path) -> list[Path]:
    """The YAML, and the files of data sets, graph, writer and harvest."""
    data = [Path(os.path.abspath(config_path))]
    for _, part in parts_of(config)[0]:
        sets: list[Any] = [taskset for _, taskset, _ in user_tasksets(part)]
        for taskset in [*sets, *filter(None, [experience_buffer(part)])]:
            found = locate(part, taskset) if taskset.path else None
            if found is not None and found.kind in ("file", "folder"):
                data += found.files
    stays = LeftOut(patterns=config.runtime_env.exclude)
    graph, writer, harvest = config.graph, config.writer, config.harvest
    named = (graph.path, graph.test_cases, writer.test_cases, writer.prompt, harvest.templates)
    for name in filter(None, named):
        path = Path(os.path.abspath(config.positions.beside(name)))
        data += [file for file, _ in files_below(path, stays)] or [path] * path.is_file()
    return list(dict.fromkeys(data))


def open_payload() -> tuple[AflowConfig, tuple[Function | None, Function | None]]:
    """In the job: put the keys into this process's environment, and read configuration and
    functions as the client sent them. RunFailed: not a submitted job, or the keys did not come."""
    arrival = arrive()
    if arrival is None or arrival.base is None:
        raise RunFailed("this is no job that `aflow-tune submit` sent")
    # Keys first: unpickling imports the user's modules, which may read them.
    if (arrival.base.parent / _NAMES).read_text(encoding="utf-8").split():
        os.environ.update(_receive_keys())
    config, functions = pickle.loads((arrival.base.parent / _PAYLOAD).read_bytes())
    return config, functions


def _receive_keys() -> dict[str, str]:
    """Ask the client for the keys, and delete its sealed answer from the cluster."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # made in Cython

    receiver = keys.Receiver()
    uri = f"gcs://{_package_of(receiver.public)}".encode()
    client = GcsClient(address=os.environ["RAY_ADDRESS"])
    print(f"{_WANTED}{receiver.public}", flush=True)
    deadline = time.monotonic() + _KEYS_SECONDS
    while time.monotonic() < deadline:
        sealed = client.internal_kv_get(uri, None)
        if sealed:
            client.internal_kv_del(uri, False, None)
            return receiver.open(sealed)
        time.sleep(0.2)
    raise RunFailed("the client did not send the keys; was it ended right after the submission?")


def _package_of(public: str) -> str:
    return f"_aflow_tune_keys_{public[:32]}.zip"


class Jobs:
    """The jobs of one cluster. `address`: of the dashboard, such as http://HEAD:8265, or of the
    cluster; None: RAY_API_SERVER_ADDRESS, else RAY_ADDRESS, else the Ray that runs on this machine.
    BadInput: no job server answers there, or it rejects our token."""

    def __init__(self, address: str | None = None) -> None:
        use_token()
        logging.getLogger("ray").setLevel(logging.WARNING)  # it logs every upload
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"ray\.dashboard")
        names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
        # Removed meanwhile: Ray prefers them to the address that it is given.
        held = {name: os.environ.pop(name) for name in names if os.environ.get(name)}
        address = address or next(iter(held.values()), None) or running_here()
        try:
            if address is None:
                raise ConnectionError("no Ray runs on this machine")
            if re.fullmatch(r"[^/\s]+:\d+", address) and not answers(address):  # Ray tries minutes
                raise ConnectionError("no Ray answers there")
            if address.startswith(("http://", "https://")):
                # Ray's client has no timeout for a port that accepts and never answers.
                requests.get(f"{address.rstrip('/')}/api/version", timeout=_ANSWER_SECONDS)
            self.client = JobSubmissionClient(address)
        except Exception as error:  # Ray's AuthenticationError is a bare Exception
            raise _no_server(address or "--address", " ".join(str(error).split())[:400]) from error
        finally:
            os.environ.update(held)

    def submit(
        self, config_path: Path, overrides: Sequence[str], say: Callable[[str], None] = print
    ) -> str:
        """Check a configuration as far as this machine can, send it, hand over its keys, and return
        the job's id. BadInput: it was refused, or the cluster runs on this machine where other
        users could change what is sent; nothing was sent. RunFailed: the cluster rejected the job
        or the keys, or the job did not ask for them."""
        with tempfile.TemporaryDirectory(prefix="aflow-tune-") as folder:
            prepared = prepare_submission(config_path, overrides, Path(folder))
            config, environment, names, warned = prepared
            for warning in warned:
                say(f"warning: {warning}")
            if not config.runtime_env.trust_users:
                answer = self.client._do_request("GET", "/nodes?view=summary")
                told = answer.json() if answer.ok else {}
                refuse_open_server((told.get("data") or {}).get("summary") or [])
            root = str(config.checkpoint_root_dir)
            run_dir = os.path.join(root, config.project, config.group, config.name)
            # With `pip` the job's own environment is active, and `python` is its interpreter.
            own = f'"${{{PYTHON_VARIABLE}:-python}}"'
            python = "python" if config.runtime_env.pip else own
            try:
                job = self.client.submit_job(
                    entrypoint=f"{python} -m aflow_tune.commands.run_submitted",
                    runtime_env=environment,
                    metadata={"aflow_tune_run": run_dir},
                )
            except (OSError, RuntimeError, ValueError) as error:
                text = " ".join(str(error).split())[-600:]
                raise RunFailed(f"the cluster did not take the job: {text}") from error
        say(f"submitted {job}; run folder {run_dir}")
        if names:
            self._hand_over(job, names)
        return str(job)

    def follow(self, job: str, show: Callable[[str], None]) -> int:
        """Show a job's log until it ends, and return its exit code. BadInput: there is no such job.
        RunFailed: the job server was unreachable for two minutes; the job goes on."""
        self.status(job)
        text, heard, ended = "", time.monotonic(), False
        while not ended:
            time.sleep(_POLL_SECONDS)
            try:
                ended = self.client.get_job_status(job).is_terminal()
                heard = time.monotonic()
                before, text = len(text), self.client.get_job_logs(job)
                if len(text) > before:
                    show(text[before:])
            except (OSError, RuntimeError) as error:
                if time.monotonic() - heard > _AWAY_SECONDS:
                    away = f"the job server is away; job {job} goes on: {error}"
                    raise RunFailed(away) from error
                ended = False
        if told := re.findall(rf"^{ENDED}(\d+)$", text, re.MULTILINE):
            return int(told[-1])
        code = self.client.get_job_info(job).driver_exit_code
        return int(ExitCode.FAILED if code is None else code)

    def stop(self, job: str) -> bool:
        """Ask a job to save its state and end; False if it has ended already."""
        self.status(job)
        return bool(self.client.stop_job(job))

    def status(self, job: str) -> JobStatus:
        """Ray's status of a job. BadInput: there is no such job."""
        try:
            return self.client.get_job_status(job)
        except RuntimeError as error:
            title, cure = "There is no such job.", "aflow-tune submit --list"
            raise BadInput.of(title, job, "the id of a job", "unknown", cure) from error

    def listed(self) -> list[dict[str, Any]]:
        """Jobs of `submit`, latest last: id, status, run folder, seconds run, start (epoch ms)."""
        rows = []
        for info in self.client.list_jobs():
            run = (info.metadata or {}).get("aflow_tune_run")
            if run is not None and info.submission_id is not None:
                end = info.end_time or time.time() * 1000
                rows.append(
                    {
                        "job": info.submission_id,
                        "status": info.status.value,
                        "run": run,
                        "seconds": round((end - (info.start_time or end)) / 1000, 1),
                        "start": info.start_time or 0,
                    }
                )
        return sorted(rows, key=lambda row: row["start"])

    def _hand_over(self, job: str, names: Sequence[str]) -> None:
        """Wait until the job asks for its keys, and upload them sealed."""
        deadline, asked = time.monotonic() + _ASKED_SECONDS, None
        while asked is None:
            log, ended = "", False
            with contextlib.suppress(RuntimeError, OSError):
                ended = self.client.get_job_status(job).is_terminal()
                log = str(self.client.get_job_logs(job))
            asked = re.search(rf"^{_WANTED}([0-9a-f]{{64}})$", log, re.MULTILINE)
            if asked is None and (ended or time.monotonic() > deadline):
                told = f"job {job} did not get as far as asking for its keys:\n{log[-2000:]}"
                raise RunFailed(told)
            time.sleep(_POLL_SECONDS)
        sealed = keys.seal({name: os.environ[name] for name in names}, asked[1])
        place = f"/api/packages/gcs/{_package_of(asked[1])}"
        answer = self.client._do_request("PUT", place, data=sealed)
        if answer.status_code != requests.codes.ok:
            raise RunFailed(f"the cluster did not take the keys: {answer.text[:400]}")


def _no_server(address: str, found: str) -> BadInput:
    cure = "`aflow-tune cluster up`, or give a dashboard: --address http://HOST:8265"
    if re.search("oken|nauthorized|orbidden", found):
        cure = "copy the cluster's ~/.ray/auth_token here, or export RAY_AUTH_TOKEN=..."
    expected = "a Ray job server that takes us"
    return BadInput.of("No job can be submitted.", address, expected, found, cure)
