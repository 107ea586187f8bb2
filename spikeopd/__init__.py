"""SpikeOPD: train spiking language models and bring them to neuromorphic hardware.

`spikeopd` trains (torch), `export` lowers to integers, `neuro_sim` runs event by event and on Lava,
`energy` turns counted events into an energy report.

    run = spikeopd.train("tiny", output="runs/tiny", overrides={"stage1.updates": 50})
    student = spikeopd.load_student(run.student)

Names are imported when they are first used: this module imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spikeopd.autoload import watch

if TYPE_CHECKING:
    from spikeopd.config import load_config as load_config
    from spikeopd.corpus import sample_corpus as sample_corpus
    from spikeopd.hub import push_to_hub as push_to_hub
    from spikeopd.llama2c import convert_llama2c as convert_llama2c
    from spikeopd.planning import plan as plan
    from spikeopd.remote_code import add_remote_code as add_remote_code
    from spikeopd.runlog import read_metrics as read_metrics
    from spikeopd.students import load_student as load_student
    from spikeopd.suggestion import suggest as suggest
    from spikeopd.text.tokenizer import train_tokenizer as train_tokenizer
    from spikeopd.training import TrainingRun as TrainingRun
    from spikeopd.training import dry_run as dry_run
    from spikeopd.training import prepare_tokens as prepare_tokens
    from spikeopd.training import train as train
    from spikeopd.training import train_teacher as train_teacher
    from spikeopd.vocabulary import cut_vocabulary as cut_vocabulary

__version__ = "0.1.0"

_HOMES = {
    "TrainingRun": "spikeopd.training",
    "add_remote_code": "spikeopd.remote_code",
    "convert_llama2c": "spikeopd.llama2c",
    "cut_vocabulary": "spikeopd.vocabulary",
    "dry_run": "spikeopd.training",
    "load_config": "spikeopd.config",
    "load_student": "spikeopd.students",
    "plan": "spikeopd.planning",
    "prepare_tokens": "spikeopd.training",
    "push_to_hub": "spikeopd.hub",
    "read_metrics": "spikeopd.runlog",
    "sample_corpus": "spikeopd.corpus",
    "suggest": "spikeopd.suggestion",
    "train": "spikeopd.training",
    "train_teacher": "spikeopd.training",
    "train_tokenizer": "spikeopd.text.tokenizer",
}
__all__ = ["__version__", *sorted(_HOMES)]


watch()  # so that transformers' Auto classes know the student


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spikeopd' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "spikeopd":
            raise
        from spikeopd.errors import BackendMissing, install_command

        raise BackendMissing(
            f"training needs torch and transformers ({error}); install them with: {install_command('train')}"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
