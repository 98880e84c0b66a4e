"""Builds the site of these pages into `site/`: `make docs`. A broken link or reference ends it with an error."""

import importlib.util
import sys
from pathlib import Path

NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
ROOT = Path(__file__).parent.parent


def main() -> None:
    """Build the site, or say what is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"make docs: expected mkdocs-material and mkdocstrings to be installed, but {', '.join(missing)} "
            "cannot be imported; pip install -e '.[docs]' -c constraints.txt installs them"
        )
    from mkdocs.__main__ import cli

    cli(["build", "--strict", "--config-file", str(ROOT / "mkdocs.yml"), *sys.argv[1:]])


if __name__ == "__main__":
    main()
