"""Components: a section's ``kind`` names a callable, and the section's other keys are its parameters.

A kind is a callable: a class of hyper-parameters, a function, a factory. Some of its parameters are *given* by the
framework when it is made (the labels to a partition, the input's shape to a model), by name and only if it asks for
them; the others are the keys of its section, held to their annotations. Built-in kinds have short names; any other
callable is ``python:package.module:Name``. Built-in ones are named here as text and imported when they are used, so
that this room knows of the rooms below it by name alone.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial, update_wrapper
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, ClassVar, Generic, TypeVar, cast, get_type_hints

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, create_model, model_validator
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ValidationError, core_schema

from fed.config import docstrings
from fed.config.compatibility import Combinable
from fed.config.validation import Section, nearest, sentence_error
from fed.errors import InvalidExperiment, place_of

__all__ = ["Component", "Family", "bounded", "is_object", "keys_of", "named"]

_OBJECT = "object:"


def is_object(written: object) -> bool:
    """Tell whether a written section stands for an object given in Python that no file can name."""
    return isinstance(written, dict) and str(written.get("kind")).startswith(_OBJECT)


class Component(Section):
    """Section whose ``kind`` chooses a callable and whose other keys are that callable's."""

    target: ClassVar[Callable[..., Any]]
    """Callable that the kind names."""

    family: ClassVar["Family[Any]"]
    """Family of kinds that the section chooses from."""

    kind: str
    """Name of the kind: a built-in one, or python:package.module:Name."""

    def __reduce__(self) -> tuple[Any, ...]:  # its class is made when it is asked for, and has no name to import
        return self.family.validate, (self.make() if self.is_object else self.model_dump(exclude_unset=True),)

    @property
    def is_object(self) -> bool:
        """True if the section stands for an object given in Python that no file can name."""
        return self.kind.startswith(_OBJECT)

    def make(self, **given: object) -> Any:
        """Call the kind with this section's keys, and with those of ``given`` that it asks for.

        In a family of functions a kind that is one is not called, but made a function of two arguments by these keys.
        """
        asked_for = _parameters(self.target)
        keys = {name: getattr(self, name) for name in type(self).model_fields if name in asked_for}
        keys |= self.model_extra or {}
        if self.family.of_functions and not inspect.isclass(self.target) and not self.is_object:
            return update_wrapper(partial(self.target, **keys), self.target) if keys else self.target
        given = {name: value for name, value in given.items() if name in asked_for}
        return self.target(**{**keys, **given})

    @model_validator(mode="after")
    def _hold_what_spans_keys(self) -> "Component":
        # A class of hyper-parameters may check keys against each other; what needs more than its keys waits until made.
        named = _named(self.target).items()
        required = {name for name, parameter in named if parameter.default is parameter.empty}
        if inspect.isclass(self.target) and required <= type(self).model_fields.keys():
            try:
                self.make()
            except TypeError as error:  # an abstract class, or one that cannot be called so
                raise ValueError(f"{self.kind} cannot be made: {error}") from None
        return self


_Section = TypeVar("_Section", bound=Component)


