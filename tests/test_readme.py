"""The README's example runs, its figure is what the code draws, its tree names every module."""

import re
import runpy
from pathlib import Path

import jax
import pytest


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_and_learns():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    space = {}
    with jax.numpy_dtype_promotion("standard"):
        exec(code, space)
    assert int(space["state"].step) == 20 and space["metrics"]["loss"].shape == (2,)
    w = space["state"].outer_params["w"]
    assert float(abs(w).mean()) < 1.0  # the minimum is at zero, the start at one
    body = code[code.index("def inner_step") : code.index("for step")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 12


def test_the_figure_is_what_the_code_draws():
    pytest.importorskip("matplotlib")
    draw = runpy.run_path(str(ROOT / "benchmarks" / "readme_figure.py"))["draw"]
    recorded = (ROOT / "docs" / "_static" / "readme.svg").read_text(encoding="utf-8")
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("0", draw() + "\n") == number.sub("0", recorded)


def test_every_module_is_named():
    modules = {p.name for p in (ROOT / "src" / "diloco").rglob("*.py")} - {"__init__.py"}
    missing = sorted(m for m in modules if not re.search(rf"^ +{re.escape(m)} ", README, re.M))
    assert not missing
    named = set(re.findall(r"^ +(\w+\.py) ", README, re.M))
    assert named <= modules


def test_commands_name_recipes_that_exist():
    recipes = {p.stem for p in (ROOT / "conf" / "recipes").glob("*.toml")}
    named = set(re.findall(r"diloco (?:train|plan|compile|recipe) ([\w-]+)", README))
    assert named and named <= recipes
