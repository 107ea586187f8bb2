"""The prefix bank and the diagnostics of App. B: by hand, by brute force, and in the order of averages."""

import json

import numpy as np
import pytest
import torch
from training_setup import small_setup

from spikeopd.diagnostics import dynamics, report
from spikeopd.diagnostics.dynamics import Paired
from spikeopd.diagnostics.prefixes import BankOptions, PrefixBank, describe, generate_bank, load_bank, save_bank
from spikeopd.errors import InputError
from spikeopd.methods import spad
from spikeopd.models.bispikclm import Recorder
from spikeopd.quality import rate_sites


@pytest.fixture(scope="module")
def world():
    setup = small_setup()
    student = spad.initial_student(setup).eval().requires_grad_(False)
    bank = generate_bank(student, setup.validation, BankOptions(5, 7, 4, seed=3), rows=2)
    return setup, student, bank


def test_bank_pairs_own_and_corpus_continuations_of_one_prompt(world, tmp_path):
    setup, student, bank = world
    text = setup.validation.tokens
    windows = np.lib.stride_tricks.sliding_window_view(text, 11)
    for prompt, corpus in zip(bank.prompts, bank.corpus_tokens, strict=True):
        assert (windows == np.concatenate((prompt, corpus))).all(1).any()
    again = generate_bank(student, setup.validation, BankOptions(5, 7, 4, seed=3), rows=5)
    assert (again.self_tokens == bank.self_tokens).all(), "the bank must not depend on the batch"
    assert bank.inputs("self").shape == (5, 10) and (bank.inputs("self")[:, :7] == bank.prompts).all()
    assert (bank.inputs("corp")[:, 7:] == bank.corpus_tokens[:, :3]).all()
    loaded = load_bank(save_bank(bank, tmp_path / "bank.npz"))
    assert (loaded.self_tokens == bank.self_tokens).all() and loaded.about == bank.about
    assert (tmp_path / "bank.npz").read_bytes() == save_bank(bank, tmp_path / "second.npz").read_bytes()
    assert bank.about == describe(student, setup.validation, BankOptions(5, 7, 4, seed=3))
    assert bank.about != describe(student, setup.validation, BankOptions(5, 7, 3, seed=3)), "another K is another bank"
    (tmp_path / "bank.npz").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(InputError, match="prefix bank"):
        load_bank(tmp_path / "bank.npz")


def test_hidden_is_averaged_over_time_before_the_distance_and_membranes_after():
    """Self fires at step 1, corpus at step 2: the time averages agree, the traces do not."""
    early = torch.tensor([1.0, 0.0]).view(2, 1, 1, 1)
    late = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
    assert dynamics.hidden_discrepancy(early, late).item() == 0.0
    assert dynamics.membrane_discrepancy(early, late).item() == 1.0


def test_gaps_by_hand():
    """Two prompts, two positions, two layers."""
    paired = Paired(
        kappa_self=np.array([[1.0, 2.0], [3.0, 6.0]]),
        kappa_corp=np.array([[1.0, 1.0], [2.0, 1.0]]),
        rate_self=np.array([[[0.1, 0.2], [0.3, 0.4]], [[0.1, 0.1], [0.5, 0.5]]]),
        rate_corp=np.array([[[0.1, 0.2], [0.1, 0.5]], [[0.2, 0.0], [0.5, 0.1]]]),
        hidden=np.array([[[0.0, 0.2], [0.4, 0.6]], [[0.2, 0.2], [0.0, 0.0]]]),
        membrane=np.ones((2, 2, 2)),
    )
    assert dynamics.prefix_gap(paired).tolist() == [0.5, 3.0]
    assert dynamics.spike_drift(paired).tolist() == pytest.approx([0.05, (0.2 + 0.1 + 0.0 + 0.4) / 4])
    values = dynamics.summary(paired)
    assert values["hidden_gap"] == pytest.approx(0.2) and values["membrane_drift"] == 1.0
    assert values["mean_kappa_self"] == 3.0 and values["last_prefix_gap"] == 3.0
    still = Paired(*(np.zeros_like(getattr(paired, name)) for name in paired.__dataclass_fields__))
    assert dynamics.spike_improvement(paired, still).tolist() == pytest.approx([0.05, 0.175])
    both = (paired.kappa_self - paired.kappa_corp)[:, 0]
    assert values["standard_errors"]["prefix_gap"][0] == pytest.approx(abs(both[0] - both[1]) / 2), "two prompts"
    compared = report.compare({"first": paired, "still": still})
    assert compared["first"]["standard_errors"]["spike_improvement"] == [0.0, 0.0], "against itself"
    assert compared["first"]["kappa_self_change"] == 0.0 and compared["still"]["kappa_self_change"] == -3.0
    means = paired.kappa_self.mean(1)
    error = compared["still"]["standard_errors"]["kappa_self_change"]
    assert error == pytest.approx(abs(means[0] - means[1]) / 2) and error > 0, "two prompts"
    text = report.table(report.compare({"Offline-only": paired, "SpikeOPD": still}))
    assert f"SpikeOPD      self -3.0000 ± {error:.4f}, corpus " in text and "KL against Offline-only" in text
    assert "0.1750" not in text and "1125.0000" in text and "2.67" in text  # mean drift 0.1125, times 1e4


