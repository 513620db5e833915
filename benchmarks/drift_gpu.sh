#!/usr/bin/env bash
# The drift runs on a GPU: the rows of benchmarks/drift_runs.py with vLLM on CUDA, in under ten minutes,
# without network. Everything lands in the folder given (default: drift-gpu): a log per part, the
# metrics of each run as JSON, the plot, and summary.txt, which also says what could not be done.
#
#     benchmarks/drift_gpu.sh [FOLDER]
#
# Merged sync to a server goes over NCCL, which refuses two processes on one device: that row needs a
# second GPU and is reported as left out where there is none.
set -u
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-drift-gpu}" && cd "${1:-drift-gpu}" && pwd)
python=${PYTHON:-python}
command="from flows.cli.app import main; main()"
export PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE
: > "$out/summary.txt"
say() { echo "$*" | tee -a "$out/summary.txt"; }

gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
if [ "$gpus" -eq 0 ]; then
    say "no CUDA device: nothing was run"
    exit 1
fi
say "$gpus GPU(s): $(nvidia-smi --query-gpu=name --format=csv,noheader | sort -u | paste -sd, -)"

row() { # name of the part, seconds it may take, command …
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    if timeout "$limit" "$@" > "$out/$name.log" 2>&1; then
        say "$name: done in $((SECONDS - start)) s"
    else
        say "$name: FAILED with code $? after $((SECONDS - start)) s; see $name.log"
    fi
}

drift_run() {
    rm -rf "${out:?}/$1"
    row "$1" 80 "$python" -m benchmarks.drift_runs run "$out" "$1"
}

for kind in adapter merged stock-100 stock-62 adapter-bf16 adapter-qwen2 adapter-server; do
    drift_run "$kind"
done
if [ "$gpus" -ge 2 ]; then
    drift_run merged-server
else
    say "merged-server: left out, NCCL needs a second GPU"
fi
for mode in adapter merged; do
    row "audit-$mode" 60 "$python" -c "$command" audit-sync --preset demo --mode "$mode" --store "$out/store"
done
row audit-server 90 "$python" -c "$command" audit-sync --preset demo --server --store "$out/store"
row plot 60 "$python" -m benchmarks.drift_runs plot "$out" "$out/drift.png"
"$python" -m benchmarks.drift_runs table "$out" | tee -a "$out/summary.txt"
