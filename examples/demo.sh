#!/bin/sh
# The main job end to end on the shipped default. Called by `make demo`; BIN and OUT say where things are.
set -eu
BIN=${BIN:-.venv/bin}
OUT=${OUT:-demo}
PROMPT="The following functions are"

say() { printf '\n== %s\n' "$*"; }

if [ -f "$OUT/run/final/config.json" ]; then
	say "train: $OUT/run is there already (remove $OUT to begin anew)"
elif [ -f "$OUT/run/config.yaml" ]; then
	say "train: continuing $OUT/run"
	"$BIN/spikeopd-train" --config tiny --output "$OUT/run" --resume
else
	say "train: both stages from the shipped teacher, a few minutes"
	"$BIN/spikeopd-train" --config tiny --output "$OUT/run"
fi

say "export: integers, NIR, verified spike for spike"
rm -rf "$OUT/bundle"
"$BIN/spikeopd-export" "$OUT/run/final" --to nir --output "$OUT/bundle"

say "run: event engine"
"$BIN/spikeopd-run-lava" "$OUT/bundle" --backend event --prompt "$PROMPT" --max-new-tokens 48 \
	--temperature 0.8 --seed 1 --output "$OUT/run.json"

say "run: the same on Lava processes, compared with the event engine spike for spike"
"$BIN/spikeopd-run-lava" "$OUT/bundle" --backend lava --prompt "$PROMPT" --max-new-tokens 8 \
	--temperature 0.8 --seed 1 --verify

say "energy"
"$BIN/spikeopd-energy" report "$OUT/run.json" --output "$OUT/energy.txt" --quiet
"$BIN/spikeopd-energy" report "$OUT/run.json" --output "$OUT/energy.html" --quiet
sed -n 1,14p "$OUT/energy.txt"
say "done: the whole report is $OUT/energy.txt, and as a page $OUT/energy.html"
