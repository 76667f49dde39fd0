"""One command of a sweep from its request to its table: what follows what.

Checked, held by a lock, compared with earlier commands, run, written down after every trial and
at the end, however that comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from aflow_tune.runs.folder import locked
from aflow_tune.sweeps.page import PAGE_FILE, write_sweep_page
from aflow_tune.sweeps.plan import Plan, Request, check_same, make_plan
from aflow_tune.sweeps.study import SweepStudy, readable
from aflow_tune.sweeps.sweep import Sweep
from aflow_tune.sweeps.table import JSON_FILE, as_json, render, rows, write_json_file
from aflow_tune.sweeps.trial import LocalStarter, Starter


@dataclass(frozen=True)
class Ended:
    """A sweep whose trials have all ended: its table as text, and the content of `sweep.json`."""

    text: str
    content: dict[str, Any]


def run_sweep(
    request: Request,
    *,
    ray: str | None = None,
    stop: Callable[[], bool],
    say: Callable[[str], None] = print,
) -> Ended:
    """Run, or go on with, the sweep that is asked for.

    Args:
        ray: the address of the Ray that runs are started through, in place of the
            configuration's, or `none`: processes of this machine.

    Raises:
        BadInput: it was refused; nothing was started.
        AlreadyFinished, Interrupted, BudgetReached, RunFailed: as `Sweep.run`.
    """
    if ray not in (None, "none"):
        setting = f"cluster.ray_address={ray}"
        request = replace(request, overrides=(*request.overrides, setting))
    plan = make_plan(request, say)
    for warning in plan.warnings:
        say(f"warning: {warning}")
    with locked(plan.folder), _starter(plan, local=ray == "none") as starter:
        return carry_out(plan, starter, stop=stop, say=say)


def carry_out(
    plan: Plan,
    starter: Starter,
    *,
    stop: Callable[[], bool],
    say: Callable[[str], None] = print,
) -> Ended:
    """Run the trials of a plan whose folder is held. Where it ends with an error, the table as it
    stands is written and said first. Raises as `run_sweep`."""
    request = plan.request
    check_same(plan)
    say(f"sweep folder: {plan.folder}")
    with readable(plan.folder):
        study = SweepStudy(
            plan.folder,
            plan.axes,
            sampler=request.sampler,
            pruner=request.prune,
            seed=request.seed,
            trials=plan.trials,
            first_report=plan.first_report,
            together=request.parallel > 1,
        )

        def write() -> str:
            found = rows(plan, study.records())
            write_json_file(plan, found)
            write_sweep_page(plan, found)
            return render(plan, found)

        try:
            try:
                Sweep(plan, study, starter, stop=stop, say=say, changed=write).run()
            except BaseException:
                with contextlib.suppress(Exception):  # what ended it matters more
                    say(f"\n{write()}\n")
                raise
            text = write()
            content = as_json(plan, rows(plan, study.records()))
        finally:
            study.close()
    return Ended(f"{text}\n\n{plan.folder / PAGE_FILE} and {JSON_FILE} beside it", content)


@contextlib.contextmanager
def _starter(plan: Plan, *, local: bool) -> Iterator[Starter]:
    from aflow_tune.cluster.sweep_ray import cluster_for, ray_starter

    found = None if local else cluster_for(plan.config)
    if found is None:
        yield LocalStarter()
        return
    with ray_starter(plan.config, found, plan.folder, plan.request.parallel) as starter:
        yield starter
