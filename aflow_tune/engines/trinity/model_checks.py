"""Checks of the model that a configuration names: there, whole, with a chat template.

Reads small JSON files of a folder or of the local cache; nothing is loaded or fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.data.checks import Findings
from aflow_tune.engines.local.models import BUNDLED, cache_dir, is_cached
from aflow_tune.engines.local.weight_files import damage_of
from aflow_tune.engines.trinity.tasksets import looks_local
from aflow_tune.errors import Fault
from aflow_tune.schema_names import nearest

if TYPE_CHECKING:
    from aflow_tune.engines.trinity.config import AflowConfig

_SHORT_PROMPT = 32
"""Tokens that a chat template and one short question take together."""


def check_model(config: AflowConfig, *, whole: bool = True) -> Findings:
    """The policy's model and the auxiliary ones.

    Args:
        whole: ask for weights, tokenizer and chat template too. False where only the sizes in
            config.json are read.
    """
    found = Findings()
    if config.model.tinker.enable or config.model.external_model.enable:
        return found
    names = [("model.model_path", config.model.model_path)]
    for number, auxiliary in enumerate(config.explorer.auxiliary_models):
        key = f"explorer.auxiliary_models.{number}.model_path"
        names.append((key, auxiliary.model_path or ""))
    for key, name in names:
        found.add(_check_name(config, key, name))
        if whole and name in BUNDLED:
            kept = cache_dir() / name
            cure = f"rm -r {kept}: it is then fetched again"
            found.faults += _damaged(kept, config.positions.where(key), cure)
    template = config.model.chat_template_path
    if template and not Path(template).expanduser().is_file():
        where = config.positions.where("model.chat_template_path")
        found.faults.append(Fault(where, "a template file", "no such file", "check the path"))
    folder = Path(config.model.model_path).expanduser()
    if config.model.model_path and (folder / "config.json").is_file():
        found.add(_check_folder(config, folder, whole))
    prompt = config.model.max_prompt_tokens
    if prompt is None and config.model.max_model_len and config.model.max_response_tokens:
        prompt = config.model.max_model_len - config.model.max_response_tokens
    if prompt is not None and 1 < prompt < _SHORT_PROMPT:
        found.warnings.append(
            f"a prompt budget of {prompt} tokens: a chat template and one short question take "
            f"about {_SHORT_PROMPT}"
        )
    return found


def _check_name(config: AflowConfig, key: str, name: str) -> Findings:
    found = Findings()
    where = config.positions.where(key)
    expected = f"a model folder, a hub id, or one of {', '.join(BUNDLED)}"
    folder = Path(name).expanduser()
    if not name.strip():
        cure = f"model_path: {next(iter(BUNDLED))}"
        found.faults.append(Fault(where, expected, "nothing", cure))
    elif name in BUNDLED:
        if not is_cached(name):
            found.warnings.append(
                f"model {name}: not on this machine yet; it is fetched once at the start (into "
                f"{cache_dir()})"
            )
    elif folder.is_dir():
        if not (folder / "config.json").is_file():
            cure = "name the folder that holds config.json and the weights"
            found.faults.append(Fault(where, expected, "a folder without config.json", cure))
    elif close := nearest(name, BUNDLED, 0.85):
        found.faults.append(Fault(where, expected, repr(name), f"model_path: {close}"))
    elif folder.is_file():
        cure = "name the folder that holds it"
        found.faults.append(Fault(where, expected, "a file", cure))
    elif looks_local(config, name):
        cure = "check the path: there is no such folder"
        found.faults.append(Fault(where, expected, f"{name}: no such folder", cure))
    elif not is_cached(name):
        found.warnings.append(
            f"model {name}: not on this machine; it will be fetched from the hub at the start"
        )
    return found


def _check_folder(config: AflowConfig, folder: Path, whole: bool) -> Findings:
    found = Findings()
    where = config.positions.where("model.model_path")
    settings = _read(folder / "config.json")
    if settings is None:
        cure = "save the model again with save_pretrained"
        found.faults.append(Fault(where, "a readable config.json", "no JSON object", cure))
        return found
    if settings.get("quantization_config") and config.mode not in ("bench", "serve", "explore"):
        kind = settings["quantization_config"].get("quant_method", "quantised")
        cure = "name the model in 16 bits; docs/recipes.md says what can be quantised while loading"
        expected = "weights in 16 or 32 bits: the trainer cannot hold quantised ones"
        found.faults.append(Fault(where, expected, f"{folder}: {kind}", cure))
    if whole:
        found.faults += _missing(config, folder, where)
    longest, asked = settings.get("max_position_embeddings"), config.model.max_model_len
    if isinstance(longest, int) and asked and asked > longest and not settings.get("rope_scaling"):
        found.warnings.append(
            f"{config.positions.where('model.max_model_len')}: {asked} tokens, but the model was "
            f"made for {longest}"
        )
    return found


def missing_shards(folder: Path) -> list[str]:
    """The files of weights that the index in `folder` names and that are not there."""
    index = (_read(folder / "model.safetensors.index.json") or {}).get("weight_map")
    names = set(index.values()) if isinstance(index, dict) else set()
    if (folder / "model.safetensors").is_file():  # all in one: nobody reads the index
        return []
    return sorted(str(name) for name in names if not (folder / str(name)).is_file())


def _damaged(folder: Path, where: str, cure: str) -> Iterable[Fault]:
    for damage in filter(None, map(damage_of, sorted(folder.glob("*.safetensors")))):
        yield Fault(where, "whole files of weights", damage, cure)


def _missing(config: AflowConfig, folder: Path, where: str) -> Iterable[Fault]:
    """What a folder with a config.json lacks for being loaded."""
    weights = ("*.safetensors", "*.bin", "*.safetensors.index.json")
    if not any(next(folder.glob(pattern), None) for pattern in weights):
        cure = "save model and tokenizer into one folder"
        yield Fault(where, "weights (*.safetensors)", "none in the folder", cure)
    elif absent := missing_shards(folder):
        found = f"{len(absent)} of them are not in the folder, {absent[0]} among them"
        cure = "fetch the model again: a download was cut off"
        yield Fault(where, "every file of weights that its index names", found, cure)
    yield from _damaged(folder, where, "fetch or save the model again: it was cut off")
    tokenizer = _read(folder / "tokenizer_config.json")
    if tokenizer is None and not (folder / "tokenizer.json").is_file():
        cure = "save the tokenizer beside the model with save_pretrained"
        yield Fault(where, "a tokenizer", "none in the folder", cure)
    elif not (
        config.model.custom_chat_template
        or config.model.chat_template_path
        or config.explorer.rollout_model.chat_template
        or (tokenizer or {}).get("chat_template")
        or (folder / "chat_template.jinja").is_file()
        or (folder / "chat_template.json").is_file()
    ):
        cure = "use the model's Instruct version, or set model.chat_template_path"
        yield Fault(where, "a chat template", "none in the folder", cure)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