@dataclass(frozen=True)
class Family(Generic[_Section]):
    """Kinds that one section of an experiment chooses from; an annotation of that section's type.

    Args:
        name: word for a kind of the family in messages.
        base: section with the keys that every kind of the family has.
        builtin: short name → ``module:Name``.
        given: names of the parameters that the framework supplies.
        default: kind of a section that names none.
        of_functions: True if a section makes a function, such as one of (output, target). A kind is then such a
            function, whose further parameters are keys, or a class whose objects are called so; a function or such an
            object may be given in Python.
        arguments: number of arguments of such a function that are no keys: its first ones.
    """

    name: str
    base: type[_Section]
    builtin: Mapping[str, str] = field(hash=False)
    given: tuple[str, ...] = ()
    default: str | None = None
    of_functions: bool = False
    arguments: int = 2

    @property
    def has_none(self) -> bool:
        """True if a kind of the family is ``none``, for which a file may write null."""
        return "none" in self.builtin

    @cache  # noqa: B019  # families last as long as the program
    def section(self, kind: str) -> type[_Section]:
        """Section that a kind's keys are checked against.

        Raises:
            InvalidExperiment: if there is no such kind, or what it names cannot be imported or called.
        """
        target = _load(self, kind)
        _refuse_undeclared_fields(target)
        base = self.base
        fields = _fields(target, self._given(target))
        # Such a field would hide one of the section's own methods.
        for name in (name for name in fields if name not in base.model_fields):
            if name.startswith("_") or name in base.__class_vars__ or hasattr(base, name):
                raise InvalidExperiment(f"{kind} has a parameter {name}, which cannot be a key: give it another name")
        about: dict[str, Any] = {"__base__": base, "__doc__": docstrings.summary(target)}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters(target).values()):
            # **kwargs take any key, which a section would refuse.
            about["__cls_kwargs__"] = {"extra": "allow"}
        name = f"{kind} {self.name}"
        try:
            section = cast("type[_Section]", create_model(name, **{**about, **fields}))
        except PydanticSchemaGenerationError:  # a parameter that no file can hold, such as a tensor
            section = cast("type[_Section]", create_model(name, **{**about, **dict(_of_known_types(fields))}))
        section.target = staticmethod(target)  # a function as it is would become a method
        section.family = self
        return section

    def _given(self, target: Callable[..., Any]) -> tuple[str, ...]:
        """The parameters that are no keys; of a function of (output, target) the first two, whatever their names."""
        if not self.of_functions:
            return self.given
        # A user chooses the names of a function's first arguments, so that they are told by their place.
        return () if inspect.isclass(target) else (*tuple(_named(target))[: self.arguments], *self.given)

    def validate(self, value: object) -> _Section:
        """Section that these keys, ``kind`` among them, make."""
        if isinstance(value, self.base):
            return value
        # Before functions: an object of a kind may be callable, too.
        if isinstance(value, Combinable) and dataclasses.is_dataclass(value):
            return self._section_of(value)
        if self.of_functions and callable(value):
            return self._section_of_callable(value)
        if value is None and self.has_none:
            value = "none"
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, dict):
            raise ValueError(f"must be a name, a mapping with the key kind, or an object of a kind, got {value!r}")
        kind = value.get("kind", self.default)
        try:
            if kind is None:
                raise InvalidExperiment(f"missing key; known: {', '.join(self.builtin)}")
            if not isinstance(kind, str):
                raise InvalidExperiment(f"must be a text; known: {', '.join(self.builtin)}")
            section = self.section(kind)
        except InvalidExperiment as error:
            detail = sentence_error(str(error), "kind", kind)
            raise ValidationError.from_exception_data(self.name, [detail]) from None
        return section.model_validate({"kind": kind, **value})

    def _section_of(self, made: Any) -> _Section:
        """The section that makes an equal object when it is read from a file; else one that holds the object."""
        home = f"{type(made).__module__}:{type(made).__qualname__}"
        kinds = {target: kind for kind, target in self.builtin.items()}
        keys = {part.name: getattr(made, part.name) for part in dataclasses.fields(made) if part.init}
        if not home.startswith("__main__:"):  # another process has another main module
            with suppress(InvalidExperiment, ValidationError, TypeError):
                section = self.make(kinds.get(home, f"python:{home}"), **keys)
                # The round trip is tried, since a field may hold what no file can, such as a tensor.
                if self.validate(section.model_dump(mode="json", warnings=False)).make() == made:
                    return section
        return self._holder(made, repr(made))

    def _section_of_callable(self, made: Callable[..., Any]) -> _Section:
        """The section of a function or class that a file can name; else one that holds it."""
        named = made if inspect.isclass(made) or inspect.isroutine(made) else type(made)
        home = f"{named.__module__}:{named.__qualname__}"
        kind = {target: kind for kind, target in self.builtin.items()}.get(home, f"python:{home}")
        if named is made and named.__module__ != "__main__":
            with suppress(InvalidExperiment, ValidationError, TypeError, ValueError):
                if self.section(kind).target is made:
                    return self.validate(kind)
        return self._holder(made, home)

    def _holder(self, made: Any, written: str) -> _Section:
        holder = cast("type[_Section]", create_model(f"given {self.name}", __base__=self.base))
        holder.target = staticmethod(lambda: made)
        holder.family = self
        return holder(kind=f"{_OBJECT}{written}")

    def make(self, kind: str | None = None, **keys: object) -> _Section:
        """The section of a kind, or of the default kind, with these keys."""
        return self.validate(keys if kind is None else {"kind": kind, **keys})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(
            lambda component, info: component.model_dump(mode=info.mode, exclude_unset=info.exclude_unset),
            info_arg=True,
        )
        return core_schema.no_info_plain_validator_function(self.validate, serialization=dump)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        choices = [self._schema_of(kind, handler) for kind in self.builtin]
        pattern = {"type": "string", "pattern": "^python:[^:]+:[^:]+$", "description": "Your own, by module and name."}
        users = {"type": "object", "properties": {"kind": pattern}, "required": ["kind"]}
        names = {"enum": list(self.builtin), "type": "string", "description": "A kind, with its defaults."}
        nothing = [{"type": "null", "description": "The kind none."}] if self.has_none else []
        # Not oneOf: a section without a kind fits more than one.
        return {"anyOf": [names, *choices, users, *nothing] if choices else [pattern, users]}

    def _schema_of(self, kind: str, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        section = self.section(kind)
        name = f"{kind}_{self.name}:{id(section)}"  # under which it stands once, however often it is referred to
        named = cast("CoreSchema", {**section.__pydantic_core_schema__, "ref": name})
        reference = handler(core_schema.definitions_schema(core_schema.definition_reference_schema(name), [named]))
        definition = handler.resolve_ref_schema(reference)
        definition["properties"]["kind"] = {"const": kind, "description": docstrings.summary(section.target)}
        definition["required"] = [key for key in definition["required"] if key != "kind" or kind != self.default]
        return reference


@cache
def keys_of(target: Callable[..., Any]) -> type[Section]:
    """A section whose keys are a callable's parameters, held to their annotations."""
    fields: dict[str, Any] = _fields(target)
    return cast("type[Section]", create_model(target.__name__, __base__=Section, **fields))


def _load(family: Family[Any], kind: str) -> Callable[..., Any]:
    # Not through _import: an error in a module of ours is a defect, and keeps its traceback.
    if kind in family.builtin:
        module, _, name = family.builtin[kind].partition(":")
        return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))
    if kind.startswith(_OBJECT):
        raise InvalidExperiment(
            f"was given in Python as an object that no file can name: give it again, as fed.Experiment({family.name}=…)"
        )
    if not kind.startswith("python:"):
        raise InvalidExperiment(f"no such {family.name}{nearest(kind, list(family.builtin))}")
    return named(kind)


