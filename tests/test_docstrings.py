"""Docstrings and names that are understood at once: a plain first word, every argument, one name for a thing."""

import ast
import importlib
import inspect
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

import fed.vectors.layout
from fed.config.docstrings import arguments
from tests.readability import counts, fragments, leans, sources, starred_tuples, tuples_of_unlike_things
from tests.trees import tree_of

pytestmark = pytest.mark.xdist_group("syntax trees")  # so that files are parsed once
ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("fed", "aggregators", "clients", "server", "simulations")
OBSCURE = re.compile(
    "(After|And|As|At|Because|Before|But|By|Everybody|For|From|How|If|In|Into|It|Its|Nobody|Nothing|Of|On|Once|Or|Out|Since"
    "|So|Somebody|Something|Than|That|Then|These|They|This|Those|To|Under|Until|What|When|Where|Whether|Which|Who|Whoever"
    r"|Whose|Why|With|Without)\b"
)
# Folders that are held to plain entries and to one thought a line.
READABLE = (*ROOMS, "benchmarks", "examples")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
LEGEND = "Shapes: see :mod:`fed.vectors.layout`."
PAGE = '''
LARGEST = 9
"""Of a number that a client says."""


def opened(whose: str, what: str, path: str, wait_s: float) -> bool:
    """An open file.

    Args:
        whose: they are, for the message.
        what: what it is,
            in two lines.
        path: path of the file.
        wait_s: seconds to wait.

    Returns:
        Whether it is open: True if it is.
    """
    size, name = len(whose), what
    size, wait_s = wait_s, size
    both = (name, size)
    first, second = divmod(3, 2)
    return open(*both), open(*what)
'''
# An algorithm's page names what the server and what a client keeps, in the paper's symbols, as every other page does.
OF_EVERY_PAGE = {"State", "ClientState"}


def test_a_docstring_begins_with_a_noun_or_a_verb() -> None:
    found = []
    folders = (*ROOMS, "benchmarks", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if ".venv" not in path.parts]
    for path in (path for path in paths if "_pb2" not in path.name):
        for node in ast.walk(tree_of(path)):
            text = (ast.get_docstring(node) or "") if isinstance(node, DOCUMENTED) else ""
            if OBSCURE.match(text):
                found.append(f"{path.relative_to(ROOT)}: {text.partition(chr(10))[0]}")
    assert paths
    assert found == []


def test_a_public_function_of_three_parameters_documents_each(module_name: str) -> None:
    found = []
    for name, function in _public_functions(module_name):
        parameters = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
        missing = set(parameters) - set(arguments(function)) - _options_with_help(function)
        if len(parameters) > 2 and missing:
            found.append(f"{name}: Args must name {', '.join(sorted(missing))}")
    assert found == []


def test_a_shape_letter_has_one_meaning(module_name: str) -> None:
    legend = set(re.findall(r"^    ([A-Z]): ", fed.vectors.layout.__doc__ or "", re.MULTILINE))
    source = _source(module_name)
    names = [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == 1]
    suffixes = {suffix[1] for name in names if (suffix := re.fullmatch(r"_?[a-z]\w*?_([A-Z][A-Z0-9]*)", name))}
    unknown = {letter for letters in suffixes for letter in letters if not letter.isdigit()} - legend
    found = [f"{letter} is not in the legend of fed.vectors.layout" for letter in sorted(unknown)]
    told = "Shapes:" in source.replace(LEGEND, "")
    if module_name != "fed.vectors.layout" and (told or (suffixes and LEGEND not in source)):
        found.append(f"say {LEGEND!r}, and no legend of its own")
    assert found == []


def test_the_legend_gives_no_letter_twice() -> None:
    letters = re.findall(r"^    ([A-Z]): ", fed.vectors.layout.__doc__ or "", re.MULTILINE)
    assert letters
    assert sorted(set(letters)) == sorted(letters)


