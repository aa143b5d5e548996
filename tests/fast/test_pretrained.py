"""Adapters on a frozen language model: stacked = one by one = a loop over clients with `peft`, for every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from joined import joined
from models.folders import LENGTH, Kind, PeftNet, adapted, folder, in_peft, peft_model, tokens
from personafl.algorithms import METHODS, Training
from personafl.core import tree, wire
from personafl.core.algorithm import Problem, for_returning, reduce
from personafl.core.batches import Data, Padding, Steps
from personafl.core.optim import Sgd
from personafl.core.seam import using
from personafl.core.tasks import task_named
from personafl.core.tree import Tree
from personafl.errors import BadInput
from personafl.fast.gradient import gradient_and_value
from personafl.models import make_net_and_split
from personafl.models.network import SharedNetwork
from personafl.simulate.calibrate import in_doubt
from personafl.simulate.engine import Engine, gather, largest_batch
from personafl.simulate.trainer import bound

pytest.importorskip("peft")
pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]  # of other packages
CLIENTS = np.array([0, 1, 2])  # of 3, 6 and 1 texts
ENGINES = Engine("stacked", 8), Engine("sequential", 1)
PERSONAL: dict[str, Any] = {  # what is personal of FedSA-LoRA, of FedPer's kind, and all of it with nothing shared
    "fedsim": "lora_B", "fedalt": "lora_A", "fedper": "lora", "fedrep": r"re:.*h\.1\..*", "lgfedavg": r"re:.*h\.0\..*",
    "fedbabu": "lora_B", "fedala": "lora_B",
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def plainly(rule: Any, down: Tree, states: Tree, data: Data) -> Tree:
    """Return a rule's results by core's definitions alone, client after client."""

    def one(row: int) -> Data:
        phases = {
            name: b._replace(rows=b.rows[row], real=b.real[row], key=b.key[row], padding=Padding())
            for name, b in data.phases.items()
        }
        return Data(phases, data.examples[row], data.round)

    with using({}):
        return tree.stack([rule(down, tree.take(states, row), one(row)) for row in range(len(CLIENTS))])


def gap(found: Tree, expected: Tree) -> float:
    ours = tree.flatten(wire.dense_each(found))
    theirs = tree.flatten(wire.dense_each(expected))
    assert ours.keys() == theirs.keys()
    return max((float((ours[name] - leaf).abs().max()) for name, leaf in theirs.items() if leaf.numel()), default=0.0)


def check(method: str, kind: Kind, path: Path, personal: str | None, **options: Any) -> None:
    net, split, data = adapted(kind, path, **({} if personal is None else {"personal": personal}), **options)
    task = task_named(data.task)
    ours = Problem(net, task.loss, split=split, correct=task.correct, data=data.shape)
    other = PeftNet(net, kind, path) if options.get("adapters", 1) == 1 else net  # peft has one at a layer
    theirs = Problem(other, task.loss, split=split, correct=task.correct, data=data.shape)
    rules = METHODS[method].build(Training(work=Steps(epochs=2, batch=4), optimizer=Sgd(lr=0.5)))
    double = lambda leaf: leaf.to(torch.float64)  # noqa: E731
    start = tree.map(lambda leaf: double(leaf) + 0.1, net.init(torch.Generator().manual_seed(1)))
    server = rules.server.init(ours, start, 10.0)
    down = wire.dense(rules.server.broadcast(server))
    states = tree.stack(
        [tree.map(double, rules.client.init(ours, down, torch.Generator().manual_seed(int(c)))) for c in CLIENTS]
    )
    for number in range(2):
        batches = gather(data, CLIENTS, rules.client.phases, 1, number)
        sent = for_returning(down)
        expected = plainly(bound(rules.client.update, theirs), sent, states, batches)
        sent_up = tree.flatten(wire.dense_each(expected))
        assert max(float((leaf - 0.1).abs().max()) for leaf in sent_up.values() if leaf.numel()) > 1e-3  # it is not 0
        for way in ENGINES:
            assert gap(way.train(bound(rules.client.update, ours), sent, states, batches), expected) < 1e-10, way
        states, uploads = expected
        heard = joined(rules.server, server, uploads, batches.examples, CLIENTS, number)
        server = rules.server.update(server, heard, number)
        down = wire.dense(rules.server.broadcast(server))


NO_HEAD = {
    "fedbn",
    "fedrod",
    "feddbe",
    "fedproto",
    "fedpac",
    "fedcp",
    "gpfl",
}  # their personal part is one that a base has frozen
HEADED = {*NO_HEAD, "fedavg", "fedper", "fedrep", "fedsim", "ditto"}


@pytest.mark.parametrize("method", [name for name in METHODS if name not in NO_HEAD])
def test_gpt2_with_every_method(method: str, path: Path) -> None:
    """Its linear layers are Conv1D, with fused query, key and value."""
    check(method, "gpt2", path, PERSONAL.get(method))


@pytest.mark.parametrize("method", ["fedavg", "fedalt", "fedsim", "ditto", "finetune", "local"])
def test_llama(method: str, path: Path) -> None:
    check(method, "llama", path, "lora_B" if method in PERSONAL else None)


@pytest.mark.parametrize("method", sorted(HEADED))
def test_bert_with_a_head_that_is_trained_too(method: str, path: Path) -> None:
    check(method, "bert", path, {"fedsim": "lora_B", "fedavg": None, "ditto": None}.get(method, "output"))


@pytest.mark.parametrize("method", ["fedalt", "fedsim", "fedavg"])
def test_two_adapters_at_a_layer(method: str, path: Path) -> None:
    """One shared and one personal (FedDPA): stacked = one by one = core's definitions."""
    check(method, "gpt2", path, None if method == "fedavg" else "lora_local", adapters=2)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_attention_in_one_pass_gives_the_same_up_to_rounding(kind: Kind, path: Path) -> None:
    """In float32 training has torch's own attention and samples of all clients as one batch; definitions have not."""
    net, _, data = adapted(kind, path)
    net = net.to(torch.device("cpu"), torch.float32)
    start = {name: value.float() + 0.1 for name, value in net.init(torch.Generator().manual_seed(1)).items()}
    seen: list[tuple[str, int]] = []

    def look(layer: Any, given: Any, options: dict[str, Any]) -> None:
        seen.append((layer.config._attn_implementation, len(options["input_ids"])))

    net._module.model.register_forward_pre_hook(look, with_kwargs=True)
    with using({}):
        plain = net.apply(start, data.x)
    alone = net.apply(start, data.x)
    both = torch.func.vmap(lambda x: net.apply(start, x))(torch.stack([data.x, data.x.flip(0)]))
    assert seen == [("eager", len(data.x)), ("sdpa", len(data.x)), ("sdpa", 2 * len(data.x))]
    for found, expected in ((alone, plain), (both[0], plain), (both[1], plain.flip(0))):
        assert float((found - expected).abs().max()) < 1e-4 * float(plain.abs().max())


