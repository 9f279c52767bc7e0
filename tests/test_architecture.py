"""The budgets of the house, and the proof that each of these checks bites."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"

#: Folders of code beside the package itself.
BESIDE = ("benchmarks", "examples", "scripts", "tests")
MAX_FILE = 400
#: A file of tests is a list that nobody reads from end to end, so it may be longer; without a bound it would grow on.
MAX_TEST_FILE = 600
MAX_FUNCTION = 60
MAX_PARAMETERS = 6
JUNK = frozenset({"common", "helper", "helpers", "misc", "util", "utils"})
IMPURE = frozenset({"asyncio", "os", "random", "socket", "sqlite3", "subprocess", "threading", "time"})
PURE_ROOMS = ("ostler.model", "ostler.policy")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
MAKERS = frozenset({"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"})
MUTATORS = frozenset({"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem"}) | frozenset(
    {"remove", "reverse", "setdefault", "sort", "update"}
)
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
NOQA = re.compile(r"\bnoqa\b")
REASONED_NOQA = re.compile(r"\bnoqa: [A-Z]+[0-9]+(, [A-Z]+[0-9]+)* - \w")
IGNORE = re.compile(r"\btype: ignore\b")
REASONED_IGNORE = re.compile(r"\btype: ignore\[[a-z, -]+\]  # (?!noqa)\w")
Function = ast.FunctionDef | ast.AsyncFunctionDef

#: Files that may be longer than the bound, each with its reason.
LONG: Mapping[str, str] = {
    "ostler/__init__.pyi": "an index of names for type checkers: it has no logic, and must be one file",
}
#: Modules whose functions import by a name that may be our own, each with its reason.
LAZY: Mapping[str, str] = {
    "ostler": "naming a state must cost neither the database driver nor the validation library",
    "ostler.agents.files.registration": "the module is the user's, named in a definition file",
    "ostler.cli.lazy": "a list of the commands imports none of them",
    "ostler.isolation.finding": "a level is found by name, and may be brought by another package",
    "ostler.isolation.inside.finding_source": "the module is the user's, where the agent's class lives",
    "ostler.lazily": "a package names what it offers, and loads only what is asked for",
    "ostler.simulation.scenariocode": "the module is the user's, named in a scenario",
    "ostler.store.opening": "most homes never need the driver of PostgreSQL, which may not be installed",
}


@dataclass(frozen=True)
class Source:
    path: Path
    base: Path

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        parts = self.path.relative_to(self.base).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def at(self, node: ast.AST, complaint: str) -> str:
        return f"{self.path.relative_to(self.base)}:{getattr(node, 'lineno', 0)}: {complaint}"


def sources(base: Path, *endings: str) -> list[Source]:
    return [Source(path, base) for ending in endings or ("py",) for path in sorted(base.rglob(f"*.{ending}"))]


def beside() -> list[Source]:
    """The code that is not in the package, with the scripts that are Python without an ending."""
    named = [one for part in BESIDE for one in sources(ROOT / part, "py", "pyi")]
    scripts = [path for path in sorted((ROOT / "scripts").iterdir()) if path.is_file() and not path.suffix]
    plain = [Source(path, path.parent) for path in scripts if "python" in path.read_text().partition("\n")[0]]
    return [Source(one.path, ROOT) for one in (*named, *plain)]


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def targets(source: Source, node: ast.AST, known: frozenset[str]) -> Iterator[str]:
    """The modules that an import statement names; a name imported from a package may itself be one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        home = source.module.split(".")[: -node.level or None] if node.level else []
        origin = ".".join([*home, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{origin}.{alias.name}"
            yield inner if inner in known else origin


# --- the checks --------------------------------------------------------------------------------------


def long_files(source: Source) -> Iterator[str]:
    name = source.path.relative_to(source.base)
    most = MAX_TEST_FILE if name.parts[0] == "tests" else MAX_FILE
    lines = source.text.count("\n")
    if lines > most and name.as_posix() not in LONG:
        yield source.at(source.tree, f"has {lines} lines, the most is {most}; split it by noun")


def long_functions(source: Source) -> Iterator[str]:
    for node in functions(source.tree):
        documented = ast.get_docstring(node) is not None
        first = node.body[0].end_lineno if documented else node.lineno - 1
        lines = (node.end_lineno or 0) - (first or 0) + documented
        if lines > MAX_FUNCTION:
            yield source.at(node, f"{node.name} has {lines} lines, the most is {MAX_FUNCTION}")


def many_parameters(source: Source) -> Iterator[str]:
    for node in functions(source.tree):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        named = [one.arg for one in every if one.arg not in {"self", "cls"}]
        if len(named) > MAX_PARAMETERS:
            yield source.at(node, f"{node.name} takes {len(named)} parameters, the most is {MAX_PARAMETERS}")


def hidden_imports(source: Source) -> Iterator[str]:
    for function in functions(source.tree):
        for node in ast.walk(function):
            relative = isinstance(node, ast.ImportFrom) and node.level
            own = (name for name in targets(source, node, frozenset()) if name.split(".")[0] == "ostler")
            if relative or next(own, None):
                yield source.at(node, f"{function.name} imports from our own package; import at the top")
            elif _names_our_own(node) and source.module not in LAZY:
                yield source.at(node, f"{function.name} may import from our own package; import at the top")


def _names_our_own(node: ast.AST) -> bool:
    """Whether it is a call that imports by name, and the name is ours or is not known until it runs."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called not in {"import_module", "__import__"}:
        return False
    name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
    return not isinstance(name, str) or name.startswith(".") or name.partition(".")[0] == "ostler"


def silent_exemptions(source: Source) -> Iterator[str]:
    """A rule that is switched off for a line says why on that line."""
    with source.path.open("rb") as file:
        comments = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    for token in comments:
        where, text = f"{source.path.relative_to(source.base)}:{token.start[0]}", token.string
        told = REASONED_NOQA.search(text)
        if NOQA.search(text) and not told:
            yield f"{where}: write the rule and its reason, as in # noqa: S603 - our own program"
        elif IGNORE.search(text) and not told and not REASONED_IGNORE.search(text):
            yield f"{where}: write the rule and its reason, as in # type: ignore[arg-type]  # wrong on purpose"


def junk_drawers(source: Source) -> Iterator[str]:
    for part in source.path.relative_to(source.base).with_suffix("").parts:
        if part.strip("_") in JUNK:
            yield source.at(source.tree, f"{part} says nothing; name the module after what it holds")


def mutable_state(source: Source) -> Iterator[str]:
    """A literal under a constant's name is allowed while nothing in its module changes it."""
    tree = source.tree
    for node in tree.body:
        for name in _mutable_names(node):
            if name == "__all__":
                continue
            if not CONSTANT.fullmatch(name):
                yield source.at(node, f"{name} is mutable state of the module; pass it, or make it a constant")
            elif name in _mutated(tree):
                yield source.at(node, f"{name} is changed in this module, so it is no constant")


def _mutable_names(node: ast.stmt) -> Iterator[str]:
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    value = node.value
    literal = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
    called = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in MAKERS
    if literal or called:
        names = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (name.id for name in names if isinstance(name, ast.Name))


def _mutated(tree: ast.Module) -> frozenset[str]:
    found: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            found.add(node.value)
        elif isinstance(node, ast.AugAssign):
            found.add(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            found.add(node.func.value)
    return frozenset(one.id for one in found if isinstance(one, ast.Name))


def unfinished(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield f"{source.path.relative_to(source.base)}:{number}: open an issue instead of a mark in the code"


def prints(source: Source) -> Iterator[str]:
    if source.module.startswith("ostler.cli"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield source.at(node, "a library does not print; return it, or log it")


def impure_imports(source: Source) -> Iterator[str]:
    if not source.module.startswith(PURE_ROOMS):
        return
    for node in ast.walk(source.tree):
        for name in targets(source, node, frozenset()):
            if name.split(".")[0] in IMPURE:
                yield source.at(node, f"decisions and records do not touch {name}; take what is needed as a value")


CHECKS: tuple[Callable[[Source], Iterator[str]], ...] = (
    long_files,
    long_functions,
    many_parameters,
    hidden_imports,
    silent_exemptions,
    junk_drawers,
    mutable_state,
    unfinished,
    prints,
    impure_imports,
)


def circles(base: Path) -> list[str]:
    """Every group of modules that import one another, wherever in the file the import stands."""
    every = sources(base)
    known = frozenset(source.module for source in every)
    graph = {
        source.module: {
            name for node in ast.walk(source.tree) for name in targets(source, node, known) if name in known
        }
        for source in every
    }
    reach = {module: _reachable(graph, module) for module in graph}
    knots = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in graph
        if module in reach[module]
    }
    return [" and ".join(knot) + " import one another" for knot in sorted(knots)]


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(graph[module])
    return seen


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "lint-imports"
    environment = {"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin:/bin", "NO_COLOR": "1"}
    return subprocess.run(
        [program, "--no-cache"], cwd=root, env=environment, capture_output=True, text=True, check=False
    )


# --- the code as it is -------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_source_keeps_the_budget(check: Callable[[Source], Iterator[str]]) -> None:
    complaints = [complaint for source in sources(SRC, "py", "pyi") for complaint in check(source)]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("check", [long_files, silent_exemptions], ids=lambda check: check.__name__)
def test_the_code_beside_it_keeps_the_budget(check: Callable[[Source], Iterator[str]]) -> None:
    found = beside()
    assert {source.path.relative_to(ROOT).parts[0] for source in found} == set(BESIDE)
    complaints = [complaint for source in found for complaint in check(source)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_no_exemption_outlives_its_reason() -> None:
    assert {name for name in LONG if (SRC / name).read_text().count("\n") > MAX_FILE} == set(LONG)
    importing = {
        source.module
        for source in sources(SRC)
        for function in functions(source.tree)
        if any(_names_our_own(node) for node in ast.walk(function))
    }
    assert importing == set(LAZY)


def test_no_import_circles() -> None:
    assert not circles(SRC), "\n" + "\n".join(circles(SRC))


def test_import_direction() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


# --- each check bites --------------------------------------------------------------------------------

BODY = "\n".join("    pass" for _ in range(MAX_FUNCTION))

BAD: tuple[tuple[Callable[[Source], Iterator[str]], str, str], ...] = (
    (long_files, "ostler/a.py", "x = 1\n" * (MAX_FILE + 1)),
    (long_files, "ostler/a.pyi", "x: int\n" * (MAX_FILE + 1)),
    (long_files, "tests/test_a.py", "x = 1\n" * (MAX_TEST_FILE + 1)),
    (long_functions, "ostler/a.py", f"def f():\n{BODY}\n"),
    (long_functions, "ostler/a.py", f'async def f():\n    """Short."""\n{BODY}\n'),
    (many_parameters, "ostler/a.py", "def f(self, a, b, c, d, /, e, *, g, h): ...\n"),
    (hidden_imports, "ostler/a.py", "def f():\n    from ostler.model import Task\n"),
    (hidden_imports, "ostler/a.py", "def f():\n    import ostler.store\n"),
    (hidden_imports, "ostler/a.py", "class A:\n    def f(self):\n        from . import b\n"),
    (hidden_imports, "ostler/a.py", "def f():\n    import_module('ostler.store')\n"),
    (hidden_imports, "ostler/a.py", "def f(name):\n    return importlib.import_module(name)\n"),
    (hidden_imports, "ostler/a.py", "def f():\n    __import__('ostler')\n"),
    (silent_exemptions, "ostler/a.py", "x = 1  # noqa: S311\n"),
    (silent_exemptions, "ostler/a.py", "x = 1  # noqa - because\n"),
    (silent_exemptions, "ostler/a.py", "# ruff: noqa: S101\n"),
    (silent_exemptions, "ostler/a.py", "x = 1  # type: ignore[arg-type]\n"),
    (silent_exemptions, "ostler/a.py", "x = 1  # type: ignore[arg-type]  # noqa: S311\n"),
    (junk_drawers, "ostler/model/utils.py", ""),
    (junk_drawers, "ostler/_common/a.py", ""),
    (mutable_state, "ostler/a.py", "seen = {}\n"),
    (mutable_state, "ostler/a.py", "seen: list[int] = list()\n"),
    (mutable_state, "ostler/a.py", "SEEN = [n for n in 'ab']\ndef f():\n    SEEN.append(1)\n"),
    (mutable_state, "ostler/a.py", "_SEEN = {}\ndef f(k):\n    _SEEN[k] = 1\n"),
    (unfinished, "ostler/a.py", "x = 1  # TO" + "DO later\n"),
    (prints, "ostler/a.py", "def f():\n    print('hello')\n"),
    (impure_imports, "ostler/policy/a.py", "import time\n"),
    (impure_imports, "ostler/model/a.py", "def f():\n    from os.path import join\n"),
)


@pytest.mark.parametrize(("check", "name", "text"), BAD, ids=lambda one: getattr(one, "__name__", None))
def test_check_bites(check: Callable[[Source], Iterator[str]], name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert list(check(Source(path, tmp_path))), f"{check.__name__} did not notice:\n{text}"


@pytest.mark.parametrize("first", ["from ostler.b import x", "import ostler.b", "def f():\n    from . import b"])
def test_circle_bites(first: str, tmp_path: Path) -> None:
    package = tmp_path / "ostler"
    package.mkdir()
    for name, text in (("__init__", ""), ("a", first), ("b", "from ostler import c\n"), ("c", "import ostler.a\n")):
        (package / f"{name}.py").write_text(text)
    assert circles(tmp_path) == ["ostler.a and ostler.b and ostler.c import one another"]


def test_import_direction_bites(tmp_path: Path) -> None:
    shutil.copytree(SRC, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src/ostler/model/text.py").open("a") as file:
        file.write("\nfrom ostler.store import Store\n")
    done = lint_imports(tmp_path)
    assert done.returncode != 0
    assert "ostler.model is not allowed to import ostler.store" in done.stdout