def test_two_things_never_share_a_name() -> None:
    homes = defaultdict(set)
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name):
        for node in ast.walk(tree := tree_of(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(path)
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
                homes[node.targets[0].id].add(path)
    doubles = {name for name, paths in homes.items() if len(paths) > 1 and not name.startswith("_")}
    assert doubles == OF_EVERY_PAGE


def test_a_test_has_a_name_of_at_most_ten_words() -> None:
    names = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert {name for name in names if len(name.split("_")) > 11} == set()


@pytest.mark.parametrize("room", READABLE)
def test_an_entry_says_what_it_is_without_its_name(room: str) -> None:
    found = [str(place) for path in sources(room) for place in fragments(path)]
    assert found == [], "begin with a noun and its unit and range, or with True if"


@pytest.mark.parametrize("room", READABLE)
def test_unlike_things_are_assigned_one_by_one(room: str) -> None:
    found = [str(place) for path in sources(room) for place in tuples_of_unlike_things(path)]
    assert found == [], "write a line for each"


@pytest.mark.parametrize("room", READABLE)
def test_no_tuple_is_built_to_be_starred(room: str) -> None:
    found = [str(place) for path in sources(room) for place in starred_tuples(path)]
    assert found == [], "name the arguments in the call"


def test_riddles_are_found_among_good_entries(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(PAGE)
    assert [place.text.split(":")[0] for place in fragments(page)] == ["LARGEST", "whose", "what", "Returns"]
    assert [place.line for place in tuples_of_unlike_things(page)] == [19]
    assert [place.text for place in starred_tuples(page)] == ["open(*both)"]


@pytest.mark.parametrize(
    "riddle",
    [
        *("they are, for the message.", "they are.", "of the log to say that the disk is", "the clients', or None."),
        *("Whether the class overrides it.", "how many there are", "what came with the task", "the present one."),
        *("is told each sender", "names the run.", "trains, as long as it may", "where it is put", "its own keys."),
    ],
)
def test_an_entry_that_leans_on_its_name_is_found(riddle: str) -> None:
    assert leans(riddle)


@pytest.mark.parametrize(
    "entry",
    [
        *("client that is named in the error, such as 'client 3'", "seconds to wait, > 0", "True if the disk is full."),
        *("names of clients, in ascending order", "μ ≥ 0, the pull towards x", "``samples``: one for each client"),
        *(
            "number of clients that take part",
            "one mapping for each round",
            "the client's own model",
            "None, or a name",
        ),
    ],
)
def test_an_entry_with_a_noun_of_its_own_passes(entry: str) -> None:
    assert not leans(entry)


def test_counts_are_of_entries_and_of_lines() -> None:
    assert re.fullmatch(
        r"aggregators: 0 of \d+ entries lean on their name \(0%\); 0 tuple assignments in \d+ lines of code "
        r"\(0\.0 per 1,000\); 0 starred tuples",
        counts("aggregators"),
    )


def _source(module_name: str) -> str:
    if module_name.endswith(("_pb2", "_pb2_grpc")):
        return ""
    return inspect.getsource(importlib.import_module(module_name))


def _options_with_help(function: FunctionType) -> set[str]:
    """Parameters of a command that the command line itself documents."""
    annotated = {
        name: getattr(one.annotation, "__metadata__", ())
        for name, one in inspect.signature(function).parameters.items()
    }
    return {name for name, about in annotated.items() if any(getattr(part, "help", None) for part in about)}


def _public_functions(module_name: str) -> Iterator[tuple[str, FunctionType]]:
    """Functions and methods that a module defines and makes public, but those documented in a base class."""
    module = importlib.import_module(module_name)
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if getattr(value, "__module__", None) != module_name:
            continue
        if isinstance(value, FunctionType):
            yield name, value
        elif inspect.isclass(value):
            for key, member in vars(value).items():
                method = member.__func__ if isinstance(member, classmethod | staticmethod) else member
                inherited = any(key in vars(base) for base in value.__mro__[1:])
                if isinstance(method, FunctionType) and not key.startswith("_") and not inherited:
                    yield f"{name}.{key}", method
