"""The adapter of a dry run: the real one, which tells the scripted model what to say.

Each call of the tuned model carries the answer that the run's script has for it, in a field of
the request that `engines/local/scripted.py` reads; it is not part of what is recorded or trained.
What a row gives as its answer is not said where JSON or a tool call is demanded: no server would
let a model say it there.
How the run ended is appended to a file, which the dry run reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity.common.experience import Experience

from aflow_tune.context import RolloutContext, current_caller
from aflow_tune.dry_run.numbers import PlayedCall, PlayedRun, append_run
from aflow_tune.dry_run.script import TRUTH, Part, Script
from aflow_tune.engines.local.scripted import ANSWER_FIELD
from aflow_tune.engines.trinity.rollout.adapter import WorkflowAdapter
from aflow_tune.engines.trinity.rollout.operators import FAILURE_KEY, TRACE_KEY
from aflow_tune.engines.trinity.rollout.recording import RolloutRecorder

SCRIPT_KEY = "script"
"""Key of `workflow_args`: the `Script`."""


class ScriptedAdapter(WorkflowAdapter):
    """`WorkflowAdapter` on a `ScriptedSampler`. Its `workflow_args` also hold `script`."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        script: Script = self.task.workflow_args[SCRIPT_KEY]
        self._item = int(self.task.index.get("index", self.task.task_id))
        self._part: Part = script.part(self._raw_task(), self._item, self.run_index)

    async def run_async(self) -> list[Experience]:
        """One run, as `WorkflowAdapter.run_async`; its outcome is kept.

        Raises:
            OSError: it could not be written down.
        """
        experiences = await super().run_async()
        append_run(Path(str(self.settings.run_dir)), self._played(experiences))
        return experiences

    async def _call_user(
        self, context: RolloutContext, recorder: RolloutRecorder
    ) -> tuple[float, dict[str, float]]:
        create = recorder._create

        async def told(**kwargs: Any) -> Any:
            answer = self._part.next(current_caller())
            if self._part.kind == TRUTH and _demands_a_form(kwargs):
                answer = None
            if answer is not None:
                body = {**(kwargs.get("extra_body") or {}), ANSWER_FIELD: answer}
                kwargs = {**kwargs, "extra_body": body}
            return await create(**kwargs)

        recorder._create = told  # type: ignore[method-assign]
        return await super()._call_user(context, recorder)

    def _played(self, experiences: list[Experience]) -> PlayedRun:
        last = experiences[-1]
        failure = (last.info or {}).get(FAILURE_KEY)
        calls = () if failure else tuple(_call(experience) for experience in experiences)
        return PlayedRun(
            task=int(self.task.task_id),
            item=self._item,
            run=self.run_index,
            kind=self._part.kind,
            source=self._part.source,
            reward=None if failure else float(last.reward or 0.0),
            failure=failure,
            detail=str((last.info or {}).get(TRACE_KEY, "")),
            calls=calls,
        )


def _demands_a_form(kwargs: Mapping[str, Any]) -> bool:
    """Whether the answer to a request has to be JSON or a tool call."""
    form = kwargs.get("response_format")
    kind = form.get("type", "text") if isinstance(form, Mapping) else "text"
    return kind != "text" or kwargs.get("tool_choice") not in (None, "auto", "none")


def _call(experience: Experience) -> PlayedCall:
    prompt = int(experience.prompt_length)
    response = len(experience.tokens) - prompt
    return PlayedCall(prompt, response, experience.truncate_status is not None)
