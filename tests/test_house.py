"""The floors of the house: imports point downwards only, and the books know no tensor."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

import pytest

import hf_paged

ROOT = Path(__file__).parent.parent
FIGURES = run_path(str(ROOT / "scripts" / "figures"))
PACKAGE = ROOT / "hf_paged"
COMMAND_LINE = ROOT / "hf_paged_cli"

BELOW = {
    "blocks": set(),
    "scheduling": {"blocks"},
    "trace": set(),
    "kv": {"blocks"},
    "model": {"kv", "blocks"},
    "generate": {"model", "kv", "trace", "blocks"},
    "checking": {"model"},
    "engine": {"model", "kv", "scheduling", "trace", "blocks"},
    "continuous": {"engine", "generate", "model", "kv", "blocks"},
    "demo": {"generate", "model", "kv", "blocks", ""},
    "": {"continuous", "engine", "checking", "generate", "model", "kv", "trace", "blocks"},
    "trainer": {"model"},
    "trl": {"continuous", "engine", "model"},
    "serve": {"engine", "model", "demo", "trace", ""},
    "cli": {"serve", "engine", "model", "kv", ""},
    "ray": {"cli", "serve", "engine", "blocks"},
    "__main__": {"continuous"},
}
"""For each floor the floors it may import; "" is the package's own front door."""


KERNELS = {"hf_paged_kernels": {"torch", "triton"}, "hf_paged_native": {"torch"}}
"""Packages that each package of kernels may import beside the standard library."""


def _floor(file: Path) -> str:
    parts = file.relative_to(PACKAGE).parts
    return "" if parts == ("__init__.py",) else parts[0].removesuffix(".py")


@functools.cache
def _imports(file: Path) -> list[str]:
    """Absolute names of everything a file imports, TYPE_CHECKING included."""
    package = file.relative_to(ROOT).with_suffix("").parts
    found = []
    for node in FIGURES["walked"](FIGURES["parsed"](file)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [module] if node.module else [f"{module}.{alias.name}" for alias in node.names]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))
SOURCES = FILES + sorted(COMMAND_LINE.glob("*.py")) + sorted((ROOT / "kernels").rglob("*.py"))


def test_imports_point_downwards() -> None:
    """Files that import from a floor which is not below theirs."""
    found = []
    for file in FILES:
        floor = _floor(file)
        for name in _imports(file):
            top, _, rest = name.partition(".")
            if top == "hf_paged" and rest.partition(".")[0] not in {floor, *BELOW[floor]}:
                found.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not found


MOST_PRIVATE = 56
"""Places in tests that read or write a private attribute of the code."""
MOST_INNER = 34
"""Places in tests that reach for an engine's inner objects; `support/engine_parts.py` has most."""
MOST_UNTESTED = 5
"""Modules with a class that keeps state, and no test of their stem: four of several ranks, which rank cases test,
and Ray's router, whose test needs a live Ray.
"""
MOST_TESTED = {"adapters": 11, "ranks": 3, "routing": 11, "shared reads": 6, "states": 11}
"""Files that test whether an optional capability is there."""
MOST_WRITERS = 4
"""Files that give a column's numbers: one of the engine and one of generate(), and two that change some rows'."""
MOST_PUBLIC = 25
"""Names in `hf_paged.__all__`."""
MOST_CLASSES = 362
"""Classes of the code, as `scripts/figures` counts them."""

MOST_METHODS, MOST_ATTRIBUTES = 40, 20
"""Of a class."""


@functools.cache
def _trees() -> dict[Path, ast.Module]:
    """All of the code, parsed once for all tests that count in it."""
    return {file: FIGURES["parsed"](file) for file in FIGURES["sources"](FIGURES["CODE"])}


def test_tests_share_by_the_support_folder() -> None:
    """A test file imports no other one."""
    between = FIGURES["imports_between_tests"]
    assert [file.name for file in sorted((ROOT / "tests").rglob("*.py")) if between(file)] == []


def test_modules_with_state_have_a_test_of_their_stem() -> None:
    """Tests mirror modules: a reader of `engine/driver.py` finds `tests/test_engine_driver.py`."""
    trees = _trees()
    found = FIGURES["untested"](trees)
    assert len(found) <= MOST_UNTESTED, found


