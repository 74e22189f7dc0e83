#!/usr/bin/env bash
# Build the null device and count a step over it: bench/null_cuda/run.sh SHAPE… [-- OPTION…]; README.md says what it needs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
headers=$(find "$site/nvidia" -path '*/include/crt/host_defines.h' 2>/dev/null | head -n 1)
if [ -z "$headers" ] || ! "$python" -c 'import importlib.util, torch; assert torch.version.cuda and importlib.util.find_spec("deepspeed")' 2>/dev/null; then
    echo "$python has no torch for CUDA, no DeepSpeed or no CUDA headers: see bench/null_cuda/README.md" >&2
    exit 2
fi
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
cc -shared -fPIC -O1 -w -I"${headers%/crt/host_defines.h}" "$here/device.c" -o "$built/device.so" -lpthread
cc -shared -fPIC -O1 -w "$here/driver.c" -o "$built/libcuda.so.1"
export PYTHONPATH="${CHECKOUT:-$here/../..}/src" TORCHINDUCTOR_COMPILE_THREADS=1 LD_LIBRARY_PATH="$built${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
shapes=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do shapes+=("$1"); shift; done
[ $# -eq 0 ] || shift
for shape in "${shapes[@]}"; do  # a process each: it keeps what it has allocated
    LD_PRELOAD="$built/device.so" "$python" -W ignore "$here/count.py" "$shape" "$@"
done
