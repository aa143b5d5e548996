"""Faults of machines: damaged files, signals at any time, full disks; prints what came of each, and a Markdown table.

    python tests/deploy/faults.py damage [COUNT] | kills [COUNT] | full [EVERY]

One JSON line for each case that went wrong, and the table at the end.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter, defaultdict
from typing import Any

import fault_damage
import fault_kills
import torch

GOOD = ("one line", "identical", "repaired")


def damage(count: int = 10_000) -> int:
    """Damage files, and count what came of it by where they were."""
    came: dict[str, Counter[str]] = defaultdict(Counter)
    bad = 0
    for found in fault_damage.damaged(count):
        came[found["snapshot"]][found["came"]] += 1
        if found["came"] not in GOOD or not found.get("named", True):
            bad += found["came"] not in GOOD
            print(json.dumps(found), flush=True)
    columns = [*GOOD, *sorted({word for row in came.values() for word in row} - set(GOOD))]
    print(f"| Damaged files of | cases | {' | '.join(columns)} |")
    print(f"|{'---|' * (len(columns) + 2)}")
    for name, row in came.items():
        print(f"| {name} | {sum(row.values())} | {' | '.join(str(row[column]) for column in columns)} |")
    total = sum(came.values(), Counter[str]())
    print(f"| all | {sum(total.values())} | {' | '.join(str(total[column]) for column in columns)} |", flush=True)
    return bad


def kills(count: int = 500) -> int:
    """Send signals, and count what came of the runs."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    bad = 0
    for found in fault_kills.kills(count):
        well = found["equal"] is True and not found["tracebacks"]
        bad += not well
        print(json.dumps(found), flush=True)
        kind = found["of"] if found["of"] in ("sync", "async", "rigorous") else "one server"
        rows[kind].update({"runs": 1, "bits": int(well), **found["signals"]})
    names = [sent.name for sent in fault_kills.SIGNALS]
    print(f"| Processes | runs | {' | '.join(names)} | reference bits |\n|{'---|' * (len(names) + 3)}")
    for kind, row in [*rows.items(), ("all", sum(rows.values(), Counter[str]()))]:
        counts = " | ".join(str(row[name]) for name in names)
        print(f"| {kind} | {row['runs']} | {counts} | {row['bits']} of {row['runs']} |")
    return bad


def full(every: int = 1) -> int:
    """Fill disks, and count what came of the runs."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for found in itertools.chain(fault_kills.full(every), fault_kills.filled(max(1, 20 // every))):
        well = found["equal"] is True and not found["tracebacks"]
        rows[found["victim"]].update({"writes": 1, "bits": int(well), "ended": found["ended"]})
        if not well:
            print(json.dumps(found), flush=True)
    print("| The disk of | writes at which it was full | ended with a line, started again | reference bits |")
    print("|---|---|---|---|")
    for victim, row in rows.items():
        print(f"| {victim} | {row['writes']} | {row['ended']} | {row['bits']} |")
    return sum(row["writes"] - row["bits"] for row in rows.values())


def main(what: str, *numbers: str) -> None:
    torch.set_num_threads(1)
    makers: dict[str, Any] = {"damage": damage, "kills": kills, "full": full}
    bad = makers[what](*map(int, numbers))
    sys.stdout.flush()
    os._exit(bool(bad))


if __name__ == "__main__":
    main(*sys.argv[1:])