def named(kind: str) -> Callable[..., Any]:
    """The class, function or other callable of a user's own that ``python:package.module:Name`` names.

    Raises:
        InvalidExperiment: if it cannot be imported, or cannot be called.
    """
    module, _, name = kind.removeprefix("python:").partition(":")
    if not module or module.startswith(".") or not name:
        raise InvalidExperiment("must have the form python:package.module:Name")
    loaded = _import(module)
    if not hasattr(loaded, name):
        raise InvalidExperiment(f"module {module} has no {name}")
    target = getattr(loaded, name)
    if not callable(target):
        raise InvalidExperiment(f"{name} of {module} must be a class or a function, not a {type(target).__name__}")
    return cast("Callable[..., Any]", target)


def _refuse_undeclared_fields(target: Callable[..., Any]) -> None:
    """Refuse a subclass of a dataclass that is none itself, whose annotations would silently be no keys.

    Raises:
        InvalidExperiment: if it is one, with annotations of its own.
    """
    if not inspect.isclass(target) or not dataclasses.is_dataclass(target):
        return
    if {"__dataclass_fields__", "__init__"} & vars(target).keys():
        return
    own = {name: str(annotation) for name, annotation in inspect.get_annotations(target).items()}
    fields = [name for name, annotation in own.items() if "ClassVar" not in annotation]
    if fields:
        raise InvalidExperiment(
            f"{target.__name__} lacks its decorator, without which nobody can set {', '.join(fields)}: write "
            "@dataclass(frozen=True, kw_only=True) above the class"
        )


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        # Only for the user's module itself or a package around it; a missing import inside it is another error.
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise InvalidExperiment(f"cannot import {module} ({error}); is its folder on the path?") from None
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        remedy = f"install what brings {error.name}" if isinstance(error, ModuleNotFoundError) else "correct it"
        raise InvalidExperiment(
            f"module {module} fails while it is imported, at {place_of(error)}: {problem}: {remedy}"
        ) from error