def test_teacher_kl_by_hand():
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.9, 0.1])
    expected = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    assert dynamics.teacher_kl(q.log()[None], p.log()[None]).item() == pytest.approx(expected, rel=1e-6)


def test_replay_equals_a_prefix_by_prefix_calculation(world):
    """Every prefix fed alone, every quantity from its definition; any batch size gives the same."""
    setup, student, bank = world
    paired = dynamics.replay(student, setup.teacher, bank, rows=2, chunk=3)
    sites = rate_sites(student.config, "all")
    seen = {}
    for source, tokens in (("self", bank.self_tokens), ("corp", bank.corpus_tokens)):
        for n in range(5):
            for t in range(4):
                ids = torch.from_numpy(np.concatenate((bank.prompts[n], tokens[n, :t])))[None]
                recorder = Recorder(membranes_of=("h",))
                with torch.no_grad():
                    q = student(ids, recorder=recorder, use_cache=False).logits[0, -1].double().softmax(-1)
                    p = setup.teacher(ids).logits[0, -1].double().softmax(-1)
                last = [{site: recorder.spikes[layer, site][:, 0, -1] for site in sites} for layer in range(2)]
                rates = [torch.cat([x.flatten() for x in sites_.values()]).mean().item() for sites_ in last]
                seen[source, n, t] = (
                    (p * (p / q).log()).sum().item(),
                    rates,
                    [sites_["h"].mean(0) for sites_ in last],
                    [recorder.membranes[layer, "h"][:, 0, -1] for layer in range(2)],
                )
    for n in range(5):
        for t in range(4):
            mine, corpus = seen["self", n, t], seen["corp", n, t]
            assert paired.kappa_self[n, t] == pytest.approx(mine[0], rel=1e-4, abs=1e-6)
            assert paired.kappa_corp[n, t] == pytest.approx(corpus[0], rel=1e-4, abs=1e-6)
            assert paired.rate_self[n, t] == pytest.approx(mine[1], rel=1e-5)
            for layer in range(2):
                hidden = (mine[2][layer] - corpus[2][layer]).abs().mean().item()
                membrane = np.mean([(mine[3][layer][step] - corpus[3][layer][step]).abs().mean() for step in range(4)])
                assert paired.hidden[n, t, layer] == pytest.approx(hidden, abs=1e-6)
                assert paired.membrane[n, t, layer] == pytest.approx(membrane, abs=1e-5)
    assert np.abs(paired.kappa_self[:, 0] - paired.kappa_corp[:, 0]).max() < 1e-6, "s_1 is the prompt in both"
    assert paired.hidden[:, 1:].max() > 0


def test_identical_sources_have_no_gap(world):
    setup, student, bank = world
    same = PrefixBank(bank.prompts, bank.corpus_tokens, bank.corpus_tokens, bank.about)
    values = dynamics.summary(dynamics.replay(student, setup.teacher, same))
    for name in ("mean_prefix_gap", "mean_spike_drift", "hidden_gap", "membrane_drift"):
        assert values[name] == 0.0


def test_diagnose_command(world, tmp_path, capsys, monkeypatch):
    setup, student, _ = world
    from spikeopd.evaluation import cli

    for name in ("offline", "adapted"):
        student.save_pretrained(tmp_path / name)
        setup.tokenizer.save(tmp_path / name)
    setup.teacher.save_pretrained(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("The bank pairs prefixes of one prompt. " * 40)
    words = ["diagnose", str(tmp_path / "offline"), f"SpikeOPD={tmp_path / 'adapted'}", "--teacher",
             str(tmp_path / "teacher"), "--bank", str(tmp_path / "bank.npz"), "--split", "all", "--source",
             f"text:{tmp_path / 'text.txt'}", "--num-prompts", "3", "--prompt-length", "8", "--max-new-tokens", "5",
             "--quiet", "--json", "--output", str(tmp_path / "out"), "--figures"]  # fmt: skip
    monkeypatch.setenv("SPIKEOPD_CACHE", str(tmp_path / "cache"))
    assert cli.main(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["pairs"] == 3 and len(first["checkpoints"]["SpikeOPD"]["prefix_gap"]) == 5
    assert first["checkpoints"]["SpikeOPD"]["hidden_gap"] == first["checkpoints"]["Offline-only"]["hidden_gap"]
    assert (tmp_path / "out" / "diagnostics.png").is_file() and (tmp_path / "out" / "diagnostics.svg").is_file()
    bank = (tmp_path / "bank.npz").read_bytes()
    assert cli.main(words) == 0
    assert (tmp_path / "bank.npz").read_bytes() == bank, "a stored bank is replayed, not replaced"
    capsys.readouterr()
    assert cli.main(["diagnose", str(tmp_path / "offline"), "--temperature", "nan"]) == 2
    assert "--temperature nan must be" in capsys.readouterr().err
    assert cli.main(["diagnose", str(tmp_path / "offline"), "nameless"]) == 2
    assert "give a name and a checkpoint" in capsys.readouterr().err


def test_means_over_seeds_keep_every_number_and_curve():
    seeds = [{"gap": 1.0, "curve": [0.0, 2.0], "errors": {"curve": [1.0, 1.0]}},
             {"gap": 2.0, "curve": [1.0, 6.0], "errors": {"curve": [3.0, 2.0]}}]  # fmt: skip
    assert report.mean_curves(seeds) == {"gap": 1.5, "curve": [0.5, 4.0], "errors": {"curve": [2.0, 1.5]}}
