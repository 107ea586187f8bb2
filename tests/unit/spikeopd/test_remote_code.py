"""The student's code beside its weights: loaded where there is torch, transformers and what they need, nothing more."""

import json
import subprocess
import sys
from importlib.metadata import distribution

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file

from spikeopd.errors import InputError
from spikeopd.remote_code import FILE, add_remote_code, remote_code
from spikeopd.students import load_student
from tests.small_students import INHIBITING, PLUS, small_student, tokens

FORMS = {
    "paper": {},
    "plus": PLUS,
    "inhibiting int8": INHIBITING | {"deploy_precision": "int8"},
    "plus int8": PLUS | {"deploy_precision": "int8"},
    "paper int8": {"readout": "residual", "deploy_precision": "int8"},
    "plus int4": PLUS | {"deploy_precision": "int4"},
    "twin int8": PLUS | {"deploy_precision": "int8", "neuron": "quantised"},
}
LOAD = """
import json, sys
import torch, transformers
from safetensors.torch import save_file
told = json.loads(sys.argv[1])
for folder, ids in told.items():
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
        sys.exit("loaded without being asked")
    except ValueError:
        pass
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
        text = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
    save_file({"logits": logits, "text": text}, folder + "/found.safetensors")
for name in ("spikeopd", "numba", "neuro_sim", "export", "energy"):
    try:
        __import__(name)
        sys.exit(f"{name} is here")
    except ImportError:
        pass
"""


def environment(folder, *names):
    """Links to the installed distributions that these names need, and to no other."""
    folder.mkdir()
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        found = distribution(name)
        for top in {path.parts[0] for path in found.files if path.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
        needs = [Requirement(text) for text in found.requires or ()]
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return folder


def test_a_process_without_the_package_computes_the_same_bits(tmp_path):
    told = {}
    for index, options in enumerate(FORMS.values()):
        folder = tmp_path / str(index)
        small_student(seed=index, **options).save_pretrained(folder)
        add_remote_code(folder)
        told[str(folder)] = tokens(9, seed=index)
    only = environment(tmp_path / "only", "torch", "transformers")
    code = f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(only)!r}]" + LOAD
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, json.dumps(told)],
        capture_output=True, text=True, cwd=tmp_path,
        env={"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for name, (folder, ids) in zip(FORMS, told.items(), strict=True):
        found = load_file(f"{folder}/found.safetensors")
        student = load_student(folder)
        with torch.no_grad():
            logits = student(torch.tensor([ids])).logits
            text = student.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
        assert logits.dtype == found["logits"].dtype and torch.equal(logits, found["logits"]), name
        assert torch.equal(text, found["text"]), name


def test_the_package_keeps_to_its_own_code(tmp_path):
    small_student().save_pretrained(tmp_path)
    add_remote_code(tmp_path)
    (tmp_path / FILE).write_text("raise SystemExit('strange code')")
    import transformers

    for student in (load_student(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert type(student).__module__ == "spikeopd.models.bispikclm"


def test_the_file_is_small_and_names_no_module_of_the_package():
    text = remote_code()
    assert text == remote_code() and len(text) < 70_000
    assert "import spikeopd\n" not in text and "from spikeopd" not in text and "numba" not in text
    compile(text, FILE, "exec")


def test_a_neuron_from_elsewhere_is_refused(tmp_path, monkeypatch):
    from spikeopd import registry

    monkeypatch.setitem(registry.NEURONS, "mine", "somewhere.else:mine")
    small_student().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"neuron": "mine"}))
    with pytest.raises(InputError, match="'mine' is not of this package"):
        add_remote_code(tmp_path)
    assert not (tmp_path / FILE).exists()
