"""Models of Hugging Face `transformers` from a folder: tokens in, scores out; read once, and shared by all who use it.

Weights are mapped from their files (safetensors): processes on a machine have one copy of them in memory. Attention is
`transformers`' written-out one, and its mask is made here, as numbers: both stack over clients (vmap). Where there is
no vmap around, whoever calls may have torch's own attention instead (`fused`).
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from personafl.core.net import copied
from personafl.core.shape import TaskName
from personafl.errors import BadInput
from personafl.models.adapters import is_linear
from personafl.options import users_code

Precision = Literal["float32", "bfloat16", "float16"]
_AUTO = {"next-token": "AutoModelForCausalLM", "classification": "AutoModelForSequenceClassification"}


class Pretrained(nn.Module):
    """A Hugging Face model in a folder, for the next token or for classes of texts; in a recipe `source = FOLDER`.

    Its own dropout is off. With adapters all of it is frozen but the layers that a classifier has for its classes.
    """

    model: Any
    apart = True  # a text's scores depend on no other text: those of several clients may be one batch
    fused = False  # whether attention is torch's own, in one pass, which does not stack: equal up to rounding
    again: Callable[[], AbstractContextManager[None]] = nullcontext  # what a block is computed in, if it is once more

    def __init__(
        self,
        input_shape: Sequence[int],
        vocabulary: int,
        classes: int,
        task: TaskName,
        *,
        source: str,
        sha256: str | None = None,
        base_dtype: Precision = "float32",
        pad_token: int | None = None,
        checkpoint: bool = False,  # whether blocks are computed again for the gradient, which takes less memory
    ) -> None:
        super().__init__()
        if task not in _AUTO:
            raise BadInput(f"model.source: is for {' and '.join(_AUTO)}, and the task of this data is {task}")
        folder = base_folder(source)
        found = checked_fingerprint("model.source", folder, sha256)
        base = _loaded(str(folder), found, _AUTO[task], None if task == "next-token" else classes, base_dtype)
        self.model = copied(base.model, base.model.parameters())
        self._how = "eager"
        self.blocks = _blocks(self.model, self._checkpointed, folder) if checkpoint else []
        _simplify(self.model)
        self.source = str(folder)
        self.classes, self.own_classes = classes, task == "classification"
        self.head = base.head  # names of parameters that are a classifier's own
        self.causal = task == "next-token" or any(getattr(m, "is_causal", False) for m in self.model.modules())
        config = self.model.config
        self.pad = config.pad_token_id if pad_token is None else pad_token
        # Where tokens see only those before them, padding after a text changes nothing: and it may be a token of texts.
        self.hides_pad = self.pad is not None and (pad_token is not None or not self.causal)
        if self.own_classes:
            self._renew_head(base.missing)
            self.parts = {"output": tuple(f"model.{name}" for name in base.head)}
            config.pad_token_id = self.pad
            if self.pad is None and self.causal:
                raise BadInput(
                    f"model.source: {folder} says of no token that it pads, and a decoder needs one to find where a "
                    "text ends; set model.pad_token"
                )
        # Which layers LoRA goes beside unless model.targets says so: all linear ones but those of the output.
        inside = f"{self.model.base_model_prefix}."
        self.targets = tuple(
            f"model.{name}"
            for name, layer in self.model.named_modules()
            if is_linear(layer) and name.startswith(inside) and f"{name}.weight" not in base.head
        )
        _check_size(self.model, folder, vocabulary, input_shape[0])

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, length] to scores [batch, length, classes] of the next, or [batch, classes]."""
        kind = self.model.dtype
        # Not in float64: of some models the written-out one has its softmax in float32, and would not be the same.
        self._attend("sdpa" if self.fused and self.model._supports_sdpa and kind is not torch.float64 else "eager")
        for block in self.blocks:
            block.gradient_checkpointing = self.fused
        length = tokens.shape[1]
        seen = torch.ones(
            1, 1, length, length, dtype=torch.bool, device=tokens.device
        )  # [texts, 1, who looks, at what]
        if self.causal:
            seen = seen.tril()
        if self.hides_pad:
            seen = seen & (tokens != self.pad)[:, None, None, :]
        mask = torch.zeros((), dtype=kind, device=tokens.device).masked_fill(~seen, torch.finfo(kind).min)
        scores: Tensor = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return scores if self.own_classes else scores[..., : self.classes]

    def _attend(self, how: str) -> None:
        """Have attention computed so."""
        if how != self._how:  # to ask the configuration takes as long as a small layer
            self.model.config._attn_implementation = self._how = how

    def _checkpointed(self, block: Callable[..., Any], *given: Any) -> Any:
        """Return what a block makes of its inputs, all that is kept of it: it is computed once more for the gradient.

        By then the module has other values in it, so that is done in the context that `again` makes now.
        """
        context = self.again()
        both = lambda: (nullcontext(), context)  # noqa: E731
        return recomputed(block, *given, use_reentrant=False, preserve_rng_state=False, context_fn=both)

    def freeze(self) -> None:
        """Make everything but a classifier's own layers constant."""
        for name, value in self.model.named_parameters():
            value.requires_grad_(name in self.head)

    def _renew_head(self, missing: frozenset[str]) -> None:
        """Draw anew what the folder has no weights of, from torch's generator."""
        for name in self.head:
            parent, _, own = name.rpartition(".")
            layer = self.model.get_submodule(parent)
            value = getattr(layer, own)
            layer._parameters[own] = nn.Parameter(value.detach().to(torch.float32, copy=True))
            if value.dtype is not torch.float32:
                layer.register_forward_pre_hook(_exact)
        for name in sorted(missing):
            value = self.model.get_parameter(name)
            std = getattr(self.model.config, "initializer_range", 0.02)
            with torch.no_grad():
                value.zero_() if name.endswith("bias") else value.normal_(std=std)


