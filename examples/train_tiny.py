"""Train both stages from Python, a few updates only, and let the student speak.

python examples/train_tiny.py
"""

import tempfile

from transformers import AutoTokenizer

import spikeopd

with tempfile.TemporaryDirectory() as folder:
    run = spikeopd.train("tiny", output=f"{folder}/run", overrides={"stage1.updates": 30, "stage2.updates": 3})
    for stage in ("stage1", "stage2"):
        print(stage, {name: round(value, 3) for name, value in run.summary[stage]["final"].items()})
    student, tokenizer = spikeopd.load_student(run.student), AutoTokenizer.from_pretrained(run.student)
    ids = tokenizer("The following functions", return_tensors="pt").input_ids
    print(tokenizer.decode(student.generate(ids, max_new_tokens=20, do_sample=True)[0]))
