"""A saved student to the Hugging Face hub, through huggingface_hub and the login that its own tools keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spikeopd.card import FOLDER
from spikeopd.errors import BackendMissing, InputError, install_command, short
from spikeopd.remote_code import FILE
from spikeopd.students import find_student, read_config

FILES = ("*.json", "*.safetensors", "merges.txt", "README.md", FILE)  # what a student is made of


def check_hub(repo: str) -> None:
    """Refuse, before any work, a name the hub would not take, a hub that does not answer, and nobody logged in."""
    with _told(repo):
        from huggingface_hub import HfApi
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, not listed

        validate_repo_id(repo)
        if repo.count("/") != 1:
            raise ValueError("give it as OWNER/NAME")
        HfApi().whoami()


def push_to_hub(student: str | Path, repo: str, *, private: bool = False) -> str:
    """Upload a saved student to the model repository `repo` (OWNER/NAME), made if it is not there; returns its address.

    One commit. private holds for a repository that is made now.
    """
    folder = find_student(student)
    read_config(folder)
    with _told(repo):
        from huggingface_hub import CommitOperationAdd, HfApi

        parts = []
        for path in sorted({path for pattern in FILES for path in folder.glob(pattern)}):
            # The card says where to load the student from.
            card = path.read_text("utf-8").replace(FOLDER, repo).encode() if path.name == "README.md" else None
            parts.append(CommitOperationAdd(path.name, path if card is None else card))
        hub = HfApi()
        made = hub.create_repo(repo, private=private, exist_ok=True)
        hub.create_commit(repo, parts, commit_message=f"{folder.resolve().name}: a spiking student")
        return str(made)


@contextmanager
def _told(repo: str) -> Iterator[None]:
    """What the hub and its library refuse, as one line."""
    try:
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the HTTP library it uses
    except ImportError as error:
        raise BackendMissing(f"--push-to-hub needs huggingface_hub ({error}): {install_command('train')}") from error
    try:
        yield
    except (HTTPError, OSError, ValueError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise InputError(f"--push-to-hub {repo}: {short(lines[0])}") from error
