"""Which files a checkpoint is read from: safetensors, and nothing that lies outside its folder.

A folder may come from anywhere. Its index says which files hold the weights, so the index is checked before any of them
is opened: a pickle can run code, a path can lead to somebody else's files, and reading a device never ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import cached_file

SUFFIX = ".safetensors"


def check_options(options: dict[str, Any]) -> None:
    """Raise ValueError for arguments of `from_pretrained` that ask for something other than safetensors."""
    if options.get("use_safetensors") is None:
        options["use_safetensors"] = True
    if options["use_safetensors"] is not True:
        raise ValueError("use_safetensors: pickles are not read, they can run code; expected True, got False")
    if options.get("weights_only", True) is not True:
        raise ValueError("weights_only: pickles are not read, they can run code; expected True, got False")
    if options.get("gguf_file") is not None:
        raise ValueError(f"gguf_file: only safetensors are read; expected None, got {options['gguf_file']!r}")


def check_checkpoint(name: Any, options: dict[str, Any]) -> None:
    """Raise ValueError, before any weights are opened, if the checkpoint `name` would be read from anything but
    safetensors of its own folder. `name` is a folder or a model of the hub, as in `from_pretrained`; `options` are that
    function's arguments."""
    adapter = (options.get("adapter_kwargs") or {}).get("_adapter_model_path")
    if adapter is not None:
        _check_adapter(Path(adapter))
    if options.get("state_dict") is not None:
        return
    folder = Path(str(name)) / options.get("subfolder", "")
    if Path(str(name)).is_file():
        raise ValueError(f"{name}: expected a checkpoint's folder, got a file")
    variant = options.get("variant")
    weights = f"model.{variant}{SUFFIX}" if variant else f"model{SUFFIX}"
    index = f"model{SUFFIX}.index.{variant}.json" if variant else f"model{SUFFIX}.index.json"
    if folder.is_dir():
        if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists() and adapter is None:
            raise ValueError(f"{folder}: expected a model, got an adapter alone; load its base model, then the adapter")
        if (named := _named_in_config(folder)) is not None:
            raise ValueError(
                f"{folder}: expected weights in {weights}, got transformers_weights={named!r} in config.json"
            )
        _check_adapter(folder)
        for file in (folder / weights, folder / index):
            if (file.exists() or file.is_symlink()) and not file.is_file():
                raise ValueError(f"{file}: expected a regular file, got something else")
        if (folder / weights).is_file():
            return
        pickles = sorted(x.name for pattern in ("*.bin", "*.bin.index*.json") for x in folder.glob(pattern))
        if pickles and not (folder / index).is_file():
            raise ValueError(f"{folder}: expected {weights}, got {', '.join(pickles)}: pickles can run code")
    index_file = _find(name, index, options)
    if index_file is not None:
        _check_index(Path(index_file), folder if folder.is_dir() else None)


def _check_adapter(folder: Path) -> None:
    """Raise ValueError for an adapter whose weights are a pickle: transformers loads an adapter that lies beside a
    model."""
    pickled = any(folder.glob("adapter_model*.bin")) and not (folder / f"adapter_model{SUFFIX}").is_file()
    if pickled and (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder}: expected adapter_model{SUFFIX}, got a pickle: pickles can run code")


def _named_in_config(folder: Path) -> str | None:
    """Return the file of weights that config.json names, if it names one; transformers would take it instead of the
    usual one."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None  # transformers says what is wrong with it
    return config.get("transformers_weights") if isinstance(config, dict) else None


def _find(name: Any, file: str, options: dict[str, Any]) -> str | None:
    """Return the path of a file of the folder, or of the hub's model, which is downloaded if needed; None where there
    is none."""
    where = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
    path: str | None = cached_file(
        str(name),
        file,
        **{key: options[key] for key in where if options.get(key) is not None},
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return path


def _check_index(index: Path, folder: Path | None) -> None:
    """Raise ValueError unless the index names only safetensors beside it. `folder` is where the named files are; None
    if they have yet to be downloaded, so that only their names can be checked."""
    try:
        files = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index}: expected a safetensors index with a weight_map, got {error!r}") from error
    for file in sorted(map(str, files)):
        if not file.endswith(SUFFIX):
            raise ValueError(f"{index}: expected safetensors files, got {file!r}: other files can run code")
        if "/" in file or "\\" in file:
            raise ValueError(f"{index}: expected names of files beside it, got the path {file!r}")
        if folder is not None and not _is_inside(folder / file, folder):
            raise ValueError(f"{index}: expected regular files of its own folder, got {file!r}, which is none")


def _is_inside(file: Path, folder: Path) -> bool:
    """Return whether `file` is a regular file of `folder`, or of the store that the hub's cache links its folders
    to."""
    whole, target = folder.resolve(), file.resolve()
    stores = [whole] + ([whole.parent.parent / "blobs"] if whole.parent.name == "snapshots" else [])
    return target.is_file() and any(target.is_relative_to(store) for store in stores)


def check_config(config: Any) -> None:
    """Raise ValueError if a configuration that is passed to `from_pretrained` names a file of weights."""
    if isinstance(config, PreTrainedConfig) and getattr(config, "transformers_weights", None) is not None:
        raise ValueError(f"transformers_weights: expected None, got {config.transformers_weights!r}")
