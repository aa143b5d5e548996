"""What a packed model costs on a device: the .onnx files of an export, packed and with whole float weights, in turns.

    python benchmarks/device_inference.py FILE.onnx...           files that personafl export --onnx wrote
    python benchmarks/device_inference.py RUN... --client 7      or finished runs, exported for this

Every measurement is a fresh process with numpy and onnxruntime alone: milliseconds to make a session and for a batch,
and the peak of resident memory above what the imports take. Medians over the repeats, in which the files take turns.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

# VmHWM and not ru_maxrss: the latter begins with the memory of the process that starts this one.
DEVICE = """
import json, statistics, sys, time
import numpy, onnxruntime

def kilobytes(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))

imported = kilobytes("VmHWM")
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(sys.argv[2])
began = time.perf_counter()
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
found = {"load": time.perf_counter() - began}
[entry] = session.get_inputs()
kind = numpy.int64 if entry.type == "tensor(int64)" else numpy.float32
for batch in map(int, sys.argv[3:]):
    x = numpy.ones((batch, *entry.shape[1:]), kind)
    spent = []
    for _ in range(30):
        began = time.perf_counter()
        session.run(None, {entry.name: x})
        spent.append(time.perf_counter() - began)
    found[str(batch)] = statistics.median(spent[5:])
found["peak"] = (kilobytes("VmHWM") - imported) / 1024
assert "torch" not in sys.modules
print(json.dumps(found))
"""


def whole(path: Path) -> onnx.ModelProto | None:
    """Return the model of a file with its packed weights as float tensors; None if it has none that are packed."""
    model = onnx.load(path)
    graph, entry = model.graph, model.graph.input[0]
    names = [tensor.name.removesuffix(".codes") for tensor in graph.initializer if tensor.name.endswith(".codes")]
    if not names:
        return None
    outputs = list(graph.output)
    graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    shape = [dim.dim_value or 1 for dim in entry.type.tensor_type.shape.dim]
    kind = helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = session.run(names, {entry.name: np.ones(shape, kind)})

    def packed(name: str) -> bool:
        own = name in names or name.startswith(tuple(f"{weight}." for weight in names))
        return own or re.match(r"\dbit\.", name) is not None  # or shared by the weights of so many bits

    nodes = [node for node in graph.node if not packed(node.output[0])]
    tensors = [tensor for tensor in graph.initializer if not packed(tensor.name)]
    tensors += [numpy_helper.from_array(value, name) for name, value in zip(names, values, strict=True)]
    dense = helper.make_graph(nodes, "network", [entry], outputs, tensors)
    return helper.make_model(dense, opset_imports=model.opset_import, ir_version=model.ir_version)


def measured(path: Path, threads: int, batches: list[int]) -> dict[str, float]:
    """Return seconds and MiB from a process of its own."""
    words = [sys.executable, "-I", "-c", DEVICE, path, str(threads), *map(str, batches)]
    result: dict[str, float] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return result


def files_of(given: list[Path], clients: list[str], folder: Path) -> list[Path]:
    """Return the ONNX files that were given, and those of runs, exported to a folder."""
    files = []
    for path in given:
        if path.is_dir():
            from personafl import export  # with torch; files need none of it

            models = export(path, folder / f"run{len(files)}", clients or None, onnx=True).models
            files += [model.onnx for model in models if model.onnx is not None]
        else:
            files.append(path)
    return files


def main() -> None:
    """Print two lines per file, one if nothing in it is packed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE.onnx|RUN")
    parser.add_argument("--client", action="append", default=[], help="of runs, beside the global model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    columns = ["load ms", *(f"ms for {batch}" for batch in options.batch), "peak MiB"]
    print(f"{options.threads} thread(s), medians of {options.repeats} processes each")
    print(f"{'file':<24}{'weights':<9}{'bytes':>12}" + "".join(f"{title:>12}" for title in columns))
    with tempfile.TemporaryDirectory() as name:
        for file in files_of(options.paths, options.client, Path(name)):
            dense, forms = whole(file), {"float": file}
            if dense is not None:
                forms = {"float": Path(name) / "dense.onnx", "packed": file}
                onnx.save(dense, forms["float"])
            found: dict[str, list[dict[str, float]]] = {form: [] for form in forms}
            for _ in range(options.repeats):
                for form, path in forms.items():
                    found[form].append(measured(path, options.threads, options.batch))
            for form, path in forms.items():
                medians = {key: statistics.median(row[key] for row in found[form]) for key in found[form][0]}
                peak = medians.pop("peak")
                times = "".join(f"{1000 * value:>12.2f}" for value in medians.values())
                print(f"{file.name:<24}{form:<9}{path.stat().st_size:>12,}{times}{peak:>12.1f}", flush=True)


if __name__ == "__main__":
    main()
