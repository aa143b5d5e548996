"""Model files: a trained model as a device keeps it, in one safetensors file that describes itself.

The tensors are a model's parts in compact forms (`core.wire`), named `PART/PARAMETER`; their sum is the model. What it
is and which network it belongs to stands in the header's metadata, as text (see `Card`). Nothing in a file is ever
called: a network of the user's own is built only if its name is that of an `nn.Module` class.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import safetensors
import torch
from pydantic import BeforeValidator, ConfigDict, Field, Json, ValidationError
from pydantic_core import to_json
from torch import Tensor, nn

from personafl.core import wire
from personafl.core.heads import with_head
from personafl.core.net import Net
from personafl.core.reading import AS_FOUND, Reading
from personafl.core.shape import DataShape
from personafl.core.split import listed
from personafl.core.tree import Params
from personafl.data.config import Moments
from personafl.data.federated import FederatedData, blank
from personafl.data.inputs import normalized
from personafl.errors import BadInput
from personafl.models import MODELS, make_net_and_split
from personafl.models.factored import factorize
from personafl.models.network import Network, SharedNetwork
from personafl.options import Positive, import_path
from personafl.storage.seals import read_sealed, sealed

FORMAT, VERSION = "personafl model", 1
_REMEDY = "give a file that personafl export wrote"

Part = dict[str, Any]  # by parameter name a tensor or one of wire's forms


def network_text(network: Network) -> str:
    """Return the record of a network as a model file has it, with the model's own options apart."""
    parts = {"personal": None, "adapter": None, "adapter_size": 1}
    parts |= network.model_dump(mode="json", include=set(parts))
    known = {"rank", "alpha", "targets", "frozen"}
    if getattr(network, "frozen", None):  # else all that came from there is trained, and in the file
        known |= {"adapter_from", "adapter_sha256"}
    if getattr(network, "adapters", 1) == 2:
        known.add("adapters")
    lora = network.model_dump(mode="json", include=known, exclude_none=True)
    parts |= lora if isinstance(network, SharedNetwork) else {}
    values = {"name": network.name or None, "options": network.options, "buffers": network.buffers, **parts}
    return to_json(values).decode()


def _from_file(values: Any) -> Any:
    """Return such a record as a recipe has it."""
    if not (isinstance(values, dict) and isinstance(values.get("options"), dict)):
        raise ValueError("is no description of a network")
    own = {key: value for key, value in values.items() if key != "options"}
    return {**values["options"], **own, "name": own.get("name") or ""}


class Card(DataShape):
    """What a model file says about itself: the metadata of its header, by these names."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    run: str  # digest of the run that it is from
    method: str
    model: Literal["global", "personal", "tuned", "blend"]  # blend: between global and the last personal one
    client: str | None = None  # whose model it is
    network: Json[Annotated[SharedNetwork, BeforeValidator(_from_file)]]
    head: Literal["gated", "valved"] | None = None  # of `core.heads`, in place of the layer that is personal
    dtype: Literal["float32", "float64"] = "float32"  # of its weights and inputs
    input_shape: Json[tuple[Positive, ...]]
    target_shape: Json[tuple[Positive, ...]]
    reading: Json[Reading] = AS_FOUND  # how its data were read, and the names of classes
    moments: Json[Moments] | None = None  # by which its network normalises inputs; None: it does not
    scale: Json[Moments] | None = None  # of a regression's targets, whose units its network answers in
    parameters: int  # numbers that are stored
    parameters_dense: int
    bytes_packed: int  # of the tensors in a file of their own
    bytes_dense: int  # the same with dense weights
    bytes_fp32: int | None = None  # the same with dense weights in single precision
    bits: int | None = None  # of a weight in the layers that are quantized; None: none is
    test_accuracy: float | None = None  # of the global model, the mean over clients that took part
    epsilon: float | None = None  # of the privacy that clients of the run have, with delta; None: none was asked for
    delta: float | None = None
    assumption: str | None = None  # that epsilon rests on
    sample_epsilon: float | None = None  # of single samples: of the client's own data, or of any client's; None: none
    sample_delta: float | None = None
    sample_covers: Literal["all", "sent"] = "all"  # whether what a client keeps is covered, or only what it sends
    accuracies: Json[dict[str, float]] = Field(default_factory=dict)  # on the same data, of this model and of others


def described(facts: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a model file: what it is, and what a `Card` has, as text."""
    return {"format": FORMAT, "format_version": str(VERSION), **facts}


