"""How often GiGPO finds another run in the same state: without that it is plain GRPO.

GiGPO compares the calls that different runs of a step made in one anchor state (`STATE_KEY`). A
call that is alone in its state gets no such comparison, and where nearly all are alone, the
algorithm quietly does nothing of its own. `AnchorRate` measures it for each step and says so once.

Trinity's own `gigpo/anchor_group_hit_ratio` counts groups, one run that meets a state twice among
them; this counts the calls, and asks for a second run. The first call of a run begins where every
run of its task begins, so it nearly always meets the others; the warning looks at later calls.
"""

from __future__ import annotations

from collections import defaultdict, deque

from trinity.buffer.operators.experience_operator import ExperienceOperator
from trinity.common.experience import Experience
from trinity.utils.log import get_logger

from aflow_tune.engines.trinity.info_keys import STATE_KEY

LOW = 0.2
"""A share of calls below this is low."""
STEPS = 3
"""Steps in a row over which it must be low before it is said."""


class AnchorRate(ExperienceOperator):
    """Logs `gigpo/anchor_hit_rate`; changes no experience.

    Stands behind `RunFilter`, so that failed runs do not count as others in a state.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=STEPS)
        self._said = False

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """The same experiences, and the shares of calls whose state another run met as well:
        `gigpo/anchor_hit_rate` of all, `gigpo/anchor_hit_rate_later` of those after the first of
        their run, which is left out where there are none."""
        if not exps:
            return exps, {}
        runs: dict[str, set[str]] = defaultdict(set)
        for exp in exps:
            if STATE_KEY in exp.info:
                runs[exp.info[STATE_KEY]].add(exp.eid.rid)
        hits = {id(exp): len(runs.get(exp.info.get(STATE_KEY, ""), ())) > 1 for exp in exps}
        metrics = {"gigpo/anchor_hit_rate": sum(hits.values()) / len(exps)}
        later = [hits[id(exp)] for exp in exps if exp.eid.step > 0]
        if later:
            metrics["gigpo/anchor_hit_rate_later"] = sum(later) / len(later)
        self._watch(metrics)
        return exps, metrics

    def _watch(self, metrics: dict[str, float]) -> None:
        name = list(metrics)[-1]
        self._rates.append(metrics[name])
        if self._said or len(self._rates) < STEPS or max(self._rates) >= LOW:
            return
        self._said = True
        shown = ", ".join(f"{rate:.2f}" for rate in self._rates)
        get_logger(__name__).warning(
            f"{name} is {shown} in the last {STEPS} steps: fewer than {LOW:.0%} of these calls "
            "are made in a state that another run of the step met too, so GiGPO has little to "
            "compare and works like GRPO. Name coarser states with `state_key(...)`, raise "
            "`algorithm.repeat_times`, or use `algorithm_type: multi_step_grpo`."
        )
