"""ONNX files: a trained network that stock onnxruntime runs, with nothing of ours, its quantized weights still packed.

A weight with few distinct values is stored as in `wire.Quantized`: its values (`centers`) and their codes, packed, in
the next of 1, 2, 4 or 8 bits, so that bytes hold whole codes. A table has the codes of every possible byte:

    weight = Gather(Gather(centers, codes in every byte), bytes)

These nodes depend on nothing else, so onnxruntime runs them just once, when it makes a session.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from personafl.core import wire
from personafl.errors import BadInput

if TYPE_CHECKING:
    import onnx

TOLERANCE = 1e-5  # relative to the largest score, or to 1 if that is larger
_LARGEST = 2**31  # bytes of a file
_MOST = 256  # values of a weight that is stored as codes
_BYTES = torch.arange(256, dtype=torch.uint8)


def check_installed() -> None:
    """Fail if what writes and runs ONNX files is not there."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"ONNX files need {', '.join(missing)}; install with: pip install 'personafl[onnx]'")


def onnx_file(network: nn.Module, x: Tensor, facts: Mapping[str, str]) -> bytes:
    """Return the ONNX file of a network, from input "x" [batch, …] to "scores"; facts are its metadata.

    It is in single precision. Before it is returned, onnxruntime runs it on the samples x, together and the first one
    alone; its scores must be those of torch up to `TOLERANCE`.
    """
    import onnx

    size = 4 * sum(value.numel() for value in (*network.parameters(), *network.buffers()))
    if size >= _LARGEST:  # before gigabytes are written that protobuf does not take
        raise BadInput(f"its weights take {size / 2**30:.1f} GiB in single precision, and such a file has at most 2")
    network = network.float().eval()
    x = x.float() if x.is_floating_point() else x
    plain = _exported(network, x)
    model = min(_with_lookups(plain), plain, key=lambda candidate: candidate.ByteSize())
    onnx.helper.set_model_props(model, dict(facts))
    content: bytes = model.SerializeToString(deterministic=True)
    _check_scores(content, network, x)
    return content


