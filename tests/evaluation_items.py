"""Questions of our own making in the format of the eight benchmarks, and the small models they are asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "benchmarks"  # real files, where they are at hand


def _choices(*texts: str) -> dict[str, list[str]]:
    return {"text": list(texts), "label": list("ABCDE"[: len(texts)])}


# In every list the right choice of the first question is the shortest one, that of the second is not.
ITEMS: dict[str, list[dict[str, Any]]] = {
    "arc_easy": [
        {"id": "a", "question": "What do plants take in through their leaves to make sugar?",
         "choices": _choices("light", "small grains of sand and stone", "the songs of many birds"), "answerKey": "A"},
        {"id": "b", "question": "Which of these melts when it is warmed a little?",
         "choices": _choices("iron", "a block of ice taken from a cold lake"), "answerKey": "B"},
    ],
    "arc_challenge": [
        {"id": "a", "question": "A ball rolls down a hill. What pulls it?",
         "choices": _choices("the colour of the grass below", "gravity", "the smoke of a far away fire"),
         "answerKey": "B"},
        {"id": "b", "question": "Why is a shadow long in the evening?",
         "choices": _choices("wind", "because the sun stands low above the ground"), "answerKey": "B"},
    ],
    "winogrande": [
        {"sentence": "The cup did not fit in the box because the _ was too large.", "option1": "cup",
         "option2": "box", "answer": "1"},
        {"sentence": "Anna gave Maria a present because _ had a birthday.", "option1": "Anna", "option2": "Maria",
         "answer": "2"},
    ],
    "boolq": [
        {"passage": "A kettle is a pot for boiling water. Most kettles have a lid.",
         "question": "is a kettle used to boil water", "idx": 0, "label": 1},
        {"passage": "The old mill has no roof and nobody lives there.", "question": "does the mill have a roof",
         "idx": 1, "label": 0},
    ],
    "piqa": [
        {"goal": "Dry a wet shirt.", "sol1": "Hang it up.", "sol2": "Put it under the table in a bowl of water.",
         "label": 0},
        {"goal": "Open a stiff jar.", "sol1": "Shout.",
         "sol2": "Hold the lid in warm water for a while, then turn it with a cloth.", "label": 1},
    ],
    "hellaswag": [
        {"ind": 0, "activity_label": "Baking bread", "ctx_a": "A man kneads dough on a table.", "ctx_b": "he",
         "endings": ["bakes it.", "jumps over a very tall fence into the sea.", "paints the dough with green letters.",
                     "asks the dough how far it is to the city."], "label": "0"},
        {"ind": 1, "activity_label": "Reading", "ctx_a": "A girl sits on a bench with a book.", "ctx_b": "she",
         "endings": ["flies.", "turns the page slowly and goes on reading until the evening.", "eats the bench.",
                     "melts."], "label": "1"},
    ],
    "openbookqa": [
        {"id": "a", "question_stem": "A frozen pond is covered by", "choices": _choices(
            "ice", "a thick layer of dry and yellow leaves of paper"), "answerKey": "A"},
        {"id": "b", "question_stem": "Bees visit flowers to", "choices": _choices(
            "sleep", "gather the sweet liquid they make honey from"), "answerKey": "B"},
    ],
    "headqa_en": [
        {"name": "own", "year": "2026", "category": "biology", "qid": 1, "qtext": "The heart pumps:", "ra": 1,
         "image": "", "answers": [{"aid": 1, "atext": "Blood"}, {"aid": 2, "atext": "Air from the left lung alone"}]},
        {"name": "own", "year": "2026", "category": "biology", "qid": 2, "qtext": "Bones are made firm by:", "ra": 2,
         "image": "", "answers": [{"aid": 1, "atext": "Hair"}, {"aid": 2, "atext": "Minerals such as calcium salts"}]},
    ],
}  # fmt: skip
SPLITS = {"arc_easy": "test", "arc_challenge": "test", "openbookqa": "test", "headqa_en": "test"}


def write_items(folder: Path, items: Mapping[str, list[dict[str, Any]]] = ITEMS) -> Path:
    """FOLDER/TASK/SPLIT.jsonl for every task."""
    for name, records in items.items():
        path = folder / name / f"{SPLITS.get(name, 'validation')}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder
