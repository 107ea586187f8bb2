"""The folder of a run: config.yaml, env.json, metrics.jsonl, summary.json; and its progress on the terminal.

metrics.jsonl has one object per logged update: `stage`, `update`, `time` (seconds since this process began) and keys
such as `stage2/loss`. It is flushed line by line: a killed run leaves at most a torn last line, which readers skip.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import spikeopd
from spikeopd.errors import BackendMissing, InputError, SpikeOPDError, printable, say, short
from spikeopd.files import (
    LOCK,
    parse_json,
    read_json,
    regular_size,
    remove_leftovers,
    sole_process,
    write_json,
    write_text,
)

SCHEMA_VERSION = 1
SECONDS_BETWEEN_LINES = 30.0
METRICS_LIMIT = 256 << 20  # bytes; half a million updates
PACKAGES = (
    "spikeopd",
    "numpy",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "datasets",
    "pyyaml",
)


class RunLog:
    """Writes a run folder. active=False (every process but the first) makes each method do nothing."""

    def __init__(
        self, folder: Path | str, *, active: bool = True, quiet: bool = False, tensorboard: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.active = active
        self.quiet = quiet
        self._began = time.monotonic()
        self._metrics: IO[str] | None = None
        self._events = TensorBoardReader(self.folder / "tensorboard") if tensorboard and active else None
        self._held = contextlib.ExitStack()
        self._begun = False  # here and now, not resumed

    @property
    def metrics_path(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def config_path(self) -> Path:
        return self.folder / "config.yaml"

    def hold(self) -> None:
        """Be the only process that writes here, until `close` or the end of the process, however it ends."""
        if not self.active:
            return
        new = not self.folder.exists()
        try:
            if new:  # what was asked for in vain leaves no empty folder behind
                self._held.callback(_remove_if_empty, self.folder)
            self._held.enter_context(sole_process(self.folder))
            remove_leftovers(self.folder)
        except OSError as error:
            raise InputError(
                f"{self.folder}: cannot be written ({error.strerror or error}); give another --output"
            ) from error

    def start(self, config_yaml: str, environment: Mapping[str, Any], *, resume: bool = False) -> None:
        """Begin or continue a run; refuse to overwrite one, and to continue where there is none."""
        if not self.active:
            return  # the first process may have begun it a moment ago
        exists = self.config_path.is_file()
        if exists and not resume:
            raise InputError(f"{self.folder} already holds a run; continue it with --resume, or give another --output")
        if resume and not exists:
            raise InputError(f"{self.folder} holds no run to resume (no config.yaml); leave --resume out to begin one")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / "env.json"
            record = _read_json(path) if resume and path.is_file() else {}
            if record:
                before = record.get("resumed")
                record["resumed"] = [*(before if isinstance(before, list) else []), dict(environment)]
            write_json(path, _plain(record) or dict(environment))  # a NaN in an old one is no reason to stop
            write_text(self.config_path, config_yaml)  # last: it marks the folder as a run
            self._begun = not resume
        except OSError as error:
            raise InputError(
                f"{self.folder}: cannot be written ({error.strerror or error}); give another --output"
            ) from error

    def metrics(self, stage: str, update: int, values: Mapping[str, Any]) -> None:
        """Append one line; names get the stage in front (`loss` -> `stage2/loss`). NaN and infinity become null."""
        if not self.active:
            return
        line = {"stage": stage, "update": update, "time": round(time.monotonic() - self._began, 3)}
        line |= {name if "/" in name else f"{stage}/{name}": _plain(value) for name, value in values.items()}
        if self._metrics is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.metrics_path
            if path.is_symlink() or path.exists() and not path.is_file():  # lines would go somewhere else
                raise InputError(f"{path}: not a file of this folder; remove it to go on")
            _drop_torn_line(path)
            self._metrics = open(self.metrics_path, "a", encoding="utf-8")  # noqa: SIM115 - kept open for the run
        self._metrics.write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")
        self._metrics.flush()
        if self._events:
            self._events.feed(line)

    def truncate(self, stage: str, update: int) -> None:
        """Forget what was logged after `update` of `stage`, as a resume from that checkpoint will log it again.

        A stage behind it keeps its lines: it goes on from its own checkpoint, or forgets them when it begins anew.
        """
        if not self.active or not self.metrics_path.is_file():
            return
        self._close_metrics()
        lines = read_metrics(self.metrics_path)
        kept = [line for line in lines if line.get("stage") != stage or _whole(line.get("update")) <= update]
        write_text(self.metrics_path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
        if self._events:
            self._events.rebuild(kept)

    def summary(self, values: Mapping[str, Any]) -> None:
        if self.active:
            write_json(self.folder / "summary.json", {"schema_version": SCHEMA_VERSION, **_plain(dict(values))})

    def note(self, message: str) -> None:
        """A line on stderr, above the progress bar if there is one."""
        if self.active and not self.quiet:
            _console().print(printable(message), markup=False, highlight=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        """A line on stderr that also a quiet run has to say."""
        if self.active and self.quiet:
            say(message)
        else:
            self.note(message)

    @contextlib.contextmanager
    def progress(self, name: str, total: int, done: int = 0, unit: str = "update") -> Iterator[Progress]:
        """Progress over `total` updates of which `done` are behind: a bar on a terminal, else a line every 30 s."""
        if not self.active or self.quiet:
            yield Progress(name, total, done)
        elif sys.stderr.isatty():
            with _Bar(name, total, done) as bar:
                yield bar
        else:
            lines = _Lines(name, total, done, sys.stderr, unit)
            yield lines
            lines.finish()

    def close(self) -> None:
        self._close_metrics()
        if self._events:
            self._events.close()
        self._held.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, SpikeOPDError):
            self._withdraw()
        self.close()

    def _withdraw(self) -> None:
        """A run that was refused before its first update must not stand in the way of its correction."""
        marks = (self.folder / "env.json", self.config_path)
        if self._begun and set(self.folder.iterdir()) <= {*marks, self.folder / LOCK}:
            for path in marks:
                path.unlink(missing_ok=True)

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


# --- reading back ----------------------------------------------------------------------------------------------------


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Every line of a metrics.jsonl (or of the run folder that holds one); a torn last line is left out."""
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    try:
        if (size := regular_size(path)) > METRICS_LIMIT:
            raise InputError(f"{path}: {size} bytes are too many for the metrics of a run")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; give a run folder or its metrics.jsonl") from error
    except ValueError as error:
        raise InputError(f"{path}: {short(error)}; give a run folder or its metrics.jsonl") from error
    complete = text[: text.rfind("\n") + 1]
    lines = []
    for number, line in enumerate(complete.split("\n")[:-1], start=1):
        try:
            lines.append(dict(parse_json(line)))
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}:{number}: not a JSON object; the file was damaged, remove this line") from error
    return lines


