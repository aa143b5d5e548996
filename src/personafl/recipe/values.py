"""Recipes as plain nested values: read from TOML, overridden from the command line, merged."""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from personafl.errors import BadInput


def read_toml(path: Path) -> dict[str, Any]:
    """Read a recipe file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(
            f"{path}: no such recipe file; give a .toml file, options such as --model mlp, or key.sub=value"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error


def digests_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the SHA-256 of a recipe's values, and of what they were before moments of inputs were put in, if they are.

    A server makes the moments from its devices' sums, so whoever knows a recipe beforehand knows the second.
    """
    section = values.get("data")
    told = isinstance(section, Mapping) and isinstance(section.get("normalize"), Mapping)
    before = [{**values, "data": {**values["data"], "normalize": "auto"}}] if told else []
    texts = (json.dumps(each, sort_keys=True, default=str) for each in (values, *before))
    return tuple(hashlib.sha256(text.encode()).hexdigest() for text in texts)


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return nested values with `key.sub=value` texts applied; a value is TOML, or else plain text."""
    result: dict[str, Any] = plain(values)
    for key, value in changes_of(overrides).items():
        put(result, key, value)
    return result


def changes_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what `key.sub=value` texts say, by key."""
    result: dict[str, Any] = {}
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not all(key.split(".")):
            raise BadInput(f"override {text!r}: write key.sub=value, as in training.lr=0.05")
        try:
            value = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            value = raw
        result[key.strip()] = value
    return result


def from_words(words: list[str] | None, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a recipe's nested values and its file's name: the file, then the command's options, then the overrides."""
    files = [word for word in words or [] if "=" not in word]
    if len(files) > 1:
        raise BadInput(f"{files[1]!r}: only one recipe can be given; overrides are written key.sub=value")
    values = read_toml(Path(files[0])) if files else {}
    if files:
        values.setdefault("name", Path(files[0]).stem)
    for key, value in options.items():
        if value is not None:
            put(values, key, value)
    return apply_overrides(values, [word for word in words or [] if "=" in word]), files[0] if files else ""


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `key.sub` in nested values."""
    *sections, last = key.split(".")
    for section in sections:
        if section in ("method", "model") and isinstance(values.get(section), str):  # by its name alone
            values[section] = {"name": values[section]}
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise BadInput(f"{key}: {section!r} is a value here, not a section (given: {values!r})")
    values[last] = value


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of nested values as `key.sub`, and what each has."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values of those under `key.sub`."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        put(result, key, value)
    return result


def merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with changes put in, section by section; one of another kind or form is put in whole."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), dict)
        alike = both and all(value.get(name, base[key].get(name)) == base[key].get(name) for name in ("kind", "form"))
        result[key] = merged(base[key], value) if alike else value
    return result


def plain(value: Any) -> Any:
    """Return nested values as TOML has them, so that a recipe written and read again is the same."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def without_none(value: Any) -> Any:
    """Return nested values without the entries that are None, which TOML does not have."""
    if isinstance(value, dict):
        return {key: without_none(entry) for key, entry in value.items() if entry is not None}
    return [without_none(entry) for entry in value] if isinstance(value, list) else value
