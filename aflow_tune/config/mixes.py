"""`mix:` over Trinity's task sets: what is refused, and how the mix is laid out for its reader.

A mix gives each source its share of every training batch. A source is a training task set, by
its name, or the rows of a task set that say `source: NAME`, as `aflow-tune data prepare` writes
them. Task sets are written, found, read and checked as without a mix; only when the run starts
do they become one task set of Trinity's, read by `readers.MixReader`. Which items a batch holds
is decided in `aflow_tune.data.mix`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from trinity.common.config import DataSelectorConfig, TasksetConfig

from aflow_tune.config.schema import nearest
from aflow_tune.config.settings import AflowConfig
from aflow_tune.config.tasksets import is_file, read_taskset, user_tasksets
from aflow_tune.data.mix import DEFAULT_SHARES, KINDS, default_shares, exact_shares, kind_of
from aflow_tune.errors import Fault
from aflow_tune.files import write_json

MIX_READER = "aflow_tune.engines.trinity.readers.MixReader"
FIXED_SAMPLE = "aflow_tune.engines.trinity.readers.FixedSample"
_SHARED = ("rollout_args", "workflow_args", "reward_fn_args", "format")
"""What all task sets of a mix have in common, as they become one."""


def shares_of(config: AflowConfig) -> dict[str, Fraction]:
    """The share of each source of `config.mix`, as written or by the default recipe.

    Raises:
        ValueError: the shares are no shares, or the recipe has none for a source.
    """
    written = {name: source.ratio for name, source in config.mix.items()}
    if any(ratio is not None for ratio in written.values()):
        return exact_shares({name: ratio or 0.0 for name, ratio in written.items()})
    kinds = {name: kind_of(name, source.benchmark) for name, source in config.mix.items()}
    if None in kinds.values():
        raise ValueError("a source without a share is of no kind that the default recipe knows")
    return default_shares({name: str(kind) for name, kind in kinds.items()})


def check_mix(config: AflowConfig) -> list[Fault]:
    """What is wrong with `mix:` and with the task sets that it names."""
    if not config.mix:
        return []
    return [*_ratios(config), *_sources(config), *_alike(config)]


def fields_of_mix(config: AflowConfig) -> tuple[str, ...]:
    """The fields that every row of the training data gets from the mix."""
    if not config.mix:
        return ()
    return ("source", "benchmark") if len(benchmarks_of(config)) == len(config.mix) else ("source",)


def merge_mix(config: AflowConfig, run_dir: Path) -> None:
    """Make the training task sets one, read in batches of the configured shares.

    To be called last: on a prepared configuration with its task sets laid out.
    """
    if not config.mix:
        return
    inputs = config.buffer.explorer_input
    place = run_dir / "data" / "mix.json"
    keys = ("name", "storage_type", "path", "split", "subset_name")
    content = {
        "seed": config.seed,
        "shares": {name: str(share) for name, share in shares_of(config).items()},
        "benchmarks": benchmarks_of(config),
        "tasksets": [{key: getattr(one, key) for key in keys} for one in inputs.tasksets],
    }
    write_json(place, content)
    merged = {"name": "mix", "storage_type": MIX_READER, "path": str(place)}
    selector = DataSelectorConfig()
    inputs.tasksets = [replace(inputs.tasksets[0], **merged, data_selector=selector)]


def quick_tasksets(config: AflowConfig, step: int) -> list[TasksetConfig]:
    """The held-out task sets to evaluate the weights of `step` on.

    The first and the last evaluation, which are compared, use every row; those between them the
    fixed sample of `quick_eval` rows, if that is set.
    """
    tasksets = config.buffer.explorer_input.eval_tasksets
    size, last = config.quick_eval, config.trainer.total_steps
    if size is None or step == 0 or (last is not None and step >= last):
        return tasksets
    selector = DataSelectorConfig(FIXED_SAMPLE, seed=config.seed, kwargs={"size": size})
    return [replace(taskset, data_selector=selector) for taskset in tasksets]


def benchmarks_of(config: AflowConfig) -> dict[str, str]:
    """The benchmark of each source, where it is given or is the source's own name."""
    found = {}
    for name, source in config.mix.items():
        own = name if name in KINDS and name not in DEFAULT_SHARES else None
        benchmark = source.benchmark or own
        if benchmark:
            found[name] = benchmark
    return found