def _drop_torn_line(path: Path) -> None:
    """Cut what a killed process left behind the last line end, so that the next line starts fresh."""
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except (ValueError, TypeError):
        return {}


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's; what JSON cannot say (NaN, infinity) as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if hasattr(value, "tolist"):  # numpy and torch scalars and arrays
        return _plain(value.tolist())
    return float(value) if math.isfinite(value) else None


# --- where a run happens ---------------------------------------------------------------------------------------------


def environment(*, device: str, seeds: Mapping[str, int], argv: Sequence[str] | None = None) -> dict[str, Any]:
    """What is needed to understand a result later: versions, commit, machine, seeds and the command."""
    return {
        "schema_version": SCHEMA_VERSION,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "argv": list(sys.argv if argv is None else argv),
        "device": device,
        "seeds": dict(seeds),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "versions": {name: _version(name) for name in PACKAGES},
        **_git(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return spikeopd.__version__ if name == "spikeopd" else None


def _git() -> dict[str, Any]:
    """Commit of the source tree this package runs from, or None when it was installed from a wheel."""

    def run(*arguments: str) -> str | None:
        try:
            command = ["git", "-C", str(Path(__file__).parent), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An environment inside another project's repository must not be taken for ours.
    if run("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return {"git_commit": None, "git_dirty": None}
    status = run("status", "--porcelain", "--untracked-files=no")
    return {"git_commit": run("rev-parse", "HEAD"), "git_dirty": None if status is None else bool(status)}


# --- progress --------------------------------------------------------------------------------------------------------


class Progress:
    """Counts updates and shows nothing; the others show."""

    def __init__(self, name: str, total: int, done: int) -> None:
        self.name, self.total, self.done = name, total, done

    def advance(self, count: int = 1, /, **values: float) -> None:
        """One more update is done (or `count`); `values` (loss, perplexity …) stand beside it."""
        self.done += count


class _Lines(Progress):
    """A line at the start, every 30 seconds and at the end."""

    def __init__(self, name: str, total: int, done: int, stream: IO[str], unit: str = "update") -> None:
        super().__init__(name, total, done)
        self._stream, self._first, self._unit = stream, done, unit
        self._values: Mapping[str, float] = {}
        self._began = self._last = time.monotonic()
        self._write(f"{name}: {unit} {done} of {total}")

    def advance(self, count: int = 1, /, **values: float) -> None:
        super().advance(count, **values)
        self._values = values
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            rate = (self.done - self._first) / (now - self._began)
            self._write(f"{self._state()}, {_clock((self.total - self.done) / rate)} left")

    def finish(self) -> None:
        self._write(f"{self._state()}, took {_clock(time.monotonic() - self._began)}")

    def _state(self) -> str:
        return ", ".join([f"{self.name}: {self._unit} {self.done} of {self.total}", *_words(self._values)])

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class _Bar(Progress):
    """A rich progress bar with time left."""

    def __init__(self, name: str, total: int, done: int) -> None:
        super().__init__(name, total, done)
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}", markup=False),
            console=_console(),
        )
        self._task = self._bar.add_task(name, total=total, completed=done, values="")

    def advance(self, count: int = 1, /, **values: float) -> None:
        super().advance(count, **values)
        self._bar.update(self._task, advance=count, values=_fitting(_words(values), self._bar.console.width - 56))

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _fitting(words: Sequence[str], room: int) -> str:
    """As many of them as there is room for, at least one: else the bar gives up its own numbers."""
    fitting = list(words[:1])
    for word in words[1:]:
        if len(", ".join([*fitting, word])) > room:
            break
        fitting.append(word)
    return ", ".join(fitting)


def _words(values: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items()]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


@lru_cache(maxsize=1)
def _console_of(stream: IO[str]) -> Any:
    from rich.console import Console

    return Console(file=stream)


def _console() -> Any:
    """One console for stderr, so that notes appear above the bar instead of through it."""
    return _console_of(sys.stderr)


# --- TensorBoard -----------------------------------------------------------------------------------------------------


class TensorBoardReader:
    """Turns lines of metrics.jsonl into TensorBoard events, while a run goes on or afterwards.

    `TensorBoardReader(folder).rebuild(read_metrics(run))` makes the events of a finished run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise BackendMissing("train.tensorboard needs TensorBoard: pip install tensorboard") from error
        self._open = SummaryWriter

    def feed(self, line: Mapping[str, Any]) -> None:
        if self._writer is None:
            self._writer = self._open(str(self.folder))
        for name, value in line.items():
            if "/" in name and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, line["update"])

    def rebuild(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Replace the events: TensorBoard would show those of forgotten updates beside the new ones."""
        self.close()
        for old in self.folder.glob("events.out.tfevents.*"):
            old.unlink()
        for line in lines:
            self.feed(line)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
