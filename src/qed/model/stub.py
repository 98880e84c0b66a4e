"""The few lines of Python beside a checkpoint through which transformers finds this package.

Without `import qed`, transformers does not know the model type "qed". The field `auto_map` of a config.json names
classes of a file in the checkpoint's folder, which transformers' Auto classes import if they are told to with
`trust_remote_code=True`. Ours, the stub, only imports `qed`, which then registers itself. Once `qed` is imported, the
Auto classes take the registered classes, whether or not they are told to trust a folder's code, and the stub is not
read.
"""

from __future__ import annotations

from pathlib import Path

from ..files import write_text

STUB = "modeling_qed.py"
AUTO_MAP = {
    auto_class: f"{STUB.removesuffix('.py')}.{name}"
    for auto_class, name in (
        ("AutoConfig", "QEDConfig"),
        ("AutoModel", "QEDModel"),
        ("AutoModelForCausalLM", "QEDForCausalLM"),
    )
}
TEXT = '''\
"""Loads this model with the Python package `qed-attention`, which has its code. Nothing else is done here."""

try:  # transformers names missing packages that are imported outside `try` by their modules: `qed`, which is wrong
    from qed import QEDConfig, QEDForCausalLM, QEDModel
except ImportError as error:
    raise ImportError(
        "this checkpoint needs the Python package qed-attention, which is not installed or does not work here: "
        f"pip install qed-attention ({error})"
    ) from error

__all__ = ["QEDConfig", "QEDForCausalLM", "QEDModel"]
'''


def write_stub(folder: Path) -> None:
    """Write the stub into a checkpoint's folder, replacing any file of its name."""
    write_text(folder / STUB, TEXT)


def is_mapped(kind: type, auto_class: str | type) -> bool:
    """Return whether `auto_map` covers a class, so that it need not be registered for an Auto class: whether it is one
    of this package. ValueError for an Auto class that loads none of them."""
    name = auto_class if isinstance(auto_class, str) else auto_class.__name__
    ours = kind.__module__.startswith(f"{__package__}.")
    if ours and name not in AUTO_MAP:
        raise ValueError(f"auto_class: expected one of {', '.join(AUTO_MAP)}, got {name!r}")
    return ours
