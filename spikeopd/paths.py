"""Paths of a run that cannot be right, told before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from spikeopd.config import Config
from spikeopd.errors import InputError

FILES = ("text", "jsonl", "parquet")  # kinds of sources that name files


def check_paths(config: Config, output: Path, resume: bool) -> None:
    """Sources, teacher and student that are named by a path must be there; a new run needs a folder of its own."""
    data = config.data
    for name in (data.source, data.prompt_source, data.validation_source):
        kind, _, rest = (name or "").partition(":")
        path = rest.partition("#")[0]
        if kind in FILES and path and not set(path) & set("*?[") and not Path(path).exists():
            raise InputError(f"{name}: no such file {path}; check the path")
    models = {"teacher.teacher_model_name_or_path": config.teacher.teacher_model_name_or_path}
    if config.train.stage == "2":
        models["stage2.model_name_or_path"] = config.stage2.model_name_or_path or ""
    else:
        models["stage1.model_name_or_path"] = config.stage1.model_name_or_path or ""
    for option, model in models.items():
        if _is_path(model) and not Path(model).expanduser().exists():
            raise InputError(f"{option} {model}: no such file or folder; check the path")
    if not resume and (output / "config.yaml").exists():
        raise InputError(f"{output} already holds a run; continue it with --resume, or give another --output")


def _is_path(name: str) -> bool:
    """Written as a path; anything else may be a name on the hub."""
    return name.startswith(("/", "./", "../", "~/")) or name.endswith(".gguf")
