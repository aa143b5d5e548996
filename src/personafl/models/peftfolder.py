"""LoRA adapters as `peft` keeps them: a folder with adapter_config.json and adapter_model.safetensors.

A layer's adapter is base_model.model.LAYER.lora_A.weight [rank, in] and …lora_B.weight [out, rank] there; layers of a
classifier that are trained as a whole (`modules_to_save`) have their own names.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from personafl.core.split import listed
from personafl.core.tree import Params
from personafl.errors import BadInput
from personafl.models.adapters import LowRank, TwoLowRank, is_conv1d
from personafl.models.pretrained import Pretrained, checked_fingerprint

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ROOT = "base_model.model."
_PLAIN = {"use_dora": False, "use_rslora": False, "bias": "none", "rank_pattern": {}, "alpha_pattern": {}}
_WHERE = "model.adapter_from"


def files_of(module: nn.Module, weights: Params) -> dict[str, bytes]:
    """Return the files of a folder by name, for a network with these weights; what is frozen is the module's."""
    layers = _layers(module)
    values = _joined(dict(module.named_parameters()) | weights, layers)
    if not (isinstance(module, Pretrained) and layers):
        raise BadInput('peft: is for lora adapters on a Hugging Face model (model.source, model.adapter = "lora")')
    names = _names(module, layers)
    if extra := sorted((weights.keys() & values.keys()) - names.keys()):
        raise BadInput(
            f"peft: {listed(extra)} is trained too, and a folder of peft has adapters alone; use model files"
        )
    first, one = next(iter(layers.items()))
    rank = len(values[f"{first}.a.weight"])
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if module.own_classes else "CAUSAL_LM",
        "base_model_name_or_path": module.source,
        "r": rank,
        "lora_alpha": one.scale * rank,
        "lora_dropout": 0.0,
        "target_modules": [_base_name(name) for name in layers],
        "modules_to_save": sorted({_saved(module, name) for name in module.head}) or None,
        "fan_in_fan_out": any(is_conv1d(module.get_submodule(name.rpartition(".")[0])) for name in layers),
        "bias": "none",
        "inference_mode": True,
    }
    tensors = {theirs: values[ours].detach().cpu().contiguous() for ours, theirs in names.items()}
    return {CONFIG: json.dumps(config, indent=2).encode(), WEIGHTS: safetensors.torch.save(tensors, {"format": "pt"})}


def told(folder: str) -> dict[str, Any]:
    """Return what a folder says of its adapters: rank, alpha, targets."""
    config = _config(Path(folder).expanduser())
    try:
        targets = config["target_modules"]
        names = (targets,) if isinstance(targets, str) else tuple(map(str, targets))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"{_WHERE}: {folder}/{CONFIG} has no r, lora_alpha and target_modules of LoRA") from error
    if rank < 1 or not 0 < alpha < math.inf:
        raise BadInput(f"{_WHERE}: {folder}/{CONFIG} has r = {rank}, lora_alpha = {alpha:g}; both must be above 0")
    return {"rank": rank, "alpha": alpha, "targets": names}


def same(folder: str, sha256: str | None) -> str:
    """Return the SHA-256 of a folder; fail if it is not that of before, if there was one."""
    return checked_fingerprint(_WHERE, Path(folder).expanduser(), sha256, CONFIG)


def put_in(module: nn.Module, folder: str) -> None:
    """Give a network the adapters of a folder, in place; they must be those of its layers."""
    path = Path(folder).expanduser() / WEIGHTS
    try:
        found = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise BadInput(
            f"{_WHERE}: {path} cannot be read ({error}); give a folder that peft's save_pretrained wrote"
        ) from error
    names = _names(module, _layers(module))
    own = dict(module.named_parameters())
    # A classifier for other classes, or none, is no matter: it is drawn anew.
    head = {theirs for ours, theirs in names.items() if ".adapter." not in ours}
    wrong = {theirs for ours, theirs in names.items() if theirs in found and found[theirs].shape != own[ours].shape}
    if bad := sorted(((found.keys() ^ set(names.values())) | wrong) - head):
        raise BadInput(
            f"{_WHERE}: {path} is for another model: {listed(bad)} does not fit; use the one it was made for"
        )
    with torch.no_grad():
        for ours, theirs in names.items():
            if theirs in found.keys() - wrong:
                own[ours].copy_(found[theirs])


def _layers(module: nn.Module) -> dict[str, LowRank]:
    """Return the adapters of a network; of two at a layer the first, in which the second is."""
    found = {name: layer for name, layer in module.named_modules() if isinstance(layer, LowRank)}
    return {name: layer for name, layer in found.items() if name.rpartition(".")[0] not in found}


def _joined(values: Mapping[str, torch.Tensor], layers: Mapping[str, LowRank]) -> dict[str, torch.Tensor]:
    """Return parameters with two adapters at a layer as one of twice their rank: BAx + B′A′x = [B B′][A; A′]x."""
    made = dict(values)
    for name, layer in layers.items():
        if isinstance(layer, TwoLowRank):
            for part, axis in (("a.weight", 0), ("b.weight", 1)):
                both = made[f"{name}.{part}"], made.pop(f"{name}.local.{part}")
                made[f"{name}.{part}"] = torch.cat([value.detach() for value in both], axis)
    return made


def _names(module: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return what peft calls each parameter: of the adapters, and of a classifier's own layers."""
    names = {}
    for name in layers:
        names[f"{name}.a.weight"] = f"{_ROOT}{_base_name(name)}.lora_A.weight"
        names[f"{name}.b.weight"] = f"{_ROOT}{_base_name(name)}.lora_B.weight"
    head = module.head if isinstance(module, Pretrained) else ()
    return names | {f"model.{name}": f"{_ROOT}{name}" for name in head}


def _base_name(adapter: str) -> str:
    """Return the layer of an adapter as the Hugging Face model has it."""
    return adapter.removeprefix("model.").removesuffix(".adapter")


def _saved(module: Pretrained, name: str) -> str:
    """Return the module that peft keeps as a whole for one of its parameters."""
    inside = f"{module.model.base_model_prefix}."
    return name.removeprefix(inside).partition(".")[0]


def _config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = dict(json.loads((folder / CONFIG).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{_WHERE}: {folder} has no {CONFIG} that can be read; give a folder of peft's") from error
    if config.get("peft_type") != "LORA":
        raise BadInput(
            f"{_WHERE}: {folder} has adapters of the kind {config.get('peft_type')}, and LORA is known alone"
        )
    for key, plain in _PLAIN.items():
        if config.get(key) not in (plain, None):
            raise BadInput(f"{_WHERE}: {folder} has {key} = {config[key]}, which is not supported; use plain LoRA")
    return config
