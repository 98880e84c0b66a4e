"""Checkpoints and exported models whose files were damaged: what is loaded has the right bits, or nothing is."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from qed import QEDForCausalLM
from qed.train import checkpoints

from . import damage, training
from .drawing import Draw

CONTENT = ("weights.safetensors", "optimizer.safetensors", "state.json")


def _untouched(folder: Path, *, sums: bool) -> bool:
    """Whether a checkpoint's files are still those that training wrote."""
    original = training.stopped() / "checkpoints" / folder.name
    names = (*CONTENT, "sums.json") if sums else CONTENT
    return original.is_dir() and all(
        (folder / name).is_file() and (folder / name).read_bytes() == (original / name).read_bytes() for name in names
    )


def _damage_a_file(draw: Draw, folder: Path) -> None:
    names = [x.name for x in sorted(training.stopped().glob("checkpoints/*/sums.json"))[0].parent.iterdir()]
    target = draw.choice(sorted(x for x in folder.glob("step-*") if x.is_dir() and not x.is_symlink()))
    file = target / draw.choice(sorted(names))
    if not file.is_file():
        return
    kinds = [*damage.ANY, *([damage.other_json] * 4 if file.suffix == ".json" else [])]
    if not file.stat().st_size:
        kinds = [damage.garbage, damage.remove]
    draw.choice(kinds)(draw, file)


def _flip_a_bit(draw: Draw, folder: Path) -> None:
    """Of the weights or of the optimiser: still a file that loads."""
    files = [x for x in sorted(folder.glob("step-*/*.safetensors")) if x.is_file() and x.stat().st_size]
    if files:
        damage.flip(draw, draw.choice(files))


def _unsum(draw: Draw, folder: Path) -> None:
    """A file is damaged, and the list of sums does not speak of it."""
    target = draw.choice(sorted(x for x in folder.glob("step-*") if x.is_dir() and not x.is_symlink()))
    name = draw.choice(CONTENT)
    try:
        sums = json.loads((target / "sums.json").read_text())
        del sums[name]
        (target / "sums.json").write_text(json.dumps({} if draw.chance(0.5) else sums))
        damage.flip(draw, target / name)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return  # something else has damaged them already


def _stray(draw: Draw, folder: Path) -> None:
    """Something that is no checkpoint has a checkpoint's name, or nearly one."""
    name = draw.choice(
        ("step-00000099", "step-99999999", "step-00000009", "step-0000000x", "step-00000014.part", "step-")
    )
    place = folder / name
    if place.exists() or place.is_symlink():
        return
    kind = draw.choice(("folder", "file", "dangling", "link", "half"))
    if kind == "folder":
        place.mkdir()
    elif kind == "file":
        place.write_bytes(draw.randbytes(9))
    elif kind == "dangling":
        place.symlink_to(folder / "nowhere")
    elif kind == "link":
        place.symlink_to(folder.parent / "elsewhere")
    else:
        place.mkdir()
        (place / "sums.json").write_text("{}")
        (place / draw.choice(CONTENT)).write_bytes(draw.randbytes(99))


def damaged_checkpoints(seed: int) -> None:
    """A stopped run resumes from the newest whole checkpoint to the same bits, whatever happened to the others."""
    draw = Draw("damaged_checkpoints", seed)
    truth = training.whole()
    with training.workplace() as place:
        out, elsewhere = place / "run", place / "run" / "elsewhere"
        shutil.copytree(training.stopped(), out)
        elsewhere.mkdir()
        (elsewhere / "precious").write_text("not a checkpoint's")
        folder = out / "checkpoints"
        for _ in range(draw.choice((1, 1, 2, 4))):
            draw.choice((_damage_a_file, _damage_a_file, _flip_a_bit, _unsum, _stray))(draw, folder)
        sound = sorted(x.name for x in folder.glob("step-????????") if _untouched(x, sums=True))
        found = checkpoints.newest(folder, lambda text: None)
        if found is not None:
            assert _untouched(found.folder, sums=False), f"{found.folder.name} was loaded, and is damaged"
        if sound:
            assert found is not None, f"{sound[-1]} is whole and was not found"
            assert found.folder.name >= sound[-1], f"{sound[-1]} is whole, {found.folder.name} was taken"
        try:
            training.finish(out)
        except (ValueError, OSError) as error:
            if sound or not any(word in str(error) for word in ("checkpoint", "step-")):
                raise AssertionError(f"whole are {sound}; refused with: {error!r}") from error
            return
        training.same_end(out, truth)
        assert training.numbers(out) == training.numbers(truth), "other numbers in metrics.jsonl"
        last = checkpoints.newest(folder, lambda text: None)
        assert last is not None
        assert last.folder.name == checkpoints.name_of(training.STEPS), f"the newest is now {last.folder.name}"
        assert (elsewhere / "precious").is_file(), "a file behind a link was removed"


