"""`aflow-tune submit`: a run as a job of Ray's job server, and what becomes of it.

The client needs the address of the cluster's dashboard and nothing else: no shared disk, no Ray
process. What it sends is in `submission.py`; the job (`submitted.py`) runs on the head node like a
command there. The last line that a job prints tells how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import requests
from ray.job_submission import JobStatus, JobSubmissionClient

from aflow_tune.cluster.open_sessions import refuse_open_server
from aflow_tune.cluster.sealed import seal
from aflow_tune.cluster.submission import prepare_submission
from aflow_tune.cluster.submitted import (
    ENDED,
    PYTHON_VARIABLE,
    WANTED,
    package_of,
)
from aflow_tune.errors import BadInput, ExitCode, Fault, RunFailed
from aflow_tune.find_ray import answers, running_here, use_token

_KEYS_SECONDS = 900.0
"""How long the job may take until it asks for keys: `runtime_env.pip` is installed before."""
_AWAY_SECONDS = 120.0
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 15.0
_HEAD = re.compile(r"[^/\s]+:\d+")
"""An address of a cluster, where its dashboard is asked for."""


@dataclass(frozen=True)
class Submitted:
    """A job that the cluster has taken."""

    job: str
    run_dir: str


class Jobs:
    """The jobs of one cluster.

    Args:
        address: the dashboard's, such as http://HEAD:8265, or that of the cluster. None: that of
            RAY_API_SERVER_ADDRESS, of RAY_ADDRESS, or of the Ray that runs here.

    Raises:
        BadInput: no job server answers there, or it does not take our token.
    """

    def __init__(self, address: str | None = None) -> None:
        use_token()
        logging.getLogger("ray").setLevel(logging.WARNING)  # it tells of every upload
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"ray\.dashboard")
        given = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
        address = address or given or running_here()
        if address is None:
            raise _no_server("--address", "no Ray runs on this machine")
        if _HEAD.fullmatch(address) and not answers(address):  # Ray's client tries for long
            raise _no_server(address, "no Ray answers there")
        try:
            if address.startswith(("http://", "https://")):
                # Ray's client waits without end for what has the port and is silent.
                requests.get(f"{address.rstrip('/')}/api/version", timeout=_ANSWER_SECONDS)
            with _only(address):
                self.client = JobSubmissionClient(address)
        except (ConnectionError, RuntimeError, ValueError, requests.RequestException) as error:
            raise _no_server(address, " ".join(str(error).split())[:400]) from error
        except Exception as error:  # Ray's AuthenticationError has no base of its own
            raise _no_server(address, " ".join(str(error).split())[:400]) from error

    def submit(
        self, config_path: Path, overrides: Sequence[str], say: Callable[[str], None] = print
    ) -> Submitted:
        """Check a configuration as far as this machine can, send it, and hand over its keys.

        Raises:
            BadInput: the configuration, its code or its data were refused, or other users of this
                machine, if the cluster is here, could change them; nothing was sent.
            RunFailed: the cluster did not take the job, or it ended before it asked for its keys.
        """
        with tempfile.TemporaryDirectory(prefix="aflow-tune-") as folder:
            run = prepare_submission(config_path, overrides, Path(folder))
            for warning in run.warnings:
                say(f"warning: {warning}")
            if not run.config.runtime_env.trust_users:
                answer = self.client._do_request("GET", "/nodes?view=summary")
                told = answer.json() if answer.ok else {}
                refuse_open_server((told.get("data") or {}).get("summary") or [])
            # With `pip` the job's own environment is active, and `python` is its interpreter.
            own = run.config.runtime_env.pip
            python = "python" if own else f'"${{{PYTHON_VARIABLE}:-python}}"'
            job = self._send(
                entrypoint=f"{python} -m aflow_tune.commands.run_submitted",
                runtime_env=run.environment,
                metadata={"aflow_tune_run": run.run_dir},
            )
        say(f"submitted {job}; run folder {run.run_dir}")
        if run.names:
            self._hand_over(job, run.names)
        return Submitted(job, run.run_dir)

    def follow(self, job: str, show: Callable[[str], None]) -> int:
        """Show a job's log until it ends; returns its exit code.

        Raises:
            BadInput: there is no such job.
            RunFailed: the job server was away for too long; the job goes on.
        """
        self._known(job)
        shown, heard = 0, time.monotonic()
        while True:
            try:
                shown = asyncio.run(self._tail(job, shown, show))
                if self.client.get_job_status(job).is_terminal():
                    break
                heard = time.monotonic()
            except (OSError, RuntimeError, aiohttp.ClientError) as error:
                if time.monotonic() - heard > _AWAY_SECONDS:
                    raise RunFailed(
                        f"the job server is away; job {job} goes on: {error}"
                    ) from error
            time.sleep(_POLL_SECONDS)
        text = self.client.get_job_logs(job)
        if len(text) > shown:
            show(text[shown:])
        return self.exit_code(job)

    def exit_code(self, job: str) -> int:
        """The exit code of a job that has ended."""
        told = re.findall(rf"^{ENDED}(\d+)$", self.client.get_job_logs(job), re.MULTILINE)
        if told:
            return int(told[-1])
        code = self.client.get_job_info(job).driver_exit_code
        if code is None:
            return int(ExitCode.FAILED)
        return int(code)

    def stop(self, job: str) -> bool:
        """Ask a job to save its state and end; False if it had ended before."""
        self._known(job)
        return bool(self.client.stop_job(job))

    def status(self, job: str) -> JobStatus:
        """Where a job is."""
        self._known(job)
        return self.client.get_job_status(job)

    def listed(self) -> list[dict[str, Any]]:
        """Our jobs, the latest last: id, status, run folder, seconds since the start."""
        rows = []
        for info in self.client.list_jobs():
            run = (info.metadata or {}).get("aflow_tune_run")
            if run is None or info.submission_id is None:
                continue
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

    async def _tail(self, job: str, shown: int, show: Callable[[str], None]) -> int:
        seen = 0
        async for text in self.client.tail_job_logs(job):
            new = text[max(0, shown - seen) :]
            seen += len(text)
            if new:
                show(new)
                shown = max(shown, seen)
        return shown

    def _send(self, **job: Any) -> str:
        try:
            return str(self.client.submit_job(**job))
        except (OSError, RuntimeError) as error:
            text = " ".join(str(error).split())[-600:]
            if "No available agent" in text:
                text += (
                    " The agent of the head node is still starting, or another Ray of that machine "
                    "has its port: then start the head with --dashboard-agent-listen-port=PORT."
                )
            raise RunFailed(f"the cluster did not take the job: {text}") from error

    def _hand_over(self, job: str, names: Sequence[str]) -> None:
        """Wait until the job asks for keys, and upload them sealed."""
        deadline = time.monotonic() + _KEYS_SECONDS
        while True:
            asked = re.search(rf"^{WANTED}([0-9a-f]{{64}})$", self._logs(job), re.MULTILINE)
            if asked:
                break
            if self.status(job).is_terminal() or time.monotonic() > deadline:
                log = self._logs(job)[-2000:]
                raise RunFailed(f"job {job} did not get as far as asking for its keys:\n{log}")
            time.sleep(_POLL_SECONDS)
        sealed = seal({name: os.environ[name] for name in names}, asked[1])
        protocol, name = package_of(asked[1])
        answer = self.client._do_request("PUT", f"/api/packages/{protocol}/{name}", data=sealed)
        if answer.status_code != requests.codes.ok:
            raise RunFailed(f"the cluster did not take the keys: {answer.text[:400]}")

    def _logs(self, job: str) -> str:
        with contextlib.suppress(RuntimeError):
            return str(self.client.get_job_logs(job))
        return ""

    def _known(self, job: str) -> None:
        try:
            self.client.get_job_status(job)
        except RuntimeError as error:
            there = ", ".join(row["job"] for row in self.listed()[-3:]) or "none"
            raise BadInput(
                "There is no such job.",
                [Fault(job, "the id of a job", f"unknown; our latest: {there}", "--list")],
            ) from error


@contextlib.contextmanager
def _only(address: str) -> Iterator[None]:
    """Ray lets RAY_ADDRESS win over the address that it is given."""
    names = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
    held = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


def _no_server(address: str, found: str) -> BadInput:
    cure = (
        "start one with `aflow-tune cluster up`, or give the dashboard: --address http://HOST:8265"
    )
    if "oken" in found or "nauthorized" in found or "orbidden" in found:
        cure = (
            "copy the cluster's ~/.ray/auth_token here, or export RAY_AUTH_TOKEN=... (on the head "
            "node `ray get-auth-token` prints it)"
        )
    return BadInput(
        "No job can be submitted.", [Fault(address, "a Ray job server that takes us", found, cure)]
    )
