"""What a student spends: exported by the command, fed validation text, every event counted and priced.

The exporter is called as a command: `spikeopd` imports it nowhere, packages meet through files.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from spikeopd.config import Config
from spikeopd.errors import CheckFailed, short

# Without the working folder, whose files are nobody's modules.
EXPORT = "import sys; sys.path[:] = [p for p in sys.path if p]; from export.cli import main; sys.exit(main())"
WINDOWS = 16  # of the validation text, each as long as a window of Stage 1


def measure(config: Config, student: Path, folder: Path) -> dict[str, Any]:
    """Energies per token [nJ] (`efficiency.of_counts`) and, of spikes, CPU milliseconds per token on the event engine.

    Writes a bundle to `folder` and removes it.
    """
    from spikeopd.evaluation.bundle_model import count_events
    from spikeopd.studies.efficiency import of_counts
    from spikeopd.text.tokenizer import load_tokenizer
    from spikeopd.text.tokens import prepare, sequential_windows

    data, bundle = config.data, folder / "bundle"
    words = [str(student), "--output", str(bundle), "--evaluation-tokens", "0", "--verification-tokens", "8", "--quiet"]
    done = subprocess.run([sys.executable, "-c", EXPORT, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckFailed(f"{student}: the export failed ({short(done.stderr.strip().splitlines()[-1:])})")
    tokenizer = load_tokenizer(data.tokenizer, data.framing)
    text = prepare(
        data.validation_source or data.source, tokenizer, "validation", data.cache_dir, data.max_validation_tokens
    )
    windows = sequential_windows(text, data.sequence_length)[:WINDOWS]
    counted = count_events(bundle, [tuple(int(token) for token in window) for window in windows])
    shutil.rmtree(bundle)
    found: dict[str, Any] = {"tokens": counted.activity.tokens}
    found |= of_counts(counted.shape, counted.activity, counted.keys)
    if counted.cpu_seconds is not None:
        found["event_ms"] = 1e3 * counted.cpu_seconds / counted.activity.tokens
    return found
