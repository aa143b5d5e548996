"""A server and three devices on this machine, as processes, with certificates of their own: `make demo-deploy`.

Prints every command before it runs it, and what the processes say.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

COMMAND = [sys.executable, "-c", "from personafl.cli import main; main()"]
ROOT = Path(__file__).resolve().parents[1]


def start(*words: str) -> subprocess.Popen[str]:
    print("\n$ personafl", *words, flush=True)
    return subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(*words: str, lines: int | None = None) -> None:
    process = start(*words)
    text = process.communicate()[0].splitlines()
    shown = text if lines is None or len(text) <= lines else [*text[: lines - 1], "…", text[-1]]
    for line in shown:
        print(f"  {line}")
    if process.returncode:
        sys.exit(process.returncode)


def follow(name: str, process: subprocess.Popen[str], until: str | None = None) -> threading.Event:
    """Print what a process says; the event is set once it has said `until`."""
    seen = threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            sys.stdout.write(f"  [{name}] {line.rstrip()}\n")  # one write: lines of others stay whole
            sys.stdout.flush()
            if until is not None and until in line:
                seen.set()
        seen.set()

    threading.Thread(target=read, daemon=True).start()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "demo-deploy.toml"))
    parser.add_argument("--listen", default="localhost:18443")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="personafl-") as folder:
        pki, dealt, run_path = f"{folder}/pki", f"{folder}/dealt", f"{folder}/run"
        run("pki", "init", pki)
        names = [f"device-{number}" for number in range(3)]
        run("pki", "issue", pki, "server", "coordinator", *names)
        run("data", "deal", options.recipe, "--out", dealt)
        server = start(
            "server", f"{dealt}/recipe.toml", "--identity", f"{pki}/server.pem", "--listen", options.listen,
            "--out", run_path,
        )  # fmt: skip
        follow("server", server, "listening").wait(60)
        devices = {}
        for name in names:
            devices[name] = start(
                "device", "--server", options.listen, "--data", f"{dealt}/{name}.safetensors",
                "--identity", f"{pki}/{name}.pem", "--state", f"{folder}/{name}",
            )  # fmt: skip
            begun = follow(name, devices[name], "accepted")
        begun.wait(60)
        run("status", "--server", options.listen, "--identity", f"{pki}/coordinator.pem")
        codes = [process.wait() for process in (*devices.values(), server)]
        time.sleep(0.2)  # the last lines
        for name in names:
            run("predict", f"{folder}/{name}", "--data", f"{dealt}/{name}.safetensors", lines=3)
        sys.exit(max(codes))


if __name__ == "__main__":
    main()