def runs_of_a_block(kind: Kind, path: Path, **options: Any) -> int:
    """Return how often one is run for a gradient of two stacked clients."""
    net, _, data = adapted(kind, path, **options)
    name = next(name for name, _ in net._module.named_modules() if name.endswith((".mlp", ".intermediate")))
    seen: list[int] = []
    net._module.get_submodule(name).register_forward_pre_hook(lambda *_: seen.append(1))
    start = {name: value.double() + 0.1 for name, value in net.init(torch.Generator()).items()}
    loss = task_named(data.task).loss

    def gradient(part: torch.Tensor) -> Any:
        own = {name: value * part for name, value in start.items()}
        return gradient_and_value(lambda own, _: loss(net.apply(own, data.x), data.y).mean(), own, None)[0]

    torch.func.vmap(gradient)(torch.ones(2, dtype=torch.float64))
    return len(seen)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_blocks_are_computed_once_more_for_the_gradient(kind: Kind, path: Path) -> None:
    """Gradient checkpointing: the same numbers, stacked, one by one and in a loop with peft."""
    check("fedalt", kind, path, "lora_B", checkpoint=True)
    assert (runs_of_a_block(kind, path), runs_of_a_block(kind, path, checkpoint=True)) == (1, 2)
    with pytest.raises(BadInput, match=r"model\.checkpoint: is for adapters beside a frozen model"):
        make_net_and_split(SharedNetwork(source=folder("gpt2", path), checkpoint=True), tokens("next-token"))


