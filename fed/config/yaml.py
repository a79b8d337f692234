"""YAML 1.2's core schema for PyYAML: ``1e-3`` is a number, ``off`` is a word, and a key stands once."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from fed.errors import InvalidExperiment, InvalidInput, located

__all__ = ["dump", "load", "parse"]

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # merged keys may be overridden
        keys = [self.construct_object(key, deep=True) for key in own]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                mark = own[index].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    pass


for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}  # PyYAML's are of YAML 1.1, in which off is false and 1e-3 a text
    for _tag, _pattern, _first in (
        ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
        ("int", re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), "-+0123456789"),
        ("float", _FLOAT, "-+.0123456789"),
        ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
        ("merge", re.compile(r"<<"), "<"),
    ):
        # PyYAML asks for a match at the beginning alone: 1e-3x would be a number.
        _whole = re.compile(rf"^(?:{_pattern.pattern})$")
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _whole, list(_first))


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)  # int(text, 0) refuses 007, which is 7


_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def parse(text: str) -> Any:
    """The value that a YAML text holds.

    Raises:
        InvalidExperiment: if it is no YAML; the message says where.

    Example:
        >>> parse("{lr: 1e-3, batching: off}")
        {'lr': 0.001, 'batching': 'off'}
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506  # _Loader is a SafeLoader
    except RecursionError:
        raise InvalidExperiment("not valid YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, AttributeError, KeyError) as error:  # of a tag that its text does not fit, too
        said = " ".join(str(error).split()).replace(' in "<unicode string>",', " at")  # PyYAML's name of a text
        raise InvalidExperiment(f"not valid YAML: {said}") from None


def load(path: Path) -> dict[str, Any]:
    """The keys and values that a YAML file holds.

    Raises:
        InvalidInput: if the file cannot be read.
        InvalidExperiment: if it is no YAML, or no mapping; the message names the file and says where.
    """
    with located(path):
        try:
            value = parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InvalidInput(f"no such file (looked in {Path.cwd()})") from None
        except OSError as error:
            raise InvalidInput(f"cannot be read ({error.strerror}): give a file that you may read") from None
        except UnicodeDecodeError as error:
            raise InvalidInput(f"must be text in UTF-8, which byte {error.start} is not: convert it") from None
        if not isinstance(value, dict):
            got = "nothing" if value is None else type(value).__name__
            raise InvalidExperiment(f"must hold a mapping of keys to values, got {got}")
        # A key such as 1 or null is unknown, and the sentence about it needs a text.
        return {str(key): inner for key, inner in value.items()}


def dump(value: object) -> str:
    """The YAML text of a value: keys in their order, short lists on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100)
