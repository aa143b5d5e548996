"""Tiny Hugging Face models with random weights, in folders, and token data for them; shared by tests of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from personafl.core.net import Net
from personafl.core.split import Split
from personafl.data.federated import FederatedData, Ragged, make_federated
from personafl.models import make_net_and_split
from personafl.models.network import SharedNetwork

Kind = Literal["gpt2", "llama", "bert"]
WORDS, LENGTH, PAD = 23, 6, 0
TARGETS: dict[Kind, list[str]] = {
    "gpt2": ["c_attn", r".*\.mlp\.c_fc"],
    "llama": ["q_proj", "v_proj", "mlp.down_proj"],
    "bert": ["query", "value"],
}


def folder(kind: Kind, path: Path, seed: int = 0) -> str:
    """Write a model of two layers, for the next token or (BERT) for three classes, and return where it is."""
    import transformers

    place = path / f"{kind}-{seed}"
    if place.exists():
        return str(place)
    torch.manual_seed(seed)
    wide = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    wide |= {"intermediate_size": 12, "max_position_embeddings": 10, "pad_token_id": PAD}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=WORDS, n_positions=10, n_embd=8, n_layer=2, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **wide))
    else:
        model = transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3, **wide))
    with torch.no_grad():  # larger weights than at the start, for outputs that depend on their inputs
        for value in model.parameters():
            value.add_(torch.randn(value.shape) * 0.2)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(place)
    return str(place)


def tokens(task: Literal["next-token", "classification"], clients: int = 3) -> FederatedData:
    """Return clients of unequal size with random texts, of which some end early."""
    sizes = [3, 6, 1, 4, 2][:clients]
    dice = torch.Generator().manual_seed(1)
    text = torch.randint(1, WORDS, (sum(sizes), LENGTH + 1), generator=dice)
    text[::3, LENGTH - 2 :] = PAD
    rows = Ragged.from_lists(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]))
    next_token = task == "next-token"
    y = torch.where(text[:, 1:] == PAD, -1, text[:, 1:]) if next_token else torch.arange(sum(sizes)) % 3
    return make_federated(
        name="any", x=text[:, :LENGTH], y=y, classes=WORDS if next_token else 3, train=rows, validation=rows,
        test=rows, seen=np.arange(clients), unseen=np.zeros(0, np.int64),
        client_names=tuple(map(str, range(clients))), label_names=tuple("012"), vocabulary=WORDS, task=task,
    )  # fmt: skip


def adapted(kind: Kind, path: Path, **options: Any) -> tuple[Net, Split | None, FederatedData]:
    """Return a network with adapters of rank 2, scaled by 3/2, its split, and data for it; in float64."""
    data = tokens("classification" if kind == "bert" else "next-token")
    given = {"adapter": "lora", "rank": 2, "alpha": 3.0, "targets": TARGETS[kind], **options}
    net, split = make_net_and_split(SharedNetwork(source=folder(kind, path), **given), data)
    return net.to(torch.device("cpu"), torch.float64), split, data


def in_peft(name: str) -> str:
    """Return what a parameter of ours is called in a model of `peft`."""
    name = name.replace("adapter.a.", "lora_A.default.").replace("adapter.b.", "lora_B.default.")
    name = name.replace("classifier.", "classifier.modules_to_save.default.")
    return name.replace("model.", "base_model.model.", 1)


class Logits(nn.Module):
    """A model of transformers or peft as one of tokens alone; padding is hidden from what looks both ways."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        if self.model.config.model_type != "bert":
            return self.model(input_ids=x).logits  # type: ignore[no-any-return]
        zero = torch.zeros((), dtype=torch.float64)
        hidden = zero.masked_fill(x == PAD, torch.finfo(torch.float64).min)[:, None, None]
        hidden = hidden.expand(-1, 1, x.shape[1], -1)
        return self.model(input_ids=x, attention_mask=hidden).logits  # type: ignore[no-any-return]


def peft_model(kind: Kind, path: Path) -> Any:
    """Return the same adapters put in by `peft`, in float64, not yet trained."""
    import peft
    import transformers

    auto = transformers.AutoModelForSequenceClassification if kind == "bert" else transformers.AutoModelForCausalLM
    base = auto.from_pretrained(folder(kind, path), attn_implementation="eager", dtype=torch.float64)
    targets = TARGETS[kind] if kind != "gpt2" else r".*\.c_attn|.*\.mlp\.c_fc"
    config = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=targets, task_type="SEQ_CLS" if kind == "bert" else "CAUSAL_LM",
        fan_in_fan_out=kind == "gpt2",
    )  # fmt: skip
    return peft.get_peft_model(base, config).eval().double()


class PeftNet(Net):
    """A model of `peft` as a network of ours: with the parameters of ours, by our names."""

    def __init__(self, ours: Net, kind: Kind, path: Path) -> None:
        super().__init__(Logits(peft_model(kind, path)))
        self._module.eval()
        self._theirs = {name: f"model.{in_peft(name)}" for name in ours.shapes}
        assert self.shapes == {self._theirs[name]: shape for name, shape in ours.shapes.items()}
        self.shapes = ours.shapes

    def apply(self, params: Any, x: Tensor, real: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        values = {self._theirs[name]: value for name, value in params.items()}
        return torch.func.functional_call(self._module, values, (x,))  # type: ignore[no-any-return]
