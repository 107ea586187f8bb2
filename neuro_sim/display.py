"""What a person sees while tokens come: streamed text, and a line with speed and events."""

from __future__ import annotations

import sys
import time
from typing import Any

from neuro_sim.decode import Result
from neuro_sim.runfile import summary
from neuro_sim.text import Pieces, Text
from spikeopd.errors import discard_stdout, printable, say

REFRESH_SECONDS = 0.2
LOG_SECONDS = 30.0
ENERGY_UNITS = ((1e12, "J"), (1e9, "mJ"), (1e6, "µJ"), (1e3, "nJ"), (1.0, "pJ"))


def status_line(result: Result) -> str:
    """tokens/s, SOPs/token, energy per token by Appendix E, mean firing rate."""
    s = summary(result)
    prompt = f"prompt {s['prompt_tokens_per_second']:.0f} tok/s" if s["prompt_tokens_per_second"] else ""
    # The first new token comes out of the prompt: a rate of generation needs a second one.
    speed = prompt or "no time taken"
    if s["tokens_per_second"]:
        speed = f"{s['tokens_per_second']:.1f} tok/s" + (f" ({prompt})" if prompt else "")
    made = f"{s['generated_tokens']:.0f} new token" + ("" if s["generated_tokens"] == 1 else "s")
    return (
        f"{made}  {speed}  {s['sops_per_token'] / 1e6:.3f} M {'MACs' if result.graded else 'SOPs'}/token  "
        f"{energy(s['pj_per_token'])}/token  rate {s['firing_rate']:.3f}"
    )


def energy(pj: float) -> str:
    """In the largest unit in which it is at least 1, as the energy reports show it."""
    factor, unit = next((pair for pair in ENERGY_UNITS if pj >= pair[0]), ENERGY_UNITS[-1])
    return f"{pj / factor:.4g} {unit}"


def put(text: str, must_finish: bool) -> bool:
    """Write to stdout at once. If its reader is gone: False when the run has more to do, else BrokenPipeError."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        if not must_finish:
            raise
        discard_stdout()
        return False
    return True


class Display:
    """Streams the text of a single sequence to stdout; keeps a status line where a terminal is, else logs now and then.

    On a terminal the text grows in place above the status line and is printed plainly at the end.
    must_finish: the run is wanted for more than its text, so it goes on when nobody reads that any more.
    """

    def __init__(self, text: Text, num_sequences: int, *, quiet: bool, stream: bool, must_finish: bool = False) -> None:
        self.text, self.quiet, self.must_finish = text, quiet, must_finish
        self.read = True  # until the reader of stdout goes away
        self.stream = stream and num_sequences == 1
        self.terminal = sys.stderr.isatty() and not quiet
        self.in_place = self.terminal and self.stream and sys.stdout.isatty()
        self.pieces = Pieces(text)
        self.last_refresh, self.last_log = 0.0, time.monotonic()
        self.live: Any = None

    def __enter__(self) -> Display:
        if self.terminal:
            from rich.console import Console
            from rich.live import Live

            self.live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def update(self, result: Result, sequence: int, token: int | None) -> None:
        now = time.monotonic()
        if self.stream and token is not None and not self.in_place:
            self._put(self.pieces.next(result.sequences[sequence].generated_tokens))
        if self.live is not None:
            if now - self.last_refresh >= REFRESH_SECONDS:
                self.last_refresh = now
                self.live.update(self._panel(result, sequence), refresh=True)
        elif not self.quiet and now - self.last_log >= LOG_SECONDS:
            self.last_log = now
            say(status_line(result))

    def _panel(self, result: Result, sequence: int) -> Any:
        from rich.console import Group
        from rich.text import Text as RichText

        line = RichText(status_line(result), style="dim")
        if not self.in_place:
            return line
        shown = printable(self.text.decode(result.sequences[sequence].generated_tokens)).splitlines()[-12:]
        return Group(RichText("\n".join(shown)), line)

    def _put(self, text: str) -> None:
        self.read = self.read and put(text, self.must_finish)

    def finish(self, result: Result) -> None:
        """The results, plainly, on stdout."""
        if self.stream:
            self._put(self.pieces.next(result.sequences[0].generated_tokens, final=True) + "\n")
        else:
            for index, sequence in enumerate(result.sequences):
                self._put(f"[{index}] {self.text.decode(sequence.generated_tokens)}\n")
