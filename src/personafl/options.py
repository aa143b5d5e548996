"""Options by name: checks what a recipe gives for a function's keyword options, and says what is wrong in one line."""

import contextlib
import dataclasses
import importlib
import inspect
import json
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from personafl.errors import BadInput, PersonaError, did_you_mean

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
_MOST, _LARGEST = 10**9, 3.4e38  # of whatever a recipe counts; of numbers in single precision
_Model = TypeVar("_Model", bound=BaseModel)


class Strict(BaseModel):
    """Values of a recipe or another file of ours: unknown keys are errors."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)


class Named(BaseModel):
    """A part of a recipe that names something; further keys are the options of that."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", frozen=True)

    name: str

    @model_validator(mode="before")
    @classmethod
    def _by_name_alone(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values

    @property
    def options(self) -> dict[str, Any]:
        """The further keys."""
        return self.model_extra or {}


def checked(
    build: Callable[..., Any], given: Mapping[str, Any], where: str, beside: Iterable[str] = ()
) -> dict[str, Any]:
    """Return `given` validated against the keyword-only options of `build`.

    `where` is the recipe's section, `beside` the keys that the section has besides the options, for a misspelt one of
    them ends up here.
    """
    function: Any = build
    hints = typing.get_type_hints(function.__init__ if isinstance(build, type) else build, include_extras=True)
    # A positional parameter is filled by the framework, so a recipe may not name it.
    options = {p.name: (hints.get(p.name, Any), p.default) for p in _options(build)}
    if unknown := [name for name in given if name not in options]:
        raise BadInput(f"{where}.{unknown[0]}: unknown key; {did_you_mean(unknown[0], {*options, *beside})}")
    schema = create_model("Options", __config__=ConfigDict(extra="forbid"), **options)  # type: ignore[call-overload]
    try:
        valid = schema(**given)
    except ValidationError as error:
        raise explain(error, where, schema) from error
    check_numbers(given, valid, where)
    return {name: getattr(valid, name) for name in given}


def check_numbers(given: Any, valid: Any, key: str = "") -> None:
    """Fail on what pydantic takes for a number and nobody means: NaN, infinity, true, false, counts beyond all bounds.

    `valid` is what it made of what was given.
    """
    if isinstance(given, Mapping):
        for name, value in given.items():
            made = valid[name] if isinstance(valid, Mapping) else getattr(valid, name, value)
            check_numbers(value, made, f"{key}.{name}" if key else name)
    elif isinstance(given, list | tuple):
        for place, (value, made) in enumerate(zip(given, valid, strict=False)):
            check_numbers(value, made, f"{key}[{place}]" if isinstance(value, Mapping) else key)
    elif isinstance(given, bool) and not isinstance(valid, bool):
        raise BadInput(f"{key}: input should be a number, not true or false (given: {str(given).lower()})")
    elif isinstance(valid, float) and not abs(valid) <= _LARGEST:
        raise BadInput(f"{key}: input should be a finite number, of at most {_LARGEST} (given: {given})")
    elif isinstance(valid, int) and valid > _MOST and "seed" not in key:
        raise BadInput(f"{key}: input should be less than or equal to {_MOST} (given: {given})")


def short_form(text: str, what: str, models: Mapping[str, type[_Model]]) -> _Model:
    """Read `kind:key=value,key=value` as one of the models, which have a field `kind`; `what` names it in errors."""
    kind, _, rest = text.strip().partition(":")
    if kind not in models:
        raise BadInput(f"{what} {kind!r} is unknown: {did_you_mean(kind, models)}")
    keys = [key for key in models[kind].model_fields if key != "kind"]
    values = {"kind": kind}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if key not in keys:
            raise BadInput(f"{what} {kind!r} has no key {key!r}: {did_you_mean(key, keys)}")
        if not equals or not value:
            raise BadInput(f"{what} {text!r}: {key!r} needs a value, as in {key}=…")
        values[key] = value
    try:
        made = models[kind].model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"{what} {text!r}: {first['loc'][-1]}: {first['msg']}") from None
    check_numbers(values, made, what)
    return made


def import_path(name: str, where: str) -> Any:
    """Return what the user wrote as package.module:Name, which must be callable; `where` is the recipe's key."""
    module, _, attribute = name.partition(":")
    with users_code(f"{where}: cannot import {name!r}"):
        found = getattr(importlib.import_module(module), attribute)
    if not callable(found):
        raise BadInput(f"{where}: {name!r} is a {type(found).__name__}, which cannot be called")
    try:
        inspect.signature(found)
    except ValueError as error:
        raise BadInput(f"{where}: {name!r} does not say which options it takes; write a function around it") from error
    return found


@contextlib.contextmanager
def users_code(said: str) -> Iterator[None]:
    """Say in one line whatever code of the user's raises, also where it would end the process; `said` begins it."""
    try:
        yield
    except (KeyboardInterrupt, PersonaError):
        raise
    except BaseException as error:
        remedy = "; is it on PYTHONPATH?" if isinstance(error, ModuleNotFoundError) else "; check it"
        raise BadInput(f"{said}: {reason(error)}{'' if isinstance(error, ValueError) else remedy}") from error


def reason(error: BaseException) -> str:
    """Return an error's first line; the kind too, where it is not about a value."""
    text = (str(error).strip() or "no reason given").splitlines()[0]
    return text if isinstance(error, ValueError | ImportError | AttributeError) else f"{type(error).__name__}: {text}"


def describe(build: Callable[..., Any]) -> str:
    """Return the keyword-only options of `build`, with the defaults that there are, as a recipe would write them."""
    bare = (None, inspect.Parameter.empty)
    return ", ".join(p.name if p.default in bare else f"{p.name}={_toml(p.default)}" for p in _options(build))


