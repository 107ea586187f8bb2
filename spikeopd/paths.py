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
    start = config.stage2.model_name_or_path
    if config.train.stage == "2" and start and find_model(start) is None:
        raise InputError(f"stage2.model_name_or_path {start}: no student there; give the folder of a run or of one")
    if not resume and (output / "config.yaml").exists():
        raise InputError(f"{output} already holds a run; continue it with --resume, or give another --output")


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
