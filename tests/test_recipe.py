"""Recipes: what is read, what is refused, and that every error names file, line, key and the nearest valid name."""

from __future__ import annotations

import pytest
from llmopt.optimizer.errors import UsageError
from llmopt.optimizer.recipe import Recipe, shipped

GOOD = """\
version: 1
name: try
passes:
  - quantize: {method: rtn, bits: 4, group_size: 32}
  - kv_cache
gates:
  max_perplexity_increase: 8%
  min_top1_agreement: 0.9
"""


def test_good_recipe():
    loaded = Recipe.parse(GOOD)
    assert [p.name for p in loaded.passes] == ["quantize", "kv_cache"]
    assert loaded.passes[0].config.bits == 4
    assert loaded.recipe.gates.max_perplexity_increase == pytest.approx(0.08)
    assert loaded.recipe.gates.min_top1_agreement == 0.9
    assert loaded.exporter.name == "huggingface"


def test_as_run_spells_out_every_option_and_runs_again():
    loaded = Recipe.parse(GOOD)
    run = loaded.as_run()
    assert run["passes"][0]["quantize"]["symmetric"] is True
    import yaml

    again = Recipe.parse(yaml.safe_dump(run, sort_keys=False))
    assert again.as_run() == run


@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_recipes_are_valid(name):
    loaded = Recipe.load(f"{name}.yaml")
    assert loaded.recipe.name == name
    assert loaded.recipe.description


@pytest.mark.parametrize(
    ("assignment", "read"),
    [
        ("passes.quantize.bits=8", lambda r: r.passes[0].config.bits == 8),
        ("passes.0.bits=3", lambda r: r.passes[0].config.bits == 3),
        ("passes.kv_cache.dtype=auto", lambda r: r.passes[1].config.dtype == "auto"),
        ("gates.max_mean_kl=0.25", lambda r: r.recipe.gates.max_mean_kl == 0.25),
        ("calibration.num_samples=7", lambda r: r.recipe.calibration.num_samples == 7),
        ("seed=11", lambda r: r.recipe.seed == 11),
        ("passes.quantize.ignore=['*.v_proj']", lambda r: r.passes[0].config.ignore == ["*.v_proj"]),
        ("export.huggingface.max_shard_size=1MB", lambda r: r.exporter.config.max_shard_size == "1MB"),
    ],
)
def test_overrides(assignment, read):
    text = GOOD + "export:\n  - huggingface\n"
    assert read(Recipe.parse(text, [assignment]))


