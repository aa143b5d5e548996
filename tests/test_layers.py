"""The house is as CONTRIBUTING.md draws it: imports go down only, and nothing in it is too long to read."""

import functools
import pkgutil
import re
from pathlib import Path

from house import ROOT, Module, cycles, depth, imports_of, joined, modules_of, picture

MODULES = modules_of(ROOT / "src" / "personafl")
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
LINES = picture(TEXT)


@functools.cache
def imports() -> dict[str, set[str]]:
    """Return which modules each imports; not at collection, for every worker of the tests would read the house."""
    return imports_of(MODULES)


def test_the_picture_has_every_room_once() -> None:
    drawn = [room for line in LINES for room in line]
    assert sorted(drawn) == sorted({module.room for name, module in MODULES.items() if name})


def test_what_the_walks_name_is_there() -> None:
    walks = TEXT.partition("## Two walks\n")[2].partition("\n## ")[0]
    names = re.findall(r"`(\w+(?:\.\w+)+)`", walks)
    assert len(names) > 30
    for name in names:
        pkgutil.resolve_name(f"personafl.{name}")


def test_imports_go_down() -> None:
    height = {room: at for at, line in enumerate(LINES) for room in line}
    pairs = {(MODULES[name], MODULES[other]) for name, others in imports().items() for other in others if name}
    assert {
        f"{one.name} -> {other.name}"
        for one, other in pairs
        if one.room != other.room and height[one.room] >= height[other.room]
    } == set()


def test_no_executor_knows_a_method() -> None:
    known = {other for name, others in imports().items() for other in others if not name.startswith("algorithms")}
    methods = {name for name in known if name.startswith("algorithms")}
    assert methods == {"algorithms", "algorithms.training"}


def test_no_module_and_no_package_is_in_a_cycle() -> None:
    packages = joined(imports(), {name: module.package for name, module in MODULES.items()})
    assert {" ".join(part) for graph in (imports(), packages) for part in cycles(graph)} == set()


def test_files_and_functions_are_short() -> None:
    files = {name for name, module in MODULES.items() if module.lines > 400}
    functions = {f"{name}.{f}" for name, module in MODULES.items() for f, lines in module.functions() if lines > 60}
    assert files | functions == set()


def test_the_house_is_seen_with_its_faults(tmp_path: Path) -> None:
    """An import counts in a function and for types; a cycle is found through others; the depth takes it as one."""
    files = {
        "__init__": "from personafl.errors import Bad",
        "errors": "",
        "low/__init__": "",
        "low/a": "def f():\n    from personafl.low.b import x",
        "low/b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from personafl.high.c import y",
        "high/__init__": "",
        "high/c": "import personafl.low.a\nfrom personafl import __version__, errors",
    }
    for name, source in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    modules = modules_of(tmp_path)
    graph = imports_of(modules)
    assert graph["high.c"] == {"low.a", "errors"}
    assert cycles(graph) == [["high.c", "low.a", "low.b"]]
    assert cycles(joined(graph, {name: module.package for name, module in modules.items()})) == [["high", "low"]]
    assert depth(graph) == 2
    assert list(Module("low.a", tmp_path / "low" / "a.py").functions()) == [("f", 2)]
    assert picture("## The rooms\n\n    high/  api.py   words a/ b\n    low/\n\n## Next\n\n    x/\n") == [
        ["high/", "api.py"],
        ["low/"],
    ]
