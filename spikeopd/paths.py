"""Paths of a run that cannot be right, told before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spikeopd.errors import InputError
from spikeopd.files import find_model

if TYPE_CHECKING:
    from spikeopd.config import Config

FILES = ("text", "jsonl", "parquet")  # kinds of sources that name files


def check_paths(config: Config, output: Path, resume: bool) -> None:
    """Sources, teacher and student that are named by a path must be there; a new run needs a folder of its own."""
    data = config.data
    for name in (data.source, data.prompt_source, data.validation_source):
        check_source(name or "")
    check_model(config.teacher.teacher_model_name_or_path, "teacher.teacher_model_name_or_path")
    stage = "stage2" if config.train.stage == "2" else "stage1"
    start = getattr(config, stage).model_name_or_path
    if start and not _is_student(start):
        raise InputError(f"{stage}.model_name_or_path {start}: no student there; give the folder of a run or of one")
    if not resume and (output / "config.yaml").exists():
        raise InputError(f"{output} already holds a run; continue it with --resume, or give another --output")


def _is_student(path: str) -> bool:
    from spikeopd.students import find_bundle  # reads numpy, which few need here

    return find_model(path) is not None or bool(find_bundle(path))


def check_source(name: str) -> None:
    """A text source that names a file."""
    kind, _, rest = name.partition(":")
    path = rest.partition("#")[0]
    if kind in FILES and path and not set(path) & set("*?[") and not Path(path).exists():
        raise InputError(f"{name}: no such file {path}; check the path")


def check_file(path: str, option: str) -> None:
    if not Path(path).expanduser().is_file():
        raise InputError(f"{option} {path}: no such file; check the path")


def check_model(name: str, option: str) -> None:
    """A model written as a path; anything else may be a name on the hub."""
    written = name.startswith(("/", "./", "../", "~/")) or name.endswith(".gguf")
    if written and not Path(name).expanduser().exists():
        raise InputError(f"{option} {name}: no such file or folder; check the path")