BAD = {
    "empty": ("", ["try.yaml", "empty"]),
    "not a mapping": ("- quantize\n", ["try.yaml:1", "mapping"]),
    "bad syntax": ("passes: [quantize\nname: x\n", ["try.yaml:2", "YAML"]),
    "tab": ("passes:\n\t- quantize\n", ["try.yaml:2", "YAML"]),
    "duplicate key": ("name: a\nname: b\npasses: [kv_cache]\n", ["try.yaml:2", "'name'", "twice"]),
    "no passes": ("name: a\n", ["no passes"]),
    "unknown top key": ("pases:\n  - quantize\n", ["try.yaml:1", "'pases'", "'passes'"]),
    "unknown pass": ("passes:\n  - kv_cache\n  - quantise: {bits: 4}\n", ["try.yaml:3", "'quantise'", "'quantize'"]),
    "unknown option": ("passes:\n  - quantize:\n      bit: 4\n", ["try.yaml:3", "'bit'", "'bits'"]),
    "bits out of range": ("passes:\n  - quantize:\n      bits: 9\n", ["try.yaml:3", "quantize.bits", "8", "9"]),
    "bits not a number": ("passes:\n  - quantize:\n      bits: four\n", ["try.yaml:3", "quantize.bits", "'four'"]),
    "group size": ("passes:\n  - quantize: {group_size: 7}\n", ["try.yaml:2", "group_size", "7"]),
    "options not a mapping": ("passes:\n  - quantize: 4\n", ["try.yaml:2", "mapping"]),
    "two passes in one entry": ("passes:\n  - quantize: {}\n    kv_cache: {}\n", ["try.yaml:2", "one name"]),
    "passes not a list": ("passes: quantize\n", ["try.yaml:1", "list"]),
    "bad percentage": ("passes: [kv_cache]\ngates:\n  max_mean_kl: x%\n", ["try.yaml:3", "max_mean_kl", "percentage"]),
    "gate below zero": ("passes: [kv_cache]\ngates:\n  max_mean_kl: -1\n", ["try.yaml:3", "max_mean_kl"]),
    "unknown gate": ("passes: [kv_cache]\ngates:\n  max_kl: 1\n", ["try.yaml:3", "'max_kl'", "'max_mean_kl'"]),
    "nested unknown key": ("passes: [kv_cache]\ncalibration:\n  samples: 3\n", ["try.yaml:3", "'num_samples'"]),
    "missing text": ("passes: [kv_cache]\nevaluate:\n  text: nowhere.txt\n", ["try.yaml:3", "nowhere.txt"]),
    "unknown key of an override": (
        "passes:\n  - quantize:\n      overrides:\n        '*.v_proj': {bit: 8}\n",
        ["try.yaml:4", "'bit'", "'bits'"],
    ),
    "unknown key of auto": (
        "passes:\n  - quantize: {method: auto, auto: {target_bit: 4}}\n",
        ["try.yaml:2", "'target_bit'", "'target_bits'"],
    ),
    "unknown exporter": ("passes: [kv_cache]\nexport: [hugginface]\n", ["try.yaml:2", "'huggingface'"]),
    "version": ("version: 2\npasses: [kv_cache]\n", ["try.yaml:1", "version", "2"]),
    "python tag": ("passes: !!python/object:os.system [x]\n", ["try.yaml:1"]),
    "unimportable class": ("passes:\n  - no_such_module:Thing\n", ["try.yaml:2", "no_such_module"]),
    "class that is no pass": ("passes:\n  - collections:OrderedDict\n", ["collections:OrderedDict", "Pass"]),
    "NUL byte": ("passes: [kv_\0cache]\n", ["try.yaml"]),
    "impossible date": ("passes: [kv_cache]\nname: 2024-13-45\n", ["try.yaml:2", "cannot be read"]),
    "bad int tag": ("passes: [kv_cache]\nseed: !!int abc\n", ["try.yaml:2", "cannot be read"]),
    "bad bool tag": ("passes: [kv_cache]\nseed: !!bool abc\n", ["try.yaml:2", "cannot be read"]),
    "endless nesting": ("passes: " + "[" * 3000 + "\n", ["try.yaml", "nested"]),
    "infinite gate": ("passes: [kv_cache]\ngates: {max_mean_kl: .inf}\n", ["try.yaml:2", "max_mean_kl"]),
    "infinite percentage": ("passes: [kv_cache]\ngates: {max_mean_kl: inf%}\n", ["try.yaml:2", "max_mean_kl"]),
    "true for a limit": ("passes: [kv_cache]\ngates: {max_mean_kl: true}\n", ["try.yaml:2", "not true or false"]),
    "huge group": ("passes:\n  - quantize: {group_size: 8000000000000}\n", ["try.yaml:2", "group_size"]),
    "null entry": ("passes: [null]\n", ["try.yaml:1", "one name"]),
    "unknown cache kind": ("passes:\n  - kv_cache: {kind: pagged}\n", ["try.yaml:2", "kind", "'pagged'"]),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_recipes(case, tmp_path):
    text, parts = BAD[case]
    path = tmp_path / "try.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        Recipe.load(path)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("assignment", "part"),
    [
        ("passes.quantize.bits", "KEY=VALUE"),
        ("passes.quantise.bits=8", "'quantize'"),
        ("passes.5.bits=8", "no passes.5"),
        ("passes.quantize.bits=99", "--set passes.quantize.bits=99"),
        ("gates.max_kll=1", "--set gates.max_kll=1"),
        ("passes.quantize=8", "one of its options"),
        ("seed=[", "not a YAML value"),
        ("seed=!!int x", "not a YAML value"),
        ("seed=2001-13-01", "not a YAML value"),
        ("seed=" + "[" * 3000, "not a YAML value"),
        ("passes.\u00b2.bits=8", "no passes"),
    ],
)
def test_bad_overrides(assignment, part):
    with pytest.raises(UsageError) as caught:
        Recipe.parse(GOOD, [assignment])
    assert part in str(caught.value)


@pytest.mark.parametrize("entry", ["null", "3", "{quantize: 3}", "[]"])
def test_overrides_of_an_entry_that_is_none(entry):
    for key in ("0", "quantize"):
        with pytest.raises(UsageError):
            Recipe.parse(f"passes: [{entry}]\n", [f"passes.{key}.bits=8"])


def test_missing_recipe_names_the_nearest():
    with pytest.raises(UsageError, match="'int4-flash'"):
        Recipe.load("int4-flsh")
    with pytest.raises(UsageError, match="no such recipe file"):
        Recipe.load("some/where/r.yaml")


def test_folder_is_no_recipe(tmp_path):
    with pytest.raises(UsageError, match="folder"):
        Recipe.load(tmp_path)


def test_text_is_found_beside_the_recipe(tmp_path):
    (tmp_path / "mine.txt").write_text("words " * 100)
    (tmp_path / "r.yaml").write_text("passes: [kv_cache]\ncalibration: {text: mine.txt}\n")
    assert Recipe.load(tmp_path / "r.yaml").recipe.calibration.text == str(tmp_path / "mine.txt")


def test_one_text_for_both_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("words " * 100)
    (tmp_path / "b.txt").write_text("words " * 100)
    (tmp_path / "r.yaml").write_text("passes: [kv_cache]\ncalibration: {text: a.txt}\nevaluate: {text: b.txt}\n")
    with pytest.raises(UsageError, match="same text"):
        Recipe.load(tmp_path / "r.yaml")