def test_public_names_are_few() -> None:
    """All names that a user meets with `import hf_paged`."""
    assert len(hf_paged.__all__) <= MOST_PUBLIC, sorted(hf_paged.__all__)


def test_classes_are_counted() -> None:
    """Beside values, shapes and errors: a new one needs a reason, in the commit that raises the number."""
    trees = _trees()
    assert len(FIGURES["counted"](FIGURES["classes_of"](trees))) <= MOST_CLASSES


def test_classes_stay_small() -> None:
    """A class of many methods or attributes is several."""
    trees = _trees()
    large = [
        name
        for name, (methods, attributes) in FIGURES["sizes_of"](trees).items()
        if methods > MOST_METHODS or attributes > MOST_ATTRIBUTES
    ]
    assert large == []


def test_no_folders_import_each_other() -> None:
    """Files at a folder's root and each of its sub-folders count as folders."""
    graph = FIGURES["folder_graph"](FIGURES["import_graph"](), FIGURES["modules"]())
    assert FIGURES["circles"](graph) == []


def test_kinds_are_asked() -> None:
    """Books and rows read no window, but one error that says how long it is; only `model/` says of which kind layers
    are.
    """
    trees = {file: FIGURES["parsed"](file) for file in FILES}
    assert len(FIGURES["kind_tests"](trees)) <= 1


def test_capabilities_are_plugged_in() -> None:
    """Not threaded through by conditionals: few files ask whether there are states, routing or adapters."""
    found = FIGURES["optional_tests"](_trees())
    assert found.keys() == MOST_TESTED.keys()
    for capability, files in found.items():
        assert len(files) <= MOST_TESTED[capability], (capability, files)


def test_columns_are_written_in_few_places() -> None:
    """Everything between a filler and a layer walks the declarations."""
    for column, files in FIGURES["column_writers"](_trees()).items():
        assert len(files) <= MOST_WRITERS, (column, files)


def test_no_modules_import_each_other() -> None:
    """Not by way of others either, nor under TYPE_CHECKING."""
    assert FIGURES["circles"](FIGURES["import_graph"]()) == []


def test_tests_ask_for_behaviour() -> None:
    """Of private attributes only where nothing else shows what a test is about."""
    places = FIGURES["all_private_reaches"]()
    assert len(places) <= MOST_PRIVATE, places


def test_tests_use_engines_as_users_do() -> None:
    """Members that are not documented are read only where nothing else shows what a test is about."""
    reaches = FIGURES["all_engine_reaches"]()
    assert len(reaches) <= MOST_INNER, sorted(reaches)


def test_the_books_need_the_standard_library_only() -> None:
    """So does what a step's sizes are read from."""
    books = [file for file in FILES if _floor(file) in ("blocks", "scheduling", "trace")]
    found = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in [*books, PACKAGE / "kv" / "config.py"]
        for name in _imports(file)
        if name.split(".")[0] not in {"hf_paged", *sys.stdlib_module_names}
    ]
    assert books
    assert not found


def test_the_tensors_do_not_know_transformers() -> None:
    """Nor the packages that build on it."""
    tensors = [file for file in FILES if _floor(file) == "kv"]
    found = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in tensors
        for name in _imports(file)
        if name.split(".")[0] in ("transformers", "peft", "accelerate")
    ]
    assert tensors
    assert not found


def test_kernels_is_a_plain_folder() -> None:
    """A package named kernels would hide PyPI's, which transformers imports."""
    assert not [path for path in ROOT.rglob("kernels/__init__.py") if ".venv" not in str(path)]


