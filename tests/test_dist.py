"""Wheel and sdist: `make dist` builds them from what git knows, and the wheel works where nothing else of the tree is.

Other packages are not installed again: the clean environment finds those of the one that runs the tests.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from .documents import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
# Every module but those of kernels, which need Triton, and those that are programs.
IMPORTS = """
import importlib, pkgutil, sys, qed
names = [x.name for x in pkgutil.walk_packages(qed.__path__, "qed.")]
for name in names:
    if not name.endswith("__main__"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] not in {optional!r}:
                raise
print(len(names), qed.__file__)
"""
OPTIONAL = {"triton", "vllm"}


def run(*words: object, cwd: Path) -> str:
    done = subprocess.run([str(x) for x in words], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def tracked(folder: str = "") -> set[str]:
    """Files that git knows, below a folder."""
    return set(run("git", "ls-files", folder or ".", cwd=ROOT).splitlines())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make dist` writes, in a clone."""
    for package in ("build", "twine"):
        pytest.importorskip(package)
    clone = tmp_path_factory.mktemp("dist") / "qed"
    if subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], capture_output=True).returncode:
        pytest.skip("no clone of this tree")
    (clone / "runs").mkdir()
    (clone / "runs" / "weights").write_text("of no use to anybody else")
    (clone / "src" / "qed" / "scratch.py").write_text("x = 1\n")  # git does not know it
    venv = clone / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (venv / "bin" / "python").chmod(0o755)
    for name in (".ready", ".tools", ".slow"):
        (venv / name).touch()
    printed = run("make", "dist", cwd=clone)
    assert "pip install" not in printed  # it would put the clone into the environment that runs the tests
    assert printed.count("PASSED") == 2
    assert not (clone / "build" / "dist").exists()
    return clone / "dist"


@pytest.mark.slow
def test_a_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    inside = {x for x in names if ".dist-info/" not in x}
    assert inside == {x.removeprefix("src/") for x in tracked("src/qed")}
    assert any(x.endswith("licenses/LICENSE") for x in names)


@pytest.mark.slow
def test_an_sdist_can_be_built_and_has_its_licence(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    files = {str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file()}
    assert files >= {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", *tracked("src/qed")}
    assert not [x for x in files if x.split("/")[0] in ("tests", "results", "runs", "benchmarks", ".ci")]
    run(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "again", folder, cwd=tmp_path
    )
    first, second = (zipfile.ZipFile(next(x.glob("*.whl"))) for x in (built, tmp_path / "again"))
    assert {x: first.read(x) for x in first.namelist()} == {x: second.read(x) for x in second.namelist()}


@pytest.mark.slow
def test_what_a_wheel_says_of_itself(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    about = Parser().parsestr(archive.read(next(x for x in archive.namelist() if x.endswith("/METADATA"))).decode())
    assert about["Name"] == PROJECT["name"]
    assert about["License-Expression"] == "Apache-2.0"
    assert set(about.get_all("Classifier")) == set(PROJECT["classifiers"])
    assert about["Keywords"].split(",") == PROJECT["keywords"]
    assert set(about.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    needed = [x for x in about.get_all("Requires-Dist") if "extra ==" not in x]
    assert len(needed) == len(PROJECT["dependencies"])
    assert not [x for x in needed if x.startswith("sentencepiece")]
    assert about.get_all("Project-URL") is None  # there is no address that would lead anywhere


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(built: Path, tmp_path: Path) -> None:
    """In a folder without the tree: the program, every module, and a training that needs the package's own files."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    python, site = venv / "bin" / "python", next(venv.glob("lib/python*/site-packages"))
    others = tmp_path / "others"  # the packages of this environment, but for ours
    others.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("qed", "__editable__")) and path.suffix != ".pth":
            (others / path.name).symlink_to(path)
    (wheel,) = built.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site / "others.pth").write_text(f"{others}\n")
    count, place = run(python, "-c", IMPORTS.format(optional=OPTIONAL), cwd=tmp_path).split()
    assert int(count) > 150
    assert Path(place).is_relative_to(site)
    version = run(python, "-m", "qed", "--version", cwd=tmp_path).strip()
    assert run(venv / "bin" / "qed", "--version", cwd=tmp_path).strip() == version
    assert version in wheel.name
    assert "sound" in run(
        venv / "bin" / "qed", "doctor", *["--tokens", "16", "--heads", "1", "--width", "16"], cwd=tmp_path
    )
    shutil.rmtree(venv)