def _ratios(config: AflowConfig) -> Iterable[Fault]:
    written = {name: source.ratio for name, source in config.mix.items()}
    given = [ratio for ratio in written.values() if ratio is not None]
    expected = "a `ratio` for each source, or for none"
    sound = bool(given)
    for name, source in config.mix.items():
        if source.ratio is not None:
            if not (math.isfinite(source.ratio) and 0 < source.ratio <= 1):
                sound, key = False, f"mix.{name}.ratio"
                found = str(source.ratio)
                yield config.fault(key, "a share above 0, at most 1", found, "ratio: 0.4")
        elif given:
            sound = False
            yield config.fault(f"mix.{name}", expected, "no ratio", f"{name}: {{ratio: 0.5}}")
        elif kind_of(name, source.benchmark) is None:
            told = (
                f"{expected}; then a `benchmark` or a name that tells its kind: {', '.join(KINDS)}"
            )
            yield config.fault(f"mix.{name}", told, "neither", f"{name}: {{ratio: 0.5}}")
    if sound:
        try:
            shares_of(config)
        except ValueError as error:
            scaled = (f"{name}: {(ratio or 0) / sum(given):.4g}" for name, ratio in written.items())
            fix = f"in these proportions: {', '.join(scaled)}"
            yield config.fault("mix", "ratios that are 1 together", str(error), fix)


def _sources(config: AflowConfig) -> Iterable[Fault]:
    """Every source has rows, and every row a source."""
    mix, unread = config.mix, False
    named: Counter[str] = Counter()
    known: list[str] = []
    for key, taskset, held_out in user_tasksets(config):
        if held_out or not taskset.path:
            continue
        name = taskset.name or "train"
        known.append(name)
        if name in mix:
            named[name] += 1
            if named[name] == 2:
                fix = f"name: {name}_2, and a share of its own in `mix`"
                yield config.fault(f"{key}.name", "a name of its own", repr(name), fix)
            continue
        table = read_taskset(config, taskset)
        if table is None or table.faults:
            unread = True
            continue
        sources = Counter(str(row.get("source", "no source")) for row in table.rows)
        named.update(sources)
        known += sources
        strange = {source: count for source, count in sources.items() if source not in mix}
        if strange:
            found = "rows of " + ", ".join(f"{one} ({n})" for one, n in [*strange.items()][:4])
            expected = f"{name!r} as a source in `mix`, or rows whose `source` is one"
            fix = f"give {name!r}, or each `source` of its rows, a share in `mix`"
            yield config.fault(f"{key}.name", expected, found, fix)
    for name in mix:
        if not named[name] and not unread:
            expected = "the name of a training task set, or a `source` of its rows: "
            close = nearest(name, known, 0.5)
            fix = f"did you mean `{close}`?" if close else "give the task set this name"
            expected += ", ".join(map(repr, known)) or "there is none"
            yield config.fault(f"mix.{name}", expected, repr(name), fix)


def _alike(config: AflowConfig) -> Iterable[Fault]:
    """Settings of single task sets that a mix cannot follow."""
    training = [(key, taskset) for key, taskset, held_out in user_tasksets(config) if not held_out]
    for key, taskset in training:
        kind = (taskset.task_selector or taskset.data_selector).selector_type
        if kind not in (None, "sequential"):
            expected, fix = "none: a mix shuffles by itself", "remove data_selector"
            yield config.fault(f"{key}.data_selector.selector_type", expected, repr(kind), fix)
        if not is_file(taskset):
            found = repr(taskset.storage_type)
            yield config.fault(f"{key}.storage_type", "file", found, "storage_type: file")
        for name in _SHARED:
            if getattr(taskset, name) != getattr(training[0][1], name):
                found = "other settings than in the first task set"
                fix = "give all task sets of the mix the same"
                yield config.fault(f"{key}.{name}", f"one `{name}` for all of a mix", found, fix)
