"""Where a run computes, how exactly, and where its data are."""

import ctypes
import dataclasses
import os
import platform

import numpy as np
import torch

from personafl.data.federated import FederatedData
from personafl.data.window import Window
from personafl.errors import BadInput

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of <malloc.h>
_TOGETHER = 1024  # clients that are trained at the same time at most


def set_arithmetic(dtype: str, device: torch.device) -> None:
    """Have a GPU compute the same bits every time, with factors of products and convolutions rounded to TF32 or not.

    With bfloat16, products that are not rounded to it are to TF32. torch's own defaults are a mixture of TF32 and
    float32, and convolutions that add up in any order. A layer that has no other way makes torch warn.
    """
    if device.type not in {"tf32": ("cuda",), "bfloat16": ("cuda", "cpu")}.get(dtype, (device.type,)):
        raise BadInput(f'engine.dtype: "{dtype}" is not possible on {device.type}; use "float32"')
    if device.type != "cuda":
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype in ("tf32", "bfloat16")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product; torch asks for it
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nobody reads it


def keep_freed_memory() -> None:
    """Ask glibc's allocator to keep freed blocks of up to 32 MiB for the next step, rather than return them at once.

    A step's temporaries would otherwise be fresh pages every time, which the kernel has to clear.
    """
    if platform.libc_ver()[0] == "glibc":
        for option, value in ((_MMAP_THRESHOLD, 2**25), (_TRIM_THRESHOLD, 2**28)):
            ctypes.CDLL(None).mallopt(option, value)


def named_device(name: str) -> torch.device:
    """Return the device that a recipe names."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(
            f"engine.device: {name!r} is not available here ({str(error).splitlines()[0].partition('. ')[0]}); use cpu"
        ) from error
    return device


def placed(data: FederatedData, device: torch.device, dtype: torch.dtype, data_mb: int | None) -> FederatedData:
    """Return data in the run's precision and on its device, if they fit there; if not, with a window there.

    They fit if they take no more than `data_mb`, None: half of a GPU's free memory.
    """
    x, y = data.x.to(dtype) if data.x.is_floating_point() else data.x, data.y
    if data_mb is not None and device.type == "cpu":
        raise BadInput("engine.data_mb: on a CPU data are used where they are; leave it out")
    room = None if data_mb is None else data_mb * 2**20
    if room is None and device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] // 2
    if room is None or x.nbytes + y.nbytes <= room:
        return dataclasses.replace(data, x=x.to(device), y=y.to(device))
    sizes = data.train.sizes
    samples = min(room * len(x) // (x.nbytes + y.nbytes), int(np.sort(sizes)[-_TOGETHER:].sum()))
    largest = int(sizes.argmax())
    if sizes[largest] > samples:
        raise BadInput(
            f"client {data.client_names[largest]}: its {sizes[largest]:,} samples do not fit the {room // 2**20:,} MiB "
            f"that data may take on {device}; raise engine.data_mb, or set engine.device=cpu"
        )
    return dataclasses.replace(data, x=x, y=y, window=Window(x, y, samples, device))
