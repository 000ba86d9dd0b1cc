"""The project's own files agree with each other and with the code."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from planner import resources
from planner.errors import PlannerError

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _names(requirements):
    return {re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-") for requirement in requirements}  # type: ignore[index]


def test_every_requirement_has_a_tested_version():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = _names(line for line in lines if line and not line.startswith("#"))
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = _names([*PYPROJECT["project"]["dependencies"], *(r for extra in extras.values() for r in extra)])

    assert wanted - pinned == {"torch-autoplan"}
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in lines if line and not line.startswith("#"))


def test_tools_are_pinned_to_the_tested_versions():
    pinned = set((ROOT / "constraints.txt").read_text().splitlines())

    assert set(PYPROJECT["project"]["optional-dependencies"]["dev"]) - {"torch-autoplan[test]"} <= pinned


def test_the_profiles_of_a_checkout_are_found():
    assert resources.profiles_path() == ROOT / "profiles"


def test_the_profiles_of_an_installed_package_come_first(tmp_path, monkeypatch):
    package = tmp_path / "planner"
    (package / "_profiles").mkdir(parents=True)
    monkeypatch.setattr(resources, "__file__", str(package / "resources.py"))

    assert resources.profiles_path() == package / "_profiles"


def test_lost_profiles_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "__file__", str(tmp_path / "planner" / "resources.py"))
    with pytest.raises(PlannerError, match=r"hardware data is missing beside .*; install torch-autoplan again"):
        resources.profiles_path()


@pytest.mark.timeout(300)
def test_a_wheel_carries_every_package_and_all_data(tmp_path):
    source = tmp_path / "source"
    for directory in ("planner", "profiles", "tests"):
        shutil.copytree(ROOT / directory, source / directory, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source],
        check=True,
    )
    [wheel] = tmp_path.glob("torch_autoplan-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(source)) for path in (source / "planner").rglob("*.py")}
    data = {str(path.relative_to(source)) for path in (source / "profiles").rglob("*") if path.is_file()}

    assert sources <= inside
    assert {name.replace("profiles/", "planner/_profiles/", 1) for name in data} <= inside
    assert not any(name.startswith(("tests/", "benchmarks/", "examples/", "profiles/")) for name in inside)
