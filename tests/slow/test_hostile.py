"""Every reader against the hostile corpus and random mutations, in a process with limits: refused in a line, or read.

SPIKEOPD_FUZZ sets the number of mutations per reader. Nothing may run code, hang or grow; counts are printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import READERS

pytestmark = pytest.mark.slow
FUZZ = int(os.environ.get("SPIKEOPD_FUZZ", "6000"))
SLOW = ("checkpoint, sealed", "weights of a checkpoint, sealed", "moments of a checkpoint, sealed",
        "configuration of a teacher")  # fmt: skip
TESTS = str(Path(__file__).parents[1])

CHILD = r"""
import json, os, random, resource, shutil, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import hostile
from spikeopd.errors import SpikeOPDError
name, place, fuzz = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
reader = hostile.READERS[name]
good = place / "good"
good.mkdir()
reader.make(good)
shutil.copytree(good, place / "try")
reader.read(place / "try")  # the good one is read, and what is imported is imported
content = (good / reader.file).read_bytes()
watching = False
def hook(event, arguments):
    if watching and (event in ("os.system", "os.exec", "os.fork", "pickle.find_class", "ctypes.dlopen")
                     or event == "subprocess.Popen" and "spikeopd.text.backend" not in str(arguments)):
        os._exit(99)
sys.addaudithook(hook)
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + (2 << 30),) * 2)
tally, slowest, kinds = {"read": 0, "refused": 0}, 0.0, 0
rng = random.Random(name)
def variants():
    yield from hostile.PLACES.items()
    yield from hostile.corpus(name, content)
    for number in range(fuzz):
        yield f"mutation {number}", hostile.mutated(content, rng)
sys.stderr.flush(); os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # said lines
# Readers that change their folder get a new one each time.
fresh = reader.file == "meta.json" or reader.file.startswith("update-") or name == "environment of a run"
for kind, data in variants():
    if fresh or kind in hostile.PLACES:
        shutil.rmtree(place / "try"); shutil.copytree(good, place / "try")
    file = place / "try" / reader.file
    if kind in hostile.PLACES:
        signal.alarm(300)  # wall: who waits for a pipe takes no CPU
        file.unlink()
        data(file)
        data = b""
    else:
        signal.alarm(0)
        if not file.is_file() or file.is_symlink() or file.stat().st_size > 1 << 30:
            shutil.rmtree(place / "try"); shutil.copytree(good, place / "try")
        file.write_bytes(data)
    kinds += not kind.startswith("mutation")
    began = time.process_time()
    watching = True
    try:
        reader.read(place / "try")
        outcome = "read"
    except SpikeOPDError as error:
        outcome = "refused"
        text = str(error)
        if len(text) > 2500 or "\x1b" in text or ("\n" in text and name != "recipe"):
            print(json.dumps({"kind": kind, "message": text[:3000]})); sys.exit(1)
    except BaseException as error:
        print(json.dumps({"kind": kind, "error": repr(error)[:500], "data": repr(data[:300])})); sys.exit(1)
    watching = False
    slowest = max(slowest, time.process_time() - began)
    tally[outcome] += 1
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
found = {"variants": kinds, "executions": sum(tally.values()), **tally, "slowest_s": round(slowest, 2)}
print(json.dumps(found | {"peak_mib": peak}))
"""


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_or_reads(tmp_path, name):
    # A worker for each odd tokenizer is slow: fewer of them.
    fuzz = FUZZ // 100 if name.startswith("tokenizer") else FUZZ // 10 if name in SLOW else FUZZ
    done = subprocess.run(
        [sys.executable, "-c", CHILD, TESTS, name, str(tmp_path), str(fuzz)],
        capture_output=True,
        text=True,
        timeout=3000,
        cwd=tmp_path,
    )
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    found = json.loads(done.stdout)
    print(f"\n{name}: {found}")
    assert found["slowest_s"] < 10 and not (tmp_path / "ran").exists()
    assert found["refused"] > 0 or name.startswith(("token cache", "environment"))  # which are made anew
    assert found["variants"] >= 33