def _spoil_the_header(draw: Draw, folder: Path) -> str:
    """Of model.safetensors: its length, or one character of the names, types, shapes and places of tensors."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    data[draw.randrange(8 + size)] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    return "header"


def _rename_a_tensor(draw: Draw, folder: Path) -> str:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    old = draw.choice((b"in_proj", b"o_proj", b"mlp_norm", b"embed_tokens", b"theta"))
    file.write_bytes(data.replace(old, old[::-1], 1))
    return "renamed"


def _change_the_config(draw: Draw, folder: Path) -> str:
    """A field that shapes depend on gets another value, or a field gets another name."""
    file = folder / "config.json"
    values: dict[str, Any] = json.loads(file.read_text())
    if draw.chance(0.5):
        name = draw.choice(
            ("hidden_size", "num_heads", "head_dim", "intermediate_size", "vocab_size", "num_hidden_layers")
        )
        values[name] += draw.choice((1, -1, 7))
        if name == "num_hidden_layers" and values[name] > 0:
            values |= {"layer_types": ["linear_attention"] * values[name], "layer_rules": ["qed"] * values[name]}
    else:
        name = draw.choice(("lambda_max", "read_scale", "norm_eps", "conv_size", "theta_init"))
        values[name[:-1]] = values.pop(name)
    file.write_text(json.dumps(values))
    return "config"


def _point_elsewhere(draw: Draw, folder: Path) -> str:
    """An index of shards that names a pickle, a file outside the folder or a device."""
    weights = folder / "model.safetensors"
    outside = folder.parent / "outside.safetensors"
    shutil.copy(weights, outside)
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    target = draw.choice(
        ("pytorch_model.bin", "../outside.safetensors", str(outside), "/dev/null", "", "nowhere.safetensors")
    )
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    names = [x for x in header if x != "__metadata__"]
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, target)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    weights.unlink()
    return "index"


def _gross(draw: Draw, folder: Path) -> str:
    file = folder / draw.choice(("model.safetensors", "config.json"))
    kinds = (*damage.GROSS, *([damage.no_json_object] * 3 if file.suffix == ".json" else []))
    draw.choice(kinds)(draw, file)
    return "gross"


def damaged_exports(seed: int) -> None:
    """from_pretrained gives the bits that were saved, or refuses. (A flipped bit among the weights themselves cannot be
    seen: safetensors has no checksums.)"""
    draw = Draw("damaged_exports", seed)
    original = training.whole() / "export"
    expected = QEDForCausalLM.from_pretrained(original).state_dict()
    with training.workplace() as place:
        folder = place / "export"
        shutil.copytree(original, folder)
        kind = draw.choice(
            (_spoil_the_header, _spoil_the_header, _rename_a_tensor, _change_the_config, _gross, _point_elsewhere)
        )(draw, folder)
        try:
            model = QEDForCausalLM.from_pretrained(folder)
        except (ValueError, OSError, TypeError) as error:
            if not str(error).strip():
                raise AssertionError("a refusal without a word") from error
            return
        assert kind in ("header", "gross"), f"loaded in spite of a changed {kind}"
        found = model.state_dict()
        assert found.keys() == expected.keys(), "other tensors"
        for name, x in expected.items():
            assert torch.equal(found[name], x), f"{name}: other bits"
