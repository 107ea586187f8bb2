"""Train both stages from Python and let the student speak.

python examples/train_tiny.py [OUTPUT [section.key=value ...]]      (e.g. runs/quick stage1.updates=30 stage2.updates=3)
"""

import sys

from transformers import AutoTokenizer

import spikeopd

output, *overrides = sys.argv[1:] or ["runs/tiny"]
run = spikeopd.train("tiny", output, overrides)
for stage in ("stage1", "stage2"):
    print(stage, {name: round(value, 3) for name, value in run.summary[stage]["final"].items()})
student, tokenizer = spikeopd.load_student(run.student), AutoTokenizer.from_pretrained(run.student)
ids = tokenizer("The following functions", return_tensors="pt").input_ids
print(tokenizer.decode(student.generate(ids, max_new_tokens=20, do_sample=True)[0]))
print(f"export it: python examples/export_and_verify.py {run.folder} bundle")
