"""The page of docs/results/stories: unselected stories of teacher, student and bundle side by side, with statistics.

Every story begins with the begin token alone; story i of each model draws from the random stream (seed, i), so nothing
was chosen and anyone can repeat it. Student and bundle must give the same tokens: the student was trained as the
integers that the bundle holds. Repetition (Adj, Dist-4) is measured on more stories at temperature 1, where the teacher
is itself; the stories to read are drawn at a lower temperature.

  python benchmarks/stories.py --teacher runs/stories/teacher --student runs/stories/run --bundle stories \
    --output docs/results/stories
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import neuro_sim
from spikeopd.files import write_json, write_text
from spikeopd.models.teacher import load_teacher
from spikeopd.sampling import Sampling, choose, row_generators
from spikeopd.students import find_student, load_student
from spikeopd.text.tokenizer import Tokenizer, load_tokenizer

NAME = re.compile(r"named ([A-Z][a-z]+)")


def torch_stories(model: Any, tokenizer: Tokenizer, rows: int, sampling: Sampling) -> list[list[int]]:
    """Tokens of each story, without begin and end."""
    streams = row_generators(sampling.seed, rows)
    stories: list[list[int]] = [[] for _ in range(rows)]
    open_rows, cache = list(range(rows)), None
    ids = torch.full((rows, 1), tokenizer.bos_token_id)
    with torch.no_grad():
        for _ in range(sampling.max_new_tokens):
            output = model(ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits = output.logits[:, -1].double().numpy()
            for row in list(open_rows):
                token = choose(logits[row][: tokenizer.vocab_size], sampling, streams[row])
                ids[row, 0] = token
                if token == tokenizer.eos_token_id:
                    open_rows.remove(row)
                else:
                    stories[row].append(token)
            if not open_rows:
                break
    return stories


def bundle_stories(name: str, tokenizer: Tokenizer, rows: int, sampling: Sampling) -> tuple[list[list[int]], float]:
    """The same from an exported bundle on the event engine, and its tokens per second of CPU time."""
    streams, stories = row_generators(sampling.seed, rows), []
    with neuro_sim.load(name, threads=1) as model:
        decoder = model.decoder
        began, steps = time.process_time(), 0
        for row in range(rows):
            decoder.reset()
            token, story = tokenizer.bos_token_id, []
            for _ in range(sampling.max_new_tokens):
                logits, _activity = decoder.step(token)
                steps += 1
                token = choose(np.asarray(logits)[: tokenizer.vocab_size], sampling, streams[row])
                if token == tokenizer.eos_token_id:
                    break
                story.append(token)
            stories.append(story)
        seconds = time.process_time() - began
    return stories, steps / seconds


def statistics(stories: list[list[int]], texts: list[str], limit: int) -> dict[str, float]:
    """Repetition as the paper defines it (App. B), length, ends, and names that come again in the second half."""
    adjacent = [np.mean(np.equal(s[1:], s[:-1])) for s in stories if len(s) > 1]
    grams = [[tuple(s[i : i + 4]) for i in range(len(s) - 3)] for s in stories if len(s) > 3]
    named = [(match[1], text) for text in texts if (match := NAME.search(text))]
    return {
        "stories": len(stories),
        "tokens": float(np.mean([len(s) for s in stories])),
        "ended": float(np.mean([len(s) < limit for s in stories])),
        "adj": float(np.mean(adjacent)),
        "dist4": float(np.mean([len(set(g)) / len(g) for g in grams])),
        "named": len(named),
        "name_kept": float(np.mean([name in text[len(text) // 2 :] for name, text in named])) if named else 0.0,
        "words": len({word for text in texts for word in re.findall(r"[A-Za-z']+", text)}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--student", required=True)
    parser.add_argument("--bundle", default="stories")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--stories", type=int, default=20)
    parser.add_argument("--more", type=int, default=64, help="stories for the statistics at temperature 1")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(args.teacher)
    teacher, student = load_teacher(args.teacher, attentions=False), load_student(find_student(args.student)).eval()
    limit = student.config.max_position_embeddings - 1
    read = Sampling(args.temperature, seed=args.seed, max_new_tokens=limit)
    plain = Sampling(1.0, seed=args.seed, max_new_tokens=limit)
    told = {
        "teacher": torch_stories(teacher, tokenizer, args.stories, read),
        "student": torch_stories(student, tokenizer, args.stories, read),
    }
    told["bundle"], speed = bundle_stories(args.bundle, tokenizer, args.stories, read)
    texts = {name: [tokenizer.decode(s).strip() for s in stories] for name, stories in told.items()}
    numbers: dict[str, Any] = {
        f"temperature {args.temperature}": {n: statistics(told[n], texts[n], limit) for n in told},
        "temperature 1": {},
        "student and bundle tell the same tokens": told["student"] == told["bundle"],
        "bundle tokens per CPU second, one thread": round(speed, 1),
    }
    for name, model in (("teacher", teacher), ("student", student)):
        stories = torch_stories(model, tokenizer, args.more, plain)
        found = [tokenizer.decode(s).strip() for s in stories]
        numbers["temperature 1"][name] = statistics(stories, found, limit)
    write_json(args.output / "statistics.json", numbers)
    lines = [
        f"# Twenty stories, none selected (seed {args.seed}, temperature {args.temperature})".replace(
            "Twenty", "Twenty" if args.stories == 20 else str(args.stories)
        ),
        "",
        "Made by `benchmarks/stories.py`; statistics.json beside this page has the numbers. The bundle's stories are "
        + ("the student's, token for token." if told["student"] == told["bundle"] else "shown beside the student's."),
        "",
    ]
    for row in range(args.stories):
        lines += [f"## {row}", "", f"**teacher** {quoted(texts['teacher'][row])}", ""]
        both = told["student"][row] == told["bundle"][row]
        lines += [f"**{'student and bundle' if both else 'student'}** {quoted(texts['student'][row])}", ""]
        lines += [] if both else [f"**bundle** {quoted(texts['bundle'][row])}", ""]
    write_text(args.output / "stories.md", "\n".join(lines))
    print(json.dumps(numbers, indent=2))


def quoted(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
