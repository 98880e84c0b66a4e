"""Builds the site of these pages into `site/`: `make docs`. A broken link or reference ends it with an error, and then
the site that was there before stays as it is."""

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
ROOT = Path(__file__).parent.parent


def main() -> None:
    """Build the site, or say what is not installed."""
    parser = argparse.ArgumentParser(description="Build the site of docs/.")
    parser.add_argument("--site-dir", type=Path, default=ROOT / "site", help="The folder for the site.")
    parser.add_argument("--config-file", type=Path, default=ROOT / "mkdocs.yml", help="The settings of mkdocs.")
    given = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"make docs: expected mkdocs-material and mkdocstrings to be installed, but {', '.join(missing)} "
            "cannot be imported; pip install -e '.[docs]' -c constraints.txt installs them"
        )
    build(given.config_file, given.site_dir.absolute())


def build(settings: Path, site: Path) -> None:
    """Build the site in a folder beside the one that it is for, and move it there if all of it is right."""
    from mkdocs.__main__ import cli

    part = site.with_name(f"{site.name}.part")
    try:
        try:
            cli(["build", "--strict", "--clean", "--config-file", str(settings), "--site-dir", str(part)])
        except SystemExit as ended:  # as the program that mkdocs is, it always ends so
            if ended.code:
                raise
        shutil.rmtree(site, ignore_errors=True)
        part.rename(site)
    finally:
        shutil.rmtree(part, ignore_errors=True)


if __name__ == "__main__":
    main()