@cache
def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except ValueError:
        name = f"{target.__module__}.{getattr(target, '__qualname__', target)}"
        raise ValueError(
            f"{name} does not tell its parameters, which are the keys: name a class or a function written in Python"
        ) from None


def _named(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters without ``*args`` and ``**kwargs``."""
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: parameter for name, parameter in _parameters(target).items() if parameter.kind not in variable}


def _fields(target: Callable[..., Any], given: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Each parameter but those given as (annotation, default), in the form that pydantic's ``create_model`` takes."""
    keys = {name: parameter for name, parameter in _named(target).items() if name not in given}
    annotations = _annotations(target, keys)
    described = docstrings.arguments(target)
    factories = _default_factories(target)
    fields = {}
    for name, parameter in keys.items():
        annotation = annotations.get(name, Any)
        default: dict[str, Any] = {"default": parameter.default} if parameter.default is not parameter.empty else {}
        if name in factories:
            default = {"default_factory": factories[name]}
        elif isinstance(parameter.default, FieldInfo):  # a default and its bounds in one
            annotation = bounded(annotation, parameter.default)
            default = _default_of(parameter.default)
        fields[name] = (annotation, Field(**default, description=described.get(name)))
    return fields


def bounded(annotation: Any, info: FieldInfo) -> Any:
    """An annotation with the bounds of a Field that is written as the default."""
    return Annotated[annotation, *info.metadata] if info.metadata else annotation


def _default_of(info: FieldInfo) -> dict[str, Any]:
    """Arguments of a Field that say its default; none where it has none."""
    if info.is_required():
        return {}
    return {"default": info.default} if info.default_factory is None else {"default_factory": info.default_factory}


def _of_known_types(fields: Mapping[str, tuple[Any, Any]]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The same fields, whose annotations are anything where pydantic knows no such type."""
    for name, (annotation, about) in fields.items():
        try:
            TypeAdapter(annotation)
        except PydanticSchemaGenerationError:
            yield name, (Any, about)
        else:
            yield name, (annotation, about)


def _annotations(target: Callable[..., Any], names: Iterable[str]) -> dict[str, Any]:
    """Annotations of the parameters of these names; all others may be for type checkers alone."""
    if inspect.isclass(target):
        # A dataclass has annotations of its own, another class those of __init__.
        return get_type_hints(target, include_extras=True) | _annotations(target.__init__, names)
    function = inspect.unwrap(target)
    # The others are left out, for get_type_hints imports nothing, and a name under TYPE_CHECKING would raise.
    wanted = {name: text for name, text in getattr(function, "__annotations__", {}).items() if name in names}
    holder = SimpleNamespace(__annotations__=wanted)
    return get_type_hints(holder, globalns=getattr(function, "__globals__", {}), include_extras=True)


def _default_factories(target: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    parts = dataclasses.fields(target) if dataclasses.is_dataclass(target) else ()
    return {part.name: part.default_factory for part in parts if part.default_factory is not dataclasses.MISSING}
