"""The house: the package list matches the tree, lower floors import no higher ones, importing has no side effects."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"tests", "benchmarks", "examples", "docs"}
GROUND = {f"optimizer.{name}" for name in ("base", "errors", "events", "model", "registry", "runtime_spec")}
FLOORS = [("optimizer.cli", 6), ("passes", 4), ("exporters", 4), ("evaluation", 4)]
FLOORS += [("runtime.kernels", 2), ("runtime", 3)]
FLOORS += [(f"optimizer.{name}", 3) for name in ("checkpoint", "environment", "files", "gguf_source")]
FLOORS += [(f"optimizer.{name}", 3) for name in ("self_text", "source_model", "sources")]


@cache
def modules() -> dict[str, Path]:
    """Dotted name inside the package → file."""
    found = {}
    folders = [path for path in ROOT.iterdir() if (path / "__init__.py").is_file() and path.name not in OUTSIDE]
    for path in sorted([ROOT / "__init__.py", *(file for folder in folders for file in folder.rglob("*.py"))]):
        parts = path.relative_to(ROOT).parts
        name = ".".join(parts).removesuffix(".py").removesuffix(".__init__")
        found["" if name == "__init__" else name] = path
    return found


def floor(name: str) -> int:
    if name in GROUND:
        return 0
    if name == "":
        return 0  # only __version__ is there to import; everything else of it is lazy
    return next((level for prefix, level in FLOORS if name == prefix or name.startswith(f"{prefix}.")), 5)


def imports(name: str, path: Path) -> set[str]:
    """Dotted names inside the package that a module imports, those under `if TYPE_CHECKING` left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    known = set(modules())
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                deeper = f"{target}.{alias.name}" if target else alias.name
                found.add(deeper if deeper in known else target)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def test_package_list_matches_the_tree():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(config["tool"]["setuptools"]["packages"])
    present = {
        ".".join(["llmopt", *name.split(".")]) if name else "llmopt"
        for name, path in modules().items()
        if path.name == "__init__.py"
    }
    assert listed == present


def test_package_data_is_declared():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for suffix in ("*.yaml", "*.txt", "*.cpp", "*.h", "*.json", "*.j2", "*.css", "*.js"):
        for path in (file for folder in {p.parent for p in modules().values()} for file in folder.glob(suffix)):
            parts = path.relative_to(ROOT).parts
            if len(parts) == 1:
                continue
            patterns = config.get(".".join(["llmopt", *parts[:-1]]), [])
            assert any(path.match(pattern) for pattern in patterns), f"{path} is not package data"


def test_lower_floors_import_no_higher_ones():
    wrong = [
        f"{name} imports {target}"
        for name, path in modules().items()
        for target in imports(name, path)
        if name and floor(target) > floor(name)
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_the_floor_check_sees_imports():
    found = imports("optimizer.measure", ROOT / "optimizer" / "measure.py")
    assert "evaluation.proof" in found and "optimizer.recipe" in found


def test_importing_loads_no_heavy_library():
    code = (
        "import sys, llmopt, llmopt.optimizer.cli, llmopt.optimizer.recipe, llmopt.passes.kv_cache;"
        "llmopt.Pass, llmopt.optimize, llmopt.load, llmopt.passes.Quantize, llmopt.Recipe.load('int4-flash');"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_is_a_monster():
    long = {name: n for name, p in modules().items() if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_no_benchmark_hides_a_library() -> None:
    """A script's folder comes first on its path, so that a benchmark must not be named like what it imports."""
    import importlib.metadata

    taken = set(importlib.metadata.packages_distributions()) | sys.stdlib_module_names
    hiding = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} & taken
    assert not hiding, hiding
