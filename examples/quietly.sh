#!/bin/sh
# Run a long command without its words: a line every 30 seconds; what it said only if it fails.  quietly.sh LOG COMMAND...
log=$1
shift
"$@" >"$log" 2>&1 &
work=$!
trap 'kill $work 2>/dev/null; exit 130' INT TERM
seconds=0
while kill -0 $work 2>/dev/null; do
	sleep 1
	seconds=$((seconds + 1))
	if [ $((seconds % 30)) -eq 0 ]; then echo "   $seconds s ..."; fi
done
wait $work || { code=$?; cat "$log" >&2; exit $code; }
