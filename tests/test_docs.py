"""Docstrings, equations, symbols and pages agree with each other."""

import functools
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import diloco


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    p
    for folder in (DOCS, ROOT / "tutorials")
    for p in folder.rglob("*.md")
    if "_build" not in p.parts and "generated" not in p.parts
)
SOURCES = sorted((ROOT / "src").rglob("*.py"))
LABEL = re.compile(r":label: (eq-[\w-]+)|\\label\{(eq-[\w-]+)\}|\$\$ ?\((eq-[\w-]+)\)")
COMMAND_LINE = {"diloco.cli", "diloco.__main__"}  # explained by --help and by the how-to pages

sys.path.insert(0, str(DOCS / "_ext"))


def public_objects() -> dict[str, object]:
    """Functions and classes that a module defines and does not hide, by dotted name."""
    found = {}
    for info in pkgutil.walk_packages(diloco.__path__, "diloco."):
        if info.name in COMMAND_LINE:
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            own = getattr(value, "__module__", None) == info.name
            if (
                own
                and not name.startswith("_")
                and (inspect.isfunction(value) or inspect.isclass(value))
            ):
                found[f"{info.name}.{name}"] = value
    return found


OBJECTS = public_objects()


def arguments(value) -> list[str]:
    """Names of the parameters that a caller fills in."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind not in kinds and p.name != "self"]


@pytest.mark.parametrize("name", diloco.__all__)
def test_every_name_of_the_package_has_an_example(name):
    value = getattr(diloco, name)
    assert value.__doc__
    if not inspect.ismodule(value):
        assert ">>>" in value.__doc__, f"diloco.{name} has no example"


def test_every_name_in_the_prose_needs_no_more_than_import_diloco():
    texts = [p.read_text(encoding="utf-8") for p in [*PAGES, *SOURCES, ROOT / "README.md"]]
    named = {n for t in texts for n in re.findall(r"`(diloco(?:\.\w+)+)[`(]", t)}
    assert len(named) > 20
    for name in named:
        first, *rest = name.split(".")[1:]
        eager = first in ("DiLoCoConfig", "schedule")
        value = getattr(diloco, first) if eager else diloco.__getattr__(first)
        functools.reduce(getattr, rest, value)


def explained(value) -> set[str]:
    """Arguments and fields that the docstring, or a comment beside the field, explains."""
    doc = inspect.getdoc(value) or ""
    names = set(re.findall(r"^\s+\*{0,2}`?(\w+)`?(?: \(.*\))?:\s", doc, re.MULTILINE))
    if inspect.isclass(value):
        names |= set(re.findall(r"^    (\w+): .*  # \S", inspect.getsource(value), re.MULTILINE))
    return names


@pytest.mark.parametrize("name", OBJECTS)
def test_public_docstrings_are_complete(name):
    """One argument may be explained by the summary; two or more need their own lines."""
    value = OBJECTS[name]
    doc = inspect.getdoc(value) or ""
    assert doc, f"{name} has no docstring"
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    wanted = arguments(value)
    if len(wanted) > 1 or "Args:" in doc:
        missing = [a for a in wanted if a not in explained(value)]
        assert not missing, f"{name} does not explain {', '.join(missing)}"
    if inspect.isfunction(value):
        nothing = inspect.signature(value).return_annotation in (None, inspect.Signature.empty)
        says = re.search(r"^Returns\b|^(Returns|Yields):", doc, re.MULTILINE) or len(wanted) < 2
        assert nothing or says, f"{name} does not say what it returns"


def labels() -> dict[str, Path]:
    """Equation labels and the page of each."""
    found = {}
    for page in PAGES:
        for groups in LABEL.findall(page.read_text()):
            label = next(filter(None, groups))
            assert label not in found, f"{label} is in {found.get(label)} and in {page}"
            found[label] = page
    return found


def test_each_equation_is_some_function():
    used = set(re.findall(r":eq:`(eq-[\w-]+)`", "".join(p.read_text() for p in SOURCES)))
    known = labels()
    assert known, "no page has an equation"
    assert not used - set(known), (
        f"docstrings refer to equations that no page has: {sorted(used - set(known))}"
    )
    assert not set(known) - used, f"no docstring refers to: {sorted(set(known) - used)}"


@pytest.mark.parametrize(
    "row",
    tomllib.loads((DOCS / "reference" / "notation.toml").read_text())["algorithm"],
    ids=lambda row: row["code"],
)
def test_each_symbol_has_its_code_name(row):
    home = getattr(diloco, row["where"].removeprefix("diloco."))
    assert row["code"] in arguments(home)


def bibliography() -> set[str]:
    """Keys of the entries."""
    return set(re.findall(r"^@\w+\{(\S+),$", (DOCS / "refs.bib").read_text(), re.MULTILINE))


def test_citations_have_their_entry():
    keys = bibliography()
    text = "".join(p.read_text() for p in [*PAGES, *SOURCES])
    cited = set()
    for group in re.findall(r"(?:\{cite:\w+\}|:cite:\w+:)`([^`]+)`", text):
        cited |= {key.strip() for key in group.split(",")}
    assert not cited - keys, f"not in refs.bib: {sorted(cited - keys)}"


def test_pages_with_code_say_so():
    """Without this front matter MyST-NB shows the cells and runs none."""
    for page in PAGES:
        text = page.read_text()
        if "{code-cell}" in text:
            assert text.startswith("---\n"), page
            assert "kernelspec:" in text.split("---")[1], page
        assert "raises-exception" not in text, f"{page} publishes a traceback"


def test_no_address_of_a_machine_or_registry():
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if names.returncode:
        pytest.skip("not a git checkout")
    forbidden = re.compile(
        r"(?<![\w.])/(?:work|home|root|Users)/\w|(?:pypi|npmjs|files\.pythonhosted)\.(?:org|com)"
    )
    for name in filter(None, names.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in {".npz", ".gz", ".png"} or not path.is_file() or path == Path(__file__):
            continue
        match = forbidden.search(path.read_text(errors="ignore"))
        assert match is None, f"{name}: {match.group()}"
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.!+-]+", line) for line in lock)


def test_records_say_where_they_come_from():
    wanted = {"command", "machine", "versions", "kind", "unit"}
    for path in (DOCS / "data").glob("*.json"):
        content = json.loads(path.read_text())
        if "citation" in content:
            assert content["citation"] in bibliography(), path.name
            assert content["where"], path.name
            continue
        record = content.get("record", {})
        assert wanted <= set(record), f"{path.name} lacks {sorted(wanted - set(record))}"
        assert record["kind"] in {"measured", "compiled", "simulated"}


def test_fingerprint_sees_what_pages_read(tmp_path):
    from fingerprint import READ_BY_PAGES, fingerprint

    for entry in READ_BY_PAGES:
        path = tmp_path / entry
        (path if path.suffix else path / "file").parent.mkdir(parents=True, exist_ok=True)
        (path if path.suffix else path / "file").write_text("1")
    before = fingerprint(tmp_path)
    assert before == fingerprint(tmp_path)
    for entry in READ_BY_PAGES:
        path = tmp_path / entry
        file = path if path.suffix else path / "file"
        file.write_text("2")
        assert fingerprint(tmp_path) != before, entry
        file.write_text("1")
