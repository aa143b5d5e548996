"""Parts of a network by name: what a recipe's `personal = "output"` means for a given module.

- `input`, `output`: the first and the last layer with parameters, in the order in which the module registers them;
- `body`: everything but the output;
- `norms`: all normalisation layers;
- `auto`: what a module declares to be that, because its output suits personal parts badly; else the output;
- `adapter`: all adapters, and the norms too where adapters have sites, in transformers (FedAlt/FedSim);
- `lora`, `lora_A`, `lora_B`: of the adapters B(Ax) both matrices, or one of them (FedSA-LoRA, FFA-LoRA);
- `lora_local`: where there are two at a layer, the second ones (FedDPA);
- `base`: everything but adapters and the output;
- anything else: a glob (`head.*`) or a regular expression (`re:…`) for parameter names.

A module may say better what its parts are, and name new ones: `parts = {"output": ("head.*", "head_norm.*")}`.
"""

import glob
import re
from collections.abc import Mapping, Sequence

from torch import nn

from personafl.core.split import Split, listed
from personafl.errors import BadInput
from personafl.models.adapters import AdapterKind, Site, default_adapter, is_adapter

_NORM = re.compile(r"Norm(\dd)?$")  # of a class: GroupNorm, BatchNorm2d, RMSNorm, and the user's own
_LORA = {
    "lora": (r"re:(.*\.)?adapter\.(local\.)?[ab]\.weight",),
    "lora_A": (r"re:(.*\.)?adapter\.(local\.)?a\.weight",),
    "lora_B": (r"re:(.*\.)?adapter\.(local\.)?b\.weight",),
    "lora_local": (r"re:(.*\.)?adapter\.local\.[ab]\.weight",),
}
_PARTS = ("adapter", "auto", "base", "body", "input", *_LORA, "norms", "output")
_MISSING = {
    "norms": "it has no normalisation layers with parameters",
    "adapter": "it has no adapters",
    **dict.fromkeys(_LORA, "it has no lora adapters"),
    "lora_local": "it has no second adapter at a layer; set model.adapters = 2",
    "body": "it is all output",
}


def personal_split(module: nn.Module, personal: str | Sequence[str]) -> Split:
    """Return the split that makes the named parts of a module personal.

    Each entry must match something, and together they must leave something shared: parameters, or frozen ones.
    """
    split, names = parts_named(module, personal, "model.personal"), _trainable(module)
    if all(map(split.is_personal, names)) and len(names) == len(list(module.parameters())):
        what = " and ".join(map(repr, [personal] if isinstance(personal, str) else personal))
        raise BadInput(f"model.personal: {what} makes every parameter personal; {_choices(module, names)}")
    return split


def parts_named(module: nn.Module, parts: str | Sequence[str], key: str) -> Split:
    """Return what tells the parameters of the named parts from others; `key` of a recipe names them."""
    wanted = [parts] if isinstance(parts, str) else list(parts)
    names = _trainable(module)
    if not wanted:
        raise BadInput(f"{key}: names no part; {_choices(module, names)}")
    patterns: list[str] = []
    for part in wanted:
        found = _patterns(module, part)
        if not found or not all(any(Split((p,)).is_personal(name) for name in names) for p in found):
            why = f" ({_MISSING[part]})" if part in _MISSING.keys() - _declared(module) else ""
            raise BadInput(f"{key}: {part!r} matches no parameter of this model{why}; {_choices(module, names)}")
        patterns += [pattern for pattern in found if pattern not in patterns]
    return Split(tuple(patterns))


def needed_adapter(module: nn.Module, personal: str | Sequence[str]) -> AdapterKind | None:
    """Return the kind of adapters that `personal` asks for and the module does not have yet; None: it asks for none."""
    wanted = {personal} if isinstance(personal, str) else set(personal)
    if any(map(is_adapter, _trainable(module))) or wanted & _declared(module).keys():
        return None
    if wanted & _LORA.keys():
        return "lora"
    return default_adapter(module) if "adapter" in wanted else None


def _patterns(module: nn.Module, part: str) -> tuple[str, ...]:
    if part in (declared := _declared(module)):
        return tuple(declared[part])
    if part == "auto":
        return _patterns(module, "output")
    if part not in _PARTS:
        return (part,)
    if part in _LORA:
        return _LORA[part]
    if part == "base":
        output = Split(_patterns(module, "output"))
        names = [name for name in _trainable(module) if not (is_adapter(name) or output.is_personal(name))]
        return tuple(map(glob.escape, names))
    if part == "body":
        output = Split(_patterns(module, "output"))
        return tuple(glob.escape(name) for name in _trainable(module) if not output.is_personal(name))
    layers = _layers(module)
    norms = [names for layer, names in layers if _NORM.search(type(layer).__name__)]
    chosen = {
        "input": [names for _, names in layers[:1]],
        "output": [names for _, names in layers[-1:]],
        "norms": norms,
        "adapter": norms if any(isinstance(layer, Site) for layer in module.modules()) else [],
    }[part]
    exact = [glob.escape(name) for names in chosen for name in names]
    return tuple([*_adapters(module), *exact] if part == "adapter" else exact)


def _adapters(module: nn.Module) -> list[str]:
    """Return what matches the adapters: of the module itself if it is a layer, and of layers inside it."""
    names = [name for name in _trainable(module) if is_adapter(name)]
    own = [name for name in names if name.startswith("adapter.")]
    return (["adapter.*"] if own else []) + (["*.adapter.*"] if len(own) < len(names) or not names else [])


def _layers(module: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Return the layers outside adapters with trainable parameters of their own, and those parameters' names.

    What the module itself holds beside its layers (a bias, a class token) is no layer. A parameter that two layers
    share belongs to the first.
    """
    names = set(_trainable(module))
    layers = []
    for layer_name, layer in module.named_modules():
        own = [name for name, _ in layer.named_parameters(layer_name, recurse=False) if name in names]
        if own and not is_adapter(own[0]):
            layers.append((layer, own))
    inner = [(layer, own) for layer, own in layers if layer is not module]
    return inner or layers


def _trainable(module: nn.Module) -> list[str]:
    return [name for name, value in module.named_parameters() if value.requires_grad]


def _declared(module: nn.Module) -> Mapping[str, tuple[str, ...]]:
    declared = getattr(module, "parts", {})
    return declared if isinstance(declared, Mapping) else {}


def _choices(module: nn.Module, names: list[str]) -> str:
    return f"parts: {', '.join(sorted({*_PARTS, *_declared(module)}))}; parameters: {listed(names)}"
