"""The literal NIR runner: traces worked out by hand, order of execution, nodes it does not know."""

from __future__ import annotations

import nir
import numpy as np
import pytest

from export.bundle_writer import plain_dict
from export.nir.graph import DT, build_graph
from export.nir.runner import Runner, execution_order
from spikeopd.errors import InputError


def arrays(*values):
    return [np.array([value], np.float32) for value in values]


def exact_neuron(alpha: float, threshold: float) -> nir.NIRGraph:
    tau, r, leak = arrays(DT / (1 - alpha), 1 / (1 - alpha), 0)
    below = np.nextafter(np.array([threshold], np.float32), np.float32(-np.inf))
    nodes = {
        "in": nir.Input(np.array([1])),
        "u": nir.LI(tau, r, leak),
        "s": nir.Threshold(below),
        "reset": nir.Scale(np.array([-threshold], np.float32)),
        "out": nir.Output(np.array([1])),
    }
    return nir.NIRGraph(nodes, [("in", "u"), ("u", "s"), ("s", "reset"), ("reset", "u"), ("s", "out")])


def test_the_exact_neuron_by_hand():
    # alpha 0.5, V 1:  u = 1.0 fires; 0.5 + 1 - 1 = 0.5; 0.25 + 1 = 1.25 fires; 0.625 + 1 - 1 = 0.625; 1.3125 fires
    out = Runner(exact_neuron(0.5, 1.0), DT).run(np.ones((5, 1)))
    assert out[:, 0].tolist() == [1, 0, 1, 0, 1]


def test_lif_resets_hard_unless_told_otherwise():
    tau, r, leak, reset, threshold = arrays(2 * DT, 2, 0, 0, np.nextafter(np.float32(1), np.float32(0)))
    graph = nir.NIRGraph.from_list(nir.LIF(tau, r, leak, threshold, reset))
    drive = np.full((5, 1), 1.5)
    # Hard: 1.5 fires -> 0; 1.5 fires; always.  Subtractive, delayed: 1.5 | .75+1.5-1=1.25 | .625+.5=1.125 | ...
    assert Runner(graph, DT).run(drive)[:, 0].tolist() == [1, 1, 1, 1, 1]
    drive = np.array([[1.5], [0.0], [0.4], [0.0], [0.9]])
    # Hard: 1.5 | 0 | .4 | .2 | 1.0 fires.  Subtractive: 1.5 fires | .75-1=-.25 | .275 | .1375 | .96875 does not.
    assert Runner(graph, DT).run(drive)[:, 0].tolist() == [1, 0, 0, 0, 1]
    assert Runner(graph, DT, subtractive=True).run(drive)[:, 0].tolist() == [1, 0, 0, 0, 0]


def test_and_of_two_spikes():
    nodes = {
        "in": nir.Input(np.array([2])),
        "a": nir.Linear(np.array([[1, 0]], np.int8)),
        "b": nir.Linear(np.array([[0, 1]], np.int8)),
        "and": nir.Threshold(np.array([1.5])),
        "out": nir.Output(np.array([1])),
    }
    graph = nir.NIRGraph(nodes, [("in", "a"), ("in", "b"), ("a", "and"), ("b", "and"), ("and", "out")])
    assert Runner(graph, DT).run(np.array([[0, 0], [0, 1], [1, 0], [1, 1]]))[:, 0].tolist() == [0, 0, 0, 1]


def test_names_do_not_matter():
    """Shuffled names and edges give the same order of dependence."""
    order = execution_order(["z", "m", "a", "q"], [("a", "q"), ("z", "a"), ("q", "m"), ("m", "a")])
    assert order.index("z") < order.index("a") < order.index("q") < order.index("m")


def test_runs_begin_from_rest():
    runner = Runner(exact_neuron(0.5, 1.0), DT)
    assert np.array_equal(runner.run(np.ones((3, 1))), runner.run(np.ones((3, 1))))


def test_unknown_nodes_are_named():
    graph = nir.NIRGraph.from_list(nir.IF(*arrays(1, 1)))
    with pytest.raises(InputError, match="IF is not one"):
        Runner(graph, DT)


def test_the_dictionary_without_copies_is_nirs_own():
    from random_models import random_model

    graph = build_graph(random_model()).graph
    mine, theirs = plain_dict(graph), graph.to_dict()

    def equal(a, b):
        if isinstance(a, dict):
            return list(a) and set(a) == set(b) and all(equal(a[key], b[key]) for key in a) or a == b
        return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b

    assert equal(mine, theirs)
    block = mine["nodes"]["n00001_block"]["nodes"]
    assert block["n00004_w_q"]["weight"] is graph.nodes["n00001_block"].nodes["n00004_w_q"].weight
