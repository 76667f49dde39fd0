"""The answers of the scripted policy, their sources, and the adapter that sends them.

In each group even rollouts are meant to be good, odd ones bad. A good one answers with `good` of
the answers file, else with the row's own answer (`truth`, unless a call demands JSON or a tool
call), else with plain `words`; a bad one with `bad`, else words. Format: docs/dry_run.md.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from trinity.common.experience import Experience

from aflow_tune.context import RolloutContext, current_caller
from aflow_tune.engines.local.scripted import ANSWER_FIELD
from aflow_tune.engines.trinity.rollout.adapter import WorkflowAdapter
from aflow_tune.engines.trinity.rollout.operators import FAILURE_KEY, TRACE_KEY
from aflow_tune.engines.trinity.rollout.recording import RolloutRecorder
from aflow_tune.errors import BadInput, Fault
from aflow_tune.files import append_line, as_line
from aflow_tune.scoring.benchmarks import find

GOOD, BAD, TRUTH, WORDS = "good", "bad", "truth", "words"
TRUTH_FIELDS = ("answer", "solution", "target", "label")
"""Fields tried for a row's answer if neither a benchmark nor the configuration names it."""
ANY = "*"
"""The item whose answers are for every row without its own."""
ADAPTER = f"{__name__}.ScriptedAdapter"
_PLAYED_FILE = "played.jsonl"
SCRIPT_KEY = "script"
"""Key of the `Script` in `workflow_args`."""
_SHOWN = 20
_FORM = 'write {"item": 0, "good": "the right answer", "bad": "a wrong one"}'

_Texts = str | Annotated[list[str], Field(min_length=1)]
Saying = _Texts | Annotated[dict[str, _Texts], Field(min_length=1)]
"""One text for every call; a list, call by call, whose last text repeats; or either of them by
caller."""


@dataclass(frozen=True)
class Script:
    """The scripted policy of a dry run. Travels to the workers by value.

    answers: by item, the texts under `good` and `bad`. In those of item `*` a `{field}` is replaced
    by the row's. benchmark: of rows that do not name one; its gold answer is the truth. file: the
    path of the answers file, or ''.
    """

    answers: Mapping[int | str, Mapping[str, Saying]] = field(default_factory=dict)
    benchmark: str | None = None
    truth_fields: tuple[str, ...] = TRUTH_FIELDS
    file: str = ""

    def part(self, row: Mapping[str, Any], number: int, run: int) -> Part:
        """The answers of rollout `run` in the group of a row, which has this number in the data."""
        kind = GOOD if run % 2 == 0 else BAD
        saying = self._answers(row, number).get(kind)
        if saying is not None:
            return Part(kind, saying, f"`{kind}` of {self.file}")
        truth = self.truth(row) if kind == GOOD else None
        return Part(TRUTH, *truth) if truth else Part(WORDS, None, "plain words")

    def truth(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        """The row's own answer as text, and its source; None if it has none."""
        name = row.get("benchmark") or self.benchmark
        if isinstance(name, str):
            try:
                return find(name).gold(row), f"the gold answer by benchmark {name}"
            except Exception:
                # No such benchmark, or a row of another one, at which each benchmark raises errors
                # of its own: try the fields below.
                pass
        for key in self.truth_fields:
            value = row.get(key)
            if isinstance(value, list) and value:
                value = value[0]  # one of several accepted answers
            if isinstance(value, str | int | float):
                return str(value), f"the row's field `{key}`"
        return None

    def _answers(self, row: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        items: list[int | str] = [number]
        items += [str(value) for value in row.values() if isinstance(value, str | int)]
        for item in items:
            if item in self.answers and item != ANY:
                return self.answers[item]
        anywhere = self.answers.get(ANY, {})
        return {kind: _filled(saying, row) for kind, saying in anywhere.items()}


class Part:
    """The answers of one rollout, call by call. `kind` is one of GOOD, BAD, TRUTH, WORDS; `source`
    describes where they come from."""

    def __init__(self, kind: str, saying: Saying | None, source: str) -> None:
        self.kind, self.source = kind, source
        self._saying = saying
        self._calls: Counter[str] = Counter()

    def next(self, caller: str) -> str | None:
        """The answer to the next call of `caller`; None: answer with plain words."""
        saying, counted = self._saying, ""
        if isinstance(saying, dict):
            saying, counted = saying.get(caller), caller
        number = self._calls[counted]
        self._calls[counted] += 1
        return saying[min(number, len(saying) - 1)] if isinstance(saying, list) else saying


def _filled(saying: Any, row: Mapping[str, Any]) -> Any:
    """The texts with `{name}` of each field of the row replaced; other braces stay."""
    if isinstance(saying, dict):
        return {caller: _filled(inner, row) for caller, inner in saying.items()}
    if isinstance(saying, list):
        return [_filled(inner, row) for inner in saying]
    return re.sub(r"\{(\w+)\}", lambda found: str(row.get(found[1], found[0])), saying)


# -- the answers file ----------------------------------------------------------------------


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    item: Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)] | None = None
    good: Saying | None = None
    bad: Saying | None = None


