"""The Ray of one run: a running cluster that was found, or a local one started for the run.

Before a run starts on a running cluster, its nodes are checked, as `aflow-tune doctor` does too:
could other users of a machine change what Ray unpacks there (`open_sessions`, over a connection
that brings no code), and is everything there that the run needs (`lacking_on_nodes`). After the run
its actors are ended; nothing of it stays on the cluster.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pickletools
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from aflow_tune import shipping
from aflow_tune.cluster import keys, worker
from aflow_tune.cluster.local_ray import local_ray
from aflow_tune.cluster.sent_function import pack
from aflow_tune.config import on_processors
from aflow_tune.config.settings import AflowConfig, logical_gpus
from aflow_tune.errors import BadInput, Fault
from aflow_tune.find_ray import (
    FoundRay,
    find_ray,
    greet,
    handlers_kept,
    open_to_others,
    ray_base,
    refused_connection,
)
from aflow_tune.shipping import Code

Function = Callable[..., Any]
READ_INSIDE = "read it inside the function, with os.environ: every worker has it"
NAME_IT = "give its name instead: `runtime_env: {secrets: [NAME]}`"
_LASTING = "synchronizer"
_LEAVE_SECONDS = 15.0  # the actors of a command that was just killed need a while to end
_ASK_SECONDS = 300.0  # the first worker of a node installs `runtime_env.pip`
_OPEN = "Other users could change the code of this run."


@contextlib.contextmanager
def ray_for_run(
    config: AflowConfig,
    functions: Iterable[Function | None],
    env_vars: dict[str, str],
    phase: Callable[[str], None],
) -> Iterator[None]:
    """For the block, be connected to the run's Ray with the user's code in every worker. BadInput:
    Ray cannot be joined, the functions cannot be sent, or this process has joined a Ray already."""
    if ray.is_initialized():  # code and keys are part of how a process joins Ray
        title, expected = "This process is on a Ray already.", "a process that has not joined Ray"
        cure = "take `ray.init()` out and name the cluster with `cluster.ray_address`"
        raise BadInput.of(title, "ray.init()", expected, "it was called before tune()", cure)
    code, content = code_of(config, functions)
    found = find_ray(config)
    if found is not None:
        phase(f"joining the Ray at {found.address} ({found.source})")
        for warning in code.warnings:
            print(f"warning: {warning}", flush=True)
        with attached_ray(found, config, code, content, env_vars):
            yield
        return
    phase(f"starting Ray, with its files in {ray_base()}")
    with tempfile.TemporaryDirectory(prefix="aflow-tune-") as folder:
        manifest = Path(folder) / shipping.MANIFEST
        manifest.write_bytes(shipping.manifest_of(code))
        own = {**config.runtime_env.env_vars, **env_vars, shipping.VARIABLE: str(manifest)}
        for_gpus = config.engine == "trinity"
        logical = logical_gpus(config) if for_gpus and on_processors() else None
        with local_ray(config.ray_namespace, own, worker.HOOK, for_gpus, logical):
            yield


def code_of(
    config: AflowConfig, functions: Iterable[Function | None], further: Iterable[Any] = ()
) -> tuple[Code, bytes]:
    """The code that has to travel, and the pickled functions: what the functions, the modules that
    the configuration names (in dotted paths, such as a policy loss) and the objects in `further`
    (such as operators) need. In a submitted job the client has already sent the files of
    `runtime_env.include`. BadInput: a function holds something that cannot be pickled."""
    content, modules = pack(functions)
    named = [value for value in config.flatten().values() if isinstance(value, str)]
    dotted = [value for value in named if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value)]
    modules |= pack(further)[1] | {
        name
        for name in (value.rpartition(".")[0] for value in dotted)
        if (spec := shipping.find_module(name)) and spec.origin
    }
    texts = [text for _, text, _ in pickletools.genops(content) if isinstance(text, str)]
    runs = [Path(config.checkpoint_root_dir)] if config.checkpoint_root_dir else []
    named = [] if shipping.is_submitted() else config.runtime_env.include
    include = [Path(name).expanduser() for name in named]
    stays = shipping.LeftOut(runs, config.runtime_env.exclude)
    return shipping.gather(modules, texts, include, stays), content


def refuse_secrets(content: bytes, secrets: Mapping[str, str], where: str, cure: str) -> None:
    """Raise BadInput if `content` contains the value of a key; clusters log what is sent and keep
    it on disk. The faults name the variables."""
    if faults := list(shipping.secrets_in(content, secrets, where, cure)):
        raise BadInput("A key would travel in clear.", faults)


def runtime_env_of(
    config: AflowConfig,
    code: Code,
    folder: Path,
    env_vars: Mapping[str, str],
    with_keys: bool,
    extra: Mapping[str, bytes] | None = None,
) -> dict[str, Any]:
    """The `runtime_env` of a run's workers; writes what travels into `folder`. A job of `aflow-tune
    submit` has one already, which Ray merges with this one. BadInput: a file cannot be read, or the
    value of a key would travel in clear."""
    given = {**config.runtime_env.env_vars, **env_vars}
    if with_keys:
        given[keys.VARIABLE] = config.ray_namespace
    if shipping.is_submitted():
        known = {*config.runtime_env.env_vars, shipping.VARIABLE}
        return {"env_vars": {name: text for name, text in given.items() if name not in known}}
    secrets = keys.secrets_of(config, code)
    plain = "\n".join(given.values()).encode()
    refuse_secrets(plain, secrets, config.positions.where("runtime_env.env_vars"), NAME_IT)
    bundle = shipping.write_bundle(code, folder, extra, secrets)
    given[shipping.VARIABLE] = bundle.name
    environment: dict[str, Any] = {
        "py_modules": [str(bundle)],
        "env_vars": given,
        "worker_process_setup_hook": worker.HOOK,
    }
    if config.runtime_env.pip:
        environment["pip"] = list(config.runtime_env.pip)
    return environment


@contextlib.contextmanager
def attached_ray(
    found: FoundRay,
    config: AflowConfig,
    code: Code,
    content: bytes,
    env_vars: Mapping[str, str],
) -> Iterator[None]:
    """Join a running Ray for the block, and end the run's actors after it. BadInput: it cannot be
    joined, the code cannot travel or could be changed by other users of a node, or nodes lack
    something that the run needs.

    Args:
        content: the pickled functions, which must hold no keys.
        env_vars: plain environment of the workers. Ray logs it, so it must hold no keys.
    """
    refuse_secrets(content, keys.secrets_of(config, code), "the functions", READ_INSIDE)
    greet(found)
    if not config.runtime_env.trust_users and (faults := open_sessions(found)):
        raise BadInput(_OPEN, faults)
    names = keys.names_of_keys(config, code)
    with tempfile.TemporaryDirectory(prefix="aflow-tune-") as bundles, handlers_kept():
        runtime_env = runtime_env_of(config, code, Path(bundles), env_vars, bool(names))
        before = os.getcwd()
        os.chdir(bundles)  # Ray puts the current folder on the workers' sys.path
        try:
            join(found, namespace=config.ray_namespace, runtime_env=runtime_env)
        finally:
            os.chdir(before)
    try:
        _take_namespace(config)
        with contextlib.ExitStack() as stack:
            if names:
                stack.enter_context(keys.handing_over(names, config.ray_namespace))
            folder = Path(config.checkpoint_job_dir)
            folder.mkdir(parents=True, exist_ok=True)
            where = config.positions.where("checkpoint_root_dir")
            if faults := lacking_on_nodes(code.needs, folder, where):
                raise BadInput("The cluster lacks what this run needs.", faults)
            try:
                yield
            finally:
                with contextlib.suppress(Exception):  # the cluster may be gone
                    _end_actors(config.ray_namespace)
    finally:
        with handlers_kept():
            ray.shutdown()


def spans_nodes() -> bool:
    """Whether the Ray of this process has more than one node."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) > 1


def join(found: FoundRay, **settings: Any) -> None:
    """Connect this process to a Ray that `greet` accepted. BadInput: it refuses the connection."""
    try:
        ray.init(address=found.address, log_to_driver=False, logging_level="ERROR", **settings)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise refused_connection(found, error) from error


def _on_nodes(
    function: Function, asked: Mapping[str, tuple[Any, ...]], seconds: float
) -> dict[str, Any]:
    """Call a function on nodes, with the arguments in `asked` by node id; returns its result or the
    error by node id, a `TimeoutError` for a node that did not answer."""
    task = ray.remote(function)
    answers = {}
    for node, arguments in asked.items():
        at = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": at}
        answers[node] = task.options(**options).remote(*arguments)
    _, silent = ray.wait(list(answers.values()), num_returns=len(answers), timeout=seconds)
    told: dict[str, Any] = {}
    for node, answer in answers.items():
        try:
            if answer in silent:
                ray.cancel(answer, force=True)
                told[node] = TimeoutError(f"no answer within {seconds:.0f} s")
            else:
                told[node] = ray.get(answer)
        except ray.exceptions.RayError as error:
            told[node] = error
    return told


def lacking_on_nodes(
    needs: Mapping[str, str], folder: Path | None, where: str, seconds: float = _ASK_SECONDS
) -> list[Fault]:
    """What the nodes of the joined Ray lack for a run. `needs`: top-level packages, with the place
    that imports them. `folder`: one that all nodes must see, set at `where`; None: not checked."""
    here = importlib.metadata.version("aflow-tune")
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    with contextlib.ExitStack() as stack:
        mark = None
        if folder is not None:
            file = tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-")  # noqa: SIM115
            mark = stack.enter_context(file).name
        answers = _on_nodes(worker.tell, dict.fromkeys(nodes, (sorted(needs), mark)), seconds)
    faults: list[Fault] = []
    for node, address in nodes.items():
        name, told = f"node {address} ({node[:8]})", answers[node]
        if isinstance(told, Exception):
            last = (str(told).strip() or type(told).__name__).splitlines()[-1][:600]
            cure = "install aflow-tune there, in the Python that Ray runs with; see `ray status`"
            faults.append(Fault(name, "a worker that starts with our code", last, cure))
            continue
        if told["version"] != here:
            found, cure = f"aflow-tune {told['version']}", "install the same version there"
            faults.append(Fault(name, f"aflow-tune {here}, as here", found, cure))
        for found, reason, cure in told.get("clashes", ()):  # another version may not report them
            faults.append(Fault(name, reason, found, cure))
        for found in told.get("conflicts", ()):
            faults.append(Fault(name, "your own module", found, "rename your module"))
        for missing in told["missing"]:
            package = importlib.metadata.packages_distributions().get(missing, [missing])[0]
            cure = f"`runtime_env: {{pip: [{package}]}}`, or install it there"
            place = f"{name}: {needs[missing]}"
            faults.append(Fault(place, f"`{missing}`", "not installed there", cure))
        if not told["sees"]:
            cure, found = "checkpoint_root_dir: /shared/runs", f"{folder} is not there"
            faults.append(Fault(f"{name}: {where}", "a folder that every node sees", found, cure))
    return faults


def _take_namespace(config: AflowConfig) -> None:
    """Refuse if another run uses this namespace, and end what a killed one left there: Trinity's
    synchronizer, which outlives its command."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    while working := _actors_in(config.ray_namespace) - {_LASTING}:
        if time.monotonic() > deadline:
            title, where = "This run works on the cluster already.", config.positions.where("name")
            cure = "give another `name=`, or stop the other run first"
            found = f"{config.ray_namespace!r} has the actors {', '.join(sorted(working))}"
            raise BadInput.of(title, where, "a name that is free", found, cure)
        time.sleep(0.5)
    _end_actors(config.ray_namespace)


def _actors_in(namespace: str) -> set[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if actor["namespace"] == namespace}


def _end_actors(namespace: str) -> None:
    for name in _actors_in(namespace):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=namespace))


def open_sessions(found: FoundRay, seconds: float = _ASK_SECONDS) -> list[Fault]:
    """A fault for each node of a Ray that `greet` accepted where other users could change the code
    of a run, or that does not answer."""
    faults, elsewhere = open_here(found.address)
    if elsewhere and not faults:
        nodes = {node.node_id.hex(): node for node in elsewhere}
        with handlers_kept():
            join(found)
            try:
                asked = {node: (known.temp_dir,) for node, known in nodes.items()}
                told = _on_nodes(open_to_others, asked, seconds)
            finally:
                ray.shutdown()
        for node, reason in told.items():
            if reason:
                address, temp_dir = nodes[node].node_manager_address, nodes[node].temp_dir
                faults.append(_open(address, temp_dir, " ".join(str(reason).split())[-600:]))
    return faults


def open_here(address: str) -> tuple[list[Fault], list[Any]]:
    """The same for the nodes on this machine, and Ray's records of its other nodes."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # made in Cython

    faults, elsewhere = [], []
    for node in GcsClient(address=address).get_all_node_info().values():
        if node.state == node.ALIVE and not _is_here(node.node_manager_address, node.session_dir):
            elsewhere.append(node)
        elif node.state == node.ALIVE and (reason := open_to_others(node.temp_dir)):
            faults.append(_open(node.node_manager_address, node.temp_dir, reason))
    return faults, elsewhere


def refuse_open_server(nodes: Iterable[dict[str, Any]]) -> None:
    """The same for a job server's nodes (its summaries) that are on this machine; other nodes could
    only be asked through a job. BadInput: other users could change the code of a job."""
    faults = []
    for raylet in (node.get("raylet", {}) for node in nodes):
        address, socket_file = raylet.get("nodeManagerAddress"), raylet.get("rayletSocketName")
        if address and socket_file and raylet.get("state") == "ALIVE":
            session = Path(socket_file).parents[1]
            if _is_here(address, str(session)) and (reason := open_to_others(session.parent)):
                faults.append(_open(address, str(session.parent), reason))
    if faults:
        raise BadInput(_OPEN, faults)


def _open(address: str, temp_dir: str, reason: str) -> Fault:
    cure = f"`chmod 700 {Path(temp_dir).parent}` if that is yours, or start that Ray anew with "
    cure += "`aflow-tune cluster up`; or `runtime_env.trust_users=true` where you trust every user"
    expected = "a temporary folder of Ray below one that only its user may enter"
    return Fault(f"node {address}: {temp_dir}", expected, reason, cure)


def _is_here(address: str, session: str) -> bool:
    """Whether a node is on this machine. Its path alone does not tell: all nodes have the same."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return os.path.lexists(session)
