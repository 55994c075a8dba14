"""The bash scripts: MaxText here, MaxText on GKE through XPK, this package under Slurm or here."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from diloco import conf
from diloco.recipes import Recipe, load_recipe
from diloco.targets import maxtext
from diloco.targets.maxtext import Variable
from diloco.tpu import accelerator


LIBTPU_FLAGS = (
    ("--xla_enable_async_all_gather=true", "gather weights in the background"),
    (
        "--xla_tpu_enable_async_collective_fusion=true",
        "run collectives inside the fusions beside them",
    ),
    (
        "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
        "the gathers of weights among them",
    ),
    (
        "--xla_tpu_overlap_compute_collective_tc=true",
        "let the TensorCore compute while a collective runs",
    ),
)
"""libtpu flag and what it is for; the tests hand every one to libtpu."""

_XPK = (
    Variable("XPK_CLUSTER", "the name of the GKE cluster that xpk made"),
    Variable("PROJECT", "the Google Cloud project of the cluster"),
    Variable("ZONE", "the zone of the cluster"),
    Variable("DOCKER_IMAGE", "an image that holds MaxText and its requirements"),
    Variable("WORKLOAD", "the name of this workload, new each time: a-z, 0-9 and - only"),
)
_MAX_RESTARTS = Variable("MAX_RESTARTS", "restarts after a failure", "3")


def maxtext_script(recipe: Recipe) -> str:
    """Writes the MaxText command, for devices that are there already."""
    found = maxtext.flags(recipe)
    return "\n".join(
        [
            *_head(recipe, "maxtext", _MAXTEXT_NOTES),
            *_checks(_variables(found)),
            *_train_words(found),
            "",
            'exec "${train[@]}" "$@"',
            "",
        ]
    )


def xpk_script(recipe: Recipe) -> str:
    """Writes the script that submits the MaxText command to a GKE cluster with XPK."""
    found = maxtext.flags(recipe)
    hardware = recipe.hardware
    notes = [
        *_MAXTEXT_NOTES,
        "Words after the script's name go to xpk: --dry-run --skip-validation prints the manifest.",
    ]
    return "\n".join(
        [
            *_head(recipe, "xpk", notes),
            *_checks((*_XPK, *_variables(found), _MAX_RESTARTS)),
            'if [[ ! "${WORKLOAD}" =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]]; then',
            '  echo "WORKLOAD ${WORKLOAD} is no name for Kubernetes; use 1 to 40 of a-z, 0-9 and -, a letter first" >&2',
            "  exit 2",
            "fi",
            "",
            *_train_words(found),
            "",
            "# Flags of the TPU compiler.",
            "libtpu_flags=(",
            *(f"  {flag} # {why}" for flag, why in LIBTPU_FLAGS),
            ")",
            "",
            "# The container's environment. HF_TOKEN, if set, is read by xpk from this shell: it is in",
            "# no command line and in no file here, but whoever may read the workload can read it.",
            'env_file="$(mktemp)"',
            "trap 'rm -f \"${env_file}\"' EXIT",
            'printf \'LIBTPU_INIT_ARGS=%s\\n\' "${libtpu_flags[*]}" >"${env_file}"',
            'if [[ -n "${HF_TOKEN:-}" ]]; then',
            "  export HF_TOKEN",
            "  printf 'HF_TOKEN\\n' >>\"${env_file}\"",
            "fi",
            "",
            "capacity=()",
            'if [[ -n "${RESERVATION:-}" ]]; then',
            '  capacity+=("--reservation=${RESERVATION}")',
            "fi",
            "",
            "# One line in which every word is quoted for the shell of the container.",
            "printf -v command '%q ' \"${train[@]}\"",
            "",
            "xpk workload create \\",
            '  --cluster="${XPK_CLUSTER}" \\',
            '  --project="${PROJECT}" \\',
            '  --zone="${ZONE}" \\',
            f"  --device-type={accelerator(hardware.topology)} \\",
            f"  --num-slices={hardware.slices} \\",
            '  --docker-image="${DOCKER_IMAGE}" \\',
            '  --workload="${WORKLOAD}" \\',
            '  --env-file="${env_file}" \\',
            '  --max-restarts="${MAX_RESTARTS}" \\',
            '  --command="${command}" \\',
            '  "${capacity[@]}" "$@"',
            "",
        ]
    )


def local_script(recipe: Recipe) -> str:
    """Writes the command that trains here with this package."""
    return "\n".join(
        [
            *_head(recipe, "local", _OWN_NOTES),
            *_checks((_run_dir(recipe),)),
            *_recipe_words(recipe),
            *_data_words(),
            "",
            'exec diloco train "${recipe}" "${data[@]}" --run-dir "${RUN_DIR}" "$@"',
            "",
        ]
    )


def slurm_script(recipe: Recipe) -> str:
    """Writes the batch script that trains on the GPUs of one Slurm node with this package."""
    islands = recipe.diloco.num_islands
    head = _head(
        recipe, "slurm", [*_OWN_NOTES, "Submit it with sbatch from a shell that has them."]
    )
    options = [
        f"#SBATCH --job-name={recipe.name}",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        f"#SBATCH --gpus-per-node={islands} # a multiple: each island gets an equal part",
        "#SBATCH --signal=B:TERM@120 # 120 s before the limit: save, then stop",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]
    return "\n".join(
        [
            head[0],
            *options,
            *head[1:],
            *_checks((_run_dir(recipe),)),
            *_recipe_words(recipe),
            *_data_words(),
            "",
            "# In the background, so that this shell hears the signal and hands it on.",
            'trap \'kill -TERM "$!"; wait "$!"\' TERM',
            'srun diloco train "${recipe}" "${data[@]}" --run-dir "${RUN_DIR}" "$@" &',
            'wait "$!"',
            "",
        ]
    )


_MAXTEXT_NOTES = [
    "Resume: run it again with the same RUN_NAME and BASE_OUTPUT_DIRECTORY; MaxText goes on from",
    "its newest checkpoint. It does not notice changed DiLoCo flags, so change none.",
    "Bootstrap: set LOAD_PARAMETERS_PATH to the parameters of a one-slice run, with a new RUN_NAME.",
]
_OWN_NOTES = [
    "Resume: run it again with the same RUN_DIR; it goes on from the newest intact checkpoint.",
    "Words after the script's name go to diloco train, such as --set train.steps=100.",
]


def _head(recipe: Recipe, target: str, notes: Sequence[str]) -> list[str]:
    if not re.fullmatch(r"[\w.-]+", recipe.name):
        raise ValueError(
            f"recipe name {recipe.name!r} does not fit a script; use letters, digits, -, _ and ."
        )
    title = " ".join(recipe.meta.title.split())
    own = "" if _ships(recipe) else ", from values of one's own"
    source = recipe.name if recipe.name in conf.names("recipes") else f"{recipe.name}.toml"
    made = f"diloco recipe {source} --target {target}{own}"
    lines = ["#!/usr/bin/env bash", f"# {title}", f"# Made by: {made}"]
    return [*lines, *(f"# {note}" for note in notes), "set -euo pipefail", ""]


def _checks(variables: Sequence[Variable]) -> list[str]:
    """Lines that stop with a message if a variable is not set, and set those with a default."""
    lines = []
    for v in variables:
        if v.default is None:
            lines.append(f': "${{{v.name}:?set it to {v.meaning}}}"')
        else:
            lines.append(f': "${{{v.name}:={v.default}}}" # {v.meaning}')
    return [*lines, ""]


def _variables(found: dict[str, Any]) -> list[Variable]:
    return [value for value in found.values() if isinstance(value, Variable)]


def _train_words(found: dict[str, Any]) -> list[str]:
    """The MaxText command as a bash array, a flag a line."""
    words = [f"  {_flag(key, value)}" for key, value in found.items()]
    return [
        "train=(",
        "  python3 -m maxtext.trainers.pre_train.train maxtext/configs/base.yml",
        *words,
        ")",
        'if [[ -n "${LOAD_PARAMETERS_PATH:-}" ]]; then',
        '  train+=("load_parameters_path=${LOAD_PARAMETERS_PATH}")',
        "fi",
    ]


def _flag(key: str, value: Any) -> str:
    if isinstance(value, Variable):
        return f'"{key}=${{{value.name}}}"'
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, float):
        value = f"{value:.12g}"
    return shlex.quote(f"{key}={value}")


def _run_dir(recipe: Recipe) -> Variable:
    return Variable("RUN_DIR", "the run's directory", f"runs/{recipe.name}")


def _data_words() -> list[str]:
    return [
        "data=() # the recipe's own corpus, unless DATASET_PATH names a text",
        'if [[ -n "${DATASET_PATH:-}" ]]; then',
        '  data+=(--data "${DATASET_PATH}")',
        "fi",
    ]


def _recipe_words(recipe: Recipe) -> list[str]:
    """Sets `recipe`: the name of a recipe that ships, else a file that holds it."""
    if _ships(recipe):
        return [f"recipe={recipe.name}"]
    return [
        f'recipe="$(mktemp -d)/{recipe.name}.toml"',
        "cat >\"${recipe}\" <<'END_OF_RECIPE'",
        recipe.to_toml().rstrip(),
        "END_OF_RECIPE",
    ]


def _ships(recipe: Recipe) -> bool:
    return recipe.name in conf.names("recipes") and load_recipe(recipe.name) == recipe
