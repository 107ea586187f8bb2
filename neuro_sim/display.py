"""What a person sees while tokens come: streamed text, and a line with speed and events."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from neuro_sim.decode import PHASES, Generated, Result
from neuro_sim.runfile import summary
from neuro_sim.text import Pieces, Text
from spikeopd.contracts import APPENDIX_E_PJ
from spikeopd.errors import discard_stdout, printable, say

REFRESH_SECONDS = 0.2
LOG_SECONDS = 30.0
ENERGY_UNITS = ((1e12, "J"), (1e9, "mJ"), (1e6, "µJ"), (1e3, "nJ"), (1.0, "pJ"))


def columns() -> int | None:
    """How much a line on stderr may hold; None where it goes to a file."""
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else None


def status_line(result: Result, width: int | None = None) -> str:
    """tokens/s, SOPs/token, energy per token by Appendix E, mean firing rate; less of it where that is too wide."""
    s = summary(result)
    prompt = f"prompt {s['prompt_tokens_per_second']:.0f} tok/s" if s["prompt_tokens_per_second"] else ""
    # The first new token comes out of the prompt: a rate of generation needs a second one.
    speed = prompt or "no time taken"
    if s["tokens_per_second"]:
        speed = f"{s['tokens_per_second']:.1f} tok/s" + (f" ({prompt})" if prompt else "")
    made = f"{s['generated_tokens']:.0f} new token" + ("" if s["generated_tokens"] == 1 else "s")
    events = f"{s['sops_per_token'] / 1e6:.3f} M {'MACs' if result.graded else 'SOPs'}/token"
    spent, rate = f"{energy(s['pj_per_token'])}/token", f"rate {s['firing_rate']:.3f}"
    alone = speed.partition(" (")[0]
    forms = ([made, speed, events, spent, rate], [made, alone, events, spent, rate], [made, alone, spent], [alone])
    lines = ["  ".join(parts) for parts in forms]
    return next((line for line in lines if width is None or len(line) < width), lines[-1])


def stats_lines(result: Result, load_seconds: float) -> list[str]:
    """--stats: time of each phase, and where events and energy went."""
    activity, lines = result.activity, [f"loading       {load_seconds:8.3f} s"]
    for phase in PHASES:
        fed, seconds = result.phases[phase].tokens, result.seconds[phase]
        rate = f"{fed / seconds:10.1f} tok/s" if fed and seconds else ""
        lines.append(f"{phase:<13} {seconds:8.3f} s  {fed:6d} tokens fed {rate}")
    total = sum(int(counts.sum()) for counts in activity.sops.values()) * APPENDIX_E_PJ["ac"]
    macs = activity.macs["embed"] + activity.macs["head"]
    total += macs * APPENDIX_E_PJ["mac"]
    tokens = max(1, activity.tokens)

    def row(name: str, count: int, unit: str, pj: float) -> str:
        share = 100 * pj / total if total else 0.0
        return f"{name:<13} {count / tokens:12,.0f} {unit}/token  {energy(pj / tokens):>9}/token {share:5.1f} %"

    for name, counts in activity.sops.items():
        lines.append(row(name, int(counts.sum()), "SOPs", APPENDIX_E_PJ["ac"] * int(counts.sum())))
    lines.append(row("host, dense", macs, "MACs", APPENDIX_E_PJ["mac"] * macs))
    for layer in range(len(activity.sops_unmasked)):
        spikes = sum(int(activity.spikes[site][layer].sum()) for site in activity.spikes if site not in ("a", "embed"))
        cells = sum(int(activity.cells[site][layer].sum()) for site in activity.cells if site not in ("a", "embed"))
        lines.append(f"layer {layer:<7} rate {spikes / max(1, cells):.3f}")
    return lines


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

    def __init__(
        self,
        text: Text,
        num_sequences: int,
        *,
        quiet: bool,
        stream: bool,
        must_finish: bool = False,
        stop: Sequence[str] = (),
    ) -> None:
        self.text, self.quiet, self.must_finish, self.stop = text, quiet, must_finish, stop
        self.read = True  # until the reader of stdout goes away
        self.stream = stream and num_sequences == 1
        self.terminal = sys.stderr.isatty() and not quiet
        self.in_place = self.terminal and self.stream and sys.stdout.isatty()
        self.pieces = Pieces(text, stop)
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
            say(status_line(result, columns()))

    def _panel(self, result: Result, sequence: int) -> Any:
        from rich.console import Group
        from rich.text import Text as RichText

        line = RichText(status_line(result, columns()), style="dim")
        if not self.in_place:
            return line
        made = result.sequences[sequence]
        prompt, text = printable(self.text.decode(made.prompt_tokens)), printable(self._whole(made))
        shown = RichText.assemble((prompt, "dim"), text).split("\n", allow_blank=True)[-12:]
        return Group(*shown, line)

    def _whole(self, sequence: Generated) -> str:
        return Pieces(self.text, self.stop).next(sequence.generated_tokens, final=True)

    def _put(self, text: str) -> None:
        self.read = self.read and put(text, self.must_finish)

    def finish(self, result: Result) -> None:
        """The results, plainly, on stdout."""
        if self.stream:
            # A terminal shows the prompt before its continuation; a file or a pipe gets what is new alone.
            before = self.text.decode(result.sequences[0].prompt_tokens) if self.in_place else ""
            self._put(before + self.pieces.next(result.sequences[0].generated_tokens, final=True) + "\n")
        else:
            for index, sequence in enumerate(result.sequences):
                self._put(f"[{index}] {self._whole(sequence)}\n")
