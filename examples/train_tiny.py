"""Train both stages from Python, a few updates only, and let the student speak.

python examples/train_tiny.py
"""

import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from spikeopd.config import load_config
from spikeopd.models.bispikclm import register
from spikeopd.training import train

config = load_config("tiny", ["stage1.updates=30", "stage2.updates=3"])
with tempfile.TemporaryDirectory() as folder:
    summary = train(config, Path(folder) / "run")
    for stage in ("stage1", "stage2"):
        print(stage, {name: round(value, 3) for name, value in summary[stage]["final"].items()})
    register()  # teach the Auto classes the student
    final = Path(folder) / "run" / "final"
    student, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    ids = tokenizer("The following functions", return_tensors="pt").input_ids
    print(tokenizer.decode(student.generate(ids, max_new_tokens=20, do_sample=True)[0]))
