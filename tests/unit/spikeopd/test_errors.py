"""The wrapper of every command: exit codes, streams that are closed or cannot show a letter, and files not writable."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from spikeopd.errors import CheckFailed, InputError, check_writable, run_command, short


def command(body: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    """A command whose body is these statements, in a process of its own."""
    # A shell's background job ignores SIGINT, and so would its children.
    script = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script += f"import sys\nfrom spikeopd.errors import run_command, say\ndef body(argv):\n    {body}\n"
    script += "sys.exit(run_command('prog', body, None))"
    return subprocess.run([sys.executable, "-c", script], check=False, stderr=subprocess.PIPE, **options)  # type: ignore


@pytest.mark.parametrize(
    ("error", "code"),
    [(InputError("a"), 2), (CheckFailed("a"), 3), (KeyboardInterrupt(), 130), (BrokenPipeError(), 141)],
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def body(argv: object) -> int:
        raise error

    assert run_command("prog", body, None) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if code == 141 else 1)


@pytest.mark.parametrize("body", ["print('text')", "print('text', flush=True)", "print('much ' * 100000)"])
def test_a_reader_that_is_gone_is_no_success_and_no_noise(body: str) -> None:
    import os

    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = command(body, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_letters_the_terminal_does_not_know_are_replaced() -> None:
    import os

    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = command("print('a – b')\n    say('c – d')", stdout=subprocess.PIPE, env=environment)
    assert (done.returncode, done.stdout) == (0, b"a ? b\n")
    assert done.stderr == rb"c \u2013 d" + b"\n"


def test_closed_streams_do_not_end_a_command(tmp_path: Path) -> None:
    target = tmp_path / "done"
    body = f"sys.stdout.write('x'); say('y'); open({str(target)!r}, 'w').close()"
    script = f"import sys\nfrom spikeopd.errors import run_command, say\ndef body(argv):\n    {body}\n"
    (tmp_path / "script.py").write_text(script + "sys.exit(run_command('prog', body, None))")
    done = subprocess.run(["sh", "-c", f"{sys.executable} {tmp_path / 'script.py'} >&- 2>&-"], check=False)
    assert done.returncode == 0 and target.is_file()


def test_a_line_that_nobody_reads_is_lost_and_the_work_is_not() -> None:
    import os

    reading, writing = os.pipe()
    os.close(reading)
    script = "import sys\nfrom spikeopd.errors import run_command, say\ndef body(argv):\n    say('y'); print('done')\n"
    script += "sys.exit(run_command('prog', body, None))"
    done = subprocess.run([sys.executable, "-c", script], check=False, stdout=subprocess.PIPE, stderr=writing)
    os.close(writing)
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_what_can_be_written_and_what_cannot(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    check_writable(tmp_path / "new", "--output")
    check_writable(tmp_path / "deep" / "er" / "new", "--output")
    check_writable(str(tmp_path / "file"), "--output")
    for path in (tmp_path, "", tmp_path / "file" / "x", "/proc/x/y", "/dev/null", tmp_path / ("n" * 300) / "x"):
        with pytest.raises(InputError, match="^--output .*cannot be written"):
            check_writable(path, "--output")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


# --- what a terminal sees --------------------------------------------------------------------------------------------

EVIL = "a\x1b]0;owned\x07b\x9b2Jc\rd\u202ee\x00f"
SAFE = r"a\x1b]0;owned\x07b\x9b2Jc\rd\u202ee\x00f"


def test_a_terminal_never_sees_a_control_sequence_and_a_file_sees_what_was_written(tmp_path: Path) -> None:
    import os
    import pty

    reading, writing = pty.openpty()
    done = command(f"print({EVIL!r}); say({EVIL!r})", stdout=writing)
    os.close(writing)
    shown = os.read(reading, 1000).decode().strip()
    os.close(reading)
    assert done.returncode == 0 and shown == SAFE and done.stderr.decode().strip() == SAFE
    reading, writing = pty.openpty()
    assert command(r"sys.stdout.write('\x1b[0m')", stdout=writing).returncode == 0
    os.close(writing)
    assert os.read(reading, 1000) == b"\x1b[0m", "colours off, which colorama writes at the end, is no text"
    os.close(reading)
    with open(tmp_path / "file", "wb") as file:
        assert command(f"print({EVIL!r})", stdout=file).returncode == 0
    assert (tmp_path / "file").read_text() == EVIL.replace("\r", "\n") + "\n"  # universal newlines


def test_long_values_are_cut() -> None:
    assert short("x" * 10**6) == "x" * 157 + "..." and short("a\n b\t\x1b") == r"a b \x1b"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (
            "raise OSError(28, 'No space left on device', '/d/file')",
            b"prog: /d/file: No space left on device; make room",
        ),
        ("raise PermissionError(13, 'Permission denied', '/f')", b"prog: /f: Permission denied; see to it"),
        ("raise MemoryError('Unable to allocate 9 TiB')", b"prog: not enough memory (Unable to allocate 9 TiB)"),
    ],
)
def test_what_the_machine_refuses_is_one_line(body: str, line: bytes) -> None:
    done = command(body)
    assert done.returncode == 2 and done.stderr.startswith(line) and done.stderr.count(b"\n") == 1


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_an_interrupted_import_is_an_interrupt() -> None:
    """Libraries in C answer Ctrl-C with an ImportError of their own."""
    body = "import os, signal\n    try: os.kill(os.getpid(), signal.SIGINT); sys.stdin.read()\n"
    body += "    except KeyboardInterrupt: pass\n    raise ImportError('multiarray failed to import')"
    done = command(body)
    assert (done.returncode, done.stderr) == (130, b"prog: interrupted\n")
    assert command("raise ImportError('really')").returncode == 1


def test_ctrl_c_while_a_command_is_loaded_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nmain = int\n")
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from spikeopd import start\nstart._run('slow')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (-2, b""), "as the shell knows it of any program"


def test_every_command_starts_there() -> None:
    from spikeopd import start

    scripts = re.findall(
        r'^(spikeopd-[\w-]+) = "([\w.]+):(\w+)"', (Path(__file__).parents[3] / "pyproject.toml").read_text(), re.M
    )
    assert len(scripts) == 8
    for name, module, function in scripts:
        assert module == "spikeopd.start" and callable(getattr(start, function)), name
