"""--push-to-hub with the real huggingface_hub, against a stand-in of the hub's HTTP API on this machine."""

import json

import pytest

from spikeopd.card import write_cards
from spikeopd.cli import main
from spikeopd.config import load_config
from spikeopd.remote_code import FILE
from tests.hub_stand_in import hub_stand_in
from tests.small_students import small_student


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    small_student().save_pretrained(folder / "final")
    write_cards(folder, load_config("tiny"), {})
    (folder / "final" / "notes.txt").write_text("mine")
    return folder


@pytest.fixture
def hub(monkeypatch):
    with hub_stand_in("right") as (address, hub):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "right")
        yield hub


def test_a_student_goes_to_the_hub_with_its_card_and_code(run, hub, capsys):
    assert main(["share", str(run), "--remote-code", "--push-to-hub", "me/spikes", "--private", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hub"].endswith("/me/spikes")
    assert hub.made["name"] == "spikes" and "private" in (hub.made.get("visibility"), *hub.made)
    assert set(hub.files) == {"README.md", "config.json", "generation_config.json", "model.safetensors", FILE}
    assert hub.files["model.safetensors"] == (run / "final" / "model.safetensors").read_bytes()
    assert json.loads(hub.files["config.json"])["auto_map"]["AutoConfig"].endswith(".BiSpikCLMConfig")
    card = hub.files["README.md"].decode()
    assert 'from_pretrained("me/spikes")' in card and "FOLDER" not in card
    assert "FOLDER" in (run / "final" / "README.md").read_text()


def test_nobody_logged_in_is_one_line_and_no_upload(run, hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert main(["share", str(run), "--push-to-hub", "me/spikes"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("spikeopd-train: --push-to-hub me/spikes: ") and told.count("\n") == 1
    assert hub.asked == ["GET /api/whoami-v2"]


@pytest.mark.parametrize("name", ["spikes", "me/spi kes", "a/b/c"])
def test_a_name_the_hub_would_not_take_is_refused_before_training(name, tmp_path, capsys):
    assert main(["--config", "tiny", "--output", str(tmp_path / "run"), "--push-to-hub", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "run").exists()


def test_share_needs_something_to_do(capsys):
    assert main(["share", "nowhere"]) == 2
    assert "nothing to do" in capsys.readouterr().err
