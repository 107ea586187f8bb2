"""Lightning OPD, the paper's control: full forward KL with L_spk on a fixed buffer of the checkpoint's rollouts.

The buffer is made once and never refreshed: sequences, the teacher's final features and the reference's spikes, in
memory-mapped files in the run folder. Through the frozen output table the features give the teacher's scores over the
whole vocabulary exactly, at w/V of the size (OPT-125M: 768/50272). No update runs teacher, reference or a rollout.
The publication (Wu et al. 2026) stores the teacher's log-probabilities of the sampled tokens of SFT rollouts, and has
no spikes to regularise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor

from spikeopd.errors import ConfigError
from spikeopd.files import check_sums, new_directory, remove_tree, write_json, write_sums
from spikeopd.methods import opd
from spikeopd.methods.adaptation import Adaptation, load_pair, prompt_rows, with_stage2
from spikeopd.methods.setup import Setup
from spikeopd.models.bispikclm import BiSpikCLMForCausalLM, Recorder
from spikeopd.models.teacher import output_table, run_teacher
from spikeopd.quality import RATE_SITES, layer_spikes, rate_sites
from spikeopd.rollout import rollout, uniforms
from spikeopd.runlog import RunLog


@dataclass(frozen=True)
class Buffer:
    """N trajectories: sequences [N, P + K], teacher features [N, K, w], reference spikes [N, layers]."""

    sequences: NDArray[np.int64]
    teacher: NDArray[np.float32]
    spikes: NDArray[np.float64]

    def draw(self, rows: int, seed: int, update: int) -> NDArray[np.int64]:
        """Row numbers of an update, from (seed, update) alone; no row twice if there are enough."""
        generator = np.random.Generator(np.random.Philox(key=np.array([seed ^ 0x116, update], dtype=np.uint64)))
        return generator.choice(len(self.sequences), size=rows, replace=rows > len(self.sequences))


class ReplayPolicy(opd.DistilledPolicy):
    def spikes(self, sequences: Tensor, k: int, scope: str) -> Tensor:
        """Spikes of every layer on stored prefixes, [layers]: the batch's rates are needed before any backward."""
        layers = tuple(range(self.student.config.num_hidden_layers))
        recorder = Recorder(RATE_SITES[scope], layers, tokens=slice(-k, None))
        with torch.no_grad():
            self.student.model(sequences[:, :-1], use_cache=False, recorder=recorder)
            return layer_spikes(recorder, layers, scope)


def run(setup: Setup, log: RunLog, student_path: str, *, resume: bool = False) -> dict[str, Any]:
    setup = with_stage2(setup, ref_coef=0.0)
    student, reference = load_pair(setup, student_path)
    buffer = open_buffer(setup, student, log.folder / "stage2" / "buffer", log)
    divergence = opd.chosen_divergence(setup.config.stage2)
    policy = ReplayPolicy(student, setup.config.train.kl_chunk_tokens, divergence)
    return adapt(Adaptation(setup, log, policy, reference, resume=resume), buffer)


def adapt(run: Adaptation[ReplayPolicy], buffer: Buffer) -> dict[str, Any]:
    """Updates on stored trajectories. Their statistics are the buffer's, not the student's: not logged."""
    for update in run.updates(run.options.updates):
        values = opd.descend(run, replay(run, buffer, update))
        norm = run.step(values["loss"], run.options.learning_rate)
        run.log(update, values | {"grad_norm": norm})
    return run.finish()


def replay(run: Adaptation[ReplayPolicy], buffer: Buffer, update: int) -> list[opd.Visited]:
    setup, options, policy = run.setup, run.options, run.objective
    k, table = options.max_completion_length, teacher_table(setup)
    chosen = torch.from_numpy(buffer.draw(options.batch_size, setup.config.train.seed, update))
    parts = []
    for rows in setup.micro_batches(chosen, options.micro_batch_size):
        at = np.sort(rows.cpu().numpy())
        sequences = torch.from_numpy(np.array(buffer.sequences[at])).to(setup.device)
        teacher = torch.from_numpy(np.array(buffer.teacher[at])).to(table)
        spikes = torch.from_numpy(np.array(buffer.spikes[at])).sum(0).float().to(setup.device)
        active = run.call(policy.spikes, sequences, k, options.rate_scope)
        parts.append(opd.Visited(sequences, teacher, None, active, spikes if options.spike_coef else None))
    return parts