def pack(parts: Sequence[Part], facts: Mapping[str, str]) -> bytes:
    """Return the bytes of a model file: parts in wire forms, and what a `Card` has, as text.

    The header is written in order, so equal models are equal files; safetensors itself would shuffle the metadata.
    """
    data = wire.encode(tuple(parts))
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    header = json.dumps({"__metadata__": described(facts), **entries}, separators=(",", ":")).encode()
    return b"".join(sealed(len(header).to_bytes(8, "little") + header + data[8 + length :]))


def card_of(path: str | Path) -> Card:
    """Return what a model file says about itself; of the file only the header is read."""
    path = Path(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror or error}); {_REMEDY}") from error
    except safetensors.SafetensorError as error:
        raise BadInput(f"{path}: damaged, or no safetensors file ({error}); {_REMEDY}") from error
    if about.get("format") != FORMAT:
        raise BadInput(f"{path}: not a model file of personafl; {_REMEDY}")
    if (version := about.get("format_version")) != str(VERSION):
        raise BadInput(
            f"{path}: has format version {version}, and this personafl reads version {VERSION}; "
            "update personafl, or export the run again with this one"
        )
    try:
        return Card.model_validate(about)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadInput(f"{path}: its description is damaged ({where}: {first['msg']}); export it again") from error


def load_model(path: str | Path, *, module: nn.Module | None = None, dense: bool = False) -> nn.Module:
    """Return the network in a model file, ready to be applied to inputs [batch, …].

    It is built by the name that the file gives; `module` is needed if it was an object in Python, or is made by a
    function. What is no trained parameter (frozen weights, running statistics) comes from there too. Low-rank layers
    become two smaller ones where that takes fewer multiply-adds; with dense=True no layer does.
    """
    path = Path(path)
    card = card_of(path)
    data = read_sealed(path, _REMEDY)
    shape = blank(card)
    net = _net(path, card, shape, module)
    parts = _parts(path, data, net)
    return assembled(net, parts, shape.x[:1], card.moments, dense, card.scale)