def defaults(build: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only options of `build` with their defaults, dataclasses as tables of their fields."""
    return {p.name: _table(p.default) for p in _options(build) if p.default is not inspect.Parameter.empty}


def _table(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _options(build: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(build).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _toml(value: Any) -> str:
    """Write a default: of a dataclass, the fields that differ from its own defaults."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = [f.name for f in dataclasses.fields(value) if getattr(value, f.name) != _usual(f)]
        return "{" + ", ".join(f"{name}={_toml(getattr(value, name))}" for name in changed) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _usual(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@dataclasses.dataclass(frozen=True)
class _Problem:
    """One of pydantic's errors: `path` are its keys, `branch` the alternative of a union that was tried."""

    path: tuple[str, ...]
    branch: tuple[str, ...]
    members: list[type]  # the models and dataclasses that may stand there, or that lack the key
    raw: Mapping[str, Any]

    @property
    def is_tag(self) -> bool:
        """Whether a field of an alternative has one of a few names, and this is none of them."""
        return bool(self.branch) and self.raw["type"] == "literal_error" and self.raw["loc"][-1] == self.path[-1]


def explain(error: ValidationError, where: str, schema: Any) -> BadInput:
    """Return one problem that pydantic found as one line that names the key; `schema` is what was validated.

    Of alternatives (a union), the user meant the one whose tag fits, with the fewest problems, that goes deepest.
    """
    problems = [_placed(schema, raw) for raw in error.errors()]
    own = {p.branch: [q for q in problems if q.branch == p.branch] for p in problems}
    rank = {branch: (sum(p.is_tag for p in part), len(part), -len(part[0].path)) for branch, part in own.items()}
    best = [p for p in problems if rank[p.branch] == min(rank.values())]
    same = [p for p in best if p.path == best[0].path]
    key = ".".join([where, *same[0].path] if where else same[0].path)
    return BadInput(_say(key, same))


def _say(key: str, problems: list[_Problem]) -> str:
    first, kind = problems[0], problems[0].raw["type"]
    members = [member for problem in problems for member in problem.members]
    if kind in _UNKNOWN:
        names = {name for member in members for name in _fields(member)}
        return f"{key}: unknown key; {did_you_mean(first.path[-1], names)}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = first.raw["ctx"]["discriminator"].strip("'")
        valid = {name for member in members for name in typing.get_args(_fields(member)[tag])}
        if kind == "union_tag_not_found":
            return f"{key}: {tag!r} is missing; valid: {', '.join(sorted(valid))}"
        wrong = first.raw["ctx"]["tag"]
        return f"{key}.{tag}: no {wrong!r}; {did_you_mean(wrong, valid)}"
    if kind in _NOT_A_SECTION:
        example = f"{key}.{next(iter(_fields(members[0])))}" if members else f"{key}.NAME"
        return f"{key}: is a section, not a value (given: {first.raw['input']!r}); write {example}=…"
    texts = list(dict.fromkeys(_message(problem.raw) for problem in problems))
    whole = ", or ".join([texts[0], *(text.removeprefix("input should be ") for text in texts[1:])])
    own = isinstance(first.raw["input"], Mapping | BaseModel)  # a whole section: its message names the keys
    return f"{key}: {whole}" + ("" if own or kind == "missing" else f" (given: {first.raw['input']!r})")


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_NOT_A_SECTION = ("model_type", "dataclass_type", "dict_type", "model_attributes_type")


def _message(raw: Mapping[str, Any]) -> str:
    text = raw["msg"].removeprefix("Value error, ")
    if raw["type"] in ("int_parsing", "float_parsing", "int_from_float"):
        text = text.partition(",")[0]
    text = text.replace("valid tuple", "list").replace("valid list", "list")
    return f"{text[0].lower()}{text[1:]}"


def _placed(schema: Any, raw: Mapping[str, Any]) -> _Problem:
    """Walk the schema along pydantic's location, in which tags, class names and indices stand between the keys."""
    path, branch = [], []
    members = _members(schema)
    for part in raw["loc"]:
        fields = {name: kind for member in members for name, kind in _fields(member).items()}
        if part in fields:
            path.append(str(part))
            schema = fields[part]
            members = _members(schema)
        elif typing.get_origin(schema) is dict:
            path.append(str(part))
            schema = typing.get_args(schema)[1]
        elif named := [member for member in members if part == member.__name__ or part in _tags(member)]:
            branch.append(str(part))
            members = named
        elif isinstance(part, int) and path and members:  # of a list of sections
            path[-1] += f"[{part}]"
        elif isinstance(part, str):
            (path if raw["type"] in _UNKNOWN else branch).append(part)
    return _Problem(tuple(path), tuple(branch), members, raw)


def _members(schema: Any) -> list[type]:
    """Return the models and dataclasses in an annotation."""
    if isinstance(schema, type) and (issubclass(schema, BaseModel) or dataclasses.is_dataclass(schema)):
        return [schema]
    return [member for part in typing.get_args(schema) for member in _members(part)]


def _fields(member: type) -> dict[str, Any]:
    if issubclass(member, BaseModel):
        return {name: field.annotation for name, field in member.model_fields.items()}
    hints = typing.get_type_hints(member)
    return {field.name: hints[field.name] for field in dataclasses.fields(member)}  # type: ignore[arg-type]


def _tags(member: type) -> set[Any]:
    return {
        tag
        for kind in _fields(member).values()
        if typing.get_origin(kind) is typing.Literal
        for tag in typing.get_args(kind)
    }