def _simplify(model: nn.Module) -> None:
    """Have torch compute in one pass what `transformers` writes as nine: GELU by tanh."""
    for layer in list(model.modules()):
        for name, child in layer.named_children():
            if type(child).__name__ == "NewGELUActivation":
                setattr(layer, name, nn.GELU(approximate="tanh"))


def _blocks(model: nn.Module, run: Callable[..., Any], folder: Path) -> list[Any]:
    """Return the blocks of a model that can be computed once more, and have `run` do so."""
    blocks: list[Any] = [layer for layer in model.modules() if isinstance(layer, _block_type())]
    if not blocks:
        raise BadInput(
            f"model.checkpoint: the model in {folder} has no blocks that can be computed again; leave it out"
        )
    for block in blocks:
        block._gradient_checkpointing_func = run
    return blocks


def _block_type() -> type[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return GradientCheckpointingLayer


def _exact(layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Give a classifier's own layer, which is trained, inputs in its precision where the base has a lower one."""
    kind = next(layer.parameters()).dtype
    return tuple(value.to(kind) for value in given)


class _Base(NamedTuple):
    """What was read of a folder; nobody changes it."""

    model: Any
    head: tuple[str, ...]
    missing: frozenset[str]


def base_folder(source: str) -> Path:
    """Return the folder of a model; nothing is ever fetched."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise BadInput(
            f"model.source: {source} is no folder; give one with config.json and model.safetensors (a name of a model "
            "is not fetched: download it first, with `hf download NAME --local-dir FOLDER`)"
        )
    if not (folder / "config.json").is_file():
        raise BadInput(f"model.source: {folder} has no config.json; give the folder of a Hugging Face model")
    if not list(folder.glob("*.safetensors")):
        raise BadInput(
            f"model.source: {folder} has no weights in *.safetensors; write them with save_pretrained(FOLDER) of "
            "transformers"
        )
    if (folder / "adapter_config.json").exists():  # transformers would put these in, where peft is installed
        raise BadInput(
            f"model.source: {folder} has adapters beside the model (adapter_config.json); move them to a folder of "
            "their own, and start from them with model.adapter_from"
        )
    _check_inside(folder)
    return folder.resolve()


def _check_inside(folder: Path) -> None:
    """Fail if weights are said to be in other files than those of the folder, which the fingerprint is of."""
    for index in folder.glob("*.safetensors.index.json"):
        try:
            names = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadInput(f"model.source: {index} cannot be read; save the model again") from error
        if outside := sorted(names - {path.name for path in folder.glob("*.safetensors")}):
            raise BadInput(f"model.source: {index} names {outside[0]!r}, which is no file of weights beside it")


def fingerprint(folder: Path, config: str = "config.json") -> str:
    """Return the SHA-256 of a model's configuration and weights."""
    files = [folder / config, *sorted(folder.glob("*.safetensors"))]
    return _digest(tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files))


def checked_fingerprint(where: str, folder: Path, known: str | None, config: str = "config.json") -> str:
    """Return the same; fail if it is not that of before, if there was one."""
    found = fingerprint(folder, config)
    if known not in (None, found):
        raise BadInput(
            f"{where}: the model in {folder} is another one, of SHA-256 {found[:12]}…, and {str(known)[:12]}… was used "
            "before; give the folder of that one"
        )
    return found


@functools.lru_cache(maxsize=8)
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    total = hashlib.sha256()
    for name, _, _ in files:
        with open(name, "rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


@functools.lru_cache(maxsize=2)
def _loaded(folder: str, digest: str, auto: str, classes: int | None, precision: Precision) -> _Base:
    """Read a model: `digest` is its fingerprint, so that other weights in the same folder are read anew."""
    try:
        import transformers
    except ImportError:
        raise BadInput("model.source: needs the package transformers, pip install 'personafl[hf]'") from None
    with users_code(f"model.source: {folder} cannot be read"), _quiet(transformers):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for name, value in config.to_dict().items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        if classes is not None:
            config.num_labels = classes
        model, told = getattr(transformers, auto).from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="eager",
            dtype=getattr(torch, precision),
            ignore_mismatched_sizes=classes is not None,  # a head for other classes
            output_loading_info=True,
        )
    inside = f"{model.base_model_prefix}."
    other = {entry[0] if isinstance(entry, tuple) else entry for entry in told["mismatched_keys"]}
    missing = frozenset(told["missing_keys"]) | other
    drawn = {name for name in missing if not name.startswith(inside) or ".pooler." in name}
    if wrong := sorted(missing if classes is None else missing - drawn):
        raise BadInput(
            f"model.source: {folder} has no weights of {wrong[0]} ({len(wrong)} are missing); is it whole, and a "
            f"model for {'the next token' if classes is None else 'texts'}?"
        )
    own = (name for name, _ in model.named_parameters() if not name.startswith(inside) or name in drawn)
    return _Base(model, () if classes is None else tuple(own), missing)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep what transformers says while it reads off the terminal: what matters of it is an error here."""
    told = transformers.utils.logging
    level, bars = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity_error()
    told.disable_progress_bar()
    try:
        yield
    finally:
        told.set_verbosity(level)
        if bars:
            told.enable_progress_bar()


def _check_size(model: Any, folder: Path, vocabulary: int, length: int) -> None:
    """Fail if texts have more tokens, or others, than the model knows."""
    words = model.get_input_embeddings().num_embeddings
    if vocabulary > words:
        raise BadInput(
            f"model.source: {folder} knows {words} tokens, and this data has {vocabulary}; read the data with the "
            "model's own tokenizer"
        )
    places = getattr(model.config, "max_position_embeddings", None)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding) and name.endswith("position_embeddings") and layer.padding_idx is not None:
            places = layer.num_embeddings - layer.padding_idx - 1  # RoBERTa counts from there
    if places is not None and length > places:
        raise BadInput(
            f"model.source: {folder} has {places} positions, and texts of this data have {length} tokens; set "
            f"data.length={places}, or give shorter ones"
        )
