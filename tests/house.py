"""The rooms of src/personafl: which module imports which, read from the source.

An import counts wherever it stands: at the top, in a function, or for types alone. `python tests/house.py [FOLDER]`
prints the facts, of another version's folder personafl too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Graph = Mapping[str, Iterable[str]]


@dataclass(frozen=True)
class Module:
    """A module by its name without `personafl.`; the package itself is ""."""

    name: str
    path: Path

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.path.read_text())))

    @property
    def lines(self) -> int:
        return len(self.path.read_text().splitlines())

    @property
    def package(self) -> str:
        """Return the folder that it is in; a file beside the rooms is one of its own."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0] or self.name

    @property
    def room(self) -> str:
        """Return the folder below personafl/, or the file there, as the picture writes it."""
        first, _, rest = self.name.partition(".")
        return f"{first}/" if rest or self.path.name == "__init__.py" else f"{first}.py"

    def functions(self) -> Iterator[tuple[str, int]]:
        """Yield the functions and how many lines each has."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1

    def imported(self) -> Iterator[str]:
        """Yield the names that it imports, modules or what is in them; __version__ is everybody's."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{self.path}: write imports in full"
                yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name != "__version__")


def modules_of(source: Path) -> dict[str, Module]:
    """Return the modules of a folder `personafl`."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


def imports_of(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        graph[name] = set()
        for full in module.imported():
            if full.partition(".")[0] == "personafl":
                own = full.partition(".")[2]
                graph[name].add(own if own in modules else own.rpartition(".")[0])
    return graph


def joined(graph: Graph, group: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the graph between the groups of its nodes."""
    found: dict[str, set[str]] = {name: set() for name in group.values()}
    for name, others in graph.items():
        found[group[name]] |= {group[other] for other in others} - {group[name]}
    return found


def cycles(graph: Graph) -> list[list[str]]:
    """Return the sets of nodes that reach one another, by the closure of the graph."""
    reach = {name: set(others) for name, others in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    found = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}
    return sorted(map(sorted, found))


def depth(graph: Graph) -> int:
    """Return how many modules stand on one another in the longest chain; a cycle counts once."""
    lookup = {name: name for name in graph} | {name: part[0] for part in cycles(graph) for name in part}
    acyclic = joined(graph, lookup)
    known: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in known:
            known[name] = 1 + max(map(height, acyclic[name]), default=0)
        return known[name]

    return max(map(height, acyclic))


def picture(text: str) -> list[list[str]]:
    """Return the lines of rooms in CONTRIBUTING.md, from the top."""
    block = text.partition("## The rooms\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^    ((?:\w+(?:/|\.py)(?: +|$))+)", block, re.MULTILINE)
    return [line.split() for line in lines]


def main(source: Path) -> None:
    """Print the facts of the house."""
    modules = modules_of(source)
    graph = imports_of(modules)
    rooms = joined(graph, {name: module.room for name, module in modules.items() if name} | {"": "__init__.py"})
    packages = joined(graph, {name: module.package for name, module in modules.items()})
    fans = sorted(((len(others), name) for name, others in graph.items()), reverse=True)
    print(f"modules {len(modules)}, imports {sum(map(len, graph.values()))}, levels {depth(graph)}")
    print("largest fan-out:", ", ".join(f"{name or '__init__'} {count}" for count, name in fans[:5]))
    for label, which in (("modules", graph), ("packages", packages), ("rooms", rooms)):
        print(f"cycles of {label}:", "; ".join(" ".join(part) for part in cycles(which)) or "none")
    print(f"imports between rooms: {sum(map(len, rooms.values()))}")
    for room in sorted(rooms):
        own = [module for name, module in modules.items() if name and module.room == room]
        print(f"  {room:<14}{sum(module.lines for module in own):>6} lines  -> {' '.join(sorted(rooms[room]))}")
    print(f"  {'all':<14}{sum(module.lines for module in modules.values()):>6} lines")
    for name, module in modules.items():
        if module.lines > 400:
            print(f"file over 400 lines: {name} {module.lines}")
        for function, lines in module.functions():
            if lines > 60:
                print(f"function over 60 lines: {name}.{function} {lines}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "src" / "personafl")
