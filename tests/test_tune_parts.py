"""The parts of a search: spaces and where their errors point, targets (hostile ones too), times."""

from __future__ import annotations

import pytest
from llmopt.optimizer.errors import UsageError
from llmopt.optimizer.tune.budget import Budget, parse_budget
from llmopt.optimizer.tune.corners import check, every_draw, parse
from llmopt.optimizer.tune.metrics import figures
from llmopt.optimizer.tune.space import Space
from llmopt.optimizer.tune.target import parse_target
from llmopt.optimizer.yaml_source import parse_yaml

SPACE = """\
name: tuned

passes:
  - quantize:
      method: {choice: [rtn, hqq]}
      bits: {choice: [3, 4, 8]}
      group_size: {choice: [32, 64]}
      symmetric: {choice: [true, false]}
      scale_search: {choice: [0, 10], when: {method: rtn}}
  - kv_cache: {kind: paged, dtype: {choice: [auto, int8]}}
    optional: true

evaluate:
  windows: 4
  window_length: 256
"""


def space(text: str) -> Space:
    return Space(parse_yaml(text, "space.yaml"))


def test_every_draw_of_a_space_is_a_recipe_of_its_own():
    draws = every_draw(space(SPACE), 1000)
    assert draws is not None and len({draw.key for draw in draws}) == len(draws) == (2 + 1) * 3 * 2 * 2 * (1 + 2)
    for draw in draws[:: len(draws) // 6]:
        recipe = parse(draw).recipe
        assert ("scale_search" in recipe.passes[0].options) is (recipe.passes[0].options["method"] == "rtn")
        assert [step.use for step in recipe.passes[1:]] == ["kv_cache"] * (draw.values["passes.1.optional"] == "with")


def test_a_value_that_only_fails_beside_another_is_left_to_the_search():
    text = "passes:\n  - quantize: {method: {choice: [rtn, fp8]}, bits: {choice: [4, 8]}, group_size: 32}\n"
    found = every_draw(space(text), 10)
    assert found is not None and 0 < len(check(space(text))) < len(found)


@pytest.mark.parametrize(
    ("text", "where", "hint"),
    [
        ("passes:\n  - quantize:\n      bitss: {choice: [4, 8]}\n", "space.yaml:3", "bits"),
        ("passes:\n  - quantise: {bits: {choice: [4, 8]}}\n", "space.yaml:2", "quantize"),
        ("passes:\n  - quantize:\n      bits: {choice: [4, 99]}\n", "space.yaml:3", "99"),
        ("passes:\n  - quantize:\n      bits: {choise: [4, 8], choice: [1]}\n", "space.yaml:3", "choice"),
        ("passes:\n  - quantize:\n      bits: {int: [8, 4]}\n", "space.yaml:3", "lower one first"),
        ("passes:\n  - quantize:\n      bits: {choice: [4], when: {metod: rtn}}\n      method: rtn\n", ":3", "method"),
        ("pases: []\n", "space.yaml:1", "passes"),
        ("seed: {choice: [1, 2]}\npasses: [quantize]\n", "space.yaml:1", "same for all trials"),
        ("passes: [quantize]\n", "space.yaml", "no choice"),
    ],
)
def test_errors_of_a_space_name_line_and_mend(text, where, hint):
    with pytest.raises(UsageError) as caught:
        check(space(text))
    assert where in str(caught.value) and hint in str(caught.value)


def test_steps_and_numbers():
    text = "passes:\n  - quantize: {damping: {range: [0.0, 1.0], step: 0.1}, bits: {int: [2, 8], step: 2}}\n"
    damping, bits = space(text).domains.values()
    assert damping.values() == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0] and bits.values() == [2, 4, 6, 8]


def test_target_reads_units_and_counts_the_worse_figure():
    target = parse_target("min size where mean_kl<0.03 and decode_speedup >= 1.5x and perplexity_increase < 8%")
    assert [limit.limit for limit in target.limits] == [0.03, 1.5, 0.08] and target.speed
    assert parse_target("max compression where size <= 1.5GB").limits[0].limit == 1.5e9
    assert not parse_target("min size where top1_agreement > 90%").speed
    found = figures({"divergence": {"mean_kl": 0.02, "cached_mean_kl": 0.04}})
    assert target.misses(found) == [target.limits[0]] and not target.feasible(found)
    assert target.limits[0].violation(0.045) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "min",
        "min sise",
        "smallest size",
        "min size where",
        "min size when mean_kl < 1",
        "min size where mean_kl < 1 or mean_kl < 2",
        "min size where mean_kl < nan",
        "min size where mean_kl < 1e999",
        "min size where mean_kl = 1",
        "min size where mean_kl < 1MB",
        "min size where perplexity_increase < 8",
        "min size where top1_agreement > 90",
        "min size where mean_kl < 0.1 and mean_kl > 0.2",
        "min __import__('os').system('true')",
        "min size where mean_kl.__class__ < 1",
        "min size; max size",
        "min size where mean_kl < (1)",
        "min size where mean_kl < ٣",
        "min " + "size " * 10_000,
        "min size where " + " and ".join(["mean_kl < 1"] * 50),
    ],
)
def test_what_is_no_target_is_one_error(text):
    with pytest.raises(UsageError):
        parse_target(text)


def test_budget_on_a_clock_of_its_own():
    now = 100.0
    budget = Budget(parse_budget("1h30m") / 54, 40.0, lambda: now)
    assert (budget.seconds, budget.left) == (100.0, 60.0)
    assert budget.allows([]) and budget.allows([60.0, 65.0, 1.0]) and not budget.allows([66.0])
    now = 160.0
    assert budget.left == 0 and not budget.allows([])
    for text in ("", "30", "m", "0s", "-1m", "1d", "1m x"):
        with pytest.raises(UsageError):
            parse_budget(text)
