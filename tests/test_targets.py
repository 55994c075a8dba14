"""Scripts that run a recipe elsewhere: MaxText's flags and rules, quoting, and the real xpk."""

import dataclasses
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from diloco import conf, targets
from diloco.recipes import load_recipe
from diloco.targets import maxtext, scripts


ROOT = Path(__file__).parents[1]
STREAMING = "qwen3-8b-streaming-v5p-128x2"
EXPRESSIBLE = [STREAMING, "qwen3-8b-vanilla-v5p-128x2", "qwen3-30b-a3b-streaming-v5p-128x2"]
NASTY = "a b'c\"d$(touch pwned)`x` {k} %s \\ é #z\nsecond line"
SETTINGS = {
    "XPK_CLUSTER": "cluster",
    "PROJECT": "project",
    "ZONE": "us-east5-a",
    "DOCKER_IMAGE": "image:1",
    "WORKLOAD": "run-1",
    "RUN_NAME": NASTY,
    "BASE_OUTPUT_DIRECTORY": "gs://bucket/out",
    "DATASET_PATH": "gs://bucket/*.array_record",
    "TOKENIZER_PATH": "a/tokenizer",
}


def run(script, folder, settings, *words, tools=()):
    """Runs a script with programs of our own in front of PATH; returns the finished process."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in tools:
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(stat.S_IRWXU)
    path = folder / "script.sh"
    path.write_text(script, encoding="utf-8")
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(folder), **settings}
    return subprocess.run(
        ["bash", str(path), *words],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


PRINT_WORDS = 'for word in "$0" "$@"; do printf \'%s\\0\' "$word"; done'


@pytest.mark.parametrize("name", EXPRESSIBLE)
@pytest.mark.parametrize("target", sorted(targets.TARGETS))
def test_shellcheck_has_nothing_to_say(name, target, tmp_path):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    path = tmp_path / "script.sh"
    path.write_text(targets.render(load_recipe(name), target), encoding="utf-8")
    found = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_flags_say_what_the_recipe_says(name):
    recipe = load_recipe(name)
    flags = maxtext.flags(recipe)
    c, t = recipe.diloco, recipe.train
    assert flags["diloco_sync_period"] == c.sync_period
    assert flags.get("num_diloco_fragments", 1) == c.num_fragments
    assert flags.get("num_communication_overlapping_steps", 0) == c.overlap_steps
    assert flags.get("communication_overlapping_alpha", 0.0) == c.mixing
    assert (flags["diloco_outer_lr"], flags["diloco_outer_momentum"]) == (
        c.outer_learning_rate,
        c.outer_momentum,
    )
    assert flags["dcn_diloco_parallelism"] == c.num_islands
    assert flags["per_device_batch_size"] * 128 == t.global_batch_size
    assert flags["warmup_steps_fraction"] * t.steps == t.warmup_steps
    assert flags["max_target_length"] == recipe.data.sequence_length
    assert (flags["learning_rate"], flags["adam_b1"], flags["adam_b2"]) == (
        t.learning_rate,
        t.beta1,
        t.beta2,
    )


def test_unknown_key_is_refused_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"no key 'diloco_sync_perod'; did you mean diloco_sync_period"
    ):
        maxtext.check({"diloco_sync_perod": 37}, 36)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 1.5),
        ("steps", True),
        ("steps", "10"),
        ("scan_layers", 1),
        ("learning_rate", -0.1),
        ("num_communication_overlapping_steps", -1),
        ("gradient_accumulation_steps", 0),
        ("dtype", "float16"),
        ("dataset_type", "parquet"),
        ("model_name", 8),
    ],
)
def test_wrong_type_is_refused(key, value):
    with pytest.raises(TypeError, match=f"MaxText's {key} is"):
        maxtext.check({key: value}, 36)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"enable_diloco": False}, "needs enable_diloco=true"),
        ({"num_diloco_fragments": 1}, "must be 2 or more"),
        ({"num_diloco_fragments": 8}, "must divide the 36 layers"),
        ({"scan_layers": False}, "needs scan_layers=true"),
        ({"pure_nnx": False}, "needs pure_nnx=true"),
        ({"use_tokamax_gmm": True}, "refuses use_tokamax_gmm=true"),
        ({"communication_overlapping_alpha": 1.5}, r"must be in \[0, 1\]"),
    ],
)
def test_rules_between_keys(change, rule):
    flags = maxtext.flags(load_recipe(STREAMING))
    maxtext.check(flags, 36)
    with pytest.raises(ValueError, match=rule):
        maxtext.check(flags | change, 36)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["diloco.fragment_pattern=balanced"], "balanced fragments"),
        (["diloco.wire_format=int8"], "the wire format int8"),
        (["diloco.error_feedback=true"], "error feedback"),
        (["diloco.on_bad_island=skip"], "on_bad_island skip"),
        (["diloco.num_fragments=8", "diloco.sync_period=8"], "8 fragments of 36 layers"),
        (
            ["diloco.sync_period=100"],
            r"sync_period 100 with 37 fragments \(it would sync every 111",
        ),
        (["diloco.num_fragments=1"], "overlap_steps without fragments"),
        (["diloco.num_fragments=1", "diloco.overlap_steps=0"], "mixing without fragments"),
        (["model.param_dtype=bfloat16"], "a float32 Theta"),
        (["model.num_layers=72", "diloco.sync_period=37"], "other sizes than those of qwen3-8b"),
        (["data.split=non-iid"], "data that differ between islands"),
        (["train.router_z_loss=0.1"], "a z-loss of the routers"),
    ],
)
@pytest.mark.parametrize("target", ["maxtext", "xpk"])
def test_what_maxtext_cannot_express_is_an_error(overrides, what, target):
    with pytest.raises(ValueError, match=f"MaxText at e591f30cb cannot express {what}"):
        targets.render(load_recipe(STREAMING, overrides), target)


def test_other_models_and_missing_hardware_are_errors():
    with pytest.raises(ValueError, match="has no TPU topology"):
        targets.render(load_recipe("laptop-diloco"), "maxtext")
    hardware = ["hardware.name=tpu-v5p", "hardware.topology=v5p:4x4x4", "hardware.slices=2"]
    with pytest.raises(ValueError, match="cannot express a model 'laptop'"):
        targets.render(load_recipe("laptop-diloco", hardware), "maxtext")
    with pytest.raises(ValueError, match="no target 'xkp'; did you mean xpk"):
        targets.render(load_recipe(STREAMING), "xkp")


@pytest.mark.parametrize("target", ["maxtext", "xpk"])
def test_every_placeholder_is_checked_with_a_message(target, tmp_path):
    script = targets.render(load_recipe(STREAMING), target)
    needed = re.findall(r'^: "\$\{(\w+):\?', script, re.M)
    assert set(needed) == {k for k in SETTINGS if f"{{{k}" in script}
    for missing in needed:
        settings = {k: v for k, v in SETTINGS.items() if k != missing}
        done = run(script, tmp_path, settings, tools=[("xpk", "exit 9"), ("python3", "exit 9")])
        assert done.returncode not in (0, 9)
        assert f"{missing}: set it to" in done.stderr


def test_no_default_names_anybodys_things():
    for target in ("maxtext", "xpk", "slurm", "local"):
        script = targets.render(load_recipe(STREAMING), target)
        defaults = dict(re.findall(r'^: "\$\{(\w+):=([^}]*)\}', script, re.M))
        assert defaults.keys() <= {"CHECKPOINT_PERIOD", "MAX_RESTARTS", "RUN_DIR"}
        assert "gs://" not in re.sub(r"(?m)^(#|: ).*$", "", script)


def test_maxtext_words_survive_any_value(tmp_path):
    script = targets.render(load_recipe(STREAMING), "maxtext")
    done = run(script, tmp_path, SETTINGS, "log_period=7", tools=[("python3", PRINT_WORDS)])
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\0")[1:-1]
    assert words[:3] == ["-m", "maxtext.trainers.pre_train.train", "maxtext/configs/base.yml"]
    assert f"run_name={NASTY}" in words
    assert "grain_train_files=gs://bucket/*.array_record" in words
    assert words[-1] == "log_period=7"
    assert not any(word.startswith("load_parameters_path") for word in words)
    known = maxtext.table()["flags"]
    assert all(word.split("=")[0] in known for word in words[3:])
    assert not (tmp_path / "pwned").exists()


def test_bootstrap_loads_parameters(tmp_path):
    script = targets.render(load_recipe(STREAMING), "maxtext")
    settings = SETTINGS | {"LOAD_PARAMETERS_PATH": "gs://b/one slice/items"}
    done = run(script, tmp_path, settings, tools=[("python3", PRINT_WORDS)])
    assert "load_parameters_path=gs://b/one slice/items" in done.stdout.split("\0")


def test_workload_name_is_checked(tmp_path):
    script = targets.render(load_recipe(STREAMING), "xpk")
    done = run(script, tmp_path, SETTINGS | {"WORKLOAD": "Run_1"}, tools=[("xpk", "exit 9")])
    assert done.returncode == 2
    assert "WORKLOAD Run_1 is no name for Kubernetes" in done.stderr


def xpk_program():
    """The real xpk, if it is installed: from $XPK, the folder .venv-xpk, or PATH."""
    candidates = [os.environ.get("XPK", ""), str(ROOT / ".venv-xpk" / "bin" / "xpk")]
    return next((c for c in candidates if c and Path(c).is_file()), shutil.which("xpk"))


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_real_xpk_accepts_the_script(name, tmp_path):
    program = xpk_program()
    if program is None:
        pytest.skip("xpk is not installed; set XPK to its path")
    script = targets.render(load_recipe(name), "xpk")
    words = ["--dry-run", "--skip-validation", "--project-number=1"]
    words += [f"--output-manifest-file={tmp_path / 'manifest.yaml'}"]
    secret = "hf_not_a_real_token"
    xpk = f'printf \'%s\\n\' "$*" > "$HOME/command-line"; exec {program} "$@"'
    done = run(script, tmp_path, SETTINGS | {"HF_TOKEN": secret}, *words, tools=[("xpk", xpk)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert secret not in (tmp_path / "command-line").read_text()
    manifest = (tmp_path / "manifest.yaml").read_text()
    assert re.search(r"^      replicas: 2$", manifest, re.M)  # slices
    assert "parallelism: 16 " in manifest  # hosts of a slice: 64 chips, 4 a host
    assert "gke-tpu-accelerator: tpu-v5p-slice" in manifest
    assert "gke-tpu-topology: 4x4x4" in manifest
    assert all(flag in manifest for flag, _ in scripts.LIBTPU_FLAGS)
    # What the container runs, run here with a python3 that prints its words.
    command = re.search(r"^ *\((python3 .*)\) & PID=", manifest, re.M)[1]
    inside = run(command, tmp_path, {}, tools=[("python3", PRINT_WORDS)])
    words = inside.stdout.split("\0")
    assert f"run_name={NASTY}" in words
    assert f"diloco_sync_period={load_recipe(name).diloco.sync_period}" in words
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("target", ["local", "slurm"])
def test_own_scripts_pass_the_recipe_on(target, tmp_path):
    tools = [("diloco", PRINT_WORDS), ("srun", 'exec "$@"')]
    settings = {"DATASET_PATH": "my text.txt", "RUN_DIR": "runs/a b"}
    script = targets.render(load_recipe("laptop-diloco"), target)
    done = run(script, tmp_path, settings, "--set", "train.steps=2", tools=tools)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\0")[1:-1]
    assert words[:4] == ["train", "laptop-diloco", "--data", "my text.txt"]
    assert words[4:] == ["--run-dir", "runs/a b", "--set", "train.steps=2"]


@pytest.mark.parametrize("target", ["local", "slurm"])
def test_changed_recipe_travels_in_the_script(target, tmp_path):
    recipe = load_recipe("laptop-diloco", ["train.seed=7", "diloco.num_islands=4"])
    recipe = dataclasses.replace(recipe, meta=dataclasses.replace(recipe.meta, title="it's $HOME"))
    tools = [("diloco", 'cp "$2" "$HOME/seen-$(basename "$2")"'), ("srun", 'exec "$@"')]
    done = run(targets.render(recipe, target), tmp_path, {}, tools=tools)
    assert done.returncode == 0, done.stderr
    assert (
        dataclasses.replace(load_recipe(tmp_path / "seen-laptop-diloco.toml"), name=recipe.name)
        == recipe
    )


@pytest.mark.parametrize("target", sorted(targets.TARGETS))
def test_head_says_whether_the_recipe_was_changed(target):
    head = f"\n# Made by: diloco recipe {STREAMING} --target {target}"
    assert f"{head}\n" in targets.render(load_recipe(STREAMING), target)
    changed = load_recipe(STREAMING, ["train.seed=7"])
    assert f"{head}, from values of one's own\n" in targets.render(changed, target)
    mine = dataclasses.replace(changed, name="mine")
    assert "\n# Made by: diloco recipe mine.toml --target" in targets.render(mine, target)
    unfit = dataclasses.replace(changed, name="mine\ntouch pwned")
    with pytest.raises(ValueError, match="does not fit a script"):
        targets.render(unfit, target)


def test_slurm_hands_the_signal_on(tmp_path):
    # srun gets SIGTERM when the batch shell does, and the script waits for it to save.
    srun = "trap 'echo saved; exit 0' TERM; kill -TERM \"$PPID\"; while :; do sleep 0.1; done"
    done = run(
        targets.render(load_recipe("laptop-diloco"), "slurm"), tmp_path, {}, tools=[("srun", srun)]
    )
    assert "saved" in done.stdout


def test_recorded_table_is_whole():
    recorded = maxtext.table()
    assert recorded["commit"] == "e591f30cb"
    assert len(recorded["flags"]) == 77
    assert set(recorded["models"]) <= set(conf.names("models"))


SCRIPTS = ROOT / "docs" / "data" / "scripts"


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_published_script_is_what_the_command_prints(path):
    name, target, _ = path.name.rsplit(".", 2)
    printed = targets.render(load_recipe(name), target)
    assert path.read_text() == printed, f"diloco recipe {name} --target {target} > {path}"


@pytest.mark.parametrize("name", [*EXPRESSIBLE, "qwen3-8b-balanced-v5p-128x2"])
def test_twin_has_the_same_algorithm(name):
    recipe = load_recipe(name)
    twin = load_recipe(recipe.meta.twin)
    assert twin.diloco == recipe.diloco
    assert bool(twin.model.num_experts) == bool(recipe.model.num_experts)


def test_page_has_every_script_the_recipe_can_have():
    found = {path.name.removesuffix(".sh") for path in SCRIPTS.glob("*.sh")}
    wanted = {f"{name}.{target}" for name in EXPRESSIBLE for target in targets.TARGETS}
    assert found == wanted | {f"qwen3-8b-balanced-v5p-128x2.{t}" for t in ("slurm", "local")}
    full_size = {n for n in conf.names("recipes") if load_recipe(n).hardware is not None}
    assert {script.rsplit(".", 1)[0] for script in found} == full_size
