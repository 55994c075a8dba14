"""Where the TOML files live and how a table becomes a frozen dataclass.

`conf/` is beside `src/` in a checkout and inside the package in a wheel. A table is read strictly:
an unknown key is an error that names the nearest known one, so a typing slip never becomes a silent default.
"""

import dataclasses
import difflib
import tomllib
from pathlib import Path
from typing import Any, TypeVar


T = TypeVar("T")


def conf_dir() -> Path:
    """Returns the folder that holds `models/`, `hardware/` and `recipes/`.

    Returns:
        The folder inside the installed package, else the one at the root of the checkout.

    Raises:
        FileNotFoundError: If neither exists.

    Example:
        >>> sorted(p.name for p in conf_dir().iterdir() if p.is_dir())
        ['hardware', 'models', 'recipes']
    """
    here = Path(__file__).resolve()
    for folder in (here.parent / "conf", here.parents[2] / "conf"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"no conf folder beside {here.parent} or at the root of its checkout; reinstall diloco"
    )


def names(kind: str) -> list[str]:
    """Lists the entries of one kind.

    Args:
        kind: `"models"`, `"hardware"` or `"recipes"`.

    Returns:
        The file names without `.toml`, sorted.
    """
    return sorted(p.stem for p in (conf_dir() / kind).glob("*.toml"))


def nearest(word: str, known: list[str]) -> str:
    """Returns the remedy for an unknown word: the nearest known one, or all of them.

    Args:
        word: What was given.
        known: What could have been.

    Returns:
        The end of a message.

    Example:
        >>> nearest("sync_perod", ["sync_period", "num_islands"])
        'did you mean sync_period?'
        >>> nearest("x", ["sync_period", "num_islands"])
        'known: num_islands, sync_period'
    """
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"


def load(kind: str, name: str | Path) -> dict[str, Any]:
    """Reads one TOML file by its name under `conf/`, or by its path.

    Args:
        kind: `"models"`, `"hardware"` or `"recipes"`.
        name: An entry of `names(kind)`, or a path that ends in `.toml`.

    Returns:
        The file as nested dicts.

    Raises:
        ValueError: If there is no such entry or file, or the file is not valid TOML.

    Example:
        >>> load("recipes", "laptop-diloc")
        Traceback (most recent call last):
        ValueError: no recipes entry 'laptop-diloc'; did you mean laptop-diloco?
    """
    is_path = str(name).endswith(".toml")
    path = Path(name) if is_path else conf_dir() / kind / f"{name}.toml"
    if not path.is_file():
        remedy = "give the path of an existing file" if is_path else nearest(str(name), names(kind))
        raise ValueError(f"no {kind} entry {str(name)!r}; {remedy}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML ({error}); correct that line") from None


def build(cls: type[T], table: dict[str, Any], where: str) -> T:
    """Builds a dataclass from a table, refusing unknown and missing keys.

    Args:
        cls: A dataclass. Its own `__post_init__` checks the values.
        table: Field name to value.
        where: Names the table in a message, such as `"[diloco] of laptop-diloco"`.

    Returns:
        The instance.

    Raises:
        ValueError: If a key is no field of `cls`, or a field without a default is missing.

    Example:
        >>> from diloco.config import DiLoCoConfig
        >>> build(DiLoCoConfig, {"num_islands": 2, "sync_perod": 4}, "[diloco]")
        Traceback (most recent call last):
        ValueError: [diloco] has no key 'sync_perod'; did you mean sync_period?
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            raise ValueError(f"{where} has no key {key!r}; {nearest(key, list(fields))}")
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in table:
            raise ValueError(f"{where} lacks the key {name!r}; add it")
    return cls(**table)
