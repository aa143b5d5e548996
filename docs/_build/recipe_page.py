"""The reference of recipes, from the schema that validates them and the comments beside its fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import tokenize
import typing
from types import NoneType, UnionType
from typing import Any, NamedTuple

import tomli_w
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from personafl.recipe.recipe import Recipe
from personafl.recipe.values import plain, without_none

HEAD = """# Recipe

Everything that decides a run, as TOML; what is left out has the default. Any key can be set on the command line: `personafl run
training.lr=0.05`. `personafl recipe` prints a whole recipe to start from; an unknown key is an error that names the nearest one.
The sections `[model]` and `[method]` also take the options of the network and the method that they name: `personafl models`, `personafl methods`.
"""
REQUIRED = object()


class Key(NamedTuple):
    """A field of the schema."""

    annotation: Any
    default: Any


def page() -> str:
    """Return the page: the recipe's own keys, then every section."""
    keys = _keys(Recipe)
    parts = [HEAD, "## Top level", _table(Recipe, {n: k for n, k in keys.items() if not _members(k.annotation)})]
    parts += [_section(name, key, "##") for name, key in keys.items() if _members(key.annotation)]
    return "\n\n".join(parts) + "\n"


def _section(path: str, key: Key, level: str) -> str:
    members = _members(key.annotation)
    parts = [f"{level} `[[{path}]]`" if typing.get_origin(key.annotation) is tuple else f"{level} `[{path}]`"]
    if len(members) > 1:
        tag = next(name for name in _keys(members[0]) if name in ("kind", "form"))
        parts.append(f"`{tag}` is one of " + ", ".join(f"`{_tag(member)}`" for member in members) + ".")
    for member in members:
        about = (inspect.getdoc(member) or "").partition("\n\n")[0].replace("\n", " ")
        parts.append(f"**`{_tag(member)}`**: {about}" if len(members) > 1 else about)
        own = {name: key for name, key in _keys(member).items() if not (len(members) > 1 and name in ("kind", "form"))}
        if own:
            parts.append(_table(member, own))
        if path != "pretrain":  # its sections are those of the recipe
            parts += [_section(f"{path}.{n}", k, f"{level}#") for n, k in own.items() if _members(k.annotation)]
    return "\n\n".join(parts)


def _table(owner: type, keys: dict[str, Key]) -> str:
    notes = _comments(owner)
    rows = [f"| `{n}` | {_kind(k.annotation)} | {_default(k)} | {notes.get(n, '')} |" for n, k in keys.items()]
    return "\n".join(["| key | values | default | |", "|---|---|---|---|", *rows])


def _comments(owner: type) -> dict[str, str]:
    """Return what stands in comments beside the fields of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("personafl"):
            source = inspect.getsource(base)
            tokens = tokenize.generate_tokens(io.StringIO(source).readline)
            notes = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
            for field in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    lines = range(field.lineno, (field.end_lineno or field.lineno) + 1)
                    texts = [notes[line].lstrip("# ") for line in lines if line in notes]
                    found[field.target.id] = " ".join(texts).replace("|", "\\|").replace("None:", "absent:")
    return found


def _keys(member: type) -> dict[str, Key]:
    if issubclass(member, BaseModel):
        fields = member.model_fields.items()
        return {name: Key(field.annotation, _known(field.default, field.default_factory)) for name, field in fields}
    hints = typing.get_type_hints(member, include_extras=True)
    entries = dataclasses.fields(member)  # type: ignore[arg-type]
    return {entry.name: Key(hints[entry.name], _known(entry.default, entry.default_factory)) for entry in entries}


def _known(default: Any, factory: Any) -> Any:
    if default not in (PydanticUndefined, dataclasses.MISSING):
        return default
    return REQUIRED if factory in (None, dataclasses.MISSING) else None


def _default(key: Key) -> str:
    if key.default is REQUIRED:
        return "required"
    if key.default is None or _members(key.annotation):
        return "–"
    return f"`{tomli_w.dumps({'v': without_none(plain(key.default))}).partition('= ')[2].strip()}`".replace("\n", " ")


def _kind(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, UnionType):
        return " or ".join(dict.fromkeys(_kind(part) for part in arguments if part is not NoneType))
    if origin in (tuple, list):
        return "list"
    if origin is dict or _members(annotation):
        return "section"
    return {int: "integer", float: "number", bool: "`true`, `false`"}.get(annotation, "text")


def _members(schema: Any) -> list[type]:
    if isinstance(schema, type) and (issubclass(schema, BaseModel) or dataclasses.is_dataclass(schema)):
        return [schema]
    return [member for part in typing.get_args(schema) for member in _members(part)]


def _tag(member: type) -> str:
    return next((str(key.default) for name, key in _keys(member).items() if name in ("kind", "form")), member.__name__)
