"""The rules of CONTRIBUTING.md as tests, and what the documents say of the code against the code itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from deploy.site import commands, reference, settings
from gateway import errors
from policies import admission, config, replica, wire

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("policies", "gateway", "restorer")
FOLDERS = sorted({str(path.parent.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")})
PRODUCT = sorted([*(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")), ROOT / "rewake.py"])
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
EXAMPLE = ROOT / "deploy/examples/rewake.yaml"
MAX_LINES, MAX_FUNCTION = 400, 60
TEXTS = {".py", ".md", ".lua", ".yaml", ".yml", ".toml", ".sh", ".json", ".txt", ""}
ELSEWHERE = ("/" + "work/", "/" + "home/", "bash" + "_jobs", "@" + "anthropic", "claude" + ".ai")
"""What only the machine that somebody wrote a file on has. In pieces, so that this file does not match itself."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tracked() -> Iterator[Path]:
    """Every text file of the project, whether or not it has been committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = (ROOT / line for line in listed.stdout.splitlines())
    return (path for path in paths if path.is_file() and path.suffix in TEXTS)


# ---------------------------------------------------------------- the shape of the code


@pytest.mark.parametrize("path", [*PRODUCT, *sorted((ROOT / "tests").glob("*.py"))], ids=name)
def test_a_module_begins_with_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{name(path)} has no docstring"


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_a_module_fits_the_head(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{name(path)} has {lines} lines, more than {MAX_LINES}; find the second noun in it"


@pytest.mark.parametrize("path", PRODUCT, ids=name)
def test_a_function_fits_the_screen(path: Path) -> None:
    functions = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {node.name: length for node in functions if (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION}
    assert not long, f"{name(path)}: {long}"


def compiled() -> list[Path]:
    """The modules that setup.py compiles."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    told = next(node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HOT")
    hot: dict[str, str] = ast.literal_eval(told)
    return [ROOT / package / f"{module}.py" for package, modules in hot.items() for module in modules.split()]


@pytest.mark.parametrize("path", compiled(), ids=name)
def test_what_is_compiled_has_no_class_whose_annotations_are_read(path: Path) -> None:
    """mypyc keeps of ``bool | None`` only ``type``, so msgspec and pydantic would read something else."""
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    assert not {ast.unparse(base) for node in classes for base in node.bases} & {"msgspec.Struct", "Struct", "BaseModel"}


def test_every_folder_is_installed() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(packages) == [folder.replace("/", ".") for folder in FOLDERS]


def test_the_layers_are_kept() -> None:
    # The sibling of this interpreter: the one of the environment that the tests run in.
    checked = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_nothing_speaks_of_the_machine_it_was_written_on() -> None:
    found = {name(path): word for path in tracked() for word in ELSEWHERE if word in path.read_text(errors="replace")}
    assert not found


