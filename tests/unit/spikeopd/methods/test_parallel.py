"""Two gloo processes on the CPU train the same student as one process: DDP here, FSDP2 in the slow suite."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spikeopd.runlog import read_metrics

TESTS = Path(__file__).parents[3]
# Adam divides by the gradient's own size: with its usual epsilon of 1e-8 it would blow the last bit of a vanishing
# gradient, where the order of a sum shows, up to a full step.
# Without the deployable phase: rounding to int8 would blow that last bit up to a step of the grid.
COMMON = ("train.adam_epsilon=1e-4", "stage1.deploy_updates=0")


def launch(folder, processes, *overrides, environment=None):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--master-port=0"]
    command += [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        str(TESTS / "two_ranks.py"),
        str(folder),
        *COMMON,
        *overrides,
    ]
    path = os.pathsep.join((str(TESTS), str(TESTS.parent)))  # this tree, whatever is installed
    fixed = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    settings = {**os.environ, **fixed, **(environment or {})}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=settings)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = read_metrics(folder / "metrics.jsonl")
    return lines, load_file(folder / "final" / "model.safetensors")


def same(one, two):
    for a, b in zip(one[0], two[0], strict=True):
        for key in ("stage1/loss", "stage2/loss", "stage2/adj", "stage2/spk"):
            if key in a:
                assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), (a["stage"], a["update"], key)
    for name, value in one[1].items():
        assert torch.allclose(value, two[1][name], atol=2e-6), name


def test_two_processes_equal_one(tmp_path):
    one = launch(tmp_path / "one", 1, "stage1.micro_batch_size=4", "stage2.micro_batch_size=4")
    two = launch(tmp_path / "two", 2, "stage1.micro_batch_size=2", "stage2.micro_batch_size=2")
    same(one, two)


@pytest.mark.slow
def test_fsdp2_equals_one_process(tmp_path):
    one = launch(tmp_path / "one", 1, "stage1.micro_batch_size=4", "stage2.micro_batch_size=4")
    fsdp = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "BiSpikCLMBlock",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }
    two = launch(tmp_path / "two", 2, "stage1.micro_batch_size=2", "stage2.micro_batch_size=2", environment=fsdp)
    same(one, two)


def accelerated(folder, *arguments):
    """Both stages of `tiny` by the command line, started by `accelerate launch` with nothing but these arguments."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines=1", "--dynamo_backend=no"]
    command += ["--mixed_precision=no", "--main_process_port=0", *arguments, str(TESTS / "on_cpu.py"), "--config=tiny"]
    command += [f"--output={folder}", "--quiet", "stage1.updates=2", "stage1.deploy_updates=0", "stage2.updates=2",
                "stage2.batch_size=4", "stage2.prompt_length=8", "stage2.max_completion_length=4",
                "stage2.micro_batch_size=2", "data.sequence_length=16", "data.max_validation_tokens=2000",
                "stage1.micro_batch_size=4", "train.adam_epsilon=1e-4"]  # fmt: skip
    settings = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=settings)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp2", "ddp"])
def test_the_launchers_own_defaults_and_the_shipped_files(tmp_path, config):
    """Frozen models are whole on every process: the reference agrees with the student before the first step."""
    shipped = TESTS.parent / "examples" / "accelerate" / f"{config}.yaml"
    ways = {"shipped": [f"--config_file={shipped}"]}
    if config == "fsdp2":
        ways["defaults"] = ["--use_fsdp", "--fsdp_version=2"]
    for name, words in ways.items():
        result = accelerated(tmp_path / name, "--num_processes=2", *words)
        assert result.returncode == 0, result.stderr[-3000:]
        lines = [line for line in read_metrics(tmp_path / name) if line["stage"] == "stage2"]
        assert len(lines) == 2 and abs(lines[0]["stage2/ref"]) < 1e-5


@pytest.mark.slow
def test_fsdp_of_the_first_version_is_refused_in_a_line(tmp_path):
    result = accelerated(tmp_path / "one", "--num_processes=2", "--use_fsdp", "--fsdp_version=1")
    assert result.returncode and "version 2 is needed" in result.stderr