def test_a_network_that_is_trained_as_a_whole_stacks_as_others_do(path: Path) -> None:
    """There clients have more than linear layers of their own, and vmap does it."""
    net, _ = make_net_and_split(SharedNetwork(source=folder("gpt2", path)), tokens("next-token"))
    net = net.to(torch.device("cpu"), torch.float64)
    start = {name: value.double() for name, value in net.init(torch.Generator()).items()}
    x = tokens("next-token").x
    parts = torch.tensor([1.0, 0.5], dtype=torch.float64)
    stacked = torch.func.vmap(lambda part: net.apply({n: v * part for n, v in start.items()}, x))(parts)
    with using({}):
        alone = net.apply({name: value * 0.5 for name, value in start.items()}, x)
    assert float((stacked[1] - alone).abs().max()) < 1e-10


def test_fedavg_and_fedalt_are_a_loop_with_peft_and_torchs_own_optimizer(path: Path) -> None:
    """One step of everyone on all of its texts:  u ← Σ p_i (u − γ ∇_u f_i(u, v_i⁺)),  v_i⁺ = v_i − γ_v ∇_v f_i(u, v_i).

    FedAvg is FedAlt with nothing personal. Written with `peft`, `torch.optim.SGD` and `cross_entropy` alone.
    """
    net, split, data = adapted("gpt2", path, personal="lora_B")
    task = task_named(data.task)
    start = tree.map(lambda leaf: leaf.double() + 0.1, net.init(torch.Generator().manual_seed(1)))
    ours = Problem(net, task.loss, split=split, correct=task.correct, data=data.shape)
    work = Training(work=Steps(epochs=1, batch=8), optimizer=Sgd(lr=0.5))
    for method in ("fedavg", "fedalt"):
        rules = METHODS[method].build(work, **({"personal_lr": 0.25} if method == "fedalt" else {}))
        server = rules.server.init(ours, start, 10.0)
        down = wire.dense(rules.server.broadcast(server))
        states = tree.stack([rules.client.init(ours, down, torch.Generator()) for _ in CLIENTS])
        batches = gather(data, CLIENTS, rules.client.phases, 1, 0)
        update = bound(rules.client.update, ours)
        states, uploads = ENGINES[0].train(update, for_returning(down), states, batches)
        server = rules.server.update(server, reduce(wire.dense_each(uploads), batches.examples), 0)
        found = wire.dense(rules.server.broadcast(server))
        model = peft_model("gpt2", path)
        mean: dict[str, torch.Tensor] = {}
        for client in CLIENTS:
            mine = torch.from_numpy(data.train[client])
            model.load_state_dict({in_peft(name): value for name, value in start.items()}, strict=False)
            steps = [("lora_B", 0.25), ("lora_A", 0.5)] if method == "fedalt" else [("lora_", 0.5)]
            for part, rate in steps:
                values = {name: value for name, value in model.named_parameters() if part in name}
                optimizer = torch.optim.SGD(values.values(), lr=rate)
                optimizer.zero_grad()
                scores, targets = model(input_ids=data.x[mine]).logits, data.y[mine]
                each = torch.nn.functional.cross_entropy(scores.mT, targets, reduction="none", ignore_index=-1)
                (each.sum(1) / (targets >= 0).sum(1)).mean().backward()
                optimizer.step()
            own = {name: value.detach().clone() for name, value in model.named_parameters() if "lora_" in name}
            for name, value in own.items():
                mean[name] = mean.get(name, 0.0) + value * len(mine) / len(data.x)
            if method == "fedalt":
                kept = {name: states.personal[name][client] for name in states.personal}
                assert max(float((own[in_peft(n)] - v).abs().max()) for n, v in kept.items()) < 1e-10
        shared = found.shared if method == "fedalt" else found.model
        assert max(float((mean[in_peft(name)] - value).abs().max()) for name, value in shared.items()) < 1e-10
        assert max(float((start[name] - value).abs().max()) for name, value in shared.items()) > 1e-3


