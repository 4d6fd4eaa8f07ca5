"""Finding passes and exporters, and what a broken plugin may and may not do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llmopt
import pytest
from llmopt.optimizer import registry
from llmopt.optimizer.errors import UsageError
from llmopt.optimizer.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent


class Nothing(llmopt.Pass):
    """Does nothing."""

    name = "nothing"

    def plan(self, info):
        return llmopt.PlanItem("nothing")

    def run(self, model, context):
        return llmopt.PassReport("nothing")


def llmopt_command(*arguments: str, path: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command line with `path` in front of the import path."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-m", "llmopt.optimizer.cli", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not check or result.returncode == 0, result.stderr
    return result


def broken_plugin(folder: Path) -> Path:
    """An installed distribution whose pass cannot be imported."""
    (folder / "bad_plugin.py").write_text("raise RuntimeError('this plugin is out of order')\n")
    info = folder / "bad_plugin-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-plugin\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[llmopt.passes]\nbad = bad_plugin:Bad\n")
    return folder


def test_built_in_passes_come_through_entry_points():
    known = registry.entries("passes")
    assert {"quantize", "flash_attention", "kv_cache", "draft"} <= set(known)
    assert all(entry.cls is not None for entry in known.values()), known
    assert registry.find("exporters", "huggingface").name == "huggingface"


def test_registered_and_dotted_classes():
    registry.register(Nothing)
    assert registry.find("passes", "nothing") is Nothing
    loaded = Recipe.parse("passes: [nothing]")
    assert isinstance(loaded.passes[0], Nothing)


def test_module_and_class_in_a_recipe(tmp_path, monkeypatch):
    (tmp_path / "own_passes.py").write_text(
        "import llmopt\n"
        "class Mine(llmopt.Pass):\n"
        "    name = 'mine'\n"
        "    class Config(llmopt.Options):\n"
        "        amount: int = 1\n"
        "    def plan(self, info): return llmopt.PlanItem('')\n"
        "    def run(self, model, context): return llmopt.PassReport('')\n"
    )
    monkeypatch.chdir(tmp_path)
    loaded = Recipe.parse("passes:\n  - own_passes:Mine: {amount: 3}\n")
    assert loaded.passes[0].config.amount == 3
    loaded = Recipe.parse("passes:\n  - own_passes:Mine\n", ["passes.own_passes:Mine.amount=5"])
    assert loaded.passes[0].config.amount == 5


def test_abstract_class_is_refused():
    class Half(llmopt.Pass):
        name = "half"

        def plan(self, info):
            return llmopt.PlanItem("")

    with pytest.raises(UsageError, match="does not implement run"):
        registry.register(Half)


def test_broken_plugin_breaks_nothing_and_is_explained(tmp_path):
    place = broken_plugin(tmp_path)
    assert "optimize" in llmopt_command("--help", path=place).stdout
    listed = llmopt_command("passes", path=place).stdout
    assert "quantize" in listed
    assert "broken" in listed and "out of order" in listed and "bad-plugin 1.2" in " ".join(listed.split())
    (tmp_path / "r.yaml").write_text("passes:\n  - bad\n")
    used = llmopt_command("plan", "-r", str(tmp_path / "r.yaml"), "-m", "x/y", path=place, check=False)
    assert used.returncode == 2
    assert "r.yaml:2" in used.stderr and "out of order" in used.stderr and "Traceback" not in used.stderr


def test_example_package_is_installed_listed_and_run(tmp_path, tiny_model):
    """What examples/magnitude-prune/README.md says, on a tiny model."""
    place = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    source = tmp_path / "source"
    import shutil

    shutil.copytree(ROOT / "examples" / "magnitude-prune", source)
    subprocess.run([*pip, "--target", str(place), str(source)], check=True)
    assert "sparsity" in llmopt_command("passes", "magnitude_prune", path=place).stdout
    recipe = tmp_path / "sparse.yaml"
    recipe.write_text(
        "passes:\n"
        "  - magnitude_prune: {sparsity: 0.25}\n"
        "  - quantize: {method: rtn, bits: 8, group_size: 32}\n"
        "evaluate: {windows: 2, window_length: 64, speed: false}\n"
    )
    out = tmp_path / "out"
    llmopt_command("optimize", "-r", str(recipe), "-m", str(tiny_model), "-o", str(out), "--log", "none", path=place)
    record = llmopt.Artifact.open(out).manifest.passes[0]
    assert record.name == "magnitude_prune" and len(record.layers) == 14
    assert all(layer["zeros"] >= 0.25 * layer["of"] - 1 for layer in record.layers)
    assert record.summary.endswith("25%")
