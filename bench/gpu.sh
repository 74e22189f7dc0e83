#!/usr/bin/env bash
# The step bench on a GPU, in bf16, plain and compiled: bench/gpu.sh [--check]
# Requires torch with CUDA, numpy, pyarrow, safetensors, transformers (the peer), and DeepSpeed with pydantic and hjson;
# neither Ray nor MLflow. On a machine without network, WHEELS=FOLDER names a folder of wheels from which deepspeed,
# hjson and pydantic are installed if they are missing. --check runs tiny shapes on any machine.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-bench/results}

if ! "$python" -c 'import deepspeed' 2>/dev/null; then
    extra=$(mktemp -d)
    trap 'rm -rf "$extra"' EXIT
    "$python" -m pip install --quiet --no-deps --target "$extra" ${WHEELS:+--no-index --find-links "$WHEELS"} \
        deepspeed hjson pydantic pydantic_core annotated-types typing-inspection py-cpuinfo ninja
    export PYTHONPATH="$extra${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

if [ "${1:-}" = --check ]; then
    "$python" bench/step.py --precision bf16 --tokens 64 --repeats 1 --warm-up 1 --shapes bert-mini:32:0.3 gpt2-mini:32 \
        --json "$out/gpu-check.json"
    exit
fi
"$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || { echo "no GPU here; see --check" >&2; exit 2; }
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
for compile in "" --compile; do
    for dropout in 0.1 0; do
        "$python" bench/step.py --precision bf16 --dropout "$dropout" $compile --repeats 15 --warm-up 5 --tokens 65536 --profile \
            --shapes bert-base:128 bert-base:128:0.3 bert-large:128 bert-large:512 bert-large:512:0.3 gpt2-base:1024 \
            --json "$out/gpu-dropout-$dropout$compile.json"
        "$python" bench/step.py --precision bf16 --dropout "$dropout" $compile --repeats 7 --warm-up 3 --tokens 16384 \
            --shapes gpt2-xl:1024 --json "$out/gpu-xl-dropout-$dropout$compile.json"
    done
done