def compacted(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the same model in the least room: of each weight the parts that are not 0, or else their dense sum."""
    result: list[Part] = [{} for _ in parts]
    for name in dict.fromkeys(name for part in parts for name in part):
        leaves = {place: {name: part[name]} for place, part in enumerate(parts) if name in part}
        used = {place: leaf for place, leaf in leaves.items() if bool(wire.dense(leaf)[name].any())}
        leaves = used or dict([next(iter(leaves.items()))])
        total = summed(list(leaves.values()))
        if wire.size(tuple(leaves.values())) >= wire.size((total,)):
            leaves = {0: total}
        for place, leaf in leaves.items():
            result[place] |= leaf
    return tuple(part for part in result if part)


class Normalized(nn.Module):
    """x ↦ network((x − mean) / std), per channel or feature: a network for inputs in the units of the data.

    With a `scale` its outputs o become std·o + mean: numbers in the units of a regression's targets.
    """

    def __init__(self, network: nn.Module, moments: Moments | None, scale: Moments | None = None) -> None:
        super().__init__()
        self.network, self.moments, self.scale = network, moments, scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's scores, or numbers."""
        scores: Tensor = self.network(x if self.moments is None else normalized(x, self.moments))
        if self.scale is None:
            return scores
        mean, std = (torch.tensor(values, dtype=scores.dtype) for values in (self.scale.mean, self.scale.std))
        return scores * std.to(scores.device) + mean.to(scores.device)


def assembled(
    net: Net,
    parts: Sequence[Part],
    example: Tensor,
    moments: Moments | None,
    dense: bool = False,
    scale: Moments | None = None,
) -> nn.Module:
    """Return the network with the sum of the parts as its weights; low-rank layers in two, where there is no sum.

    With `moments` it normalises its inputs, with a `scale` it answers in the units of targets.
    """
    total = summed(parts)
    kind = next(iter(total.values())).dtype
    module = net.module().cpu().to(kind).eval()
    weights = total if dense else total | low_rank(parts)
    module = factorize(module, weights, example.to(kind) if example.is_floating_point() else example)
    return module if moments is None and scale is None else Normalized(module, moments, scale).eval()


def low_rank(parts: Sequence[Part]) -> dict[str, wire.Factored]:
    """Return the weights that are factors and nothing else."""
    users = Counter(name for part in parts for name in part)
    leaves = (entry for part in parts for entry in part.items())
    return {name: leaf for name, leaf in leaves if isinstance(leaf, wire.Factored) and users[name] == 1}


def bits_of(parts: Sequence[Part]) -> int | None:
    """Return the most bits that a weight takes in the layers that are quantized; None if none is."""
    forms = (leaf for part in parts for leaf in part.values() if isinstance(leaf, wire.Quantized))
    return max((form.bits(form.centers) for form in forms), default=None)


def summed(parts: Sequence[Part]) -> Params:
    """Return the dense sum of a model's parts."""
    total: Params = {}
    for part in parts:
        for name, leaf in wire.dense(part).items():
            total[name] = total[name] + leaf if name in total else leaf
    return total


def blended(models: Mapping[str, Sequence[Part]], share: float) -> tuple[Part, ...]:
    """Return the model between the global and the last personal one, of which it has so large a share."""
    shared, own = summed(models["global"]), summed(models["tuned" if "tuned" in models else "personal"])
    return ({name: torch.lerp(shared[name], own[name], share) for name in shared},)


def _net(path: Path, card: Card, data: FederatedData, module: nn.Module | None) -> Net:
    name = card.network.name
    remedy = f"personafl.load_model({str(path)!r}, module=…)"
    if module is None and not name:
        raise BadInput(f"{path}: its network was an object in Python; load it with {remedy}")
    try:
        if module is None and name not in MODELS:
            found = import_path(name, "model") if ":" in name else None
            if not (isinstance(found, type) and issubclass(found, nn.Module)):
                raise BadInput(f"model: {name!r} is no nn.Module class, and a file may not have a function called")
        net, split = make_net_and_split(card.network, data, module)
        return net if card.head is None else with_head(net, split, card.head)
    except BadInput as error:
        raise BadInput(f"{path}: {error}; or give the network: {remedy}") from error


def _parts(path: Path, data: bytes, net: Net) -> tuple[Part, ...]:
    """Return the parts in a file's bytes, compact forms kept; together they must be the network's parameters."""
    try:
        places = [name.partition("#")[0].partition("/") for name in wire.decode_named(data)]
        wrong = {name for _, _, name in places} ^ net.shapes.keys()
        if wrong:
            raise BadInput(f"parameters {listed(sorted(wrong))} are in one of them only")
        count = len({part for part, _, _ in places})
        like: tuple[Part, ...] = tuple(
            {name: torch.empty(net.shapes[name], device="meta") for part, _, name in places if part == str(number)}
            for number in range(count)
        )
        parts = wire.decode(data, like)
        for name, leaf in (entry for part in parts for entry in part.items()):
            if isinstance(leaf, Tensor) and leaf.shape != net.shapes[name]:  # forms were checked
                raise BadInput(f"{name} should have shape {list(net.shapes[name])}")
    except BadInput as error:
        raise BadInput(f"{path}: its weights are not those of its network: {error}; is it the same code?") from error
    return parts
