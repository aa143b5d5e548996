"""A network in two halves, head(features(x)), with all that is trained in the head.

The features are the last value through which everything after needs x, and in which no trained parameter, dropout or
batch statistic has a say: for one sample they stay the same from step to step. Where that is follows from the network's
graph (torch.fx), so no module declares it: under a trained output layer the features are its inputs; with a trained
first layer there are none.
"""

import contextvars
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from personafl.core.net import Net, _KeyedDropout, _MaskedNorm
from personafl.core.tree import Params
from personafl.fast.stack import stack_around

_TRACING = threading.Lock()  # what two trace at once, torch does not take back in order


@dataclass(frozen=True)
class Halves:
    """The two halves; a parameter is known to them by its name in the whole."""

    features: Net
    head: Net
    size: int  # entries of the features of one sample


@dataclass(frozen=True)
class FirstLayer:
    """A linear layer between two halves, rest(W · features(x) + b), in whose inputs no trained parameter has a say."""

    features: Net
    weight: str
    bias: str | None
    rest: Net


_OTHERS = [2, 0]  # of three samples: a sample's features may not depend on its neighbours, their number or its place
# By network, question and trained parameters; workers and rules ask again in every round.
_KNOWN: weakref.WeakKeyDictionary[Net, dict[tuple[object, frozenset[str]], Any]] = weakref.WeakKeyDictionary()
Found = TypeVar("Found")


def halves_of(net: Net, trained: Iterable[str], samples: Tensor) -> Halves | None:
    """Divide a network before its trained parameters.

    None where less than half of the multiply-adds comes before them, or where the module cannot be divided: torch.fx
    cannot trace it, or the halves are not the whole when tried on some of the samples.
    """
    return _known(_divided, net, trained, samples)


def first_layer(net: Net, trained: Iterable[str], samples: Tensor) -> FirstLayer | None:
    """Find a trained linear layer that sees the same vector for a sample in every step, or None."""
    return _known(_entered, net, trained, samples)


def _known(
    find: Callable[[Net, frozenset[str], Tensor], Found | None], net: Net, trained: Iterable[str], samples: Tensor
) -> Found | None:
    known, question = _KNOWN.setdefault(net, {}), (find, frozenset(trained))

    def answer() -> Found | None:
        try:
            return find(net, question[1], some[torch.arange(3, device=some.device) % len(some)])
        except Exception:  # a module's forward() may do what cannot be traced, and raise anything then
            return None

    if question not in known:
        stack = stack_around()
        some = stack.plain(samples)[0] if stack is not None and stack.has(samples) else samples
        # In a thread of its own: this may be asked under vmap, whose transforms are a thread's, and they forbid a lot.
        with ThreadPoolExecutor(1) as outside:
            known[question] = outside.submit(contextvars.copy_context().run, answer).result()
    found: Found | None = known[question]
    return found


def _divided(net: Net, trained: frozenset[str], x: Tensor) -> Halves | None:
    traced = _traced(net)
    if traced is None:
        return None
    module, graph, first, result = traced
    moving = _moving(graph, module, trained)
    for node in reversed(list(graph.nodes)):
        if node in moving or node.op in ("placeholder", "output"):
            continue
        body, head = _between(graph, first, node), _between(graph, node, result)
        if body is not None and head is not None:
            return _checked(net, _net(net, module, body), _net(net, module, head), x)
    return None


def _entered(net: Net, trained: frozenset[str], x: Tensor) -> FirstLayer | None:
    traced = _traced(net)
    if traced is None:
        return None
    module, graph, first, result = traced
    moving, calls = _moving(graph, module, trained), Counter(node.target for node in graph.nodes)
    for node in graph.nodes:
        layer = module.get_submodule(node.target) if node.op == "call_module" else None
        if type(layer) is not nn.Linear or f"{node.target}.weight" not in trained or calls[node.target] > 1:
            continue
        [before] = node.all_input_nodes
        body, rest = _between(graph, first, before), _between(graph, node, result)
        bias = None if layer.bias is None else f"{node.target}.bias"
        if before in moving or body is None or rest is None or bias not in (None, *net.shapes):
            continue
        found = FirstLayer(_net(net, module, body), f"{node.target}.weight", bias, _net(net, module, rest))
        return found if _makes_whole(found, net, x) else None
    return None