class Watch(TorchDispatchMode):
    """Writes down the shape of everything that is computed, and what memory it takes beyond views."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {value.untyped_storage().data_ptr() for value in tree_leaves(args) if isinstance(value, torch.Tensor)}
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in given:
                self.made.append(value.shape)
        return result


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_stack_goes_through_the_base_as_one_batch(kind: Kind, path: Path) -> None:
    """For n clients: n times the work of one, in as many calls; no weight of the base copied, none has a gradient."""
    net, _, data = adapted(kind, path, rank=1)
    problem = Problem(net, task_named(data.task).loss, data=data.shape)
    rules = METHODS["fedavg"].build(Training(work=Steps(steps=1, batch=1), optimizer=Sgd(lr=0.5)))
    start = tree.map(lambda leaf: leaf.double(), net.init(torch.Generator().manual_seed(1)))
    down = wire.dense(rules.server.broadcast(rules.server.init(problem, start, 10.0)))
    update, sent = bound(rules.client.update, problem), for_returning(down)
    flops, calls, lengths = {}, {}, set()
    for count in (1, 3):
        states = tree.stack([rules.client.init(problem, down, torch.Generator()) for _ in range(count)])
        batches = gather(data, CLIENTS[:count], rules.client.phases, 1, 0)
        with FlopCounterMode(display=False) as counter:
            Engine("stacked", 8).train(update, sent, states, batches)
        flops[count] = counter.get_total_flops()
        with Watch() as seen:
            Engine("stacked", 8).train(update, sent, states, batches)
        calls[count], lengths = len(seen.made), {tuple(shape) for shape in seen.made}
    assert flops[3] == 3 * flops[1]
    assert calls[3] <= calls[1] + 10
    constants = {value.shape for name, value in net.module().named_parameters() if name not in net.shapes}
    matrices = {shape for shape in constants if len(shape) == 2 and 1 not in shape}
    for rows, columns in matrices:
        for copied in ((rows, columns), (columns, rows), (3, rows, columns), (3, columns, rows)):
            assert copied not in lengths, f"{copied} is as large as a weight of the base"


def test_chunks_count_what_a_frozen_base_keeps(path: Path) -> None:
    """A client's activations of a batch, as counted when the network was tried, are of the memory that it takes."""
    net, _, data = adapted("llama", path)
    problem = Problem(net, task_named(data.task).loss, data=data.shape)
    assert net.constant
    assert in_doubt(problem, torch.device("cpu"))  # its size is not that of what is trained
    # Of two layers: what attention looks at [heads, length, length], and three times [length, 12] of the MLP's.
    assert net.sample_bytes > 2 * 4 * (2 * LENGTH * LENGTH + 3 * LENGTH * 12)
    copies, cpu = 8 * 4 * net.parameters, torch.device("cpu")
    for batch in (1, 16, 64):
        one = copies + max(copies, batch * net.sample_bytes)
        assert Engine.fitted(problem, "stacked", 20 * one, cpu, batch=batch).chunk == 20
    assert largest_batch(data, {"a": Steps(epochs=1, batch=4), "b": Steps(steps=1, batch=None)}) == 6
    assert largest_batch(data, {"a": Steps(epochs=1, batch=4)}) == 4
