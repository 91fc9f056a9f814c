"""Inputs that a user gives: shapes on the command line and arrays in .npz files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from onnxfuse.errors import InputDataError
from onnxfuse.replacement import replaced
from onnxfuse.runtime.feeds import InputSpec


def parse_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """`name:1,3,224,224` (also `name:[1,3]`, `name:1x3`) to a shape by input name.

    Raises:
        InputDataError: a text has another form.
    """
    result = {}
    for text in texts:
        name, colon, sizes = text.rpartition(":")
        numbers = [n for n in re.split(r"[,x]", sizes.strip().strip("[]")) if n.strip()]
        if not colon or not name or not all(n.strip().isdigit() for n in numbers):
            raise InputDataError(f"`{text}` is not an input shape", hint="write it as name:1,3,224,224")
        result[name] = tuple(int(n) for n in numbers)
    return result


def load_npz(path: str | os.PathLike[str], specs: Sequence[InputSpec]) -> list[dict[str, np.ndarray]]:
    """Input sets from an .npz file: arrays named by input, or `set0/in/<input>`, `set1/in/<input>`, … for several.

    Raises:
        InputDataError: the file cannot be read, an input is missing, or a value has the wrong dtype or rank.
    """
    where = os.fspath(path)
    if not Path(path).is_file():
        raise InputDataError(f"no such file: `{where}`", hint="check --inputs")
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise InputDataError(f"`{where}` holds one array without a name", hint="write it with `numpy.savez`")
        with archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, KeyError, EOFError) as error:
        raise InputDataError(f"`{where}` cannot be read as an .npz file: {error}") from error
    sets: dict[str, dict[str, np.ndarray]] = {}
    for key, value in arrays.items():
        match = re.fullmatch(r"(set\d+)/in/(.+)", key)
        if match:
            sets.setdefault(match[1], {})[match[2]] = value
    if not sets:
        sets["inputs"] = {k: v for k, v in arrays.items() if not re.match(r"set\d+/out/", k)}
    return [_checked(values, specs, where, label) for label, values in sorted(sets.items(), key=_set_order)]


def _set_order(item: tuple[str, object]) -> tuple[int, str]:
    digits = re.sub(r"\D", "", item[0])
    return (int(digits) if digits else 0, item[0])


def _checked(
    values: Mapping[str, np.ndarray], specs: Sequence[InputSpec], where: str, label: str
) -> dict[str, np.ndarray]:
    result = {}
    for spec in specs:
        if spec.name not in values:
            raise InputDataError(
                f"no values for input `{spec.name}`", where=f"{where} ({label})",
                hint=f"the model needs {', '.join(s.name for s in specs)}; the file has {', '.join(values) or 'none'}",
            )
        value = values[spec.name]
        if value.dtype.kind == "V" and value.dtype.itemsize == spec.dtype.itemsize:
            value = value.view(spec.dtype)  # NumPy stores bfloat16 as raw bytes
        if value.dtype != spec.dtype:
            raise InputDataError(
                f"input `{spec.name}` is `{value.dtype}`, the model needs `{spec.dtype}`", where=f"{where} ({label})"
            )
        if not spec.accepts(value.shape):
            raise InputDataError(
                f"input `{spec.name}` has shape {list(value.shape)}, the model needs {list(spec.dims)}",
                where=f"{where} ({label})",
            )
        result[spec.name] = value
    return result


def save_npz(path: str | os.PathLike[str], sets: Sequence[Mapping[str, np.ndarray]], kind: str = "in") -> None:
    """Write input sets so that `load_npz` reads them: plain names for one set, `setN/in/<input>` for several.

    Args:
        kind: `in` for inputs, `out` for outputs.

    Raises:
        OutputError: the file cannot be written.
    """
    arrays: dict[str, np.ndarray] = {}
    for index, values in enumerate(sets):
        for name, value in values.items():
            arrays[name if len(sets) == 1 else f"set{index}/{kind}/{name}"] = value
    save_arrays(path, arrays)


def save_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz file beside `path` and rename it into place.

    Raises:
        OutputError: it cannot be written.
    """
    with replaced(Path(path)) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
