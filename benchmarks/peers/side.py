"""One side of the comparison, in a process of its own: `python side.py SIDE WORK METHOD CORES [OPTION...]`, see `main`.

Reads commands from stdin, a line each, and answers with a line of JSON: `check FILE` trains a small round whose result
does not depend on the order of samples and writes the model; `turn` trains rounds for half a second, at least one, and
says how many seconds each took.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from work import WORKS

TURN = 0.5  # seconds: rounds follow one another in a run too


def side_of(name: str) -> Any:
    """Return the class of a side; its package is imported here and not before."""
    if name == "personafl":
        from with_personafl import Personafl

        return Personafl
    if name == "pfl":
        from with_pfl import Pfl

        return Pfl
    if name == "flower":
        from with_flower import Flower

        return Flower
    if name == "fedjax":
        from with_jax import FedJAXStyle

        return FedJAXStyle
    from loops import PFLlibStyle, Tight

    return {"tight": Tight, "pfllib": PFLlibStyle}[name]


def main(name: str, work_name: str, method: str, cores: str, *options: str) -> None:
    """Serve commands until stdin ends; of several cores ours uses worker processes, the others threads.

    Options are quick, bfloat16 and full_training, as those of `peers.py`.
    """
    processes = int(cores) if name in ("personafl", "flower") else 1
    torch.set_num_threads(int(cores) // processes)
    answers, sys.stdout = sys.stdout, sys.stderr  # what a package prints is no answer

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        kind = side_of(name)
    except ImportError as error:
        return answer(refused=f"not installed ({error})")
    if method not in kind.methods:
        return answer(refused=f"does not have {method}")
    if work_name not in getattr(kind, "works", WORKS):
        return answer(refused=f"does not have the model of {work_name}")
    if "bfloat16" in options and name == "fedjax":
        return answer(refused="does not have bfloat16")
    whole = replace(WORKS[work_name], bfloat16="bfloat16" in options, full="full_training" in options)
    work = whole.quick() if "quick" in options else whole
    several = {"workers": processes} if processes > 1 else {}
    answer(methods=kind.methods)
    timed = None
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "check":
            small = kind(whole.checked(), method)
            with contextlib.redirect_stdout(sys.stderr):
                small.round()
            torch.save({key: value.clone() for key, value in small.result().items()}, arguments[0])
            getattr(small, "close", lambda: None)()
            answer()
        else:
            if timed is None:
                timed = kind(work, method, **several)
            begin, rounds, spent = time.perf_counter(), 0, 0.0
            while spent < TURN:
                timed.round()
                rounds, spent = rounds + 1, time.perf_counter() - begin
            answer(seconds=spent / rounds)
    getattr(timed, "close", lambda: None)()
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
