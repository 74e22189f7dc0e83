#!/usr/bin/env bash
# All that is measured on one GPU, in bf16; start it and go home: bench/gpu.sh [--check]
#
# Stages run one after another, the most valuable first, each in processes of its own and with its own limit of time;
# none stops the others. OUT (bench/results/gpu) gets the output and JSON of each, and summary.md, which is written
# after each stage. LIMIT is that of a stage in seconds (480).
#
# Requires torch for CUDA, numpy, pyarrow, safetensors, filelock, PyYAML, transformers (the peer) and DeepSpeed, but
# neither Ray nor MLflow. On a machine without network WHEELS=FOLDER names a folder with wheels of deepspeed, hjson,
# pydantic, pydantic_core, annotated_types and typing_inspection, which are then taken from there. With pytest,
# hypothesis and pytest-timeout the tests run, too, and with sentencepiece and sentencex those that train. RUN=FOLDER is
# a run that `multihop prep` has prepared: its training is started, stopped and resumed. --check runs tiny shapes on any
# machine.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-bench/results/gpu}
limit=${LIMIT:-480}
mkdir -p "$out"
out=$(cd "$out" && pwd)

if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("deepspeed") is None)'; then
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    "$python" -m pip install --quiet --no-deps --target "$wheels" ${WHEELS:+--no-index --find-links "$WHEELS"} \
        deepspeed hjson pydantic pydantic_core annotated_types typing_inspection || exit 2
    export PYTHONPATH="$wheels${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

# stage NAME COMMAND…: run it for at most $limit seconds, keep its output, and write the summary anew.
stage() {
    local name=$1 began=$SECONDS status=0
    shift
    echo "== $name"
    timeout --kill-after=20 "$limit" "$@" >"$out/$name.txt" 2>&1 || status=$?
    printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - began))" >>"$out/stages.tsv"
    tail -n 3 "$out/$name.txt"
    "$python" bench/gpu_summary.py "$out" || true
}
step() {  # step NAME SHAPE TOKENS OPTION…
    local name=$1 shape=$2 tokens=$3
    shift 3
    stage "$name" "$python" bench/step.py --precision bf16 --shapes "$shape" --tokens "$tokens" --repeats 15 \
        --warm-up 5 --json "$out/$name.json" "$@"
}
: >"$out/stages.tsv"

if [ "${1:-}" = --check ]; then
    stage step-check "$python" bench/step.py --precision bf16 --tokens 64 --repeats 1 --warm-up 1 --one-at-a-time \
        --profile --shapes bert-mini:32:0.3 gpt2-mini:32 --json "$out/step-check.json"
    [ "$(cut -f 2 "$out/stages.tsv")" = 0 ]
    exit
fi
"$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || { echo "no GPU here; see --check" >&2; exit 2; }
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/gpu.txt"

stage tests "$python" -m pytest -q -m gpu tests/pretrain/models tests/pretrain/optim tests/pretrain/checkpoint \
    tests/pretrain/engine
stage training-tests "$python" -m pytest -q -m gpu tests/pretrain/run
step small bert-mini:128:0.3 4096 --peers ours
ours=(bert-large:128 bert-large:128:0.3 bert-large:512 bert-large:512:0.3 gpt2-base:1024)
for shape in "${ours[@]}"; do step "ours-${shape//:/-}" "$shape" 65536 --peers ours --profile; done
for shape in "${ours[@]}"; do step "compiled-${shape//:/-}" "$shape" 65536 --peers ours --compile --profile; done
step compiled-gpt2-xl-1024 gpt2-xl:1024 16384 --peers ours --compile --profile
for shape in "${ours[@]}"; do step "peers-${shape//:/-}" "$shape" 32768 --one-at-a-time --compile; done
step peers-gpt2-xl-1024 gpt2-xl:1024 16384 --one-at-a-time --compile
if [ -n "${RUN:-}" ]; then
    export RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511
    stage run-stopped timeout --signal=TERM $((limit / 4)) "$python" -m multihop.pretrain.run.worker "$RUN"
    stage run-resumed "$python" -m multihop.pretrain.run.worker "$RUN"
    unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
fi
stage optimizers "$python" -m torch.distributed.run --nproc-per-node 1 bench/optimizers.py --preset bert-large --precision bf16 \
    --micro-batch 64 --json "$out/optimizers.json"
cat "$out/summary.md"