def test_functions_are_short() -> None:
    """A function of more than 50 lines, signature and docstring aside, misses a noun."""
    for file in FILES + sorted(COMMAND_LINE.glob("*.py")):
        for node in FIGURES["walked"](FIGURES["parsed"](file)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                lines = node.end_lineno - body[0].lineno + 1
                assert lines <= 50, f"{file.name}:{node.name} has {lines} lines"


def test_lines_are_narrow() -> None:
    """Columns of the package and the kernels, whatever stands in them."""
    for file in SOURCES:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            assert len(line) <= 110, f"{file.name}:{number} has {len(line)} columns"


def _docstrings(tree: ast.Module) -> list[tuple[int, str]]:
    """The line and text of every string that is a statement: of modules, classes, functions, attributes."""
    return [
        (node.lineno, node.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def test_docstrings_begin_with_a_noun() -> None:
    """Or with a verb, or with "True if": a question has no answer in its first words."""
    found = []
    for file in [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]:
        text = file.read_text()
        if re.search(r"[\"']\s*(Whether|What)", text):  # parsing all takes seconds
            found += [
                f"{file.relative_to(ROOT)}:{line}"
                for line, string in _docstrings(ast.parse(text))
                if string.lstrip().startswith(("Whether", "What"))
            ]
    assert not found


def test_only_the_ops_import_the_kernels() -> None:
    """One interface: other modules ask kv/ops for a kernel."""
    for package in KERNELS:
        users = {
            str(file.relative_to(PACKAGE))
            for file in FILES
            if any(name.split(".")[0] == package for name in _imports(file))
        }
        assert users == {"kv/ops.py"}


@pytest.mark.parametrize(("package", "needs"), KERNELS.items())
def test_the_kernels_import_nothing_of_ours(package: str, needs: set[str]) -> None:
    for file in (ROOT / "kernels" / package).glob("*.py"):
        for name in _imports(file):
            top = name.split(".")[0]
            assert top in {*needs, "kernels", *sys.stdlib_module_names}, f"{file.name} imports {name}"


def test_the_command_line_imports_no_package_that_is_slow() -> None:
    """Commands are imported by their names when they run; only what reads or has flags knows this package."""
    for file in COMMAND_LINE.glob("*.py"):
        for name in _imports(file):
            top = name.split(".")[0]
            assert top in {COMMAND_LINE.name, "shtab", *sys.stdlib_module_names}, (
                f"{file.name} imports {name}"
            )
    users = {_floor(file) for file in FILES for name in _imports(file) if name.startswith(COMMAND_LINE.name)}
    assert users == {"", "__main__", "cli", "serve", "ray"}


def test_every_package_is_shipped() -> None:
    """The wheel holds what lies in these folders, the C++ source among it."""
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]["packages"]
    assert set(shipped) == {"hf_paged", COMMAND_LINE.name, *(f"kernels/{package}" for package in KERNELS)}
    assert (ROOT / "kernels" / "hf_paged_native" / "paged.cpp").is_file()
    for package in (PACKAGE, COMMAND_LINE):
        assert (package / "py.typed").is_file()


def test_the_oldest_transformers_is_the_same_everywhere() -> None:
    """pyproject, README and the error of an import that finds another GenerationMixin; the newest is the one
    of the scripts.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = next(each for each in project["dependencies"] if each.startswith("transformers>=")).partition(
        ">="
    )[2]
    readme = (ROOT / "README.md").read_text()
    assert f"transformers {oldest}+" in readme
    assert f"a transformers release from {oldest} on" in (PACKAGE / "model" / "methods.py").read_text()
    newest = next(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("transformers==")
    )
    assert f"and {newest.partition('==')[2]}" in readme.replace("\n", " ")


ON_A_DEVICE = {
    "tensor",
    "as_tensor",
    "empty",
    "empty_strided",
    "zeros",
    "ones",
    "full",
    "eye",
    "arange",
    "linspace",
    "randint",
    "rand",
    "randn",
}
OF_FLOATS = {"empty", "empty_strided", "zeros", "ones", "eye", "linspace", "rand", "randn"}
"""Makers of tensors whose dtype is torch's default where nobody says another."""


def _makers(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Calls of `torch.<name>(...)`, and the name."""
    for node in FIGURES["walked"](tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch":
                yield node, node.func.attr


def test_tensors_do_not_depend_on_the_users_defaults() -> None:
    """`torch.set_default_device("cuda")` moves what is the host's, and a default dtype of two bytes halves a
    buffer of floats.
    """
    found = []
    for file in SOURCES:
        for node, name in _makers(FIGURES["parsed"](file)):
            said = {keyword.arg for keyword in node.keywords}
            for word, makers in (("device", ON_A_DEVICE), ("dtype", OF_FLOATS)):
                if name in makers and not said & {word, None}:
                    found.append(f"{file.name}:{node.lineno} does not say {word}: {ast.unparse(node)}")
    assert not found
