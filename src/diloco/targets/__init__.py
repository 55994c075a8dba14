"""Renders a recipe as the command or script that runs it somewhere.

Scripts hold no name of a project, bucket or cluster: what differs between two users is an environment
variable that the script checks, and every value is quoted.
"""

from diloco import conf
from diloco.recipes import Recipe
from diloco.targets import maxtext, scripts


TARGETS = {
    "maxtext": scripts.maxtext_script,
    "xpk": scripts.xpk_script,
    "slurm": scripts.slurm_script,
    "local": scripts.local_script,
}

__all__ = ["TARGETS", "maxtext", "render", "scripts"]


def render(recipe: Recipe, target: str) -> str:
    """Writes the bash script that runs a recipe.

    Args:
        recipe: What to run.
        target: `"maxtext"` (MaxText on devices that are there), `"xpk"` (MaxText on a GKE cluster of TPU
            slices), `"slurm"` (this package, one island a job step) or `"local"` (this package, here).

    Returns:
        The script.

    Raises:
        ValueError: If the target is not known, or it cannot express the recipe.

    Example:
        >>> from diloco.recipes import load_recipe
        >>> print(render(load_recipe("laptop-diloco"), "local").splitlines()[-1])
        exec diloco train "${recipe}" "${data[@]}" --run-dir "${RUN_DIR}" "$@"
    """
    if target not in TARGETS:
        raise ValueError(f"no target {target!r}; {conf.nearest(target, list(TARGETS))}")
    return TARGETS[target](recipe)