def read_answers(path: Path, *, numbered: bool = True) -> dict[int | str, dict[str, Saying]]:
    """Read an answers file: the texts under `good` and `bad`, by item.

    Args:
        numbered: whether row numbers are allowed; with several task sets they are ambiguous.

    Raises:
        BadInput: with the first 20 faults.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        expected = "a readable file of JSON lines in UTF-8"
        title = "The answers file cannot be read."
        raise BadInput.of(title, str(path), expected, str(error), "check the path") from None
    found: dict[int | str, dict[str, Saying]] = {}
    faults: list[Fault] = []
    unnamed = itertools.count()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            entry = _Line.model_validate_json(line)
        except ValidationError as error:
            wrong = {str(e["loc"][0]) if e["loc"] else "": e["msg"] for e in error.errors()}
            for key, said in wrong.items():
                where = f"{place}: {key}" if key else place
                faults.append(Fault(where, "a line of answers", said, _FORM))
            continue
        item = next(unnamed) if entry.item is None else entry.item
        if entry.good is None and entry.bad is None:
            faults.append(Fault(place, "`good` or `bad`", "neither", _FORM))
        elif not numbered and not isinstance(item, str):
            expected = "a text of one of the row's fields: there are several training task sets"
            faults.append(Fault(f"{place}: item", expected, "a number, or no item", _FORM))
        elif item in found:
            faults.append(Fault(place, "one line for an item", f"{item!r} again", "keep one"))
        else:
            found[item] = entry.model_dump(include={GOOD, BAD}, exclude_none=True)
    if not found and not faults:
        faults.append(Fault(str(path), "at least one line", "none", _FORM))
    if faults:
        raise BadInput(f"The answers file has {len(faults)} faults.", faults[:_SHOWN])
    return found


# -- the adapter ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PlayedRun:
    """One rollout: number `run` of the group of `task` in the step, for row `item` of the data.
    `kind` and `source`: of its answers, as in `Part`. `reward` is None if it failed; `failure` is
    then the kind of failure and `detail` the reason. `calls`: those that are trained, with
    tokens of `prompt` and `response`, and `truncated` (0 or 1)."""

    task: int
    item: int
    run: int
    kind: str
    source: str
    reward: float | None
    failure: str | None = None
    detail: str = ""
    calls: tuple[dict[str, int], ...] = ()


def read_runs(folder: Path) -> list[PlayedRun]:
    """The rollouts of a dry run, by task and run; of a retried one the last outcome."""
    path = folder / _PLAYED_FILE
    found: dict[tuple[int, int], PlayedRun] = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the empty end, or a line cut off when a worker was killed
        run = PlayedRun(**entry)
        found[run.task, run.run] = run
    return [found[key] for key in sorted(found)]


class ScriptedAdapter(WorkflowAdapter):
    """The real adapter, plus a field in each request that tells the `ScriptedSampler` its answer
    and is neither recorded nor trained on. Appends each rollout's outcome to a file."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        script: Script = self.task.workflow_args[SCRIPT_KEY]
        self._item = int(self.task.index.get("index", self.task.task_id))
        self._part = script.part(dict(self.task.raw_task or {}), self._item, self.run_index)

    async def run_async(self) -> list[Experience]:
        """`WorkflowAdapter.run_async`; then appends the outcome to the file of `read_runs`."""
        experiences = await super().run_async()
        last = experiences[-1]
        info = last.info or {}
        failure = info.get(FAILURE_KEY)
        played = PlayedRun(
            int(self.task.task_id),
            self._item,
            self.run_index,
            self._part.kind,
            self._part.source,
            None if failure else float(last.reward or 0.0),
            failure,
            str(info.get(TRACE_KEY, "")),
            () if failure else tuple(map(_call, experiences)),
        )
        append_line(Path(str(self.settings.run_dir)) / _PLAYED_FILE, as_line(asdict(played)))
        return experiences

    async def _call_user(
        self, context: RolloutContext, recorder: RolloutRecorder
    ) -> tuple[float, dict[str, float]]:
        create = recorder._create

        async def told(**kwargs: Any) -> Any:
            answer = self._part.next(current_caller())
            if self._part.kind == TRUTH and demands_a_form(kwargs):
                answer = None
            if answer is not None:
                body = {**(kwargs.get("extra_body") or {}), ANSWER_FIELD: answer}
                kwargs = {**kwargs, "extra_body": body}
            return await create(**kwargs)

        recorder._create = told  # type: ignore[method-assign]
        return await super()._call_user(context, recorder)


def demands_a_form(request: Mapping[str, Any]) -> bool:
    """Whether the answer to a request has to be JSON or a tool call. A row's answer is not used
    then, as no server would let a model answer with it."""
    form = request.get("response_format")
    kind = form.get("type", "text") if isinstance(form, Mapping) else "text"
    return kind != "text" or request.get("tool_choice") not in (None, "auto", "none")


def _call(experience: Experience) -> dict[str, int]:
    prompt, truncated = int(experience.prompt_length), experience.truncate_status is not None
    response = len(experience.tokens) - prompt
    return {"prompt": prompt, "response": response, "truncated": int(truncated)}