def teacher_table(setup: Setup) -> Tensor:
    """The teacher's output table, [vocabulary, w]."""
    table = output_table(setup.teacher).weight
    assert isinstance(table, Tensor)
    return table


def trajectories(setup: Setup) -> int:
    """As many as the updates use, or as many as fit into stage2.buffer_gib; never fewer than a batch."""
    options = setup.config.stage2
    k, width = options.max_completion_length, teacher_table(setup).shape[1]
    row = 4 * k * width + 8 * (options.prompt_length + k) + 8 * len(options.spike_layers)
    fitting = int(options.buffer_gib * 2**30) // row
    if fitting < options.batch_size:
        raise ConfigError(
            f"stage2.buffer_gib: {options.buffer_gib} holds {fitting} trajectories of {row} bytes, less than one batch "
            f"of {options.batch_size}; give at least {options.batch_size * row / 2**30:.3g}"
        )
    return min(options.updates * options.batch_size, fitting)


def open_buffer(setup: Setup, student: BiSpikCLMForCausalLM, folder: Path, log: RunLog) -> Buffer:
    """The buffer of this run: read if it is there, else made by the main process while the others wait.

    A damaged one is made again, which gives the same: it follows from the student to start from, which is not trained.
    """
    most = int(setup.config.stage2.buffer_gib * 2**30) + (1 << 20)
    with setup.accelerator.main_process_first():
        if folder.exists() and (problem := check_sums(folder, most)):
            log.warn(f"{folder} is damaged ({problem}); its trajectories are made again")
            remove_tree(folder)
        if not folder.exists():
            make_buffer(setup, student, folder, log)
    names = ("sequences", "teacher", "spikes")
    return Buffer(*(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names))


@torch.no_grad()
def make_buffer(setup: Setup, student: BiSpikCLMForCausalLM, folder: Path, log: RunLog) -> None:
    options, seed, count = setup.config.stage2, setup.config.train.seed, trajectories(setup)
    k, length = options.max_completion_length, options.prompt_length + options.max_completion_length
    layers, width = opd.monitored(options), teacher_table(setup).shape[1]
    batches, size = -(-count // options.batch_size), options.micro_batch_size
    with new_directory(folder) as target, log.progress("buffer", batches, unit="batch") as bar:
        shapes = {
            "sequences": (np.int64, (count, length)),
            "teacher": (np.float32, (count, k, width)),
            "spikes": (np.float64, (count, len(layers))),
        }
        files: dict[str, np.memmap[Any, Any]] = {
            name: open_memmap(target / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)  # type: ignore[no-untyped-call]
            for name, (dtype, shape) in shapes.items()
        }
        for index in range(batches):
            prompts = prompt_rows(setup, index, options.prompt_length).to(setup.device)
            uniform = uniforms(seed, index, options.batch_size, k)
            at = index * options.batch_size
            for rows, u in zip(torch.split(prompts, size), torch.split(uniform, size), strict=True):
                end = min(at + len(rows), count)
                keep = end - at
                if keep <= 0:
                    break
                with setup.accelerator.autocast():
                    sequences = rollout(student, rows, u, options.temperature).sequences[:keep]
                files["sequences"][at:end] = sequences.cpu().numpy()
                files["teacher"][at:end] = (
                    run_teacher(setup.teacher, sequences[:, :-1], internals=False).features[:, -k:].float().cpu()
                )
                if layers:
                    with setup.accelerator.autocast():
                        files["spikes"][at:end] = _row_spikes(student, sequences, layers, k, options.rate_scope).cpu()
                at = end
            bar.advance()
        for file in files.values():
            file.flush()
        write_json(target / "buffer.json", {"trajectories": count, "bytes": sum(f.nbytes for f in files.values())})
        write_sums(target)


def _row_spikes(
    student: BiSpikCLMForCausalLM, sequences: Tensor, layers: tuple[int, ...], k: int, scope: str
) -> Tensor:
    """Spikes of each row and layer, [rows, layers]."""
    recorder = Recorder(RATE_SITES[scope], layers, tokens=slice(-k, None))
    student.model(sequences[:, :-1], use_cache=False, recorder=recorder)

    def of(layer: int) -> Tensor:
        sites = rate_sites(student.config, scope)
        first, *others = (recorder.spikes[layer, site].double().sum((0, 2, 3)) for site in sites)
        return sum(others, first)

    return torch.stack([of(layer) for layer in layers], 1)
