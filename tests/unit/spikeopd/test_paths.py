"""Wrong paths are told at once, without torch; a run that was refused does not stand in the way of its correction."""

import subprocess
import sys

import pytest

from spikeopd.config import load_config
from spikeopd.errors import InputError
from spikeopd.paths import check_paths


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.source=text:/no/such.txt"], "text:/no/such.txt: no such file"),
        (["data.source=jsonl:/no/such.jsonl#text"], "no such file /no/such.jsonl;"),
        (["teacher.teacher_model_name_or_path=/no/teacher"], "teacher_model_name_or_path /no/teacher: no such"),
        (
            ["train.stage=2", "stage2.model_name_or_path=./no/student"],
            "stage2.model_name_or_path ./no/student: no student there",
        ),
    ],
)
def test_paths_that_are_not_there(tmp_path, overrides, words):
    with pytest.raises(InputError, match=words):
        check_paths(load_config("tiny", overrides), tmp_path, False)


def test_names_patterns_and_a_folder_in_use(tmp_path):
    check_paths(load_config("tiny", ["data.source=text:/no/*.txt"]), tmp_path, False)
    check_paths(load_config("opt-125m"), tmp_path, False)  # a name on the hub
    (tmp_path / "config.yaml").write_text("")
    check_paths(load_config("tiny"), tmp_path, True)
    with pytest.raises(InputError, match="already holds a run"):
        check_paths(load_config("tiny"), tmp_path, False)


@pytest.mark.parametrize(
    "command",
    [
        "from spikeopd.cli import main; c = main(['--output', 'run', 'data.source=text:/no/such.txt'])",
        "from export.cli import main; c = main(['/no/such', '--output', 'bundle'])",
        "from spikeopd.cli import main; c = main(['--stage', '2', '--output', 'r', 'stage2.model_name_or_path=no'])",
        "from spikeopd.cli import main; c = main(['corpus', '--teacher', './no', '--output', 'c'])",
        "from spikeopd.cli import main; c = main('vocabulary --teacher t --source text:no --output c'.split())",
        "from spikeopd.cli import main; c = main(['llama2c', 'no.bin', '--output', 'c'])",
        "from spikeopd.cli import main; c = main(['--suggest', './no'])",
        "from spikeopd.evaluation.cli import main; c = main(['diagnose', 'no'])",
        "from spikeopd.evaluation.cli import main; c = main(['perplexity', 'no'])",
    ],
)
def test_the_commands_tell_it_without_torch_and_leave_nothing(tmp_path, command):
    code = f"import sys; {command}; print(c, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["2", "False"], done.stderr[-500:]
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_explain_shows_what_a_recipe_changes(capsys):
    from spikeopd.cli import main

    assert main(["--config", "tiny", "--explain", "model.hidden_size"]) == 0
    assert "(tiny: 128)" in capsys.readouterr().out
    assert main(["--explain", "model.hidden_size"]) == 0
    assert "(tiny" not in capsys.readouterr().out
