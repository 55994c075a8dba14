"""Recipes: strict reading, overrides, and a resolved recipe that reads back equal."""

import dataclasses

import pytest

from diloco import conf
from diloco.config import DiLoCoConfig
from diloco.recipes import load_recipe


@pytest.mark.parametrize("name", conf.names("recipes"))
def test_every_recipe_reads_back_equal_from_its_resolved_form(name, tmp_path):
    recipe = load_recipe(name)
    path = tmp_path / f"{name}.toml"
    path.write_text(recipe.to_toml())
    assert load_recipe(path) == recipe
    assert recipe.meta.summary.endswith(".")
    assert len(recipe.meta.summary.splitlines()) == 1


@pytest.mark.parametrize("name", conf.names("recipes"))
def test_twin_has_the_same_algorithm(name):
    twin = load_recipe(name).meta.twin
    if twin:
        assert load_recipe(twin).diloco == load_recipe(name).diloco


def test_overrides_are_read_by_the_type_of_the_field():
    recipe = load_recipe(
        "laptop-diloco",
        [
            "diloco.num_islands=4",
            "diloco.outer_learning_rate=1",
            "diloco.error_feedback=true",
            "data.split=non-iid",
            'data.corpus="a = \\"b\\".txt"',
            "model.num_layers=3",
            "train.steps=10",
            "train.steps=20",
            "train.warmup_steps=0",
        ],
    )
    assert recipe.diloco == DiLoCoConfig(
        num_islands=4, sync_period=20, outer_learning_rate=1.0, error_feedback=True
    )
    assert isinstance(recipe.diloco.outer_learning_rate, float)
    assert (recipe.data.split, recipe.data.corpus) == ("non-iid", 'a = "b".txt')
    assert recipe.model.num_layers == 3
    assert recipe.train.steps == 20


def test_strings_with_quotes_control_characters_and_no_ascii_survive(tmp_path):
    recipe = load_recipe("laptop-diloco")
    meta = dataclasses.replace(
        recipe.meta, title='a "b" \\ c\n\té\x7f', sources=("x, y", "['z']"), minutes=1e-9
    )
    recipe = dataclasses.replace(recipe, meta=meta)
    path = tmp_path / "laptop-diloco.toml"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    assert load_recipe(path) == recipe


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("train.step=3", ValueError, "no key 'step'; did you mean steps?"),
        ("trian.steps=3", ValueError, "names no section; did you mean train?"),
        ("steps=3", ValueError, "is not section.key=value; write for example train.steps=100"),
        ("train.steps", ValueError, "is not section.key=value"),
        ("train.steps=many", TypeError, "steps in .* is 'many'; use a whole number"),
        ("train.steps=1.5", TypeError, "use a whole number"),
        ("train.steps=true", TypeError, "use a whole number"),
        ('meta.title="a\\u0000b"', ValueError, "title in .* is .*; leave the NUL character out"),
        ("train.steps=0", ValueError, "train.steps 0 is below 1; use 1 or more"),
        ("train.warmup_steps=-1", ValueError, "train.warmup_steps -1 is below 0"),
        ("train.learning_rate=nan", ValueError, "learning_rate nan is not positive"),
        ("train.weight_decay=inf", ValueError, "weight_decay inf"),
        ("train.beta2=1.0", ValueError, r"beta2 1.0 is outside \[0, 1\)"),
        ("train.global_batch_size=15", ValueError, "15 is not divisible by .* 2; use 14 or 16"),
        ("train.global_batch_size=1", ValueError, "1 is not divisible by .* 2; use 2$"),
        ("diloco.sync_period=0", ValueError, "sync_period 0 is below 1"),
        ("diloco.num_fragments=31", ValueError, "num_fragments 31 exceeds sync_period 20"),
        ("diloco.error_feedback=1", TypeError, "use true or false"),
        ("data.split=mixed", ValueError, "data.split 'mixed' is not known; use one of iid"),
        ("data.sequence_length=0", ValueError, "data.sequence_length 0 is below 1"),
        ("model.name=lapto", ValueError, "no models entry 'lapto'; did you mean laptop?"),
        ("model.num_layer=2", ValueError, "no key 'num_layer'; did you mean num_layers?"),
        ("hardware.slices=2", ValueError, "lacks the key 'name'"),
    ],
)
def test_a_wrong_override_is_refused_with_the_remedy(override, error, message):
    with pytest.raises(error, match=message):
        load_recipe("laptop-diloco", [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]\nsteps = 1", r"no section \[trian\]; did you mean train"),
        ("train = 3", "train of mine stands outside a section"),
        ("[model]\nnum_layers = 2", "lacks the key 'name'"),
        ("[train", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused(text, message, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_recipe(path)
