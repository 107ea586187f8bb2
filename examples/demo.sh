#!/bin/sh
# The main job end to end: first what the shipped student says, then train, export, run on two backends, report.
# Called by `make demo`; BIN and OUT say where things are.
set -eu
BIN=${BIN:-.venv/bin}
OUT=${OUT:-demo}
SHIPPED=${SHIPPED:-stories}
PROMPT="The following functions are"

say() { printf '\n== %s\n' "$*"; }

mkdir -p "$OUT"
if "$BIN/python" -c 'import sys; from spikeopd.contracts.bundle import shipped_bundles; sys.exit(sys.argv[1] not in shipped_bundles())' "$SHIPPED"; then
	say "a spiking language model continues \"Once upon a time\": the shipped student '$SHIPPED', in integers"
	"$BIN/spikeopd-run-lava" "$SHIPPED" --backend event --prompt "Once upon a time" --max-new-tokens 120 --seed 1 \
		--output "$OUT/$SHIPPED.json"
	say "its first four tokens once more, computed again by the slow oracle and compared spike for spike"
	"$BIN/spikeopd-run-lava" "$SHIPPED" --backend event --prompt "Once upon a time" --max-new-tokens 4 --seed 1 --verify
else
	say "this copy ships no trained student '$SHIPPED'; the one trained now speaks below"
fi

if [ -f "$OUT/run/final/config.json" ]; then
	say "train: $OUT/run is there already (remove $OUT to begin anew)"
elif [ -f "$OUT/run/config.yaml" ]; then
	say "train: continuing $OUT/run"
	"$BIN/spikeopd-train" --config tiny --output "$OUT/run" --resume
else
	say "train: a small student, both stages from the shipped teacher; five minutes on two free cores, Ctrl-C and 'make demo' go on later"
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

say "done; what was made:"
cat <<END
   $OUT/run/final      the student, a Hugging Face folder      ($BIN/spikeopd-eval perplexity $OUT/run)
   $OUT/bundle         its integers: NIR, tokenizer, manifest   ($BIN/spikeopd-run-lava $OUT/bundle --interactive)
   $OUT/run.json       tokens, counts and timing of the run
   $OUT/energy.html    the energy report as a page; energy.txt as text
   watch it spike:     $BIN/spikeopd-serve $OUT/bundle          then open http://127.0.0.1:8000
END
