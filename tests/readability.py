"""Counters of what makes a page hard to read: entries that lean on a name, and tuples of unlike things.

``python -m tests.readability`` prints the counts of all rooms, and ``… fed/wire`` each place in that folder.
"""

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tests.trees import tree_of

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("fed", "aggregators", "clients", "server", "simulations", "benchmarks", "examples")

Documented: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note|References):")
_ENTRY = re.compile(r"(?P<indent> +)\*{0,2}(?P<name>\w+)(?: \([^)]*\))?: +(?P<text>\S.*)")

# Words that join what follows to something said before: an entry that begins with one leans on the parameter's name.
_JOINING = (
    "about above after along although and around as at because before behind below beneath beside besides between "
    "beyond both but by despite during either except for from how if in inside instead into its it like likewise near "
    "neither nor not of off on once onto or out outside over per since so than that their them then there these they "
    "this those though through till to too toward towards under unless until unto up upon what whatever when whenever "
    "where wherever whether which whichever while who whoever whom whose why with within without yet"
)
# Verbs that a parameter's name would be the subject or object of. None of them is a plural in these pages.
_BARE_VERBS = (
    "adds allows answers applies are asks became becomes begins belongs brings called can chooses comes computes "
    "contains could creates did do does encoded encodes ends explains finds follows forbids gets given gives goes got "
    "had happens has have holds is joins keeps kept knows lets lies made makes may means meant might moves must named "
    "needed needs orders ought picks prints puts reads receives refuses replaces returned returns runs said say says "
    "see sees sends sent served serves sets shall should shows stands starts stops stored stores taken takes tells "
    "trains turns used waits wants was were will writes would"
)
_LEANING = re.compile(
    rf"(?:{'|'.join((*_JOINING.split(), *_BARE_VERBS.split()))})\b(?!-)"
    r"|names(?! (?:of|and|or)\b)"  # "names the run", but not "names of clients"
    # "the present one", and "the client's" without its noun
    r"|(?:the|an?|each|every) (?:\w+ )?ones?\b(?! \w+ (?:of|in)\b)"
    r"|(?:the|an?|each|every) (?:[\w-]+ )*?[\w-]+(?:'s|s'|’s|s’)(?=[.,;:]|$)",
    re.IGNORECASE,
)


class Place(NamedTuple):
    """Line of a file, and what was found there."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


def leans(text: str) -> bool:
    """Tell whether a documented entry is a fragment that cannot be read without its name.

    Example:
        >>> leans("of the log to say that the disk is"), leans("seconds to wait, > 0"), leans("True if it is full")
        (True, False, False)
    """
    return bool(_LEANING.match(text))


def sources(room: str) -> Iterator[Path]:
    """Files of a room, or of a folder in one, that people write."""
    paths = sorted((ROOT / room).rglob("*.py"))
    # The other engines' environment stands in benchmarks/.
    return (path for path in paths if "_pb2" not in path.name and ".venv" not in path.parts)


def fragments(path: Path) -> list[Place]:
    """Entries of Args, Attributes and Returns, and texts under attributes, that lean on their names."""
    return [place for place in entries(path) if leans(place.text.partition(": ")[2])]


def entries(path: Path) -> list[Place]:
    """Entries of Args, Attributes and Returns, and texts under attributes, each as ``name: text``."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, Documented):
            docstring = node.body[0] if ast.get_docstring(node) else None
            line = docstring.lineno if docstring else 1
            found += [Place(path, line, f"{name}: {text}") for name, text in _entries(ast.get_docstring(node) or "")]
        if isinstance(node, ast.Module | ast.ClassDef):
            found += [Place(path, line, f"{name}: {text}") for name, text, line in _attributes(node)]
    return found


def tuples_of_unlike_things(path: Path) -> list[Place]:
    """Assignments ``a, b = x, y``, but for those that must happen at once, such as a swap."""
    found = []
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                if not _reads_what_it_assigns(names, values):
                    found.append(Place(path, node.lineno, ast.unparse(node)))
    return found


