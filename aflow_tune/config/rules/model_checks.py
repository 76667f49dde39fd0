"""Checks of the model that a configuration names: there, whole, with a chat template.

Reads small JSON files of a folder or of the local cache; nothing is loaded or fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.config.schema_names import nearest
from aflow_tune.config.tasksets import looks_local
from aflow_tune.data.checks import Findings
from aflow_tune.engines.local.models import BUNDLED, cache_dir, damage_of, is_cached
from aflow_tune.errors import Fault

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tokenization_*.py")
"""Any of these holds a vocabulary, or makes one."""
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
    for named in _named_models(config):
        found.add(_check_name(config, f"{named.key}.model_path", named.path))
        folder = Path(named.path).expanduser()
        if whole and named.path in BUNDLED:
            kept = cache_dir() / named.path
            cure = f"rm -r {kept}: it is then fetched again"
            where = config.positions.where(f"{named.key}.model_path")
            found.faults += _damaged(kept, where, cure)
        elif named.path and (folder / "config.json").is_file():
            found.add(_check_folder(config, named, folder, whole))
    template = config.model.chat_template_path
    if template and not Path(template).expanduser().is_file():
        where = config.positions.where("model.chat_template_path")
        found.faults.append(Fault(where, "a template file", "no such file", "check the path"))
    prompt = config.model.max_prompt_tokens
    if prompt is None and config.model.max_model_len and config.model.max_response_tokens:
        prompt = config.model.max_model_len - config.model.max_response_tokens
    if prompt is not None and 1 < prompt < _SHORT_PROMPT:
        found.warnings.append(
            f"a prompt budget of {prompt} tokens: a chat template and one short question take "
            f"about {_SHORT_PROMPT}"
        )
    return found


@dataclass(frozen=True)
class _Named:
    """A model that the configuration names."""

    key: str
    """Of the settings that hold its `model_path`."""
    path: str
    length: int | None
    trained: bool
    has_template: bool
    """The configuration gives a chat template of its own."""


def _named_models(config: AflowConfig) -> Iterator[_Named]:
    """The policy and the auxiliary models."""
    model, template = config.model, config.explorer.rollout_model.chat_template
    trained = config.mode not in ("bench", "serve", "explore")
    given = bool(model.custom_chat_template or model.chat_template_path or template)
    yield _Named("model", model.model_path, model.max_model_len, trained, given)
    for number, auxiliary in enumerate(config.explorer.auxiliary_models):
        key, given = f"explorer.auxiliary_models.{number}", bool(auxiliary.chat_template)
        yield _Named(key, auxiliary.model_path or "", auxiliary.max_model_len, False, given)


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


def _check_folder(config: AflowConfig, named: _Named, folder: Path, whole: bool) -> Findings:
    found = Findings()
    where = config.positions.where(f"{named.key}.model_path")
    settings = _read(folder / "config.json")
    if settings is None:
        cure = "save the model again with save_pretrained"
        found.faults.append(Fault(where, "a readable config.json", "no JSON object", cure))
        return found
    if settings.get("quantization_config") and named.trained:
        kind = settings["quantization_config"].get("quant_method", "quantised")
        cure = "name the model in 16 bits; docs/recipes.md says what can be quantised while loading"
        expected = "weights in 16 or 32 bits: the trainer cannot hold quantised ones"
        found.faults.append(Fault(where, expected, f"{folder}: {kind}", cure))
    if whole:
        found.faults += _kind(settings, where)
        found.faults += _missing(folder, where, named)
    longest, asked = settings.get("max_position_embeddings"), named.length
    if isinstance(longest, int) and asked and asked > longest and not settings.get("rope_scaling"):
        place = config.positions.where(f"{named.key}.max_model_len")
        found.warnings.append(f"{place}: {asked} tokens, but the model was made for {longest}")
    return found


def _kind(settings: dict[str, Any], where: str) -> Iterable[Fault]:
    """A model_type that transformers cannot load, and no code of its own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = settings.get("model_type")
    wrong = kind not in CONFIG_MAPPING if kind else not settings
    if wrong and not settings.get("auto_map"):
        expected = "a config.json whose model_type the installed transformers knows"
        cure = "save the model again with save_pretrained, or check model_type in its config.json"
        yield Fault(where, expected, repr(kind) if kind else "no model_type", cure)


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


def _missing(folder: Path, where: str, named: _Named) -> Iterable[Fault]:
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
    cure = "save the tokenizer beside the model with save_pretrained"
    names = ("tokenizer.json", "tokenizer_config.json")
    torn = [name for name in names if (folder / name).is_file() and _read(folder / name) is None]
    named_only = tokenizer is None or "tokenizer_class" in tokenizer
    if named_only and not any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS):
        yield Fault(where, "a tokenizer", "none in the folder", cure)
    elif torn:
        yield Fault(where, "a tokenizer that can be read", f"{torn[0]}: no JSON object", cure)
    elif not (
        named.has_template
        or (tokenizer or {}).get("chat_template")
        or (folder / "chat_template.jinja").is_file()
        or (folder / "chat_template.json").is_file()
    ):
        setting = "chat_template_path" if named.key == "model" else "chat_template"
        cure = f"use the model's Instruct version, or set {named.key}.{setting}"
        yield Fault(where, "a chat template", "none in the folder", cure)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
