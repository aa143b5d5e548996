"""A client's network from a finished run, and what it predicts."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from personafl.data.federated import FederatedData
from personafl.data.sources.memory import inputs_of
from personafl.errors import BadInput, did_you_mean
from personafl.exports.finished import Finished
from personafl.models.generating import continuation, text_tokens
from personafl.models.modelfile import blended, compacted
from personafl.models.predicting import Predictions, predictions

Kind = Literal["global", "personal", "chosen"]
_BATCH = 1024


def client_network(finished: Finished, name: str, kind: Kind | None = None) -> nn.Module:
    """Return a client's network for inputs as they are; see `personafl.Result.model` for what `kind` says."""
    if kind is not None and kind not in get_args(Kind):
        raise BadInput(f"kind = {kind!r}: {did_you_mean(str(kind), get_args(Kind))}")
    (client,) = finished.members([name])
    models = finished.models(client)
    own = next((model for model in ("tuned", "personal") if model in models), "global")
    which = {None: own, "global": "global", "personal": own, "chosen": "chosen"}[kind]
    if which == "chosen":
        which = finished.choice(client) or own
    if (kind == "personal" and own == "global") or (which == "global" and "global" not in models):
        kinds = " and ".join(model for model in ("global", "personal", "tuned") if model in models)
        raise BadInput(f"kind = {kind!r}: {finished.origin.method} makes no such model; client {name!r} has: {kinds}")
    if which.startswith("blend"):
        return finished.network(finished.origin.net(client), blended(models, float(which.removeprefix("blend "))))
    net = finished.origin.net(None if which == "global" else client)
    return finished.network(net, compacted(models[which]))


@torch.no_grad()
def predicted(finished: Finished, name: str, x: Any, kind: Kind | None, probabilities: bool) -> Any:
    """Return what a client's network says of inputs: labels or numbers, or a table of probabilities or labels."""
    network, data = client_network(finished, name, kind), finished.origin.learners.data
    if data.task == "ctc":
        raise BadInput(f"predict: the task is {data.task}; apply the network to inputs: result.model({name!r})")
    inputs = _inputs(x, data, finished.origin.learners.dtype)
    if not data.shape.whole:
        return _other(predictions(network, inputs, data.task, data.label_names), probabilities)
    scores = torch.cat([network(part) for part in torch.split(inputs, _BATCH)])
    if not probabilities:
        return _named(scores.argmax(-1), data.label_names)
    if scores.ndim != 2:
        raise BadInput("probabilities: there is a label at each place of a sample; use result.model(…)")
    import pandas as pd

    return pd.DataFrame(scores.softmax(-1).numpy(), columns=list(_values(data.label_names)))


def generated(finished: Finished, name: str, prompt: str, kind: Kind | None, **options: Any) -> str:
    """Return how a client's network continues a prompt; options are those of `models.generating.continuation`."""
    data = finished.origin.learners.data
    tokens = text_tokens("generate", data.shape, data.reading.tokenizer)
    network = client_network(finished, name, kind)
    return continuation(network, tokens, prompt, length=data.shape.input_shape[0], **options)


def _other(found: Predictions, probabilities: bool) -> Any:
    """Return numbers [samples], or [samples, targets] of several; of sets of labels a table with a column for each."""
    if found.task == "regression" and not probabilities:
        return found.values[:, 0] if len(found.names) == 1 else found.values
    import pandas as pd

    return pd.DataFrame(found.probabilities if probabilities else found.values, columns=list(found.names))


def _inputs(x: Any, data: FederatedData, dtype: torch.dtype) -> Tensor:
    """Return inputs as the network takes them."""
    tokens = data.shape.vocabulary
    inputs = inputs_of(x, data.reading, tokens=tokens is not None)
    if tuple(inputs.shape[1:]) != data.shape.input_shape:
        raise BadInput(
            f"x: samples have shape {list(inputs.shape[1:])}, and the network takes {list(data.shape.input_shape)}; "
            "give them as the training data were, [samples, …]"
        )
    if tokens is None:
        return inputs.to(dtype)
    if inputs.is_floating_point() or int(inputs.max()) >= tokens:
        raise BadInput(f"x: give whole numbers below {tokens}, the tokens that the network knows")
    return inputs


def _named(labels: Tensor, names: tuple[str, ...]) -> Any:
    """Return labels by their names."""
    return np.array(_values(names))[labels.numpy()]


def _values(names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the names of classes; those that are whole numbers, or true and false, as such, for labels were."""
    if set(names) <= {"True", "False"}:
        return tuple(name == "True" for name in names)
    whole = all(name.lstrip("-").isdecimal() and str(int(name)) == name for name in names)
    return tuple(map(int, names)) if whole else names