def _traced(net: Net) -> tuple[nn.Module, fx.Graph, fx.Node, fx.Node] | None:
    """Return a network's module and its graph, with the nodes of its input and of its result."""
    module = net.module()
    if len(list(module.named_parameters(remove_duplicate=False))) != len(list(module.parameters())):
        return None  # a parameter with two names: the halves may know it by different ones
    with _TRACING:
        graph = _Tracer().trace(module)
    [first] = (node for node in graph.nodes if node.op == "placeholder")
    [result] = (node.args[0] for node in graph.nodes if node.op == "output")
    return module, graph, first, result


class _Tracer(fx.Tracer):
    """Looks into all modules but torch's layers and those that differ from step to step.

    While it does, torch has it asked for every call of every module, in all threads: those of others go on as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _KeyedDropout | _MaskedNorm) or super().is_leaf_module(m, module_qualified_name)


def _moving(graph: fx.Graph, module: nn.Module, trained: frozenset[str]) -> set[fx.Node]:
    """Return the values that may differ from step to step for one sample."""
    moving: set[fx.Node] = set()
    for node in graph.nodes:
        own = False
        if node.op == "get_attr":
            own = node.target in trained
        elif node.op == "call_module":
            layer = module.get_submodule(node.target)
            drops = isinstance(layer, _KeyedDropout) and layer.p > 0
            names = {f"{node.target}.{name}" for name, _ in layer.named_parameters()}
            own = drops or isinstance(layer, _MaskedNorm) or not trained.isdisjoint(names)
        if own or not moving.isdisjoint(node.all_input_nodes):
            moving.add(node)
    return moving


def _between(graph: fx.Graph, source: fx.Node, target: fx.Node) -> fx.Graph | None:
    """Return the graph that computes `target` from `source`; None if the network's input is needed beside it."""
    needed: set[fx.Node] = set()
    ahead = [target]
    while ahead:
        node = ahead.pop()
        if node is source or node in needed:
            continue
        if node.op == "placeholder":
            return None
        needed.add(node)
        ahead += node.all_input_nodes
    part = fx.Graph()
    copies = {source: part.placeholder("x")}
    for node in graph.nodes:
        if node in needed:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(copies[target])
    return part


def _net(whole: Net, module: nn.Module, graph: fx.Graph) -> Net:
    """Return part of a network as one of its own; what is constant in the whole is so here."""
    part = fx.GraphModule(module, graph)
    for name, value in part.named_parameters():
        value.requires_grad_(name in whole.shapes)
    return Net(part, "shared")


def _checked(net: Net, features: Net, head: Net, x: Tensor) -> Halves | None:
    """Return the halves if they make the whole on samples x [3, …], and the first one is worth it.

    In-place operations, or features whose first axis is not the sample, make them something else.
    """
    start, whole = _tried(net, x)
    two, _ = _counted(features, start, x[_OTHERS])
    values, below = _counted(features, start, x.clone())
    outputs, above = _counted(head, start, values.clone())
    if below < above or len(values) != len(x) or not (_close(values[_OTHERS], two) and _close(outputs, whole)):
        return None
    return Halves(features, head, values[0].numel())


def _makes_whole(found: FirstLayer, net: Net, x: Tensor) -> bool:
    """Say whether the halves and the layer between them make the whole on samples x [3, …]."""
    start, whole = _tried(net, x)
    two, values = (
        found.features.apply({name: start[name] for name in found.features.shapes}, part.clone())
        for part in (x[_OTHERS], x)
    )
    if values.ndim != 2 or len(values) != len(x) or not _close(values[_OTHERS], two):
        return False
    between = functional.linear(values, start[found.weight], None if found.bias is None else start[found.bias])
    return _close(found.rest.apply({name: start[name] for name in found.rest.shapes}, between), whole)


def _tried(net: Net, x: Tensor) -> tuple[Params, Tensor]:
    """Return some parameters of a network and what it makes of x."""
    start = net.some_parameters(x)
    return start, net.apply(start, x)


def _counted(half: Net, params: Params, x: Tensor) -> tuple[Tensor, int]:
    """Return a half's outputs and its multiply-adds."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        outputs = half.apply({name: params[name] for name in half.shapes}, x)
    return outputs, counter.get_total_flops() // 2


def _close(a: Tensor, b: Tensor) -> bool:
    """Say whether values are equal but for rounding; of shapes alone, on "meta", whether these are."""
    return a.shape == b.shape and (a.is_meta or torch.allclose(a, b, rtol=1e-3, atol=1e-5))