# ---------------------------------------------------------------- ARCHITECTURE.md


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of all table rows under a heading."""
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_folder_map_has_every_file_and_no_other(folder: str) -> None:
    section = re.split(rf"\n####? {folder}\n", ARCHITECTURE)[1].split("\n#", 1)[0]
    mapped = re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)
    assert len(mapped) == len(set(mapped))
    there = {path.name for path in (ROOT / folder).iterdir() if path.suffix in (".py", ".lua")} - {"__init__.py"}
    assert set(mapped) == there


def test_every_function_that_it_names_exists() -> None:
    named = re.findall(r"`((?:policies|gateway|restorer)/[\w/]+\.py):([\w.]+)`", ARCHITECTURE)
    assert len(named) > 20
    for path, attribute in named:
        found: Any = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for part in attribute.split("."):
            assert hasattr(found, part), f"{path} has no {attribute}"
            found = getattr(found, part)


def test_every_test_that_it_names_exists() -> None:
    named = re.findall(r"`(test_\w+)(?:::(test_\w+))?`", ARCHITECTURE)
    assert len(named) > 10
    for module, function in named:
        path = ROOT / "tests" / f"{module}.py"
        assert path.is_file(), module
        assert f"def {function}(" in path.read_text() if function else True, f"{module}::{function}"


def test_the_table_of_a_replica_is_drawn_as_it_is() -> None:
    drawn = {
        (state, event): after
        for state, *steps in rows(ARCHITECTURE, "The life of a replica")[2:]
        for step in ", ".join(steps).split(", ")
        for event, _, after in [step.partition(" → ")]
        if after
    }
    assert drawn == {(str(s), str(e)): str(after) for (s, e), after in replica.TRANSITIONS.items()}


# ---------------------------------------------------------------- the store


def test_every_key_is_in_the_contract() -> None:
    described = (wire.__doc__ or "").replace("{id}", "?").replace("{model}", "?").replace("{host}", "?").replace("{name}", "?")
    keys = wire.Keys("")
    fixed = [value for value in vars(keys).values() if value]
    made = [getattr(keys, method)("?") for method, _ in inspect.getmembers(wire.Keys, inspect.isfunction) if method[0] != "_"]
    assert len(made) >= 7
    missing = [key for key in [*fixed, *made] if not re.search(rf"(?<![\w:]){re.escape(key)}(?![\w:])", described)]
    assert not missing


def test_scripts_make_no_key_of_their_own() -> None:
    """Every key reaches a script as an argument; a name spelt in Lua would escape the contract, and a Redis Cluster."""
    for script in (path for package in PACKAGES for path in (ROOT / package).rglob("*.lua")):
        code = re.sub(r"--.*", "", script.read_text())
        assert not re.findall(r"redis\.call\(\s*'\w+',\s*['\"]", code), name(script)


# ---------------------------------------------------------------- README.md


def samples() -> dict[str, str]:
    """Every configuration that the project shows, by where it stands."""
    found = {f"README {n}": text for n, text in enumerate(re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))}
    return {**found, "deploy/examples/rewake.yaml": EXAMPLE.read_text()}


@pytest.mark.parametrize("sample", samples())
def test_samples_are_configurations(sample: str) -> None:
    assert config.parse(yaml.safe_load(samples()[sample])).models


def test_the_example_shows_both_engines_and_every_setting() -> None:
    text = EXAMPLE.read_text()
    engines = {model.engine.kind for model in config.parse(yaml.safe_load(text)).models.values()}
    assert engines == {"vllm", "llama-server"}
    missing = [path for path in every_setting() if not _spelt(path, text)]
    assert not missing


def _spelt(path: str, text: str) -> bool:
    return re.search(rf"^[ #-]*{path.rpartition('.')[2]}:", text, re.MULTILINE) is not None


def every_setting() -> list[str]:
    """The path of every setting."""
    return [prefix + field for prefix, section, _ in settings.sections() for field in section.model_fields]


# ---------------------------------------------------------------- docs/reference


@pytest.mark.parametrize("page", reference.pages())
def test_the_reference_is_what_the_code_says(page: str) -> None:
    assert page not in reference.stale(), f"docs/reference/{page} is stale: run `make reference`"


def test_every_setting_says_what_it_is() -> None:
    assert not settings.undocumented(), "write one or two sentences for the operator under each of these fields"


def test_every_command_and_option_says_what_it_is() -> None:
    silent = [name for name, command in commands.commands() if not command.help]
    for name, command in commands.commands():
        silent += [f"{name} {one.opts[0]}" for one in command.params if one.param_type_name == "option" and not one.help]
    assert len([*commands.commands()]) > 10
    assert not silent


def test_every_fault_of_a_request_is_listed() -> None:
    spelt = set(re.findall(r'"(invalid_\w+|missing_\w+)"', "".join(path.read_text() for path in (ROOT / "gateway").glob("*.py"))))
    assert set(errors.FAULTS) == spelt - {"invalid_request_error", "invalid_api_key"}
    assert {kind.code for kind, _ in errors.REFUSALS.values()} == set(get_args(admission.Code))


PAGES = sorted(name(page) for at in (ROOT.glob, (ROOT / "docs").rglob, (ROOT / "grafana").rglob) for page in at("*.md"))


def headings(page: Path) -> set[str]:
    """What a link may name after its `#`."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("document", PAGES)
def test_links_lead_somewhere(document: str) -> None:
    page = ROOT / document
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text())
    assert links or page.parent != ROOT or document == "CHANGELOG.md"
    for link in links:
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not heading or heading in headings(target), link