def _exported(network: nn.Module, x: Tensor) -> onnx.ModelProto:
    """Return the network as torch writes it, all weights whole, without what it notes about the code."""
    pair = torch.cat([x[:1], x[:1]])  # a batch of 1 would be taken for a fixed size
    try:
        with _quiet(), torch.no_grad():
            sizes = ({0: torch.export.Dim("batch")},)
            # Strict, or else a network that asks for len(x) would be for batches of this size alone.
            program = torch.export.export(network, (pair,), dynamic_shapes=sizes, strict=True)
            made = torch.onnx.export(program, input_names=["x"], output_names=["scores"], dynamo=True, verbose=False)
            assert made is not None
            proto = made.model_proto
    except Exception as error:  # it runs the network's own code
        raise BadInput(f"torch cannot write this network as ONNX: {_reason(error)}") from error
    for entry in (*proto.graph.node, *proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        del entry.metadata_props[:]
    return _rebuilt(proto, proto.graph.node, proto.graph.initializer)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch logs and prints about itself from the user; an error is raised anyway."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> str:
    """Return what was wrong in the first place."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _rebuilt(proto: onnx.ModelProto, nodes: Any, tensors: Any) -> onnx.ModelProto:
    """Return a model with other nodes and tensors, and nothing that does not matter."""
    import onnx

    graph = onnx.helper.make_graph(nodes, "network", proto.graph.input, proto.graph.output, tensors)
    return onnx.helper.make_model(
        graph, opset_imports=proto.opset_import, ir_version=proto.ir_version, producer_name="personafl"
    )


def _with_lookups(plain: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with weights as codes where that is smaller.

    They are known by their values alone, since torch may have renamed, transposed or cut them.
    """
    nodes: list[onnx.NodeProto] = []
    tensors: list[onnx.TensorProto] = []
    shared: dict[str, onnx.TensorProto] = {}
    for weight in plain.graph.initializer:
        lookup = _lookup(weight)
        if lookup is None or lookup.size >= weight.ByteSize():
            tensors.append(weight)
            continue
        nodes += lookup.nodes
        tensors += lookup.tensors
        shared |= lookup.shared
    return _rebuilt(plain, [*nodes, *plain.graph.node], [*tensors, *shared.values()])


def _lookup(weight: onnx.TensorProto) -> _Lookup | None:
    """Return a weight as codes, if it has few values."""
    import onnx

    values = onnx.numpy_helper.to_array(weight)
    if values.dtype != np.float32 or values.ndim < 2:
        return None
    centers, codes = np.unique(values, return_inverse=True)
    if not 0 < len(centers) <= _MOST:
        return None
    shaped = codes.reshape(values.shape)  # numpy 1 returns them flat
    bits = next(width for width in (1, 2, 4, 8) if len(centers) <= 2**width)
    every = np.pad(centers, (0, 2**bits - len(centers)), mode="edge")  # for all codes of so many bits
    return _Lookup(weight.name, wire.Quantized.of(torch.from_numpy(shaped), torch.from_numpy(every)))


class _Lookup:
    """The nodes and tensors that restore one weight; `shared` are tensors that all weights of so many bits use."""

    def __init__(self, name: str, form: wire.Quantized) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self._name, self._shape = name, form.shape.tolist()
        bits = form.bits(form.centers)
        per_byte = 8 // bits
        every = wire.Quantized(_BYTES, form.centers, torch.tensor([256, per_byte])).unpacked()
        self.shared = {f"{bits}bit.table": _tensor(f"{bits}bit.table", every.numpy().astype(np.uint8))}
        centers = self._own("centers", form.centers.numpy())
        codes = self._own("codes", form.codes.numpy())
        values = self._add("Gather", centers, self._index(f"{bits}bit.table"))  # [256, codes in a byte]
        self._shaped(self._add("Gather", values, self._index(codes)), len(form.codes) * per_byte)
        self.nodes[-1].output[0] = name

    @property
    def size(self) -> int:
        """Bytes that it takes in the file, what is shared aside."""
        parts: list[Any] = [*self.nodes, *self.tensors]
        return sum(int(part.ByteSize()) for part in parts)

    def _shaped(self, name: str, entries: int) -> str:
        """Cut off what fills the last byte, and return the rest in the shape of the weight."""
        needed = math.prod(self._shape)
        if needed < entries:
            flat = self._add("Reshape", name, self._own("flat", np.array([-1])))
            ends = (self._own(part, np.array([at])) for part, at in (("start", 0), ("end", needed)))
            name = self._add("Slice", flat, *ends)
        return self._add("Reshape", name, self._own("shape", np.array(self._shape)))

    def _index(self, name: str) -> str:
        """Gather takes no bytes as indices."""
        import onnx

        return self._add("Cast", name, to=onnx.TensorProto.INT32)

    def _add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        import onnx

        output = f"{self._name}.{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(kind, inputs, [output], **attributes))
        return output

    def _own(self, part: str, values: NDArray[Any]) -> str:
        self.tensors.append(_tensor(f"{self._name}.{part}", values))
        return self.tensors[-1].name


def _tensor(name: str, values: NDArray[Any]) -> onnx.TensorProto:
    import onnx

    return onnx.numpy_helper.from_array(values, name)


def _check_scores(content: bytes, network: nn.Module, x: Tensor) -> None:
    """Fail if onnxruntime does not get torch's scores."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    batches = (x, x[:1])
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        found = [session.run(["scores"], {"x": batch.numpy()})[0] for batch in batches]
    except Exception as error:
        raise BadInput(f"onnxruntime cannot run this network: {_reason(error)}") from error
    for scores, batch in zip(found, batches, strict=True):
        with torch.no_grad():
            wanted = network(batch).numpy()
        gap, scale = float(np.abs(scores - wanted).max()), max(1.0, float(np.abs(wanted).max()))
        if not gap <= TOLERANCE * scale:  # also if it is not a number
            raise BadInput(f"onnxruntime's scores are {gap:.1e} from torch's, which are up to {scale:.1e}")