def starred_tuples(path: Path) -> list[Place]:
    """Arguments ``*place`` of a call where the function itself has put unlike things into that tuple."""
    found: dict[Place, None] = {}  # a function within another is walked twice
    for function in ast.walk(tree_of(path)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            made_here = _tuples_made_in(function)
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            starred = [(call, part) for call in calls for part in call.args if isinstance(part, ast.Starred)]
            for call, part in starred:
                if _is_tuple(part.value) or ast.unparse(part.value) in made_here:
                    found[Place(path, part.lineno, ast.unparse(call))] = None
    return [*found]


def lines_of_code(path: Path) -> int:
    """Number of lines with code: no blank ones, no comments, no docstrings."""
    text = path.read_text()
    told: set[int] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            told |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - told)


def counts(room: str) -> str:
    """One line of counts for a room."""
    paths = list(sources(room))
    code = sum(map(lines_of_code, paths))
    told = sum(len(entries(path)) for path in paths)
    leaning = sum(len(fragments(path)) for path in paths)
    unlike = sum(len(tuples_of_unlike_things(path)) for path in paths)
    starred = sum(len(starred_tuples(path)) for path in paths)
    share = leaning / max(told, 1)
    rate = 1000 * unlike / max(code, 1)
    return (
        f"{room}: {leaning} of {told} entries lean on their name ({share:.0%}); {unlike} tuple assignments in {code} "
        f"lines of code ({rate:.1f} per 1,000); {starred} starred tuples"
    )


COUNTERS: tuple[Callable[[Path], list[Place]], ...] = (fragments, tuples_of_unlike_things, starred_tuples)


def _entries(docstring: str) -> Iterator[tuple[str, str]]:
    """Names and texts of the entries of a docstring in Google's style."""
    section = name = text = ""
    depth = 0
    for line in [*inspect.cleandoc(docstring).splitlines(), "Note:"]:
        starts = _SECTION.fullmatch(line.rstrip())
        entry = _ENTRY.fullmatch(line)
        begins = section in ("Args", "Attributes") and entry and (not name or len(entry["indent"]) <= depth)
        if name and text and (starts or begins):
            yield name, text
            name = text = ""
        if starts:
            section = starts[1]
            name = section if section in ("Returns", "Yields") else ""
        elif begins and entry:
            name = entry["name"]
            text = entry["text"]
            depth = len(entry["indent"])
        elif line.startswith(" "):
            text = f"{text} {line.strip()}".strip() if name else ""
        elif line.strip():
            section = ""


def _attributes(node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, str, int]]:
    """Names, texts and lines of the strings that stand under an attribute."""
    for statement, following in pairwise(node.body):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split()), following.lineno


def _reads_what_it_assigns(names: list[ast.expr], values: list[ast.expr]) -> bool:
    """Tell whether a value needs what an earlier target was before the assignment."""
    earlier: set[str] = set()
    for name, value in zip(names, values, strict=False):
        if earlier & {ast.unparse(part) for part in ast.walk(value) if isinstance(part, ast.expr)}:
            return True
        earlier.add(ast.unparse(name))
    return False


def _is_tuple(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_tuple(value.body) or _is_tuple(value.orelse)
    return isinstance(value, ast.Tuple) and not any(isinstance(part, ast.Starred) for part in value.elts)


def _tuples_made_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that a function assigns a tuple to, element by element."""
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and _is_tuple(node.value)]
    return {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}


def main(rooms: list[str]) -> None:
    """Print the counts of all rooms, or the places in some of them."""
    for room in rooms or ROOMS:
        for path in sources(room) if rooms else ():
            for counter in COUNTERS:
                for place in counter(path):
                    print(f"{counter.__name__}: {place}")
        print(counts(room))


if __name__ == "__main__":
    main(sys.argv[1:])
