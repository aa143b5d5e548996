"""Many clients' LoRA on one frozen language model: a loop over clients with `peft` against one stacked pass.

    python benchmarks/adapters.py steps                      # seconds for one step of every client, both ways
    python benchmarks/adapters.py clients                    # time and memory for 1 to 1,000 clients
    python benchmarks/adapters.py steps --device cuda --size gpt2 --base bfloat16   # as the issue's figures

The model is a GPT-2 with random weights, of a `--size`, in a temporary folder; LoRA of rank 8 beside the attention's
query, key and value. The loop is the kindest one: the base is loaded once, and each client's adapters are copied into
it, trained by one step of SGD and kept. Times of both ways are taken in turn; the least of `--repeat` counts.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from personafl.algorithms import METHODS, Training
from personafl.core import rng, tree, wire
from personafl.core.algorithm import Problem
from personafl.core.batches import Steps
from personafl.core.optim import Sgd
from personafl.core.tasks import task_named
from personafl.data.federated import FederatedData, Ragged, make_federated
from personafl.models import make_net_and_split
from personafl.models.network import SharedNetwork
from personafl.simulate.clientside import received
from personafl.simulate.engine import Engine, gather
from personafl.simulate.hardware import keep_freed_memory
from personafl.simulate.trainer import bound

SIZES = {  # layers, width, heads, words
    "tiny": (2, 64, 4, 256),
    "small": (4, 128, 4, 512),
    "gpt2": (12, 768, 12, 50257),
    "medium": (24, 1024, 16, 50257),
}
RANK, LR = 8, 0.01
STEPS = ((32, 1, 32), (32, 1, 128), (32, 4, 128), (100, 1, 64), (8, 8, 256))  # clients, texts of each, tokens


def write_model(size: str, folder: str) -> None:
    import transformers

    layers, width, heads, words = SIZES[size]
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=words, n_positions=1024,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def texts(clients: int, batch: int, tokens: int, words: int, device: torch.device) -> FederatedData:
    """Return random texts, so many of each client."""
    text = torch.randint(0, words, (clients * batch, tokens + 1), generator=torch.Generator().manual_seed(0)).to(device)
    rows = Ragged.from_lists(np.split(np.arange(clients * batch), clients))
    none = Ragged.from_lists([np.zeros(0, np.int64)] * clients)
    return make_federated(
        name="random", x=text[:, :-1], y=text[:, 1:], classes=words, train=rows, validation=none, test=none,
        seen=np.arange(clients), unseen=np.zeros(0, np.int64), client_names=tuple(map(str, range(clients))),
        label_names=tuple(map(str, range(words))), vocabulary=words, task="next-token",
    )  # fmt: skip


class Ours(NamedTuple):
    """A step of every client, ready to be taken."""

    engine: Engine
    update: Callable[..., Any]
    down: Any
    states: Any
    data: Any

    def step(self) -> Any:
        return self.engine.train(self.update, self.down, self.states, self.data)


def ours(data: FederatedData, folder: str, args: argparse.Namespace, batch: int, stacked: bool) -> Ours:
    record = SharedNetwork(
        source=folder, adapter="lora", rank=RANK, alpha=RANK, targets=["c_attn"], base_dtype=args.base
    )
    net = make_net_and_split(record, data)[0].to(data.device, torch.float32)
    task = task_named(data.task)
    problem = Problem(net, task.loss, correct=task.correct, data=data.shape)
    rules = METHODS["fedavg"].build(Training(work=Steps(steps=1, batch=batch), optimizer=Sgd(lr=LR)))
    start = {name: value.to(data.device) for name, value in net.init(rng.generator(0, "start")).items()}
    _, again = received(wire.dense(rules.server.broadcast(rules.server.init(problem, start, 1.0))))
    clients = np.arange(data.clients)
    states = tree.stack([rules.client.init(problem, again, torch.Generator()) for _ in clients])
    graphs = data.device.type == "cuda" and stacked
    chosen = Engine.fitted(problem, "graphs" if graphs else "stacked", 2**40, data.device)
    engine = Engine("stacked", data.clients, graphs=chosen.graphs) if stacked else Engine("sequential", 1)
    batches = gather(data, clients, rules.client.phases, 0, 0)
    return Ours(engine, bound(rules.client.update, problem), again, states, batches)


def loop(data: FederatedData, folder: str, args: argparse.Namespace) -> Callable[[], list[dict[str, torch.Tensor]]]:
    """Return what takes a step of every client with peft."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.base))
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(model, config).to(data.device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    own = {name: value for name, value in model.named_parameters() if value.requires_grad}
    kept = [{name: value.detach().clone() for name, value in own.items()} for _ in range(data.clients)]
    optimizer = torch.optim.SGD(own.values(), lr=LR)
    rows = [torch.from_numpy(data.train[client]).to(data.device) for client in range(data.clients)]

    def steps() -> list[dict[str, torch.Tensor]]:
        after = []
        for client, mine in enumerate(rows):
            with torch.no_grad():
                for name, value in own.items():
                    value.copy_(kept[client][name])
            optimizer.zero_grad()
            scores = model(input_ids=data.x[mine], use_cache=False).logits
            torch.nn.functional.cross_entropy(scores.flatten(0, 1).float(), data.y[mine].flatten()).backward()
            optimizer.step()
            after.append({name: value.detach().clone() for name, value in own.items()})
        return after

    return steps


def seconds(ways: dict[str, Callable[[], Any]], repeat: int, device: torch.device) -> dict[str, float]:
    """Return the least time of each way, taken in turn, after two that warm up (and are recorded on a GPU).

    On a CPU it is processor time, in which other processes have no say.
    """

    clock = time.process_time if device.type == "cpu" else time.perf_counter

    def once(way: Callable[[], Any]) -> float:
        began = clock()
        way()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - began

    for way in [*ways.values()] * 2:
        once(way)
    turns = [[once(way) for way in ways.values()] for _ in range(repeat)]
    return {name: min(turn[place] for turn in turns) for place, name in enumerate(ways)}


def peak(way: Callable[[], Any], device: torch.device) -> float:
    """Return the most memory on a GPU, in GiB, while one way runs; on a CPU it is not known."""
    if device.type != "cuda":
        return float("nan")
    torch.cuda.reset_peak_memory_stats()
    way()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def compare_steps(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    print(f"{'clients × texts × tokens':>24}  {'peft':>8}  {'1 by 1':>8}  {'stacked':>8}  ratio   GiB peft / stacked")
    with tempfile.TemporaryDirectory() as folder:
        write_model(args.size, folder)
        for clients, batch, tokens in args.steps or STEPS:
            data = texts(clients, batch, tokens, SIZES[args.size][3], device)
            ways = {
                "peft": loop(data, folder, args),
                "single": ours(data, folder, args, batch, stacked=False).step,
                "stacked": ours(data, folder, args, batch, stacked=True).step,
            }
            found = seconds(ways, args.repeat, device)
            memory = [peak(ways[name], device) for name in ("peft", "stacked")]
            times = "  ".join(f"{1e3 * found[name]:8.1f}" for name in ways)
            print(
                f"{f'{clients} × {batch} × {tokens}':>24}  {times}  {found['peft'] / found['stacked']:5.2f}   "
                f"{memory[0]:.2f} / {memory[1]:.2f}",
                flush=True,
            )
    print("milliseconds for one step of every client, on a CPU of processor time")


def compare_clients(args: argparse.Namespace) -> None:
    """Run a round of n clients, each in a process of its own, which says what memory it took."""
    print(f"{'clients':>8}  {'seconds':>8}  {'ms each':>8}  {'MiB at most':>11}  chunk")
    with tempfile.TemporaryDirectory() as folder:
        write_model(args.size, folder)
        for clients in args.counts:
            command = [
                sys.executable,
                "-W",
                "ignore",
                __file__,
                "one",
                "--folder",
                folder,
                "--size",
                args.size,
                "--base",
                args.base,
            ]
            command += ["--counts", str(clients)]
            print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, end="", flush=True)


def one_count(args: argparse.Namespace) -> None:
    (clients,), device = args.counts, torch.device(args.device)
    data = texts(clients, 4, 32, SIZES[args.size][3], device)
    ready = ours(data, args.folder, args, 4, stacked=True)
    began = time.process_time()
    chunk = min(clients, args.chunk)
    for start in range(0, clients, chunk):
        some = np.arange(start, min(start + chunk, clients))
        batches = gather(data, some, {"local": Steps(steps=1, batch=4)}, 0, 0)
        states = tree.map(lambda leaf, some=some: leaf[some], ready.states)
        ready.engine.train(ready.update, ready.down, states, batches)
    spent = time.process_time() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{clients:8d}  {spent:8.2f}  {1e3 * spent / clients:8.1f}  {most:11.0f}  {chunk}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "clients", "one"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--base", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--counts", type=lambda text: [int(n) for n in text.split(",")], default=[1, 10, 100, 1000])
    parser.add_argument(
        "--steps", type=lambda text: [tuple(map(int, part.split("x"))) for part in text.split(",")],
        help="as in 32x1x128,8x8x256: clients, texts, tokens",
    )  # fmt: skip
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cpu":
        keep_freed_memory()  # as runs have it
    {"steps": compare_steps, "clients": compare_clients, "one": one_count}[args.what](args)


if __name__ == "__main__":
    main()
