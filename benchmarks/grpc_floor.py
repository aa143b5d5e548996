"""What gRPC with TLS takes by itself: a server that answers many connections and does nothing with what they send.

    python benchmarks/grpc_floor.py --devices 300 --size 1.1 --chunk 128

No server of personafl can be below that, whatever it does with updates: processor seconds of the server for a
gigabyte up and for one down, and its memory, after all that is free was given back: with nobody there, with all devices
connected, after each has sent and been sent so many megabytes in chunks of so many kB, and when they are gone again.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from deploy_load import certify

AT_ONCE = 60  # payloads that a server takes or sends
METHOD = "/floor.Peer/Exchange"


def taken() -> float:
    """Memory of this process in MB, files not counted."""
    from personafl.system import give_memory_back

    gc.collect()
    give_memory_back()
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1024


def be_server(certificates: Path, size: int, chunk: int, pipe: Connection) -> None:
    """Answer: "up" takes a payload, "down" sends one, "state" says what was taken of the machine."""
    import grpc
    import grpc.aio

    payload, turn = bytes(size), asyncio.Semaphore(AT_ONCE)

    async def exchange(incoming: AsyncIterator[bytes], context: Any) -> None:
        asked = await anext(incoming)
        if asked == b"state":
            await context.write(json.dumps([taken(), time.process_time()]).encode())
            return
        async with turn:
            if asked == b"up":
                b"".join([piece async for piece in incoming])
            if asked == b"down":
                for start in range(0, size, chunk):
                    await context.write(payload[start : start + chunk])
        await context.write(b"done")

    async def serve() -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.http2.bdp_probe", 0)])
        handlers = {"Exchange": grpc.stream_stream_rpc_method_handler(exchange)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor.Peer", handlers),))
        pems = [(certificates / name).read_bytes() for name in ("server.key", "server.pem", "ca.pem")]
        credentials = grpc.ssl_server_credentials([(pems[0], pems[1])], pems[2], True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        pipe.send(port)
        await asyncio.to_thread(pipe.recv)
        await server.stop(0)

    asyncio.run(serve())


async def ask(channel: Any, what: bytes, chunks: Sequence[bytes] = ()) -> bytes:
    from grpc.aio import EOF

    call, answer = channel.stream_stream(METHOD)(), b""
    for piece in (what, *chunks):
        await call.write(piece)
    await call.done_writing()
    while (piece := await call.read()) is not EOF:
        answer = piece
    return answer


async def measure(port: int, certificates: Path, devices: int, size: int, chunk: int) -> list[tuple[str, list[float]]]:
    import grpc
    import grpc.aio

    def line(number: int) -> Any:
        names = ("ca.pem", f"device-{number}.key", f"device-{number}.pem")
        credentials = grpc.ssl_channel_credentials(*((certificates / name).read_bytes() for name in names))
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials)

    lines, found = [line(number) for number in range(devices)], []
    chunks = [bytes(chunk)] * (size // chunk) + [bytes(size % chunk)]

    async def note(what: str) -> None:
        found.append((what, json.loads(await ask(lines[0], b"state"))))

    await note("nobody")
    for start in range(0, devices, 20):
        await asyncio.gather(*(ask(one, b"hello") for one in lines[start : start + 20]))
    await note("connected")
    await asyncio.gather(*(ask(one, b"up", chunks) for one in lines))
    await note("up")
    await asyncio.gather(*(ask(one, b"down") for one in lines))
    await note("down")
    await asyncio.gather(*(one.close() for one in lines[1:]))
    await asyncio.sleep(1.0)
    await note("gone")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=300)
    parser.add_argument("--size", type=float, default=1.1, help="megabytes of a payload")
    parser.add_argument("--chunk", type=int, default=128, help="kB of a chunk")
    options = parser.parse_args()
    size, chunk, spawn = round(options.size * 1e6), options.chunk * 1024, multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="personafl-") as name:
        certify(Path(name), options.devices)
        mine, its = spawn.Pipe()
        server = spawn.Process(target=be_server, args=(Path(name), size, chunk, its))
        server.start()
        found = asyncio.run(measure(mine.recv(), Path(name), options.devices, size, chunk))
        mine.send(None)
        server.join()
    before = 0.0
    for what, (memory, seconds) in found:
        cost = f", {(seconds - before) / (options.devices * size / 1e9):.1f} s a GB" if what in ("up", "down") else ""
        print(f"{what:>10}: {memory:.0f} MB{cost}", flush=True)
        before = seconds


if __name__ == "__main__":
    main()
